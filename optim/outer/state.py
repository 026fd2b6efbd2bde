"""What an outer optimizer is made of, and what other code asks of it or changes between two steps.

    opt.round, opt.slow_of(fragment), opt.in_flight(fragment)       # for a node and its swarm
    opt.adopt(slow, round=8, applied=[7])                           # another peer's slow weights
    opt.restart_from_model()                                        # after loading others

What a step does with it is in `shoal.optim.outer.optimizer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from shoal.optim.codecs.base import Codec, Shape
from shoal.optim.codecs.floats import FLOAT32
from shoal.optim.exchange.base import Exchange
from shoal.optim.outer.averaged import AveragedBuffers, Exclude, excluded, trained
from shoal.optim.outer.checks import check_given
from shoal.optim.outer.contribution_weight import Weight, equal
from shoal.optim.outer.fragments import Fragment, codecs_of, positions
from shoal.optim.outer.in_flight import FragmentState, PendingExchange, RoundInfo
from shoal.optim.outer.inner import Inner, Wrapper, all_parameters, as_one
from shoal.optim.outer.outer_groups import OuterGroups
from shoal.optim.outer.progress import Progress
from shoal.optim.outer.rule import AHEAD, START, Anchored, Rule, State, assign
from shoal.optim.outer.watch import LoopWatch, Unfrozen
from shoal.optim.outer.weights import ModelWeights, Processes
from shoal.optim.parameters import AveragedParameters
from shoal.optim.schedule.auto_lag import AutoLag
from shoal.optim.schedule.round_length import RoundLength, Steps
from shoal.optim.schedule.schedules import Delayed, Every, Schedule, Streaming


class OuterState(Wrapper):
    """The fields of an outer optimizer, and views and changes of them.

    The arguments are described in ``OuterOptimizer``.
    """

    # What it was made with.
    inner: torch.optim.Optimizer
    exchange: Exchange
    rule: Rule
    schedule: Schedule
    run: str
    weight: float | Weight
    length: RoundLength
    on_round: Callable[[RoundInfo], None] | None

    # What is averaged, and the outer state of it.
    rule_state: State
    """The rule's tensors, such as momentum."""
    outer: OuterGroups
    """The slow weights as an optimizer, whose groups hold the outer ``lr`` and ``momentum``."""
    _params: AveragedParameters
    _buffers: AveragedBuffers
    _weights: ModelWeights
    _fragments: list[FragmentState]
    _auto: AutoLag | None
    """What the lag follows; None if it is fixed."""

    # How far it has come.
    progress: Progress
    restarts = 0
    """Times that ``restart_from_model`` was called."""

    # What happens around a step.
    _watch: LoopWatch
    _resumed: bool
    """True from the loading of state to the first exchange after it."""

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        rule: Rule,
        schedule: Schedule,
        codec: Codec | None = None,
        run: str = "run",
        slow_device: torch.device | str | Path = "cpu",
        on_round: Callable[[RoundInfo], None] | None = None,
        fragments: Sequence[Fragment] | None = None,
        weight: float | Weight = equal,
        length: RoundLength | None = None,
        buffers: Literal["ignore", "average"] = "ignore",
        model: nn.Module | None = None,
        exclude: Exclude = (),
        ranks: Processes | None = None,
    ) -> None:
        inner = as_one(inner)
        super().__init__(inner.param_groups, inner.defaults)  # some schedulers read the defaults
        if isinstance(schedule, Streaming) and schedule.lag == "auto" and exchange.shards > 1:
            # The processes of a peer would apply at different steps.
            schedule = replace(schedule, lag=min(1, schedule.every - 1))
        self.inner = inner
        self.exchange = exchange
        self.rule = rule
        self.schedule = schedule
        self.run = run
        self.on_round = on_round
        self.weight = weight
        self.length = length or Steps()
        self._auto = AutoLag(schedule.every) if getattr(schedule, "lag", 0) == "auto" else None

        own = excluded(exclude, inner, model)
        self._params = trained(inner, exchange, own, model)
        if torch.is_inference_mode_enabled():
            raise ValueError(
                "the outer optimizer is made under torch.inference_mode(), where nothing can be "
                "trained: make it outside"
            )
        if not self._params:
            raise ValueError(
                "the outer optimizer averages floating-point parameters that require a gradient, "
                "got none"
            )
        parts = [list(range(len(self._params)))]
        if fragments is not None:
            parts = positions(fragments, self._params)
        _check_sends_all(schedule, len(parts))
        if buffers not in ("ignore", "average") or (buffers == "average" and model is None):
            raise ValueError('buffers must be "ignore", or "average" together with model=')
        self._buffers = AveragedBuffers(model if buffers == "average" else None, exclude)

        place: torch.device | Path
        if isinstance(slow_device, Path):
            place = slow_device.absolute()
        else:
            place = torch.device(slow_device)
        if ranks is None:
            self._weights = ModelWeights(self._params, model, place)
        else:
            self._weights = ranks.weights(self._params, model, place)
            self.exchange = ranks.exchange(exchange)
            self.length = ranks.length(self.length)
        self.rule_state = self._weights.housed(rule.initial(self.slow))
        self.outer = OuterGroups(rule, self.slow, self._groups())
        codecs = codecs_of(parts, codec or exchange.codec or FLOAT32, self._params, model)
        self._fragments = [
            FragmentState(part, its_codec) for part, its_codec in zip(parts, codecs, strict=True)
        ]

        self.progress = Progress(applied=[-1] * len(parts))
        self._resumed = False
        others = [parameter for parameter in all_parameters(inner) if parameter not in own]
        self._watch = LoopWatch(inner, self._weights, Unfrozen(model, others, exclude))
        self.exchange.attach(self)
        self._watch.note_weights()

    def _groups(self) -> list[list[int]]:
        """Return of each group of the inner optimizer the positions of its averaged parameters."""
        place = {parameter: index for index, parameter in enumerate(self._params)}
        groups: list[list[int]] = []
        for group in self.param_groups:
            groups.append([place[one] for one in group["params"] if one in place])
        return groups

    @property
    def parameters(self) -> AveragedParameters:
        """The averaged parameters, in the order of ``slow``: that of the model, if there is one."""
        return self._params

    @property
    def slow(self) -> list[Tensor]:
        """The slow weights of the averaged parameters."""
        return self._weights.slow

    @property
    def steps(self) -> int:
        return self.progress.steps

    @property
    def position(self) -> int:
        return self.progress.position

    @property
    def tokens(self) -> int:
        return self.progress.tokens

    @property
    def round(self) -> int:
        """Number of the next exchange; a peer that fell behind may set it forward."""
        return self.progress.round

    @round.setter
    def round(self, round: int) -> None:
        self.progress.round = round

    @property
    def applied(self) -> list[int]:
        """The last round that was applied to each fragment; -1: none yet."""
        return self.progress.applied

    @applied.setter
    def applied(self, applied: list[int]) -> None:
        self.progress.applied = applied

    @property
    def shapes(self) -> Sequence[Shape]:
        """The shapes of the averaged parameters.

        In a peer of several ranks a tensor of ``slow`` that another rank has is empty.
        """
        return self._weights.shapes

    @property
    def buffer_count(self) -> int:
        """Number of averaged buffers."""
        return len(self._buffers)

    @property
    def fragments(self) -> int:
        return len(self._fragments)

    def positions(self, fragment: int) -> list[int]:
        """Return the positions of a fragment's parameters in ``slow`` and in the rule's state."""
        return self._fragments[fragment].part

    def slow_of(self, fragment: int) -> list[Tensor]:
        return [self.slow[index] for index in self.positions(fragment)]

    def sketch_of(self, fragment: int) -> tuple[float, ...]:
        """Return the ``sketch`` of the slow weights of a fragment, of all ranks (each calls it)."""
        return self._weights.sketch(self.positions(fragment))

    def projection_of(self, fragment: int) -> tuple[float, ...]:
        """Return the ``projection`` of the slow weights of a fragment.

        Empty in a peer of several ranks, and for the number after the last fragment's, which the
        mean at the end has (``finish``).
        """
        if fragment >= self.fragments:
            return ()
        return self._weights.projection(self.positions(fragment))

    def in_flight(self, fragment: int) -> list[int]:
        """Return the rounds in which a fragment was sent that are not applied yet."""
        if fragment >= self.fragments:
            return []
        return [pending.context.key.round for pending in self._fragments[fragment].in_flight]

    @property
    def codec(self) -> Codec:
        """That of the first fragment; each of the others has its own of the same name."""
        return self._fragments[0].codec

    @property
    def listens(self) -> bool:
        """True if the next contribution of a fragment has weight 0 (``listen``)."""
        return any(fragment.listens for fragment in self._fragments)

    @property
    def lag(self) -> int:
        """Positions between sending and applying the next exchange.

        0 if it is waited for at once, ``every`` if it takes a whole round.
        """
        if self._auto is not None:
            return self._auto.lag
        if isinstance(self.schedule, Delayed):
            return self.schedule.every
        return int(getattr(self.schedule, "lag", 0))

    @property
    def lag_auto(self) -> bool:
        return self._auto is not None

    @property
    def anchored(self) -> bool:
        """True if all peers of a group have the same slow weights.

        A peer that missed a round must then adopt them.
        """
        return isinstance(self.rule, Anchored)

    @property
    def shared(self) -> State:
        """The part of the rule's state that is the same on all peers of a group.

        A newcomer adopts it with the slow weights.
        """
        names = self.rule.shared if isinstance(self.rule, Anchored) else ()
        return {name: self.rule_state[name] for name in names if name in self.rule_state}

    @property
    def shared_shapes(self) -> dict[str, list[Shape]]:
        found: dict[str, list[Shape]] = {}
        for name, tensors in self.shared.items():
            pairs = zip(tensors, self.shapes, strict=True)
            found[name] = [() if tensor.dim() == 0 else shape for tensor, shape in pairs]
        return found

    @torch.no_grad()
    def restart_from_model(self) -> None:
        """Begin anew from the weights that the model holds now: call it after loading others.

        The slow weights become the model's; the rule's state (momentum, start) and the codecs'
        memory what they are at first. Exchanges in flight are dropped: what they sent was learnt
        from the weights before. Steps, round, tokens, the outer settings and the inner optimizers'
        state go on.

        All peers should do so between the same rounds, with the same weights: where all hold equal
        ones the larger part's count, and in gossip one alone is mixed with the others.

        Raises:
            RuntimeError: within ``averaged``.
        """
        self._check_not_averaged("restart_from_model")
        for fragment in self._fragments:
            fragment.drop()
            fragment.codec = fragment.codec.fresh()
        self._weights.begin_anew()
        for name, tensors in self.rule.initial(self.slow).items():
            assign(self.rule_state[name], tensors)
        for fragment in self._fragments:
            fragment.sent_at = (self.steps, self.tokens)
        self._resumed = False
        self.restarts += 1
        self._watch.loaded_count = True
        self._watch.note_weights()

    @torch.no_grad()
    def adopt(
        self,
        slow: Sequence[Tensor],
        *,
        round: int,
        into_model: bool = False,
        shared: Mapping[str, Sequence[Tensor]] | None = None,
        applied: Sequence[int] | None = None,
        rebase: Collection[int] = (),
    ) -> list[int]:
        """Adopt slow weights, round number and ``shared`` state of a running swarm.

        The reasons are in docs/internals.md, "A peer that comes back".

        Args:
            slow: the other peer's slow weights.
            round: its next round.
            into_model: also start the fast weights there, as for a joiner.
            shared: its ``shared`` state.
            applied: its last rounds. Only fragments are adopted whose last round there is not older
                than here, and exchanges of later rounds stay in flight. Others are cancelled.
            rebase: fragments whose fast weights move with the slow ones. The others' stay as they
                are, so the next contribution is this peer's whole difference to the swarm.

        Returns the adopted fragments.

        Raises:
            ValueError: names or shapes do not fit; nothing is changed then.
            RuntimeError: within ``averaged``.
        """
        shared = shared or {}
        self._check_not_averaged("adopt")
        self._check_weights()
        check_given(slow, shared, applied, self.slow, self.shared, self.fragments)
        taken = list(range(self.fragments))
        if applied is not None and not into_model:
            taken = [number for number in taken if applied[number] >= self.applied[number]]
        for number in taken:
            moves = number in rebase and not into_model
            self._adopt_fragment(number, slow, shared, into_model=into_model, moves=moves)
            # Unless all hold the same, what was sent before is of another model than the one that
            # goes on from here.
            stays = applied is not None and (self.anchored or not into_model)
            until: float = math.inf
            if applied and stays:
                until = applied[number]
            self._fragments[number].drop(until)
            if applied is not None:
                self.applied[number] = applied[number]
        self.round = round
        if into_model:
            for fragment in self._fragments:
                fragment.codec = fragment.codec.fresh()
            self._start_from_slow()
            # What was ahead is not in these weights, so no mean may take it back.
            for ahead in self.rule_state.get(AHEAD, ()):
                ahead.zero_()
        self._watch.note_weights()
        return taken

    def _adopt_fragment(
        self,
        number: int,
        slow: Sequence[Tensor],
        shared: Mapping[str, Sequence[Tensor]],
        *,
        into_model: bool,
        moves: bool,
    ) -> None:
        part = self.positions(number)
        if moves:
            self._weights.read(part)
        for index in part:
            if moves:
                self.move(index, slow[index])
            elif not into_model:
                # The model goes on from its weights, so their rounding errors stay the same.
                self._weights.keep_rounding(index)
            self.slow[index].copy_(slow[index])
            for name, tensors in shared.items():
                self.rule_state[name][index].copy_(tensors[index])
        if moves:
            self._weights.restart(part)

    @torch.no_grad()
    def begin_from_slow(self) -> None:
        """Put the slow weights into the model, and again if others are loaded before the next step.

        For a state that was loaded while the swarm's weights count, whichever of model and
        optimizer the caller loads first. Where other code takes the inner steps, only what was
        loaded before this is replaced.
        """
        self._start_from_slow()
        self._watch.note_weights()
        self._watch.loaded_count = False

    def go_back(self, round: int) -> None:
        """Go on in an earlier ``round``, where the other peers are.

        What is in flight ends in its own.
        """
        self.round = round
        self.applied = self.applied_before(round)

    def applied_before(self, round: int) -> list[int]:
        """Return the last round that was applied to each fragment; of one that is not before
        ``round``, the last of the fragment's rounds that is.
        """
        before = [
            applied if applied < round else round - 1 - (round - 1 - applied) % self.fragments
            for applied in self.applied
        ]
        return [max(applied, -1) for applied in before]

    @torch.no_grad()
    def move(self, index: int, slow: Tensor) -> None:
        """Replace the slow weights of one parameter.

        Its staged fast weights and its start move by as much.
        """
        by = slow.to(self.slow[index].device) - self.slow[index]
        for follows in (self._weights.fast, self.rule_state.get(START, ())):
            if follows:
                follows[index].add_(by)
        self.slow[index].copy_(slow)

    @property
    def _in_flight(self) -> list[PendingExchange]:
        """All exchanges in flight: by fragment, and of a fragment the oldest first."""
        found: list[PendingExchange] = []
        for fragment in self._fragments:
            found += fragment.in_flight
        return found

    def _start_from_slow(self) -> None:
        """Let training, and the rule, go on from the slow weights."""
        everything = self._weights.everything
        assign(self._weights.stage(everything), self.slow)
        self._weights.restart(everything)
        if START in self.rule_state:
            assign(self.rule_state[START], self.slow)

    def _check_weights(self) -> None:
        """Warn, once in all, if the model's weights were changed outside a step."""
        if not self._watch.weights_changed():
            return
        if self.steps == 0 and self._weights.holds_slow():
            return  # such as DDP, which copies equal weights
        if self._watch.loaded_count:
            self._watch.warn_of_weights(stacklevel=4)
        else:
            self._start_from_slow()
            self._watch.note_weights()

    def _check_not_averaged(self, what: str) -> None:
        if self._weights.shows_slow:
            raise RuntimeError(
                f"{what}() within averaged() would be lost: the block ends with the weights that "
                "it began with"
            )

    def _inside(self) -> Sequence[torch.optim.Optimizer]:
        return [self.inner] if "inner" in vars(self) else []


def _check_sends_all(schedule: Schedule, fragments: int) -> None:
    """Raise ValueError if a schedule of ours would never send some of the fragments."""
    if not isinstance(schedule, Every | Streaming | Delayed):
        return
    if fragments > getattr(schedule, "fragments", 1):
        raise ValueError(
            f"this schedule sends one fragment, so of {fragments} fragments= most would "
            "never be averaged"
        )
