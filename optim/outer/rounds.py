"""Rounds of an outer optimizer: sending a fragment, and applying its mean.

Equal slow weights again, after a round that some peers missed.

Rules that send displacements (`Anchored`) rely on equal slow weights, of which nothing is sent. So each contribution goes with a
``sketch`` of them. If the sketches of a round's members differ, its members average once more, before they apply the mean: the slow
weights and the shared state of those that are right, with weight 1; the others take the result with weight 0.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.optim.codecs.base import BufferTailCodec
from shoal.optim.codecs.mod4 import Mod4Codec
from shoal.optim.device import accelerator_of, to_device, to_host
from shoal.optim.exchange.base import (
    Contribution,
    Exchange,
    Handle,
    Mean,
    NoPartner,
    OnDemand,
    RoundKey,
    differences,
)
from shoal.optim.outer.fragments import Weight
from shoal.optim.outer.in_flight import PendingExchange, RoundInfo, Sent
from shoal.optim.outer.inner import apply_mean, contribution_of
from shoal.optim.outer.rule import AveragesEvenly, KeepsFast, RoundContext, State, assign
from shoal.optim.outer.state import OuterState
from shoal.optim.outer.weights import distance
from shoal.optim.schedule import Apply, Send

logger = logging.getLogger(__name__)

SAME = 1e-6
"""Distance of two sketches, in parts of their largest number, up to which they differ by rounding alone."""


def sources(states: Mapping[str, Sequence[float]], *, first: bool = False) -> list[str]:
    """Return the peers whose slow weights all others should take the mean of; none if all hold the same.

    Of those that hold the same, the largest part is right: one of it stands for it. Among several parts of that size none is
    nearer to the truth. After a round that failed for everyone each peer has gone on alone, and the mean of their slow weights is
    what that round would have given (exactly so under a linear rule). ``first``: nothing was averaged yet, so there is nothing in
    common; then the first part is right, since a mean of independent initial weights is worse than any.
    """
    parts: list[list[str]] = []
    for peer in sorted(states):
        for part in parts:
            here, there = states[peer], states[part[0]]
            if distance(here, there) <= SAME * max(map(abs, (*here, *there))):
                part.append(peer)
                break
        else:
            parts.append([peer])
    if len(parts) < 2:
        return []
    most = max(map(len, parts))
    largest = [part[0] for part in parts if len(part) == most]
    return largest[:1] if first else largest


def equalise(opt: OuterState, exchange: Exchange, key: RoundKey, mean: Mean) -> None:
    """Equalise the slow weights and the shared state of the fragment ``key.fragment`` among those that take the mean.

    The fast weights move with the slow ones, so that progress since the last send is kept. What a peer of a smaller part learnt
    while it was apart is lost. If this exchange has no partner either, nothing changes, and the next round tries again.
    """
    part = opt.positions(key.fragment)
    right = sources(mean.states, first=opt.applied[key.fragment] < 0)
    if not right:
        return
    held = [opt.slow, *opt.shared.values()]
    mine = [tensors[index].float() for tensors in held for index in part]
    outcome = exchange.start(Contribution(key, mine, float(exchange.peer in right), members=tuple(mean.states))).result()
    if outcome is None:
        return
    logger.info(
        "round %d, fragment %d: the slow weights of %s differed; all have those of %s now.",
        key.round, key.fragment, ", ".join(sorted(mean.states)), ", ".join(right),
    )  # fmt: skip
    rows = [outcome.tensors[start : start + len(part)] for start in range(0, len(mine), len(part))]
    for index, slow in zip(part, rows[0], strict=True):
        opt.move(index, slow)
    for tensors, row in zip(opt.shared.values(), rows[1:], strict=True):
        for index, tensor in zip(part, row, strict=True):
            tensors[index].copy_(tensor)


LASTS = 2  # rounds that an exchange may take while its bytes move (lag "auto")


class OuterRounds(OuterState):
    """Base of ``OuterOptimizer``: what a schedule asks for."""

    exchange: Exchange
    weight: float | Weight
    on_round: Callable[[RoundInfo], None] | None
    _listening: set[int]
    _resumed: bool

    def quiet(self, most: int) -> int:
        """Return the positions up to the next at which anything is sent, applied or asked for, from 1 to ``most``.

        For simulations, which may take the steps up to there at once.
        """
        if self._auto is not None:
            least = self._auto.least
            left = (1 if p.arrived is None else p.position + least - self.position for p in self._in_flight)
            most = min([most, *(max(positions, 1) for positions in left)])
        return next((number for number in range(1, most) if self.schedule.at(self.position + number)), most)

    def _act(self, actions: Sequence[Send | Apply]) -> Iterator[Handle]:
        """Do what the schedule asks for at the present position; yield each exchange before its outcome is needed."""
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
                    pending.wait(self._codecs[action.fragment])  # a fragment is in one exchange at a time
                    if self._auto is not None:
                        self._apply(pending)
                oldest = not self._in_flight.of(action.fragment) and Apply(action.fragment) in actions
                self._send(action.fragment, at_once=oldest or Apply(action.fragment, 0) in actions)
            else:
                due = self._in_flight.due(action.fragment, None if action.after is None else self.position - action.after)
                if due is not None and not due.finished and due.handle is not None:
                    yield due.handle
                self._due(action.fragment, due)
        for pending in self._in_flight if self._auto is not None else ():
            if self._asked(pending) and self._there(pending) and not self._deferred(pending):
                if pending.handle is not None:
                    yield pending.handle
                self._apply(pending)

    def _asked(self, pending: PendingExchange) -> bool:
        """Return True if the exchange was sent at least as long ago as the quickest of the last ones took: asking has a price."""
        return self._auto is not None and self.position - pending.position >= self._auto.least

    def _there(self, pending: PendingExchange) -> bool:
        """Return True if the exchange is over, in all ranks: rank 0 decides."""
        pending.arrived = self._weights.agreed(pending.arrived)
        return pending.arrived is not None

    def _lasts(self, pending: PendingExchange) -> bool:
        """Return True if training goes on although the fragment is due: over a slow link the mean comes later. Rank 0 decides."""
        if self._auto is None or self.position - pending.position >= LASTS * self._auto.every or self._there(pending):
            return False
        return self._weights.agreed(pending.handle is not None and pending.handle.leave_out())

    def _deferred(self, pending: PendingExchange) -> bool:
        """Return True if the members' slow weights differ, so that all begin a second exchange when this one is applied.

        They do so just before the fragment is sent again: an exchange between processes needs the same order of rounds in all.
        """
        if not (self.anchored and self.exchange.compares):
            return False
        mean = pending.result()
        return mean is not None and bool(sources(mean.states))

    def _of(self, fragment: int) -> tuple[list[Tensor], list[Tensor], State]:
        part = self._parts[fragment]
        state = {name: [tensors[index] for index in part] for name, tensors in self.rule_state.items()}
        return [self.slow[index] for index in part], [self._weights.fast[index] for index in part], state

    def _context(self, key: RoundKey, **facts: Any) -> RoundContext:
        part = self._parts[key.fragment]

        def owners(places: Sequence[int], scalars: Sequence[Tensor]) -> list[Tensor]:
            return self._weights.of_owners([part[place] for place in places] or part, scalars)

        return RoundContext(key, sizes=self._weights.sizes(part), owners=owners, **facts)

    def _weigh(self, fragment: int) -> float:
        steps, tokens = self._sent_at[fragment]
        weight = self.weight(self.tokens - tokens, self.steps - steps) if callable(self.weight) else self.weight
        if not 0 <= weight < math.inf:
            raise ValueError(f"the weight of a contribution must be finite and not negative, got {weight}")
        return float(weight)

    @torch.no_grad()
    def _send(self, fragment: int, *, at_once: bool) -> None:
        """Send a fragment. ``at_once``: its outcome is applied before the next inner step."""
        if fragment >= len(self._parts):
            raise ValueError(f"the schedule sends fragment {fragment}, but there are only {len(self._parts)}: hand in fragments=")
        weight = self._weigh(fragment)
        tail = self._buffers.now() if fragment == 0 else []
        if self.slow[0].device.type == "cpu":
            tail = to_host(tail, waits=self._weights.waits(self._parts[fragment], tail))
        self._weights.read(self._parts[fragment])
        tail = tail if at_once else [tensor.clone() for tensor in tail]
        slow, fast, state = self._of(fragment)
        listening = fragment in self._listening
        self._listening.discard(fragment)
        self.round, weight, listening, lag = self._weights.agreed((self.round, weight, listening, self.lag))
        own_weight = 1.0 if listening or not weight else weight
        context = self._context(RoundKey(self.run, self.round, fragment), weight=own_weight, total=own_weight)
        rules = self.outer.rules(self._parts[fragment])
        contribution = contribution_of(rules, slow, fast, state, context)
        if not at_once:  # otherwise nothing that it is made of changes before its outcome is applied
            contribution = self._detached(contribution)
        even = rules[0][0].even(len(contribution)) if isinstance(rules[0][0], AveragesEvenly) else 0
        shown = self.sketch_of(fragment) if self.anchored and self.exchange.compares else ()
        sent = Sent(contribution, tail, 0.0 if listening else weight, even, shown)
        pending = PendingExchange(
            self._weights, self._parts[fragment], context, sent, rules, self.steps, self.position, lag, absent=weight == 0
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

        With lags of their own not all peers have the same ones in flight. A job starts again with all of them, from the same step,
        so what one has applied already is announced as its absence: the others would wait for it.
        """
        begun = {pending.context.key.round: pending for pending in self._in_flight if pending.handle is None}
        over = {round: part for part, round in enumerate(self.applied) if round >= 0 and not self._in_flight.of(part)}
        for round in sorted({*begun, *over} if self._resumed and self._auto is not None else begun):
            if round in begun:
                context = begun[round].context
                key = RoundKey(self.run, round, context.key.fragment)
                begun[round].context = self._context(key, weight=context.weight, total=context.total)
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
        whole = sent.contribution if isinstance(sent.contribution, OnDemand) else OnDemand(sent.contribution)
        tensors = whole.rounded(torch.float32).joined(sent.tail)
        pending.handle = self.exchange.start(Contribution(key, tensors, sent.weight, codec, sent.even, sent.state))

    def _due(self, fragment: int, due: PendingExchange | None) -> None:
        exchanges = self._in_flight.of(fragment)
        if due is not None:
            self._apply(due)
        elif exchanges and exchanges[-1].position == self.position:  # first round of a delayed schedule: there is no mean yet
            slow, fast, state = self._of(fragment)
            with torch.no_grad():
                context = self._context(exchanges[-1].context.key, members=0)
                apply_mean(exchanges[-1].rules, slow, fast, [], state, context)
            self._weights.restart(self._parts[fragment])

    def _detached(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors, those that share memory with staging or slow weights as copies, for these will change."""
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
            equalise(self, self.exchange, pending.context.key, mean)
        slow, fast, state = self._of(fragment)
        count, weight = len(pending.sent.contribution), pending.context.weight
        total, members = weight, 1
        if mean is not None:
            total, members = mean.weight, len(mean.members) if mean.counted is None else mean.counted
            weight = min(weight, mean.limit)
            if not pending.sent.weight and not pending.absent and members < len(mean.members):  # if all weights are 0, all count
                weight = 0.0
        facts = {"weight": weight, "total": total, "members": members, "lag": lag}
        context = self._context(pending.context.key, sent=pending.sent.contribution, fast=pending.fast, **facts)
        tensors: Sequence[Tensor] = pending.sent.contribution
        if mean is not None:
            tensors = [t.to(self.slow[0]) for t in to_device(mean.tensors[:count], self.slow[0].device)]
        apply_mean(pending.rules, slow, fast, tensors, state, context)
        self._weights.restart(part)
        if mean is not None and fragment == 0:
            buffers, tail = self._buffers.now(), mean.tensors[count:]
            there = accelerator_of(buffers)
            assign(buffers, tail if there is None else to_device(tail, there))
        # Removed last: had anything above raised, a second call would still find the exchange.
        self._in_flight.remove(pending)
        if self._auto is not None and pending.arrived is not None and mean is not None and len(mean.members) > 1:
            self._auto.observe(pending.arrived)
        self.applied[fragment] = context.key.round
        self.outer.step()
        late = self._auto is not None and pending.arrived is not None and pending.arrived > pending.lag
        self._report(context.key, mean, lag, late)

    def _report(self, key: RoundKey, mean: Mean | None, lag: int, late: bool = False) -> None:
        if self.on_round is not None:
            self.on_round(RoundInfo(key, () if mean is None else mean.members, self.steps, lag, late))

    def _apply_in_flight(self) -> None:
        self._begin_anew()
        for pending in self._in_flight:
            self._apply(pending)
