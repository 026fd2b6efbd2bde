"""Entering a swarm: the manifest of a new one, the wait for others, the choice of a shard, and the
trainer of the settings.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from shoal.node.batch_contents import to_device
from shoal.node.batches import iterator_of
from shoal.node.config.links import LINK
from shoal.node.config.setting_types import spec_label
from shoal.node.config.settings import ConfigError, Settings
from shoal.node.console import plural
from shoal.node.data.task_options import TEXT, options_for_manifest
from shoal.node.plan.advice import Situation, usual
from shoal.node.runtime.result import write_json
from shoal.node.runtime.task_setup import RL
from shoal.node.task import Shard, Task
from shoal.node.tasks.text import TextTask
from shoal.node.training import resources
from shoal.node.training.inner_optimizer import parameter_split, resolved
from shoal.node.training.trainer import Trainer
from shoal.optim import RoundInfo
from shoal.swarm.exchange.robust import DistanceScreen, LossCheck
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import TASK_NAME, Manifest
from shoal.swarm.membership.membership import Membership
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.settings.verification import Terms
from shoal.swarm.training.loss_trial import LossTrial
from shoal.swarm.training.round_steps import steps_of_rounds
from shoal.swarm.training.shard import least_used
from shoal.swarm.wire.envelope import seal
from shoal.swarm.wire.messages import Member

if TYPE_CHECKING:
    from shoal.node.parallel.node_ranks import NodeRanks

REFRESH_S = 10.0

log = logging.getLogger(__name__)


class LinkFile:
    """The link file of one run in ``folder``; call `refresh` often: it writes every ten seconds,
    and uses no network.
    """

    def __init__(self, folder: Path, membership: Membership) -> None:
        self._path = folder.absolute() / LINK
        self._membership = membership
        self._next = float("-inf")

    def refresh(self) -> None:
        """Write the link with the addresses that are known now, if it is time.

        A disk that is full costs only this file.
        """
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + REFRESH_S
        manifest = self._membership.manifest
        link = {
            "link": str(self._membership.link_now()),
            "name": manifest.name,
            "invite_only": manifest.invite_only,
        }
        if (key := self._membership.identity.path) is not None:
            link["identity"] = str(key.absolute())  # by which its creator's key is found again
        try:
            write_json(self._path, {**link, "written": time.time()})
        except OSError as error:
            log.info("the link was not written to %s (%s)", self._path, error.strerror)


# seconds that a node waits in a silent swarm that it returns to: two searches, and two readings of
# the directory
AWAIT_S = 20.0
LOOK_S = 1.0
"""Between two looks whether others train already."""


def task_options(settings: Settings) -> dict[str, int | float | str | bool]:
    """Return the task options that all peers share.

    For rl that is also the environment, but neither policy nor algorithm.
    """
    own = {"env": spec_label(settings.rl.env)} if settings.task.hooks == RL else {}
    return {**options_for_manifest(settings.task.hooks, settings.task.options), **own}


def for_new_swarm(settings: Settings) -> Settings:
    """Return the settings of a new swarm, with the defaults that depend on others.

    The built-in text task has Muon, unless the user chose an optimizer or the task's rate. A public
    swarm has its defences. A private one that begins with a few peers averages over everyone,
    unless the user chose anything about averaging.
    """
    if settings.swarm.public:
        settings = settings.model_copy(update={"outer": settings.outer.guarded()})
    elif (outer := outer_of_few(settings)) is not None:
        settings = settings.model_copy(update={"outer": outer})
    train = settings.train
    task = settings.task
    chosen = "optimizer" in train.model_fields_set or "lr" in task.options
    if task.hooks != TEXT or chosen or not hasattr(torch.optim, "Muon"):
        return settings
    return settings.model_copy(update={"train": train.model_copy(update={"optimizer": "muon"})})


def outer_of_few(settings: Settings) -> OuterSettings | None:
    """Return how a private swarm averages that begins with a few peers; None where it does not, or
    where the user chose anything about averaging.
    """
    swarm = settings.swarm
    chosen = settings.outer.model_fields_set or settings.outer.alone
    if chosen or swarm.public or swarm.bucket or swarm.start_when < 2:
        return None
    return usual(Situation(swarm.start_when))


def is_few_but_chosen(settings: Settings) -> bool:
    """Return whether a swarm of a few averages in pairs only because the user chose something else
    about averaging than the method.
    """
    outer = settings.outer
    if not outer.model_fields_set or "method" in outer.model_fields_set or outer.alone:
        return False
    return outer_of_few(settings.model_copy(update={"outer": OuterSettings()})) is not None


def new_manifest(
    settings: Settings,
    identity: Identity,
    model: str,
    terms: Terms | None = None,
    agreed: Mapping[str, int | float | str | bool] | None = None,
    fragments: int | None = None,
) -> bytes:
    """Return the sealed manifest of a new swarm.

    ``terms``: of claims, if any; ``agreed``: the task's ``agreed_options``; ``fragments``: those
    that the model is cut into.

    Raises ConfigError: settings that do not go together.
    """
    if settings.swarm.bucket and settings.verify.audit_rate:
        raise ConfigError(
            "The settings swarm.bucket and verify.audit_rate do not go together: verifiers are "
            "drawn among all members."
        )
    outer = settings.outer.resolved()
    label = spec_label(settings.task.hooks)
    if re.fullmatch(TASK_NAME, label) is None:
        raise ConfigError(
            f"The task {label!r} cannot be a swarm's: give its file a name of ASCII letters, "
            "digits, dots, dashes and underscores, and its class one of ASCII letters."
        )
    manifest = Manifest(
        created=time.time(),
        creator=identity.peer_id,
        task=label,
        task_options={**task_options(settings), **(agreed or {})},
        outer=outer if fragments is None else outer.fitted(fragments),
        train=resolved(settings.train.shared),
        verify=settings.verify,
        terms=terms,
        model=model,
        **dict(settings.swarm),
    )
    return seal(manifest, identity)


def await_others(
    membership: Membership, log: Callable[[str], None], should_stop: Callable[[], bool]
) -> None:
    """Wait a moment for known peers, if this node has returned to a swarm in which no peer answers,
    and log the outcome.
    """
    host = membership.host
    directory = membership.directory
    if host.entry() or directory.members():  # this node is not announced yet
        return
    log(
        f"nobody of this swarm answers: looking for its peers for {AWAIT_S:g} s, at "
        f"{len(host.known())} addresses where they were"
    )
    if not directory.wait_for(1, AWAIT_S, should_stop) and not should_stop():
        log(
            "nobody answered: going on without a partner from the checkpoint; others find this "
            f"node again, or by the link {membership.link()}"
        )


def await_company(
    membership: Membership, log: Callable[[str], None], should_stop: Callable[[], bool]
) -> None:
    """Wait a moment for as many members as the swarm began with, if this node has returned to it
    with others that do not train yet; it is announced already.
    """
    host = membership.host
    directory = membership.directory
    wanted = membership.manifest.start_when
    end = time.monotonic() + AWAIT_S
    said = False
    while not should_stop():
        others = [one for one in directory.members().values() if one.peer != host.peer_id]
        is_alone = not others and not host.entry()
        has_begun = any(one.state == "training" for one in others)
        missing = wanted - directory.size()
        left = end - time.monotonic()
        if is_alone or has_begun or missing <= 0 or left <= 0:
            return
        if not said:
            said = True
            log(
                f"waiting at most {AWAIT_S:g} s for {plural(missing, 'more peer')} to return, as "
                f"the swarm began with {wanted}"
            )
        directory.wait_for(wanted, min(left, LOOK_S), should_stop)


def choose_shard(
    settings: Settings, manifest: Manifest, members: Mapping[str, Member], peer: str
) -> Shard:
    """Return the shard that the user asked for, else the one that the fewest others hold (each peer
    breaks ties differently).
    """
    seed = manifest.train.seed
    pair = settings.node.shard_pair
    if pair is not None:
        return Shard(pair[0], pair[1], seed)
    return Shard(least_used(members, manifest.shards, peer), manifest.shards, seed)


OTHER_SEED = 7_919
"""Added to the shard's seed, so that a trial's batches are others than those that are trained on at
that time.
"""


def try_partners(trainer: Trainer, screen: DistanceScreen, log: Callable[[str], None]) -> None:
    """Let ``screen`` try what partners send, if the swarm's settings ask for it
    (``outer.check_loss``) and this node can.

    ``trainer`` has its shard.
    """
    if not trainer.outer.check_loss:
        return
    task = trainer.task
    shard = trainer.shard
    why = "the batches of its task are made with the model" if task.draws_with_model else ""
    if trainer.layout.ranks > 1:
        why = "its model is trained by several processes"
    if why:
        log(f"this node counts partners' weights untried (outer.check_loss), for {why}")
        return
    other = Shard(shard.index, shard.of, shard.seed + OTHER_SEED)
    move = functools.partial(to_device, device=trainer.inner_step.device)
    # Unlike a generator's, its next batch comes after one that could not be moved.
    batches = map(move, iterator_of(task.batches(other), other))
    screen.loss_check = LossCheck(
        LossTrial(
            task.loss, batches, trainer.model, trainer.whole, log, trainer.inner_step.autocast
        )
    )


# torch's optimizers without torch's compiler.
#
# When an optimizer of torch is made, and when it steps, it imports ``torch._dynamo``, only to keep
# itself out of functions that are being compiled: 1.2 to 1.7 s of a processor, as long as torch
# itself, and a quarter of what a node needed up to its first step. A node that compiles nothing
# does without.

KEPT_OUT = "__dynamo_disable"
"""Attribute in which torch keeps what it calls in place of a method that is not to be compiled,
once it has made that.
"""


def without_compiler() -> None:
    """Keep optimizers from importing the compiler, unless it is there already.

    What they compute does not change.

    Where a later version of torch does it in another way they import it as ever.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        plain = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        setattr(plain, KEPT_OUT, plain)
    for kind in (torch.optim.Adam, torch.optim.SGD):  # AdamW has Adam's
        if "step" in vars(kind) and hasattr(kind.step, "__wrapped__"):
            # An assignment would be one to a method for mypy.
            setattr(kind, "step", _as_torch_steps(inspect.unwrap(kind.step)))  # noqa: B010


def _as_torch_steps(plain: Any) -> Any:
    """Return the method that takes a step without recording gradients, as torch's own decorator has
    it.
    """

    @functools.wraps(plain)
    def step(self: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *arguments, **named)

    return step


def with_own_lag(settings: Settings) -> Settings:
    """Return the settings with this node's own lag in place of the swarm's, if it has one.

    Raises ConfigError: the swarm's method has no lag, or its rounds are too short for this one.
    """
    lag = settings.node.lag
    if lag is None:
        return settings
    try:
        outer = OuterSettings.model_validate({**settings.outer.resolved().model_dump(), "lag": lag})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"The setting node.lag={lag!r} cannot be used in this swarm: {problem}."
        ) from None
    return settings.model_copy(update={"outer": outer})


def schedule_steps(settings: Settings, swarm: TrainSettings | None) -> int:
    """Return the length of the learning-rate schedule: of this node's run, or the ``swarm``'s if
    this node takes part for less.
    """
    own = settings.train.steps
    if swarm is None or not own or not swarm.steps:
        return own
    return max(own, swarm.steps)


def follow_schedule(
    trainer: Trainer,
    settings: Settings,
    manifest: Manifest,
    round: int,
    members: Iterable[Member],
    met: Mapping[str, str],
) -> str | None:
    """Let the learning-rate schedule go on to where the swarm is in ``round``, and return a
    sentence about it if it did.

    It never goes back, nor beyond its end; a swarm without an end has no place in a schedule.
    """
    schedule = trainer.schedule
    fragments = trainer.whole.fragments
    if schedule.scheduler is None or not schedule.length or not manifest.train.steps:
        return None
    found = steps_of_rounds(manifest.outer, round // fragments, members, met)
    if found is None:
        return (
            f"the learning-rate schedule goes on from step {schedule.done} of {schedule.length}: "
            "how far the swarm is cannot be told, for no member has said how fast it is"
        )
    step = min(found, schedule.length)
    before = schedule.done
    if step <= before:
        return None
    trainer.schedule_at(step)
    said = (
        f"the learning-rate schedule {'goes on' if before else 'begins'} at step {step} of "
        f"{schedule.length}, where the swarm is"
    )
    left = schedule.length - step
    steps = trainer.whole.steps
    if settings.train.steps - steps > left:
        said += f", and stays at its end from this node's step {steps + left} on"
    return said


def make_trainer(
    settings: Settings,
    task: Task,
    device: torch.device,
    ranks: NodeRanks | None,
    log: Callable[[str], None],
    on_round: Callable[[RoundInfo], None],
    speeds: Callable[[], Iterable[float]],
    swarm: TrainSettings | None = None,
) -> Trainer:
    """Return the trainer of ``task``.

    ``log`` gets sentences for the user, ``swarm``: the swarm's settings of training, if it has
    been there before; the rest is as for ``Trainer``.

    Raises ShoalError: the task, its model, or this node's own lag cannot be used.
    """
    settings = with_own_lag(settings)
    node = settings.node
    method = settings.outer.method
    train = settings.train
    on_device = node.slow_on_device

    def check(params: Sequence[torch.Tensor]) -> None:
        if not isinstance(task, TextTask):  # whose size was known before (`task_setup.check_size`)
            resources.check(
                node.ram, params, log, method=method, slow_here=node.slow_in_memory(device.type)
            )

    steps = schedule_steps(settings, swarm)
    if ranks is not None:
        made: Trainer = ranks.make_trainer(
            task,
            settings,
            schedule_steps=steps,
            slow_on_device=on_device,
            on_model=check,
            on_round=on_round,
            speeds=speeds,
        )
    else:
        if not train.compile:
            without_compiler()
        made = Trainer(
            task, settings.outer, train, own=train, schedule_steps=steps, device=device,
            slow_on_device=on_device, offload=node.slow_folder, on_model=check,
            on_round=on_round, speeds=speeds,
        )  # fmt: skip
    if made.plan is not None:
        log(f"{made.plan}")
    found = parameter_split(task, train, made.model)
    if found is not None:
        log(f"{found}.")
    return made
