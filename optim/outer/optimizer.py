"""The outer optimizer: a real ``torch.optim.Optimizer`` that wraps the user's inner one.

    loss.backward()
    opt.step()          # inner step; where the schedule says so, also send and apply
    opt.zero_grad()

It shares the inner optimizer's ``param_groups`` and ``state``, so learning-rate schedulers and
``GradScaler`` act on it as on any optimizer. When the schedule says so, it hands a contribution to
the exchange, applies the outer rule to the slow weights (float32, or float64 if a parameter is; on
the CPU by default) and copies the fast weights back into the model. If no peer answers, the rule is
applied to the own contribution alone: local progress is never lost.

Read on from ``step``: ``after_inner`` follows the schedule, ``_send`` makes a contribution, and
``_apply`` takes its mean. The fields are listed in `shoal.optim.outer.state`, saving is in
`shoal.optim.outer.saved_state`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from shoal.optim.codecs.buffer_tail import BufferTailCodec
from shoal.optim.codecs.mod4 import Mod4Codec
from shoal.optim.device import accelerator_of, to_device, to_host, uncompiled
from shoal.optim.exchange.base import Contribution, Exchange, Handle, Mean, NoPartner, RoundKey
from shoal.optim.exchange.on_demand import OnDemand, differences
from shoal.optim.outer.agreement import sources
from shoal.optim.outer.in_flight import FragmentState, PendingExchange, RoundInfo, Sent
from shoal.optim.outer.library_steps import (
    is_mid_accumulation,
    only_makes_state,
    step_unless_overflow,
)
from shoal.optim.outer.options import check_arguments
from shoal.optim.outer.outer_groups import apply_mean, contribution_of
from shoal.optim.outer.rule import (
    AveragesEvenly,
    KeepsFast,
    RoundContext,
    State,
    assign,
)
from shoal.optim.outer.saved_state import SavedState
from shoal.optim.schedule.auto_lag import AutoLag
from shoal.optim.schedule.schedules import Apply, Send

if TYPE_CHECKING:
    from typing import Self

logger = logging.getLogger(__name__)

ROUNDS_PER_EXCHANGE = 2
"""Rounds that an exchange may take while its bytes move (lag "auto"); then training waits."""


class OuterOptimizer(SavedState):
    """Outer optimizer around ``inner``, to be used in its place in the training loop.

        opt = NoLoCo(inner, exchange, every=25)      # a subclass, with rule and schedule
        ...; opt.step(); ...; opt.finish()

    The parameters that require a gradient when it is made are averaged (with LoRA the adapters).
    One that is frozen later stays in: all peers must send the same tensors.

    ``Options`` says what the other arguments are for.

    Args:
        inner: an optimizer, or several of different parameters; their state is local.
        exchange: averages contributions with other peers.
        rule: the outer mathematics.
        schedule: when to send and apply.
        fragments: of each the module, or a list of modules and parameters; None: one fragment with
            all parameters.

    Raises:
        ValueError: no parameter that requires a gradient, not floating point, not in exactly one
            fragment, buffers or shards without a model, an exclusion that fits nothing, an inner
            optimizer that remembers earlier weights.
    """

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Check the arguments of whichever method is made, before it looks into them.

        TypeError names the one that is wrong.
        """
        check_arguments(cls, args, options)
        return super().__new__(cls)

    _step_supports_amp_scaling = True
    """``GradScaler`` calls ``step`` after an overflow too, and leaves it to ``step`` to unscale the
    gradients.
    """

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one inner step, then do what the schedule asks for.

        It may wait for a partner, within the exchange's limits. A step by which
        torch.distributed.checkpoint makes the inner optimizer's state counts as none. Called by
        ``GradScaler.step`` it leaves the inner step out if a gradient is not finite, and does the
        outer part all the same: peers count the same steps.

        Raises:
            ValueError: a parameter that was frozen when this was made requires a gradient now, or
                the inner optimizer has more than it had; no step is taken.
            RuntimeError: within ``averaged``; no step is taken.
        """
        try:
            self._check_not_averaged("step")
            self._watch.check_parameters(self.round)
            if closure is None and only_makes_state(self):
                self._make_inner_state()
                return None
            self._check_weights()
            loss = self._inner_step(closure)
            if not is_mid_accumulation(self.inner):
                self._outer_part()
            return loss
        except BaseException:
            self._watch.forget_weights()  # the inner step may have been taken in part
            for name in ("grad_scale", "found_inf"):
                vars(self).pop(name, None)  # GradScaler would leave them to the next step
            raise

    def _inner_step(self, closure: Callable[[], float] | None) -> float | None:
        overflow = vars(self).get("found_inf")  # there only while GradScaler calls
        if overflow is None:
            return self.inner.step(closure) if closure is not None else self.inner.step()
        if closure is not None:
            raise RuntimeError(
                "GradScaler takes no closure: compute the gradients before, and call "
                "scaler.step(optimizer) alone"
            )
        step_unless_overflow(self.inner, vars(self).get("grad_scale"), overflow)
        return None

    def _make_inner_state(self) -> None:
        changed = self._watch.weights_changed()
        self.inner.step()
        self._watch.stepped()
        if not changed:  # else the first real step says so, unless a state is loaded before
            self._watch.note_weights()

    @uncompiled
    def _outer_part(self) -> None:
        for _ in self.after_inner():
            pass  # the next iteration waits for the exchange

    def after_inner(self) -> Iterator[Handle]:
        """Do the outer part of ``step``.

        Yields each exchange whose outcome is needed next; iterate to the end. For callers that
        cannot block, such as a simulator with one thread for all peers: it lets the exchange end,
        then goes on.
        """
        self._check_not_averaged("step")
        self._watch.loaded_count = True
        self._watch.stepped()
        self.progress.steps += 1
        self._begin_anew()
        for position in self.length.reached(self.position, self.schedule, self.tokens):
            self.progress.position = position
            yield from self._act(self.schedule.at(position))
        self._watch.note_weights()

    def _act(self, actions: Sequence[Send | Apply]) -> Iterator[Handle]:
        """Do what the schedule asks for at the present position."""
        if self._auto is not None:
            for pending in self._in_flight:
                pending.poll(self.position)
        for action in actions:
            if isinstance(action, Send):
                yield from self._act_on_send(action.fragment, actions)
            else:
                yield from self._act_on_apply(action)
        if self._auto is not None:
            yield from self._apply_arrived(self._auto)

    def _act_on_send(self, fragment: int, actions: Sequence[Send | Apply]) -> Iterator[Handle]:
        """Send a fragment, once its last exchange is over: it is in one at a time."""
        state = self._fragment(fragment)
        for pending in state.in_flight:
            if self._lasts(pending):
                self.round += 1  # left out, but the next number is the next fragment's
                return
        for pending in list(state.in_flight):
            if not pending.finished and pending.handle is not None:
                yield pending.handle
            if self._auto is not None and not self._has_arrived(pending):
                pending.arrived = self.position - pending.position
            state.wait(pending)
            if self._auto is not None:
                self._apply(pending)
        applies_own = not state.in_flight and Apply(fragment) in actions
        self._send(fragment, at_once=applies_own or Apply(fragment, 0) in actions)

    def _act_on_apply(self, action: Apply) -> Iterator[Handle]:
        """Apply the mean that is due; nothing if it was applied before, or was not sent."""
        state = self._fragment(action.fragment)
        due: PendingExchange | None = None
        if action.after is not None:
            due = state.sent_at_position(self.position - action.after)
        elif state.in_flight:
            due = state.in_flight[0]
        if due is not None:
            if not due.finished and due.handle is not None:
                yield due.handle
            self._apply(due)
        elif state.in_flight and state.in_flight[-1].position == self.position:
            self._apply_nothing(state.in_flight[-1])

    def _apply_arrived(self, auto: AutoLag) -> Iterator[Handle]:
        """Apply the means that are there, with a lag that follows their arrivals.

        An exchange is asked for only once it has taken as long as the quickest of the last ones:
        in a peer of several ranks asking has a price.
        """
        for pending in self._in_flight:
            if self.position - pending.position < auto.least:
                continue
            if self._has_arrived(pending) and not self._is_deferred(pending):
                if pending.handle is not None:
                    yield pending.handle
                self._apply(pending)

    def _has_arrived(self, pending: PendingExchange) -> bool:
        """Return True if the exchange is over, in all ranks: rank 0 decides."""
        pending.arrived = self._weights.agreed(pending.arrived)
        return pending.arrived is not None

    def _lasts(self, pending: PendingExchange) -> bool:
        """Return True if training goes on although the fragment is due, for a slow link's mean.

        Rank 0 decides.
        """
        if self._auto is None:
            return False
        if self.position - pending.position >= ROUNDS_PER_EXCHANGE * self._auto.every:
            return False
        if self._has_arrived(pending):
            return False
        return self._weights.agreed(pending.handle is not None and pending.handle.leave_out())

    def _is_deferred(self, pending: PendingExchange) -> bool:
        """Return True if the members' slow weights differ, so that the mean is applied later.

        All then begin a second exchange (``_equalise``), in the same order of rounds: just before
        the fragment is sent again.
        """
        if not (self.anchored and self.exchange.compares):
            return False
        mean = pending.result()
        return mean is not None and bool(sources(mean.states))

    def _fragment(self, number: int) -> FragmentState:
        if number >= self.fragments:
            raise ValueError(
                f"the schedule sends fragment {number}, but there are only {self.fragments}: "
                "hand in fragments="
            )
        return self._fragments[number]

    @torch.no_grad()
    def _send(self, number: int, *, at_once: bool) -> None:
        """Send a fragment. ``at_once``: its outcome is applied before the next inner step."""
        fragment = self._fragment(number)
        part = fragment.part
        weight = self._weigh(fragment)
        tail = self._read(number, part)
        if not at_once:
            tail = [tensor.clone() for tensor in tail]
        listens = fragment.listens
        fragment.listens = False
        due = self.exchange.due(self.round, number)
        due, self.round, weight, listens, lag = self._weights.agreed(
            (due, self.round, weight, listens, self.lag)
        )

        key = RoundKey(self.run, due, number)
        own_weight = 1.0 if listens or not weight else weight
        context = self._context(key, weight=own_weight, total=own_weight)
        rules = self.outer.rules(part)
        slow, fast, state = self._tensors_of(part)
        contribution = contribution_of(rules, slow, fast, state, context)
        if not at_once:  # otherwise nothing that it is made of changes before its mean is applied
            contribution = self._detached(contribution)
        first_rule = rules[0][0]
        unweighted_count = 0
        if isinstance(first_rule, AveragesEvenly):
            unweighted_count = first_rule.unweighted_count(len(contribution))
        compared = self.anchored and self.exchange.compares
        shown = self._weights.sketch(part) if compared else ()
        pending = PendingExchange(
            weights=self._weights,
            part=part,
            context=context,
            sent=Sent(contribution, tail, 0.0 if listens else weight, unweighted_count, shown),
            rules=rules,
            step=self.steps,
            position=self.position,
            lag=lag,
            absent=weight == 0,
        )
        if weight and isinstance(fragment.codec, Mod4Codec):
            moved = self._weights.whole(part, differences(fast, slow))
            fragment.codec.expect(f"{self.run}:{due}:{number}", moved)
        self._start(pending)
        if not at_once and isinstance(self.rule, KeepsFast):
            pending.fast = [tensor.clone() for tensor in fast]
        fragment.in_flight.append(pending)
        fragment.sent_at = (self.steps, self.tokens)
        self.round = max(self.round, due) + 1

    def _read(self, number: int, part: Sequence[int]) -> list[Tensor]:
        """Read the model's weights; return its averaged buffers, which go with fragment 0."""
        tail = self._buffers.now() if number == 0 else []
        if self.slow[0].device.type == "cpu":
            tail = to_host(tail, waits=self._weights.waits(part, tail))
        self._weights.read(part)
        return tail

    def _start(self, pending: PendingExchange) -> None:
        """Begin the exchange of what was sent."""
        key = pending.context.key
        sent = pending.sent
        if pending.absent:
            pending.handle = NoPartner()
            self.exchange.absent(key)
            return
        codec = self._fragments[key.fragment].codec
        if sent.tail:
            codec = BufferTailCodec(codec, len(sent.tail))
        whole = sent.contribution
        if not isinstance(whole, OnDemand):
            whole = OnDemand(whole)
        tensors = whole.rounded(torch.float32).joined(sent.tail)
        pending.handle = self.exchange.start(
            Contribution(key, tensors, sent.weight, codec, sent.unweighted_count, sent.state)
        )

    def _weigh(self, fragment: FragmentState) -> float:
        """Return the weight of a fragment's contribution."""
        steps, tokens = fragment.sent_at
        weight = self.weight
        if callable(weight):
            weight = weight(self.tokens - tokens, self.steps - steps)
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"the weight of a contribution must be finite and not negative, got {weight}"
            )
        return float(weight)

    def _detached(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors, as copies those that share memory with staging or slow weights.

        These will change.
        """
        ours = {tensor.untyped_storage().data_ptr() for tensor in (*self._weights.fast, *self.slow)}
        found: list[Tensor] = []
        for tensor in tensors:
            changes = tensor.untyped_storage().data_ptr() in ours
            found.append(tensor.clone() if changes else tensor)
        return found

    @torch.no_grad()
    def _apply(self, pending: PendingExchange) -> None:
        """Wait for the mean of an exchange, and apply the rule; without one to the own alone."""
        number = pending.fragment
        fragment = self._fragments[number]
        key = pending.context.key
        sent = pending.sent
        fragment.wait(pending)
        mean = pending.mean
        lag = self.steps - pending.step
        if lag > 0:
            self._weights.read(fragment.part)
        if mean is not None and mean.states:
            self._equalise(key, mean)
        slow, fast, state = self._tensors_of(fragment.part)
        tensors: Sequence[Tensor] = sent.contribution
        if mean is not None:
            device = self.slow[0].device
            there = to_device(mean.tensors[: len(sent.contribution)], device)
            tensors = [tensor.to(self.slow[0]) for tensor in there]
        context = self._context(
            key, lag=lag, sent=sent.contribution, fast=pending.fast, **_shares(pending)
        )
        apply_mean(pending.rules, slow, fast, tensors, state, context)
        self._weights.restart(fragment.part)
        if mean is not None and number == 0:
            self._assign_buffers(mean.tensors[len(sent.contribution) :])
        # Removed last: had anything above raised, a second call would still find the exchange.
        fragment.in_flight.remove(pending)
        late = False
        if self._auto is not None and pending.arrived is not None:
            late = pending.arrived > pending.lag
            if mean is not None and len(mean.members) > 1:
                self._auto.observe(pending.arrived)
        self.applied[number] = key.round
        self.outer.step()
        self._report(key, () if mean is None else mean.members, lag, late)

    def _apply_nothing(self, pending: PendingExchange) -> None:
        """Let the rule restart the fast weights: in the first round there is no mean yet."""
        slow, fast, state = self._tensors_of(pending.part)
        with torch.no_grad():
            context = self._context(pending.context.key, members=0)
            apply_mean(pending.rules, slow, fast, [], state, context)
        self._weights.restart(pending.part)

    def _assign_buffers(self, tensors: Sequence[Tensor]) -> None:
        buffers = self._buffers.now()
        accelerator = accelerator_of(buffers)
        assign(buffers, tensors if accelerator is None else to_device(tensors, accelerator))

    def _equalise(self, key: RoundKey, mean: Mean) -> None:
        """Equalise a fragment's slow weights and shared state among those that take the mean.

        The fast weights move with the slow ones, so that progress since the last send is kept. What
        a peer of a smaller part learnt while it was apart is lost. If this exchange has no partner
        either, nothing changes, and the next round tries again.
        """
        part = self.positions(key.fragment)
        right = sources(mean.states, first=self.applied[key.fragment] < 0)
        if not right:
            return
        mine: list[Tensor] = []
        for tensors in (self.slow, *self.shared.values()):
            mine += [tensors[index].float() for index in part]
        weight = float(self.exchange.peer in right)
        contribution = Contribution(key, mine, weight, members=tuple(mean.states))
        outcome = self.exchange.start(contribution).result()
        if outcome is None:
            return
        logger.info(
            "round %d, fragment %d: the slow weights of %s differed; all have those of %s now.",
            key.round,
            key.fragment,
            ", ".join(sorted(mean.states)),
            ", ".join(right),
        )
        count = len(part)
        for index, slow in zip(part, outcome.tensors[:count], strict=True):
            self.move(index, slow)
        for number, tensors in enumerate(self.shared.values(), start=1):
            row = outcome.tensors[number * count : (number + 1) * count]
            for index, tensor in zip(part, row, strict=True):
                tensors[index].copy_(tensor)

    def _tensors_of(self, part: Sequence[int]) -> tuple[list[Tensor], list[Tensor], State]:
        """Return slow weights, staged fast weights and the rule's state of a fragment."""
        slow = [self.slow[index] for index in part]
        fast = [self._weights.fast[index] for index in part]
        state = {}
        for name, tensors in self.rule_state.items():
            state[name] = [tensors[index] for index in part]
        return slow, fast, state

    def _context(self, key: RoundKey, **facts: Any) -> RoundContext:
        part = self.positions(key.fragment)

        def owners(places: Sequence[int], scalars: Sequence[Tensor]) -> list[Tensor]:
            return self._weights.of_owners([part[place] for place in places] or part, scalars)

        return RoundContext(key, sizes=self._weights.sizes(part), owners=owners, **facts)

    def _report(
        self, key: RoundKey, members: tuple[str, ...], lag: int, late: bool = False
    ) -> None:
        if self.on_round is not None:
            self.on_round(RoundInfo(key, members, self.steps, lag, late))

    def _begin_anew(self) -> None:
        """Begin the exchanges that were in flight when the state was saved.

        With lags of their own not all peers have the same ones in flight. A job starts again with
        all of them, from the same step, so what one has applied already is announced as its
        absence: the others would wait for it.
        """
        begun: dict[tuple[int, int], PendingExchange] = {}
        for pending in self._in_flight:
            if pending.handle is None:
                begun[pending.context.key.round, pending.fragment] = pending
        over: list[tuple[int, int]] = []
        if self._resumed and self._auto is not None:
            for number, round in enumerate(self.applied):
                if round >= 0 and not self._fragments[number].in_flight:
                    over.append((round, number))
        for round, number in sorted({*begun, *over}):
            key = RoundKey(self.run, round, number)
            if (round, number) in begun:
                pending = begun[round, number]
                old = pending.context
                pending.context = self._context(key, weight=old.weight, total=old.total)
                self._start(pending)
            else:
                self.exchange.absent(key)
        self._resumed = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def count(self, tokens: int) -> None:
        """Count the tokens (or samples) of the coming step.

        Weights and round lengths may depend on them.
        """
        # A sum over a mask is a tensor, which would be added to.
        self.progress.tokens += int(tokens)

    def listen(self) -> None:
        """Take part in the next round (of every fragment) with weight 0.

        For a late joiner that has hardly trained yet: the mean is then that of the others, and they
        go on as if this peer were absent. The exchange must accept weights of 0; ``Distributed``
        does not.
        """
        for fragment in self._fragments:
            fragment.listens = True

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the slow weights into the model within the block.

        Afterwards the fast ones are restored bit by bit. Steps, ``finish`` and ``adopt`` within it
        raise RuntimeError: what they did to the model would be lost.
        """
        if not self._weights.shows_slow:
            self._check_weights()
        noted = self._watch.noted
        try:
            with self._weights.showing_slow():
                yield
        finally:
            if noted:
                self._watch.note_weights()

    @torch.no_grad()
    def finish(self, *, average: bool = False) -> None:
        """Apply the exchanges in flight (waiting within the exchange's limits).

        Call it once after the last step.

        Args:
            average: then take the plain mean of the models' weights, with the steps since the last
                round (and of the averaged buffers), over the group, as float32, into the slow
                weights and the model. All peers must do it, after as many rounds.
        """
        self.settle(rest=average)
        if not average:
            return
        key = RoundKey(self.run, self.round, self.fragments)
        self.round += 1
        members = self.average_over(self.exchange, tries=1, first_round=key.round)
        if not members:
            self._start_from_slow()
            self._watch.note_weights()
        self._report(key, members, 0)

    @torch.no_grad()
    def settle(self, *, rest: bool = True) -> None:
        """Apply the exchanges in flight.

        ``rest``: also take the steps since each fragment's last round into the slow weights, which
        are the model's then, for a mean of everything that follows.
        """
        self._check_not_averaged("finish")
        self._check_weights()
        self._apply_in_flight()
        if rest:
            everything = self._weights.everything
            self._weights.read(everything)
            assign(self.slow, [self._weights.fast[index] for index in everything])
        self._watch.note_weights()

    def _apply_in_flight(self) -> None:
        self._begin_anew()
        for pending in self._in_flight:
            self._apply(pending)

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
        """Take the plain mean of slow weights and averaged buffers over ``exchange``, as float32.

        The model takes it too. Call `settle` before. The members of one mean bring it to the next
        try, so that all have equal shares in the end.

        Args:
            tries: exchanges at most; another one follows unless ``enough(members)`` of the mean so
                far.
            first_round: number of the first try; ``exchange`` has rounds of its own by default.
            accept: called with the mean in the model; False puts everything back as it was, of
                which there is a copy until then.

        Returns the members of the last mean that was taken and accepted; none if there was none.
        """
        self._check_not_averaged("average_over")
        before: list[Tensor] = []
        if accept is not None:
            before = [tensor.clone() for tensor in (*self.slow, *self._buffers.now())]
        members: tuple[str, ...] = ()
        for number in range(tries):
            everything = [*(tensor.float() for tensor in self.slow), *self._buffers.now()]
            key = RoundKey(self.run, first_round + number * self.fragments, self.fragments)
            mean = exchange.start(Contribution(key, OnDemand(everything))).result()
            if mean is not None:
                members = mean.members
                self._restart_everything(mean.tensors)
            if self._weights.agreed(enough(members)):
                break
        if members and accept is not None and not self._weights.agreed(accept()):
            self._restart_everything(before)
            members = ()
        return members

    def _restart_everything(self, tensors: Sequence[Tensor]) -> None:
        """Take other slow weights and buffers, and let training go on from them."""
        assign([*self.slow, *self._buffers.now()], tensors)
        self._start_from_slow()
        self._watch.note_weights()

    def quiet(self, most: int) -> int:
        """Return the positions up to the next at which anything is sent, applied or asked for.

        From 1 to ``most``: for simulations, which may take the steps up to there at once.
        """
        if self._auto is not None:
            for pending in self._in_flight:
                remaining = 1
                if pending.arrived is not None:
                    remaining = pending.position + self._auto.least - self.position
                most = min(most, max(remaining, 1))
        for number in range(1, most):
            if self.schedule.at(self.position + number):
                return number
        return most

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError once the optimizer is made.

        The slow weights of the new parameters would be missing.
        """
        if hasattr(self, "_weights"):
            raise ValueError(
                "add parameter groups to the inner optimizer before wrapping it: later ones would "
                "never be averaged"
            )
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Raise TypeError: a copy would share the exchange, and so this peer's place in the run."""
        raise TypeError(
            "an outer optimizer cannot be copied or pickled: make another around the copied "
            "model's inner optimizer, with an exchange of its own, and load this one's "
            "state_dict()"
        )


def _shares(pending: PendingExchange) -> dict[str, Any]:
    """Return for the rule how much the own contribution counts, and how many are in the mean."""
    mean = pending.mean
    own = pending.context.weight
    if mean is None:
        return {"weight": own, "total": own, "members": 1}
    members = len(mean.members) if mean.counted is None else mean.counted
    weight = min(own, mean.limit)
    out_of_mean = not pending.sent.weight and not pending.absent
    if out_of_mean and members < len(mean.members):  # if all weights are 0, all count
        weight = 0.0
    return {"weight": weight, "total": mean.weight, "members": members}
