"""The start of a session: a manifest for a swarm without a task, and the first weights of a member.

All peers must begin with the same weights. In a swarm of `shoal up` these follow from its random
seed, which a loop of one's own cannot use. In a swarm of own loops they are those that the first
node's model holds when its optimizer is made: whoever joins asks a member for them, and fetches
what its own model does not hold.
"""

from __future__ import annotations

import difflib
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from shoal.optim import FLOAT32, METHODS, Codec, Handle, OuterOptimizer, Ranks, config_diff
from shoal.optim.exchange.base import Contribution, Exchange, NoPartner
from shoal.optim.outer.averaged import fault_of
from shoal.optim.outer.fragments import Fragment, even, positions, possible
from shoal.optim.parameters import AveragedParameters
from shoal.swarm.errors import NetworkError, ShoalError
from shoal.swarm.exchange.contribution import model_digest
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import Manifest
from shoal.swarm.membership.membership import OWN_LOOP, Membership
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.state.catch_up import catch_up
from shoal.swarm.state.snapshot import State
from shoal.swarm.training.member import TrainingMember
from shoal.swarm.wire.envelope import seal
from shoal.swarm.wire.record import State as DirectoryState

if TYPE_CHECKING:
    from shoal.swarm.exchange.group.exchange import GroupExchange
    from shoal.swarm.membership.directory import Directory

EPOCH_S: float = Manifest.model_fields["epoch_s"].default
PATIENCE_S = 600.0  # to wait for the start of the swarm, or for its weights
# seconds without any other member in view after which a joiner has nobody left to begin with
ALONE_S = 30.0
LOOK_S = 0.2
LONGEST_PAUSE_S = 2.0  # between two tries to fetch weights; each logs who could not be reached
SEEN_S = 0.5  # in which all who wait for a start look once (directory_loops.HASTE_S)
REMIND_S = 10.0
MAX_NAME_CHARS = 64  # characters
NAME_ID_CHARS = 4  # of the peer id, in the name of a node that was given none

log = logging.getLogger(__name__)


class SessionError(ShoalError):
    """An argument of a session does not fit it, or its swarm."""


def parameters_of(state: nn.Module | Iterable[Tensor]) -> AveragedParameters:
    """Return the tensors to average: those of a module, or of the given, that require a gradient
    (with LoRA the adapters).

    Those of a module have its order and names, those of a list its order and none.

    SessionError if there are none, or if one is no floating-point tensor.
    """
    several = isinstance(state, Iterable) and not isinstance(state, Tensor | str)
    inside = state.parameters() if isinstance(state, nn.Module) else state if several else ()
    given = dict.fromkeys(inside)  # a tied one counts once
    params: list[Tensor] = [p for p in given if not isinstance(p, Tensor) or p.requires_grad]
    if not params or not all(isinstance(p, Tensor) for p in params):
        raise SessionError(
            "The state must be a module or a list of floating-point parameters, some of which "
            "require a gradient: hand in the model that is trained, and not "
            f"{'nothing' if several and not given else 'this ' + type(state).__name__}."
        )
    model = state if isinstance(state, nn.Module) else None
    for name, parameter in named(model, params):
        if fault := fault_of(parameter):
            raise SessionError(f"Parameter {name} of the state {fault}.")
    return (
        AveragedParameters.of(state) if isinstance(state, nn.Module) else AveragedParameters(params)
    )


def whole_parameters(state: nn.Module | Iterable[Tensor]) -> AveragedParameters:
    """Return the tensors to average of a peer of one process.

    SessionError as `parameters_of`, and for a rank's shards.
    """
    params = parameters_of(state)
    if any(hasattr(param, "device_mesh") for param in params):
        raise SessionError(
            "The parameters are cut into shards (FSDP2), so this process is a rank of a peer: hand "
            "in ranks=shoal.Ranks() on all of its ranks."
        )
    return params


def parameters_of_all(state: nn.Module | Iterable[Tensor], ranks: Ranks) -> AveragedParameters:
    """Return this rank's parameters.

    SessionError or RankFailed, on all ranks, unless they suit each other.
    """
    if not isinstance(ranks, Ranks):
        raise SessionError(
            "ranks= takes shoal.Ranks(), made on every rank after init_process_group, and not "
            f"{type(ranks).__name__}."
        )
    params = ranks.alike(lambda: parameters_of(state))
    first = ranks.agreed(model_digest(params))

    def check() -> None:
        if model_digest(params) != first:
            raise SessionError(
                f"Rank {ranks.rank} has another model than rank 0: make the same model on all "
                "ranks of a peer."
            )
        for size in {param.device_mesh.size() for param in params if hasattr(param, "device_mesh")}:
            if ranks.size % size:
                raise SessionError(
                    f"The model is cut over {size} processes, and ranks= has {ranks.size}: make "
                    "Ranks() of all that it is on."
                )

    ranks.alike(check)
    return params


def fitting(params: AveragedParameters, model: str) -> AveragedParameters:
    """Return the parameters without their names if those of the swarm, of the digest ``model``, are
    a list, which has none.
    """
    unnamed = AveragedParameters(params)
    return unnamed if model_digest(unnamed) == model else params


def new_swarm(
    identity: Identity,
    params: AveragedParameters,
    *,
    seed: int,
    outer: dict[str, Any],
    model: nn.Module | None = None,
    **settings: Any,
) -> bytes:
    """Return the sealed manifest of a swarm of own loops.

    SessionError names the first setting that cannot be used.

    ``model`` is what is cut into fragments by layer; without one the parameters are cut evenly.
    ``outer`` may name the modules of each in ``fragments``; then, and without a model, the manifest
    has the fragment of each parameter. ``settings``: further ones of the `Manifest`, such as its
    ``name``.
    """
    if not settings.get("bucket") and settings.get("epoch_s", EPOCH_S) != EPOCH_S:
        raise SessionError(
            "The setting epoch_s is one of buckets: leave it out, or set bucket too, such as 64."
        )
    try:
        averaging, fragments = _averaging(outer, params, model)
        if averaging.alone:
            raise SessionError(
                "The method 'none' averages with no peer, so it needs no swarm: leave it out, or "
                "choose another."
            )
        manifest = Manifest(
            created=time.time(),
            creator=identity.peer_id,
            task=OWN_LOOP,
            outer=averaging,
            train=TrainSettings(seed=seed),
            model=model_digest(params),
            fragment_of=_fragment_of(fragments, len(params)),
            **settings,
        )
    except ValidationError as error:
        raise _setting_error(error) from None
    return seal(manifest, identity)


def _averaging(
    outer: dict[str, Any], params: AveragedParameters, model: nn.Module | None
) -> tuple[OuterSettings, list[set[int]]]:
    """Return the settings with their defaults, and each fragment as places in ``params``; none
    where the fragments follow from the model.
    """
    named = outer.get("fragments")
    if named is not None and not isinstance(named, int):
        fragments = _cut(named, params)
        if fragments:
            counted = {**outer, "fragments": len(fragments)}
            return OuterSettings.model_validate(counted).resolved(), fragments
    averaging = OuterSettings.model_validate(outer).resolved()
    averaging = averaging.fitted(possible(averaging.fragments or 1, model, params))
    number = averaging.fragments or 1
    if model is None and number > 1:
        return averaging, _cut(even(params, number), params)
    return averaging, []


def _fragment_of(fragments: Sequence[set[int]], count: int) -> tuple[int, ...]:
    """Return the number of the fragment of each of ``count`` parameters; nothing without any."""
    if not fragments:
        return ()
    numbers = {}
    for number, places in enumerate(fragments):
        numbers.update(dict.fromkeys(places, number))
    return tuple(numbers[place] for place in range(count))


def _setting_error(error: ValidationError) -> SessionError:
    """Return the error that names the first setting at fault, and what to do."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the settings"
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(where, OuterSettings.model_fields, 1, cutoff=0.5)
        remedy = f"did you mean {near[0]!r}?" if near else "leave it out."
        return SessionError(f"There is no setting {where!r} of a swarm: {remedy}")
    what = first["msg"].removeprefix("Value error, ")
    if where == "method":
        near = difflib.get_close_matches(str(first["input"]), METHODS, 1, cutoff=0.5)
        what = f"the methods are {', '.join(METHODS)}"
        if near:
            what = f"did you mean {near[0]!r}? The methods are {', '.join(METHODS)}"
    return SessionError(f"The swarm cannot be made with {where} as given: {what}.")


def _cut(fragments: Sequence[Fragment], params: Sequence[Tensor]) -> list[set[int]]:
    """Return each fragment as places in ``params``. SessionError if they do not fit."""
    try:
        return [set(part) for part in positions(fragments, params)]
    except ValueError as error:
        raise SessionError(f"The swarm cannot be made with fragments as given: {error}.") from None


def waiting_for(missing: int) -> str:
    """Return the reminder that ``missing`` peers must come before the swarm begins."""
    return f"waiting for {missing} more peer{'' if missing == 1 else 's'}: share the link"


def until_started(
    membership: Membership,
    opt: OuterOptimizer,
    look_s: float,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[int]:
    """Yield how many peers are missing, every ``look_s`` seconds, until they are there or others
    train already, or ``stopped``.

    Who comes last sees all others at once, and gives them ``SEEN_S`` seconds to see it too: in a
    short run it would be gone before they look.
    """
    directory = membership.directory
    wanted = membership.manifest.start_when
    seen_at = time.monotonic() + SEEN_S
    while opt.round == 0 and not stopped() and not directory.wait_for(wanted, look_s, stopped):
        if _has_begun(directory):
            return
        yield wanted - directory.size()
    if opt.round == 0 and wanted > 1 and not _has_begun(directory):
        directory.wait_for(sys.maxsize, seen_at - time.monotonic(), stopped)


def _has_begun(directory: Directory) -> bool:
    """Return whether a member has trained, though it may have left since."""
    return any(
        member.state != "waiting" and member.step > 0
        for member in (*directory.members().values(), *directory.departed().values())
    )


def begin(
    membership: Membership,
    model: str,
    opt: OuterOptimizer,
    member: TrainingMember,
    announce: Callable[[DirectoryState], None],
    *,
    first: bool,
) -> int:
    """Take over the swarm's weights unless this node is its ``first``, and wait until the swarm
    begins.

    Return the swarm's round when they were taken over; 0 if it has not begun.

    Raises:
        ModelDiffersError: the model does not fit.
        SessionError, NetworkError: no peer hands out weights, or too few peers come, within
            ``PATIENCE_S``, or a node that joined has nobody left to begin with.
    """
    state = None if first else _weights(membership, model, opt, announce)
    if state is not None and any(
        not torch.equal(their, own.to(their))
        for their, own in zip(state.slow, opt.slow, strict=True)
    ):
        log.warning(
            "the model's weights were replaced by the swarm's, of round %d",
            state.round // opt.fragments,
        )
    member.begin(state)
    announce("waiting")
    _wait_for_start(membership, opt, member, first=first)
    return 0 if state is None else state.round


class _Company:
    """The other members that a node which joined needs to begin with."""

    def __init__(self, membership: Membership) -> None:
        self._directory = membership.directory
        self._me = membership.identity.peer_id
        self._seen = time.monotonic()

    def check(self) -> None:
        """Raise SessionError if there has been no other member in view for ``ALONE_S`` seconds."""
        if self._directory.members().keys() - {self._me}:
            self._seen = time.monotonic()
        elif time.monotonic() >= self._seen + ALONE_S:
            how = (
                "the last of them has left"
                if self._directory.departed()
                else "none shows itself any more"
            )
            raise SessionError(
                f"No other member is left to begin this swarm with ({how}): join a swarm that "
                "runs, or create one."
            )


def _weights(
    membership: Membership,
    model: str,
    opt: OuterOptimizer,
    announce: Callable[[DirectoryState], None],
) -> State:
    """Fetch the weights that the swarm holds now, or begins with."""
    directory = membership.directory
    began = time.monotonic()
    company = _Company(membership)
    reminder = began + REMIND_S
    end = began + PATIENCE_S
    # A swarm of `shoal up` hands out nothing before it has begun, and may wait for this very node,
    # so announce it soon. A swarm of own loops does hand out its weights; announced with them, this
    # node is ready for the first round.
    announced = membership.manifest.task == OWN_LOOP
    pause_s = LOOK_S
    while True:
        try:
            state = catch_up(membership, model, opt, begun=False)
            if state is not None:
                return state
        except NetworkError:
            if time.monotonic() >= end:
                raise
        company.check()
        if time.monotonic() >= end:
            raise SessionError(
                f"No peer served the weights that the swarm began with in {PATIENCE_S:g} s: begin "
                "with its own, or try again."
            )
        if not announced:
            announce("waiting")
            announced = True
        if time.monotonic() >= reminder:
            log.warning("waiting for a peer that serves the weights to begin with")
            reminder += REMIND_S
        directory.wait_for(directory.size() + 1, pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _wait_for_start(
    membership: Membership, opt: OuterOptimizer, member: TrainingMember, *, first: bool
) -> None:
    wanted = membership.manifest.start_when
    began = time.monotonic()
    company = _Company(membership)
    reminder = began + REMIND_S
    end = began + PATIENCE_S
    for missing in until_started(membership, opt, LOOK_S):
        if not first:
            company.check()
        member.sync.offer()  # newcomers may wait for these weights
        if time.monotonic() >= end:
            came = wanted - missing
            raise SessionError(
                f"Only {came} of {wanted} peers came within {PATIENCE_S:g} s: share the link, and "
                "try again."
            )
        if time.monotonic() >= reminder:
            log.warning("%s", waiting_for(missing))
            reminder += REMIND_S


class SessionExchange(Exchange):
    """Exchange in front of ``inner`` that calls ``attached`` with the optimizer that it is given
    to.
    """

    def __init__(
        self,
        inner: PairExchange | GroupExchange,
        attached: Callable[[OuterOptimizer], None],
        ordered: Callable[[AveragedParameters], AveragedParameters],
        fragments: Sequence[Sequence[Tensor]] = (),
        codec: Codec = FLOAT32,
    ) -> None:
        self.inner = inner
        self._attached = attached
        self._ordered = ordered
        self.fragments = fragments
        self.codec = codec
        self._closed = False

    def attach(self, optimizer: OuterOptimizer) -> None:
        """Make ``optimizer`` the session's; the optimizer calls this when it is made."""
        self._attached(optimizer)

    def ordered(self, parameters: AveragedParameters) -> AveragedParameters:
        """Return the optimizer's parameters in the session's order.

        SessionError if it has others, or is not the first.
        """
        return self._ordered(parameters)

    def due(self, round: int, fragment: int) -> int:
        return self.inner.due(round, fragment)

    def start(self, contribution: Contribution) -> Handle:
        """Begin a round; without a partner once the session is over, or the network gone."""
        if self._closed:
            return NoPartner()
        try:
            return self.inner.start(contribution)
        except NetworkError:
            return NoPartner()

    def close(self) -> None:
        self._closed = True


def named(model: nn.Module | None, params: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the state's parameters, each with a name for people."""
    names: dict[Tensor, str] = {}
    for name, own in () if model is None else model.named_parameters():
        names[own] = repr(name)
    for index, parameter in enumerate(params):
        if parameter in names:
            yield names[parameter], parameter
        elif nn.parameter.is_lazy(parameter):
            yield f"number {index}", parameter
        else:
            yield f"number {index} of shape {tuple(parameter.shape)}", parameter


def checked_name(given: str) -> str:
    """Return the name of a node. SessionError if it cannot be shown."""
    if len(given) > MAX_NAME_CHARS or not given.isprintable():
        raise SessionError(
            "The name of a node is at most 64 printable characters: give it a shorter one."
        )
    return given


def default_name(peer: str) -> str:
    """Return a name for the node of a peer id: its machine's and the end of the id, so that nodes
    of one machine differ.
    """
    machine = platform.node().split(".")[0] or "node"
    return f"{machine[: MAX_NAME_CHARS - NAME_ID_CHARS - 1]}-{peer[-NAME_ID_CHARS:]}"


def identity_of(given: Identity | str | os.PathLike[str] | None) -> Identity:
    if given is None:
        return Identity.ephemeral()
    return given if isinstance(given, Identity) else Identity.load_or_create(given)


def check_options(settings: OuterSettings, options: Collection[str]) -> None:
    """Raise SessionError if a session's optimizer has none of the ``options`` of its own."""
    unknown = sorted(set(options) - {"slow_device", "on_round", "ranks"})
    if not unknown:
        return
    name = unknown[0]
    has = {**settings.knobs(), "method": settings.method, "codec": settings.codec_name}
    raise SessionError(
        f"The swarm's settings decide {name}, which is {has[name]}: leave it out."
        if name in has
        else f"A session's optimizer has no option {name!r}: it has slow_device and on_round."
    )


def check_alike(settings: OuterSettings, opt: OuterOptimizer, expected: OuterOptimizer) -> None:
    """Raise SessionError unless ``opt`` averages as one that is made of the swarm's
    ``settings``.
    """
    unlike = config_diff(opt, expected)
    if unlike is not None:
        knobs = ", ".join(f"{name}={value}" for name, value in settings.knobs().items())
        raise SessionError(
            f"The optimizer does not average as the swarm does: {unlike}; the swarm has "
            f"{settings.method} with {knobs}, codec {settings.codec_name}, so make it so, or by "
            "s.optimizer(inner)."
        )
