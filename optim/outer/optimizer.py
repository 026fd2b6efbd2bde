"""The outer optimizer: a real ``torch.optim.Optimizer`` that wraps the user's inner one.

It shares the inner optimizer's ``param_groups`` and ``state``, so learning-rate schedulers and
``GradScaler`` act on it as on any optimizer. When the schedule says so, it hands a contribution to
the exchange, applies the outer rule to the slow weights (float32, or float64 if a parameter is; on
the CPU by default) and copies the fast weights back into the model. If no peer answers, the rule is
applied to the own contribution alone: local progress is never lost.

Rules that send displacements (`Anchored`) rely on equal slow weights, of which nothing is sent. So
each contribution goes with a ``sketch`` of them. If the sketches of a round's members differ, as
after a round that some missed, its members average once more, before they apply the mean: the slow
weights and the shared state of those that are right, with weight 1; the others take the result with
weight 0.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor, nn

from shoal.optim.codecs.base import BufferTailCodec, Codec
from shoal.optim.codecs.mod4 import Mod4Codec
from shoal.optim.device import accelerator_of, to_device, to_host, uncompiled
from shoal.optim.exchange.base import (
    Alone,
    Contribution,
    Exchange,
    Handle,
    Mean,
    NoPartner,
    OnDemand,
    RoundKey,
    differences,
)
from shoal.optim.outer.averaged import Exclude, excluded, trained
from shoal.optim.outer.contribution_weight import Weight
from shoal.optim.outer.fragments import Fragment, even, positions, possible, strided
from shoal.optim.outer.in_flight import PendingExchange, RoundInfo, Sent
from shoal.optim.outer.inner import Inner
from shoal.optim.outer.inner_step import accumulates, initialises, step_unless_overflow
from shoal.optim.outer.outer_groups import apply_mean, contribution_of
from shoal.optim.outer.rule import AveragesEvenly, KeepsFast, RoundContext, State, assign, kind_of
from shoal.optim.outer.state import OuterState
from shoal.optim.outer.weights import Processes
from shoal.optim.parameters import AveragedParameters
from shoal.optim.schedule.round_length import RoundLength
from shoal.optim.schedule.schedules import Apply, Every, Schedule, Send, Streaming

if TYPE_CHECKING:
    from typing import Self


logger = logging.getLogger(__name__)

SAME = 1e-6
"""Distance of two sketches, in parts of their largest number, up to which they differ by rounding
alone.
"""


def sources(states: Mapping[str, Sequence[float]], *, first: bool = False) -> list[str]:
    """Return the peers whose slow weights all others should take the mean of; none if all hold the
    same.

    Of those that hold the same, the largest part is right: one of it stands for it. Among several
    parts of that size none is nearer to the truth. After a round that failed for everyone each peer
    has gone on alone, and the mean of their slow weights is what that round would have given
    (exactly so under a linear rule). ``first``: nothing was averaged yet, so there is nothing in
    common; then the first part is right, since a mean of independent initial weights is worse than
    any.
    """
    parts: list[list[str]] = []
    for peer in sorted(states):
        for part in parts:
            one, other = states[peer], states[part[0]]
            if math.dist(one, other) <= SAME * max(map(abs, (*one, *other))):
                part.append(peer)
                break
        else:
            parts.append([peer])
    if len(parts) < 2:
        return []
    most = max(map(len, parts))
    largest = [part[0] for part in parts if len(part) == most]
    return largest[:1] if first else largest


LASTS = 2  # rounds that an exchange may take while its bytes move (lag "auto")

Fragments = int | Sequence[Fragment]
"""A number of fragments, or the modules or parameters of each."""


class Options(TypedDict, total=False):
    """Arguments that every method takes; see ``OuterOptimizer``."""

    codec: Codec
    run: str
    slow_device: torch.device | str | Path
    on_round: Callable[[RoundInfo], None] | None
    weight: float | Weight
    length: RoundLength | None
    buffers: Literal["ignore", "average"]
    model: nn.Module | None
    exclude: Exclude
    ranks: Processes | None


class OuterOptimizer(OuterState):
    """Outer optimizer around ``inner``, to be used in its place in the training loop.

    The parameters that require a gradient when it is made are averaged (with LoRA the adapters). A
    frozen one is neither kept nor sent; one that is frozen later stays in, because all peers must
    send the same tensors.

    Args:
        inner: an optimizer, or several of different parameters (``Combined``); their state is
            local, never exchanged or reset.
        exchange: averages contributions with other peers.
        rule: the outer mathematics.
        schedule: when to send and apply.
        codec: how contributions become bytes; by default that of a swarm's exchange, else float32.
            One with state (error feedback) is copied for each fragment.
        run: name of the run; peers of different runs never average.
        slow_device: where the slow weights and the rule's state live: a device, or as a path a
            folder for files that are mapped into memory and have no name, so that they are gone
            with the process. OSError if it has no room.
        on_round: called with a ``RoundInfo`` after each applied exchange.
        fragments: of each the module, or a list of modules and parameters; None: one fragment with
            all parameters.
        weight: of a contribution: a number, or a function of the tokens (``count``) and inner steps
            since the fragment was last sent (`shoal.optim.outer.fragments`). 0: stay out of this
            round's mean, as if absent.
        length: of a round: in the schedule's steps, tokens or seconds (``RoundLength``). Optimizers
            must not share one.
        buffers: "average" replaces the model's floating-point buffers (BatchNorm's statistics) by
            their mean whenever fragment 0 is applied; they are sent as float32. The vectors of
            torch's spectral norms stay each peer's own. "ignore" leaves every peer its own. All
            peers must choose the same.
        model: the module, needed for its buffers and for sharded parameters (FSDP2); each process
            then has its part of all state.
        exclude: parameters that stay this peer's own (a head for its task): parameters, names,
            names of modules, or patterns such as "*.bias" (names need ``model``). They are trained,
            but neither kept nor sent, nor are buffers of these names. All peers must exclude the
            same.
        ranks: the processes of this peer, if it is several that act as one (``shoal.optim.Ranks``);
            ``exchange`` is rank 0's.

    Raises:
        ValueError: no parameter that requires a gradient, not floating point, not in exactly one
            fragment, buffers or shards without a model, an exclusion that fits nothing, an inner
            optimizer that remembers earlier weights.
    """

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Check the arguments of whichever method is made, before it looks into them.

        TypeError names the one that is wrong.
        """
        constructors = [vars(kind)["__init__"] for kind in cls.__mro__ if "__init__" in vars(kind)]
        arguments = {
            name
            for constructor in constructors
            for name in inspect.signature(constructor).parameters
        }
        for name in options.keys() - arguments:
            near = difflib.get_close_matches(name, arguments, 1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"help({cls.__name__}) lists them"
            raise TypeError(f"{cls.__name__} has no argument {name!r}: {hint}")
        given = dict(zip(("inner", "exchange"), args, strict=False)) | options
        inner, exchange = given.get("inner", ()), given.get("exchange", Alone())
        several = (
            [inner]
            if isinstance(inner, torch.optim.Optimizer) or not isinstance(inner, Sequence)
            else inner
        )
        if wrong := [one for one in several if not isinstance(one, torch.optim.Optimizer)]:
            raise TypeError(
                "inner must be an optimizer of torch, or a list of them, got "
                f"{type(wrong[0]).__name__}"
            )
        if not isinstance(exchange, Exchange):
            remedy = (
                "hand in its exchange()"
                if hasattr(exchange, "exchange")
                else "such as session.exchange() or shoal.Alone()"
            )
            raise TypeError(
                f"exchange must be an exchange, got {type(exchange).__name__}: {remedy}"
            )
        return super().__new__(cls)

    @property
    def parameters(self) -> AveragedParameters:
        """The averaged parameters, in the order of ``slow``: that of the model, if there is one."""
        return self._params

    _step_supports_amp_scaling = True
    """``GradScaler`` calls ``step`` after an overflow too, and leaves it to ``step`` to unscale the
    gradients.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError once the optimizer is made: the slow weights of the new parameters would
        be missing.
        """
        if hasattr(self, "slow"):
            raise ValueError(
                "add parameter groups to the inner optimizer before wrapping it: later ones would "
                "never be averaged"
            )
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one inner step, then do what the schedule asks for (it may wait for a partner,
        within the exchange's limits).

        ValueError if a parameter that was frozen when this was made requires a gradient now, or the
        inner optimizer has more than it had; RuntimeError within ``averaged``. No step is taken
        then. A step by which torch.distributed.checkpoint makes the inner optimizer's state counts
        as none. Called by ``GradScaler.step`` it leaves the inner step out if a gradient is not
        finite, and does the outer part all the same: peers count the same steps.
        """
        scale, overflow = (
            vars(self).get("grad_scale"),
            vars(self).get("found_inf"),
        )  # only while GradScaler calls
        try:
            self._check_not_averaged("step")
            self._watch.check_parameters(self.round)
            if closure is None and initialises(self):
                changed = self._watch.weights_changed()
                self.inner.step()
                self._watch.stepped()
                if not changed:  # else the first real step says so, unless a state is loaded before
                    self._watch.note_weights()
                return None
            self._check_weights()
            loss: float | None = None
            if overflow is None:
                loss = self.inner.step(closure) if closure is not None else self.inner.step()
            elif closure is None:
                step_unless_overflow(self.inner, scale, overflow)
            else:
                raise RuntimeError(
                    "GradScaler takes no closure: compute the gradients before, and call "
                    "scaler.step(optimizer) alone"
                )
            if accumulates(self.inner):
                return loss
            self._outer_part()
            return loss
        except BaseException:
            self._watch.forget_weights()  # the inner step may have been taken in part
            for name in ("grad_scale", "found_inf"):
                vars(self).pop(name, None)  # GradScaler would leave them to the next step
            raise

    @uncompiled
    def _outer_part(self) -> None:
        for _ in self.after_inner():
            pass  # the next iteration waits for the exchange

    def after_inner(self) -> Iterator[Handle]:
        """Do the outer part of ``step``.

        Yields each exchange whose outcome is needed next; iterate to the end.

        For callers that cannot block, such as a simulator with one thread for all peers: it lets
        the exchange end, then goes on.
        """
        self._check_not_averaged("step")
        self._watch.loaded_count = True
        self._watch.stepped()
        self.steps += 1
        self._begin_anew()
        for position in self.length.reached(self.position, self.schedule, self.tokens):
            self.position = position
            yield from self._act(self.schedule.at(position))
        self._watch.note_weights()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def count(self, tokens: int) -> None:
        """Count the tokens (or samples) of the coming step, for weights and round lengths that
        depend on them.
        """
        self.tokens += int(
            tokens
        )  # a sum over a mask is a tensor, which would be added to in place

    def listen(self) -> None:
        """Take part in the next round (of every fragment) with weight 0: for a late joiner that has
        hardly trained yet.

        The mean is then that of the others, and they go on as if this peer were absent. The
        exchange must accept weights of 0; ``Distributed`` does not.
        """
        self._listening = set(range(len(self._parts)))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the slow weights into the model within the block; afterwards the fast ones are
        restored bit by bit.

        Steps, ``finish`` and ``adopt`` within it raise RuntimeError: what they did to the model
        would be lost.
        """
        outside = self._averaged
        if not outside:
            self._check_weights()
        noted = self._watch.noted
        try:
            with self._weights.showing_slow():
                self._averaged = True
                try:
                    yield
                finally:
                    self._averaged = outside
        finally:
            if noted:
                self._watch.note_weights()

    @torch.no_grad()
    def finish(self, *, average: bool = False) -> None:
        """Apply the exchanges in flight (waiting within the exchange's limits).

        Call it once after the last step.

        ``average``: then send the steps since each fragment's last round in one more, and take the
        plain mean of the slow weights (and the averaged buffers) over the group, as float32, also
        into the model. All peers must do it, after as many steps.
        """
        self.settle(rest=average)
        if not average:
            return
        key = RoundKey(self.run, self.round, len(self._parts))
        self.round += 1
        members = self.average_over(self.exchange, tries=1, first_round=key.round)
        if not members:
            self._start_from_slow()
            self._watch.note_weights()
        self._report(key, members, 0)

    @torch.no_grad()
    def settle(self, *, rest: bool = True) -> None:
        """Apply the exchanges in flight, and send the ``rest``, the steps since each fragment's
        last round, in one more.
        """
        self._check_not_averaged("finish")
        self._check_weights()
        self._apply_in_flight()
        for fragment, (steps, _) in enumerate(list(self._sent_at)):
            if rest and steps < self.steps:
                self._send(fragment, at_once=True)
        self._apply_in_flight()
        self._watch.note_weights()

    @torch.no_grad()
    def average_over(
        self,
        exchange: Exchange,
        *,
        tries: int = 2,
        first_round: int = 0,
        enough: Callable[[tuple[str, ...]], bool] = bool,
        accept: Callable[[], bool] | None = None,
    ) -> tuple[str, ...]:
        """Take the plain mean of the slow weights (and the averaged buffers) over ``exchange``, as
        float32, into the model too.

        Call `settle` before. The members of one mean bring it to the next try, so that all have
        equal shares in the end.

        Args:
            tries: exchanges at most; another one follows unless ``enough(members)`` of the mean so
                far.
            first_round: number of the first try; ``exchange`` has rounds of its own by default.
            accept: called with the mean in the model; False puts everything back as it was, of
                which there is a copy until then.

        Returns the members of the last mean that was taken and accepted; none if there was none.
        """
        self._check_not_averaged("average_over")
        before = [] if accept is None else [t.clone() for t in (*self.slow, *self._buffers.now())]
        members: tuple[str, ...] = ()
        for number in range(tries):
            round = first_round + number * len(self._parts)
            everything = [*(t.float() for t in self.slow), *self._buffers.now()]
            key = RoundKey(self.run, round, len(self._parts))
            mean = exchange.start(Contribution(key, OnDemand(everything))).result()
            if mean is not None:
                members = mean.members
                assign([*self.slow, *self._buffers.now()], mean.tensors)
                self._start_from_slow()
                self._watch.note_weights()
            if self._weights.agreed(enough(members)):
                break
        if members and accept is not None and not self._weights.agreed(accept()):
            assign([*self.slow, *self._buffers.now()], before)
            self._start_from_slow()
            self._watch.note_weights()
            members = ()
        return members

    def quiet(self, most: int) -> int:
        """Return the positions up to the next at which anything is sent, applied or asked for, from
        1 to ``most``.

        For simulations, which may take the steps up to there at once.
        """
        if self._auto is not None:
            least = self._auto.least
            remaining = (
                1 if p.arrived is None else p.position + least - self.position
                for p in self._in_flight
            )
            most = min([most, *(max(positions, 1) for positions in remaining)])
        return next(
            (number for number in range(1, most) if self.schedule.at(self.position + number)), most
        )

    def _act(self, actions: Sequence[Send | Apply]) -> Iterator[Handle]:
        """Do what the schedule asks for at the present position; yield each exchange before its
        outcome is needed.
        """
        if self._auto is not None:
            self._in_flight.poll(self.position)
        for action in actions:
            if isinstance(action, Send):
                if any(self._lasts(pending) for pending in self._in_flight.of(action.fragment)):
                    self.round += 1  # left out, but the next number is the next fragment's
                    continue
                for pending in self._in_flight.of(action.fragment):
                    if not pending.finished and pending.handle is not None:
                        yield pending.handle
                    if self._auto is not None and not self._there(pending):
                        pending.arrived = self.position - pending.position
                    pending.wait(
                        self._codecs[action.fragment]
                    )  # a fragment is in one exchange at a time
                    if self._auto is not None:
                        self._apply(pending)
                oldest = (
                    not self._in_flight.of(action.fragment) and Apply(action.fragment) in actions
                )
                self._send(action.fragment, at_once=oldest or Apply(action.fragment, 0) in actions)
            else:
                due = self._in_flight.due(
                    action.fragment, None if action.after is None else self.position - action.after
                )
                if due is not None and not due.finished and due.handle is not None:
                    yield due.handle
                self._due(action.fragment, due)
        for pending in self._in_flight if self._auto is not None else ():
            if self._asked(pending) and self._there(pending) and not self._deferred(pending):
                if pending.handle is not None:
                    yield pending.handle
                self._apply(pending)

    def _asked(self, pending: PendingExchange) -> bool:
        """Return True if the exchange was sent at least as long ago as the quickest of the last
        ones took: asking has a price.
        """
        return self._auto is not None and self.position - pending.position >= self._auto.least

    def _there(self, pending: PendingExchange) -> bool:
        """Return True if the exchange is over, in all ranks: rank 0 decides."""
        pending.arrived = self._weights.agreed(pending.arrived)
        return pending.arrived is not None

    def _lasts(self, pending: PendingExchange) -> bool:
        """Return True if training goes on although the fragment is due: over a slow link the mean
        comes later. Rank 0 decides.
        """
        if (
            self._auto is None
            or self.position - pending.position >= LASTS * self._auto.every
            or self._there(pending)
        ):
            return False
        return self._weights.agreed(pending.handle is not None and pending.handle.leave_out())

    def _deferred(self, pending: PendingExchange) -> bool:
        """Return True if the members' slow weights differ, so that all begin a second exchange when
        this one is applied.

        They do so just before the fragment is sent again: an exchange between processes needs the
        same order of rounds in all.
        """
        if not (self.anchored and self.exchange.compares):
            return False
        mean = pending.result()
        return mean is not None and bool(sources(mean.states))

    def _of(self, fragment: int) -> tuple[list[Tensor], list[Tensor], State]:
        part = self._parts[fragment]
        state = {
            name: [tensors[index] for index in part] for name, tensors in self.rule_state.items()
        }
        return (
            [self.slow[index] for index in part],
            [self._weights.fast[index] for index in part],
            state,
        )

    def _context(self, key: RoundKey, **facts: Any) -> RoundContext:
        part = self._parts[key.fragment]

        def owners(places: Sequence[int], scalars: Sequence[Tensor]) -> list[Tensor]:
            return self._weights.of_owners([part[place] for place in places] or part, scalars)

        return RoundContext(key, sizes=self._weights.sizes(part), owners=owners, **facts)

    def _weigh(self, fragment: int) -> float:
        steps, tokens = self._sent_at[fragment]
        weight = (
            self.weight(self.tokens - tokens, self.steps - steps)
            if callable(self.weight)
            else self.weight
        )
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"the weight of a contribution must be finite and not negative, got {weight}"
            )
        return float(weight)

    @torch.no_grad()
    def _send(self, fragment: int, *, at_once: bool) -> None:
        """Send a fragment. ``at_once``: its outcome is applied before the next inner step."""
        if fragment >= len(self._parts):
            raise ValueError(
                f"the schedule sends fragment {fragment}, but there are only {len(self._parts)}: "
                "hand in fragments="
            )
        weight = self._weigh(fragment)
        tail = self._buffers.now() if fragment == 0 else []
        if self.slow[0].device.type == "cpu":
            tail = to_host(tail, waits=self._weights.waits(self._parts[fragment], tail))
        self._weights.read(self._parts[fragment])
        tail = tail if at_once else [tensor.clone() for tensor in tail]
        slow, fast, state = self._of(fragment)
        listening = fragment in self._listening
        self._listening.discard(fragment)
        self.round, weight, listening, lag = self._weights.agreed(
            (self.round, weight, listening, self.lag)
        )
        own_weight = 1.0 if listening or not weight else weight
        context = self._context(
            RoundKey(self.run, self.round, fragment), weight=own_weight, total=own_weight
        )
        rules = self.outer.rules(self._parts[fragment])
        contribution = contribution_of(rules, slow, fast, state, context)
        if (
            not at_once
        ):  # otherwise nothing that it is made of changes before its outcome is applied
            contribution = self._detached(contribution)
        even = rules[0][0].even(len(contribution)) if isinstance(rules[0][0], AveragesEvenly) else 0
        shown = self.sketch_of(fragment) if self.anchored and self.exchange.compares else ()
        sent = Sent(contribution, tail, 0.0 if listening else weight, even, shown)
        pending = PendingExchange(
            self._weights,
            self._parts[fragment],
            context,
            sent,
            rules,
            self.steps,
            self.position,
            lag,
            absent=weight == 0,
        )
        if weight and isinstance(codec := self._codecs[fragment], Mod4Codec):
            moved = self._weights.whole(self._parts[fragment], differences(fast, slow))
            codec.expect(f"{self.run}:{self.round}:{fragment}", moved)
        self._start(pending)
        if not at_once and isinstance(self.rule, KeepsFast):
            pending.fast = [tensor.clone() for tensor in fast]
        self._in_flight.add(pending)
        self._sent_at[fragment] = (self.steps, self.tokens)
        self.round += 1

    def _begin_anew(self) -> None:
        """Begin the exchanges that were in flight when the state was saved.

        With lags of their own not all peers have the same ones in flight. A job starts again with
        all of them, from the same step, so what one has applied already is announced as its
        absence: the others would wait for it.
        """
        begun = {
            pending.context.key.round: pending
            for pending in self._in_flight
            if pending.handle is None
        }
        over = {
            round: part
            for part, round in enumerate(self.applied)
            if round >= 0 and not self._in_flight.of(part)
        }
        for round in sorted({*begun, *over} if self._resumed and self._auto is not None else begun):
            if round in begun:
                context = begun[round].context
                key = RoundKey(self.run, round, context.key.fragment)
                begun[round].context = self._context(
                    key, weight=context.weight, total=context.total
                )
                self._start(begun[round])
            else:
                self.exchange.absent(RoundKey(self.run, round, over[round]))
        self._resumed = False

    def _start(self, pending: PendingExchange) -> None:
        """Begin the exchange of what was sent."""
        key, sent = pending.context.key, pending.sent
        if pending.absent:
            pending.handle = NoPartner()
            self.exchange.absent(key)
            return
        codec = self._codecs[key.fragment]
        codec = BufferTailCodec(codec, len(sent.tail)) if sent.tail else codec
        whole = (
            sent.contribution
            if isinstance(sent.contribution, OnDemand)
            else OnDemand(sent.contribution)
        )
        tensors = whole.rounded(torch.float32).joined(sent.tail)
        pending.handle = self.exchange.start(
            Contribution(key, tensors, sent.weight, codec, sent.even, sent.state)
        )

    def _due(self, fragment: int, due: PendingExchange | None) -> None:
        exchanges = self._in_flight.of(fragment)
        if due is not None:
            self._apply(due)
        elif (
            exchanges and exchanges[-1].position == self.position
        ):  # first round of a delayed schedule: there is no mean yet
            slow, fast, state = self._of(fragment)
            with torch.no_grad():
                context = self._context(exchanges[-1].context.key, members=0)
                apply_mean(exchanges[-1].rules, slow, fast, [], state, context)
            self._weights.restart(self._parts[fragment])

    def _detached(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors, those that share memory with staging or slow weights as copies, for
        these will change.
        """
        ours = {tensor.untyped_storage().data_ptr() for tensor in (*self._weights.fast, *self.slow)}
        return [t.clone() if t.untyped_storage().data_ptr() in ours else t for t in tensors]

    @torch.no_grad()
    def _apply(self, pending: PendingExchange) -> None:
        fragment = pending.fragment
        pending.wait(self._codecs[fragment])
        lag, mean, part = self.steps - pending.step, pending.mean, self._parts[fragment]
        if lag > 0:
            self._weights.read(part)
        if mean is not None and mean.states:
            self._equalise(pending.context.key, mean)
        slow, fast, state = self._of(fragment)
        count, weight = len(pending.sent.contribution), pending.context.weight
        total, members = weight, 1
        if mean is not None:
            total, members = (
                mean.weight,
                len(mean.members) if mean.counted is None else mean.counted,
            )
            weight = min(weight, mean.limit)
            if (
                not pending.sent.weight and not pending.absent and members < len(mean.members)
            ):  # if all weights are 0, all count
                weight = 0.0
        facts = {"weight": weight, "total": total, "members": members, "lag": lag}
        context = self._context(
            pending.context.key, sent=pending.sent.contribution, fast=pending.fast, **facts
        )
        tensors: Sequence[Tensor] = pending.sent.contribution
        if mean is not None:
            tensors = [
                t.to(self.slow[0]) for t in to_device(mean.tensors[:count], self.slow[0].device)
            ]
        apply_mean(pending.rules, slow, fast, tensors, state, context)
        self._weights.restart(part)
        if mean is not None and fragment == 0:
            buffers, tail = self._buffers.now(), mean.tensors[count:]
            accelerator = accelerator_of(buffers)
            assign(buffers, tail if accelerator is None else to_device(tail, accelerator))
        # Removed last: had anything above raised, a second call would still find the exchange.
        self._in_flight.remove(pending)
        if (
            self._auto is not None
            and pending.arrived is not None
            and mean is not None
            and len(mean.members) > 1
        ):
            self._auto.observe(pending.arrived)
        self.applied[fragment] = context.key.round
        self.outer.step()
        late = (
            self._auto is not None and pending.arrived is not None and pending.arrived > pending.lag
        )
        self._report(context.key, () if mean is None else mean.members, lag, late)

    def _equalise(self, key: RoundKey, mean: Mean) -> None:
        """Equalise the slow weights and the shared state of the fragment ``key.fragment`` among
        those that take the mean.

        The fast weights move with the slow ones, so that progress since the last send is kept. What
        a peer of a smaller part learnt while it was apart is lost. If this exchange has no partner
        either, nothing changes, and the next round tries again.
        """
        part = self._parts[key.fragment]
        right = sources(mean.states, first=self.applied[key.fragment] < 0)
        if not right:
            return
        held = [self.slow, *self.shared.values()]
        mine = [tensors[index].float() for tensors in held for index in part]
        outcome = self.exchange.start(
            Contribution(key, mine, float(self.exchange.peer in right), members=tuple(mean.states))
        ).result()
        if outcome is None:
            return
        logger.info(
            "round %d, fragment %d: the slow weights of %s differed; all have those of %s now.",
            key.round, key.fragment, ", ".join(sorted(mean.states)), ", ".join(right),
        )  # fmt: skip
        rows = [
            outcome.tensors[start : start + len(part)] for start in range(0, len(mine), len(part))
        ]
        for index, slow in zip(part, rows[0], strict=True):
            self.move(index, slow)
        for tensors, row in zip(self.shared.values(), rows[1:], strict=True):
            for index, tensor in zip(part, row, strict=True):
                tensors[index].copy_(tensor)

    def _report(
        self, key: RoundKey, members: tuple[str, ...], lag: int, late: bool = False
    ) -> None:
        if self.on_round is not None:
            self.on_round(RoundInfo(key, members, self.steps, lag, late))

    def _apply_in_flight(self) -> None:
        self._begin_anew()
        for pending in self._in_flight:
            self._apply(pending)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Raise TypeError: a copy would share the exchange, and so this peer's place in the run."""
        raise TypeError(
            "an outer optimizer cannot be copied or pickled: make another around the copied "
            "model's inner optimizer, with an "
            "exchange of its own, and load this one's state_dict()"
        )


def config_diff(mine: OuterOptimizer, other: OuterOptimizer) -> str | None:
    """Return the first difference of ``mine`` to ``other`` that matters for averaging ("every is 20
    and not 50"), or None.

    Compares rule, present outer rate and momentum of each parameter, schedule but for the lag (each
    peer may have its own), codec, weight, length of a round, number of buffers, and fragments.
    Tensors are not read, so ``other`` may be on the device "meta".
    """
    for index in (
        range(min(len(mine.slow), len(other.slow))) if type(mine.rule) is type(other.rule) else ()
    ):
        present, expected = mine.outer.values(index), other.outer.values(index)
        for name in present.keys() & expected.keys():
            if present[name] != expected[name]:
                return f"{name} is {present[name]} and not {expected[name]}"
    for one, two in ((mine.rule, other.rule), (_sending(mine.schedule), _sending(other.schedule))):
        if type(one) is not type(two):
            return f"it is {kind_of(one)} and not {kind_of(two)}"
        for item in fields(one):  # type: ignore[arg-type]
            difference = _differ(item.name, getattr(one, item.name), getattr(two, item.name))
            if (
                difference is not None
                and item.name not in mine.outer.defaults.keys() & other.outer.defaults.keys()
            ):
                return difference
    pairs = {
        "the codec": (mine.codec.name, other.codec.name),
        "the weight": (_shown(mine.weight), _shown(other.weight)),
        "the round": (_length(mine), _length(other)),
        "the number of averaged buffers": (len(mine._buffers), len(other._buffers)),
        "the number of fragments": (mine.fragments, other.fragments),
    }
    differing = (
        difference
        for what, (one, two) in pairs.items()
        if (difference := _differ(what, one, two)) is not None
    )
    shapes = [[parameter.shape for parameter in opt.parameters] for opt in (mine, other)]
    cut = (
        None
        if mine._parts == other._parts and shapes[0] == shapes[1]
        else "its fragments hold other parameters"
    )
    return next(differing, cut)


def _sending(schedule: Schedule) -> Schedule:
    streams = isinstance(schedule, (Every, Streaming))
    return Streaming(schedule.every, getattr(schedule, "fragments", 1)) if streams else schedule


def _differ(what: str, one: object, two: object) -> str | None:
    return None if one == two else f"{what} is {one} and not {two}"


def _shown(weight: Any) -> str:
    return getattr(weight, "__name__", str(weight))


def _length(opt: OuterOptimizer) -> str:
    """Return the kind of the length, and its number if it is one; a function of seconds gives all
    peers the same.
    """
    public = {name: value for name, value in vars(opt.length).items() if not name.startswith("_")}
    return " ".join(
        [kind_of(opt.length), *(f"{value:g}" for value in public.values() if not callable(value))]
    )


def averaged_parameters(inner: Inner, exchange: Exchange, options: Options) -> AveragedParameters:
    """Return the parameters that an optimizer with these options averages, in its order."""
    model = options.get("model")
    return trained(inner, exchange, excluded(options.get("exclude", ()), inner, model), model)


def cut(
    fragments: Fragments, inner: Inner, exchange: Exchange, options: Options
) -> Sequence[Fragment] | None:
    """Return the parameters of each fragment, None for one: as the exchange has them, if it states
    that number of them.
    """
    if not isinstance(fragments, int):
        parameters = averaged_parameters(inner, exchange, options)
        return [[parameters[at] for at in part] for part in positions(fragments, parameters)]
    if fragments == 1:
        return None
    if len(exchange.fragments) == fragments:
        return exchange.fragments
    model, parameters = options.get("model"), averaged_parameters(inner, exchange, options)
    fragments = possible(fragments, model, parameters)
    return even(parameters, fragments) if model is None else strided(model, fragments, parameters)
