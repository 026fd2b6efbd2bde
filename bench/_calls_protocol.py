"""Who exchanges which fragment with whom, and when: by calls, or in rounds; in simulated time.

    calls = Calls(Setting(peers=4, busy=0.3, steps=800), NoTraining(), DESIGNED)
    calls.run()
    calls.counts.row()                        # exchanges, turns that found nobody, ...

Time is in steps of a peer of mean speed. Training never waits: a peer's steps follow each other at
its own pace, and what arrives in between is used at its next step boundary.

By calls, each peer has a turn for each fragment every ``turn`` rounds. At its turn it calls one
other peer, and whoever is called stages the fragment at its next boundary. Who is busy says so at
once: the caller then tries others, up to ``TRIES`` of them, and applies the rule alone if all are.
A turn is left out if the fragment was exchanged since the last, but not two in a row.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Protocol

from shoal.optim.exchange.pairing import groups

LATENCY_STEPS = 0.25
"""One way: 50 ms where a step takes 200."""
TRIES = 4
MOST_TOKENS = 2
"""Calls that a peer accepts for a fragment with no turn in between."""
CANDIDATES = 2
"""Peers of a caller's order whom it may call; of those it prefers the one not met longest."""
ORDERS = 4
"""Orders of one turn in which a caller looks for somebody whom it has not met lately."""
CALIBRATION_STEPS = 4000
"""Of the runs by which the length of a turn is found."""


@dataclass(frozen=True)
class Rules:
    """Rules of the calls in which protocols differ."""

    stages_first: bool = True
    """The caller stages its fragment before it calls; else both do after they have agreed."""
    patience_rounds: float = 0.25
    """How long a turn waits for the end of the own transfer of another fragment; with
    ``stages_first`` false also for somebody who is free."""
    tokens_a_turn: int = 1
    spaced_from: int = 2
    """Members from which two are not to meet again before (n - 1)/2 turns are over."""
    holds_one: bool = False
    """A peer whose link is taken by a transfer holds one call until that is over."""


DESIGNED = Rules()
AGREED = Rules(
    stages_first=False, patience_rounds=0.5, tokens_a_turn=2, spaced_from=16, holds_one=True
)


@dataclass(frozen=True)
class Setting:
    """A swarm and its links."""

    peers: int
    busy: float
    """Part of the time that a peer of mean speed needs its link for its exchanges."""
    steps: int
    """Inner steps of a peer of mean speed; the others make as many more or fewer."""
    speeds: Sequence[float] = (1.0,)
    """Relative to each other, dealt to the peers in turn."""
    turn: float = 1.13
    """Rounds between two turns of a fragment."""
    every: int = 25
    """Steps of a round, in which each fragment is exchanged once."""
    fragments: int = 4
    seed: int = 0

    @property
    def transfer_steps(self) -> float:
        return self.busy * self.every / self.fragments

    def speed_of_each(self) -> list[float]:
        """Return the speed of each peer, 1 on average."""
        dealt = [self.speeds[number % len(self.speeds)] for number in range(self.peers)]
        return [speed * self.peers / sum(dealt) for speed in dealt]


class Training(Protocol):
    """What is to happen with the models."""

    def step(self, peer: int, applied: Sequence[tuple[int, int]], staged: Sequence[int]) -> None:
        """Make a step; then apply outcomes, each a fragment and the steps since it was staged; then
        stage fragments.
        """
        ...

    def exchange(self, fragment: int, one: int, other: int) -> None:
        """Let two peers have the mean of what they staged."""
        ...

    def alone(self, fragment: int, peer: int) -> None:
        """Let a peer have no mean of what it staged."""
        ...


class NoTraining:
    """``Training`` of nothing, for counts alone."""

    def step(self, peer: int, applied: Sequence[tuple[int, int]], staged: Sequence[int]) -> None:
        pass

    def exchange(self, fragment: int, one: int, other: int) -> None:
        pass

    def alone(self, fragment: int, peer: int) -> None:
        pass


class State(Enum):
    """Where an exchange of a fragment stands, at one peer."""

    IDLE = auto()
    CALLING = auto()
    AGREED = auto()
    """To be staged at the next boundary."""
    STAGED = auto()
    """The partner has not staged it yet."""
    MOVING = auto()
    LANDED = auto()
    """The outcome, a mean or none, is applied at the next boundary."""


TAKES_LINK = (State.CALLING, State.AGREED, State.STAGED, State.MOVING)


@dataclass
class Slot:
    """A fragment at a peer."""

    fragment: int
    turn_at: float = 0.0
    """Own step at which the next turn is due."""
    state: State = State.IDLE
    partner: int = -1
    """Who is called, or has called; -1 in an outcome without a mean."""
    staged_at: int = 0
    waits_since: int | None = None
    """Step of a turn that waits."""
    was_called: bool = False
    """Since the last turn."""
    left_out: bool = False
    """True if the last turn was."""
    tokens: int = MOST_TOKENS
    number: int = 0
    """Of the next order by which somebody is called; of the present round."""
    asked: set[int] = field(default_factory=set)
    """The peers that were asked in this turn."""
    met_at: dict[int, int] = field(default_factory=dict)
    """Own step of the last exchange with each peer."""


@dataclass
class Peer:
    """A peer's progress."""

    number: int
    step_time: float
    steps: int
    """That it makes in all."""
    begin: float
    slots: list[Slot]
    done: int = 0
    held: Held | None = None
    """The call that it holds."""

    @property
    def is_over(self) -> bool:
        return self.done >= self.steps

    @property
    def is_engaged(self) -> bool:
        """Return True if its link is taken or promised: one transfer at a time."""
        return any(slot.state in TAKES_LINK for slot in self.slots)

    @property
    def is_moving(self) -> bool:
        return any(slot.state is State.MOVING for slot in self.slots)


@dataclass
class Held:
    """A call that is to be accepted later. Its caller's link is free: nobody waits for a peer that
    waits.
    """

    caller: Peer
    slot: Slot
    """The called peer's."""


@dataclass
class Counts:
    """What happened."""

    turn: float
    exchanges: Counter[int] = field(default_factory=Counter)
    """By peer."""
    rounds: float = 0.0
    """Of all fragments of all peers, by their own steps."""
    turns: int = 0
    left_out: int = 0
    alone: Counter[str] = field(default_factory=Counter)
    """Turns that found nobody, by reason."""
    asked: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    """Calls that were not accepted, by reason."""
    lags: Counter[int] = field(default_factory=Counter)
    """Steps between staging and applying a mean."""

    def row(self) -> dict[str, float]:
        """Return shares and means."""
        applied = sum(self.lags.values())
        late = sum(lag * times for lag, times in self.lags.items())
        refused = self.answers["met lately"]
        own = self.turns - self.left_out
        found = {
            "exchanges": sum(self.exchanges.values()) / self.rounds,
            "alone": sum(self.alone.values()) / max(own, 1),
            "answered_busy": (self.answers.total() - refused) / max(self.asked, 1),
            "answered_refuse": refused / max(self.asked, 1),
            "left_out": self.left_out / max(self.turns, 1),
            "lag": late / max(applied, 1),
            "turn": self.turn,
        }
        return {name: round(value, 4) for name, value in found.items()}


class World:
    """Peers that train, each at its own pace, and events between their steps."""

    def __init__(self, setting: Setting, training: Training) -> None:
        self.setting = setting
        self.training = training
        self.now = 0.0
        self.counts = Counts(setting.turn)
        self.peers: list[Peer] = []
        for number, speed in enumerate(setting.speed_of_each()):
            slots = [Slot(fragment) for fragment in range(setting.fragments)]
            steps = round(setting.steps * speed)
            begin = self._begin_of(number) / speed
            self.peers.append(Peer(number, 1 / speed, steps, begin, slots))
            self.counts.rounds += steps / setting.every * setting.fragments
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = itertools.count()

    def run(self) -> None:
        """Let every peer make all of its steps, and all transfers end."""
        for peer in self.peers:
            self.at(peer.begin + peer.step_time, self._boundary, peer)
        while self._events:
            self.now, _, event, arguments = heapq.heappop(self._events)
            event(*arguments)

    def at(self, when: float, event: Callable[..., None], *arguments: Any) -> None:
        """Let something happen; events of the same time in the order in which they were named."""
        heapq.heappush(self._events, (when, next(self._number), event, arguments))

    def _begin_of(self, number: int) -> float:
        """Return when a peer begins its first step, in its steps."""
        raise NotImplementedError

    def _due(self, peer: Peer) -> list[Slot]:
        """Return what the peer stages at this boundary."""
        raise NotImplementedError

    def _go_on(self, peer: Peer, staged: Sequence[Slot]) -> None:
        """Go on after a boundary."""
        raise NotImplementedError

    def _boundary(self, peer: Peer) -> None:
        peer.done += 1
        applied = []
        for slot in peer.slots:
            if slot.state is State.LANDED:
                lag = peer.done - slot.staged_at
                applied.append((slot.fragment, lag))
                slot.state = State.IDLE
                if slot.partner >= 0:
                    self.counts.lags[lag] += 1
        staged = self._due(peer)
        for slot in staged:
            slot.staged_at = peer.done
        self.training.step(peer.number, applied, [slot.fragment for slot in staged])
        self._go_on(peer, staged)
        if not peer.is_over:
            self.at(peer.begin + (peer.done + 1) * peer.step_time, self._boundary, peer)

    def _move(self, fragment: int, one: Peer, other: Peer) -> None:
        """Begin the transfer of a fragment that both have staged."""
        for peer, partner in ((one, other), (other, one)):
            slot = peer.slots[fragment]
            slot.state = State.MOVING
            slot.partner = partner.number
        arrival = self.now + LATENCY_STEPS + self.setting.transfer_steps
        self.at(arrival, self._land, fragment, one, other)

    def _land(self, fragment: int, one: Peer, other: Peer) -> None:
        """Let both have the mean, at the same time."""
        for peer, partner in ((one, other), (other, one)):
            slot = peer.slots[fragment]
            assert slot.state is State.MOVING
            assert slot.partner == partner.number
            slot.state = State.LANDED
            slot.met_at[partner.number] = peer.done
            self.counts.exchanges[peer.number] += 1
        self.training.exchange(fragment, one.number, other.number)

    def _give_up(self, peer: Peer, slot: Slot, reason: str) -> None:
        """Let a staged fragment go without a partner."""
        slot.state = State.LANDED
        slot.partner = -1
        self.counts.alone[reason] += 1
        self.training.alone(slot.fragment, peer.number)


class Calls(World):
    """Exchanges by calls."""

    def __init__(self, setting: Setting, training: Training, rules: Rules) -> None:
        super().__init__(setting, training)
        self.rules = rules
        self.turn_steps = setting.turn * setting.every
        for peer in self.peers:
            for slot in peer.slots:
                phase = drawn(setting.seed, "turn", peer.number, slot.fragment)
                slot.turn_at = phase * self.turn_steps

    def _begin_of(self, number: int) -> float:
        return drawn(self.setting.seed, "begin", number)

    def _due(self, peer: Peer) -> list[Slot]:
        due = []
        for slot in peer.slots:
            if slot.state is State.AGREED:
                slot.state = State.STAGED
                due.append(slot)
        for slot in peer.slots:
            if peer.done >= slot.turn_at:
                slot.turn_at += self.turn_steps
                self._turn(peer, slot)
        waiting = [slot for slot in peer.slots if slot.waits_since is not None]
        for slot in sorted(waiting, key=lambda slot: slot.turn_at):
            if self._stages_own(peer, slot):
                due.append(slot)
        return due

    def _turn(self, peer: Peer, slot: Slot) -> None:
        """Leave this turn out, or let it wait for the own link."""
        self.counts.turns += 1
        slot.tokens = min(slot.tokens + self.rules.tokens_a_turn, MOST_TOKENS)
        was_called = slot.was_called
        slot.was_called = False
        if slot.state is not State.IDLE or (was_called and not slot.left_out):
            self._leave_out(slot)
            return
        slot.left_out = False
        slot.waits_since = peer.done

    def _leave_out(self, slot: Slot) -> None:
        slot.waits_since = None
        slot.left_out = True
        self.counts.left_out += 1

    def _stages_own(self, peer: Peer, slot: Slot) -> bool:
        """Go on with a turn that waits; return True if its fragment is staged now."""
        assert slot.waits_since is not None
        if slot.state is State.CALLING:
            return False
        is_held = peer.held is not None and peer.held.slot is slot
        if slot.state is not State.IDLE or is_held:  # called while it waited
            slot.was_called = False
            self._leave_out(slot)
            return False
        patience = self.rules.patience_rounds * self.setting.every
        if peer.done - slot.waits_since > patience:
            slot.waits_since = None
            return True
        if peer.is_engaged:
            return False
        slot.asked.clear()
        slot.state = State.CALLING
        if self.rules.stages_first:
            slot.waits_since = None
        return self.rules.stages_first

    def _go_on(self, peer: Peer, staged: Sequence[Slot]) -> None:
        for slot in staged:
            if slot.state is State.IDLE:
                self._give_up(peer, slot, "out of patience")
            elif slot.state is State.STAGED:
                self._move_if_staged(peer, slot)
        for slot in peer.slots:
            if slot.state is State.CALLING and not slot.asked:
                self._call_next(peer, slot)

    def _move_if_staged(self, peer: Peer, slot: Slot) -> None:
        partner = self.peers[slot.partner]
        theirs = partner.slots[slot.fragment]
        calls_first = theirs.state is State.CALLING and self.rules.stages_first
        if theirs.partner == peer.number and (calls_first or theirs.state is State.STAGED):
            self._move(slot.fragment, partner, peer)

    def _call_next(self, caller: Peer, slot: Slot) -> None:
        """Call somebody who was not asked in this turn."""
        other = None
        if len(slot.asked) < TRIES:
            other = self._chosen(caller, slot)
        if other is not None:
            slot.partner = other
            slot.asked.add(other)
            self.counts.asked += 1
            self.at(self.now + LATENCY_STEPS, self._answer, caller, self.peers[other], slot)
        elif self.rules.stages_first:
            self._give_up(caller, slot, "all busy")
        else:  # until its patience is over, or its last step
            slot.state = State.IDLE

    def _chosen(self, caller: Peer, slot: Slot) -> int | None:
        """Return whom to call: of the first of an order by hash the one not met longest."""
        for _ in range(ORDERS):
            order = self._order(caller.number, slot)
            slot.number += 1
            free = []
            for other in order[:CANDIDATES]:
                if other not in slot.asked and self._is_spaced(caller, slot, other):
                    free.append(other)
            if free:
                return min(free, key=lambda other: slot.met_at.get(other, -1))
        return None

    def _order(self, caller: int, slot: Slot) -> list[int]:
        ranks = {}
        for peer in self.peers:
            if peer.number != caller:
                names = ("call", caller, slot.fragment, slot.number, peer.number)
                ranks[peer.number] = drawn(self.setting.seed, *names)
        return sorted(ranks, key=ranks.__getitem__)

    def _is_spaced(self, peer: Peer, slot: Slot, other: int) -> bool:
        """Return False if the two met less than (n - 1)/2 turns ago."""
        if other not in slot.met_at or len(self.peers) < self.rules.spaced_from:
            return True
        turns = (peer.done - slot.met_at[other]) / self.turn_steps
        return turns >= (len(self.peers) - 1) / 2

    def _answer(self, caller: Peer, peer: Peer, called_slot: Slot) -> None:
        """Answer a call that has arrived."""
        slot = peer.slots[called_slot.fragment]
        if slot.state in TAKES_LINK and slot.partner == caller.number:  # calls that cross
            if slot.state is State.CALLING and caller.number < peer.number:
                self._accept(caller, peer, slot)
            return  # that of the lower number stands
        problem = self._problem(caller, peer, slot)
        holds = problem == "link" and self.rules.holds_one and peer.is_moving
        if problem is not None and not holds:
            self.counts.answers[problem] += 1
            self.at(self.now + LATENCY_STEPS, self._refused, caller, called_slot)
            return
        slot.tokens -= 1
        slot.was_called = True
        if holds:
            peer.held = Held(caller, slot)
        else:
            self._accept(caller, peer, slot)

    def _problem(self, caller: Peer, peer: Peer, slot: Slot) -> str | None:
        """Return why a call is not accepted."""
        if peer.is_over:
            return "over"
        if slot.state is not State.IDLE:
            return "fragment"
        if slot.tokens < 1:
            return "token"
        if not self._is_spaced(peer, slot, caller.number):
            return "met lately"
        if peer.held is not None:
            return "held"
        if peer.is_engaged:
            return "link"
        return None

    def _land(self, fragment: int, one: Peer, other: Peer) -> None:
        super()._land(fragment, one, other)
        for peer in (one, other):
            held = peer.held
            peer.held = None
            if held is None:
                continue
            if peer.is_over:
                self._refused(held.caller, held.caller.slots[held.slot.fragment])
            else:
                self._accept(held.caller, peer, held.slot)

    def _accept(self, caller: Peer, peer: Peer, slot: Slot) -> None:
        """Let the called peer take part, from its next boundary on unless it has staged."""
        is_staged = slot.state is State.CALLING and self.rules.stages_first
        if slot.state is State.CALLING:
            slot.waits_since = None
        slot.partner = caller.number
        slot.state = State.AGREED
        if is_staged:
            slot.state = State.STAGED
            self._move_if_staged(peer, slot)
        self.at(self.now + LATENCY_STEPS, self._accepted, caller, peer, slot)

    def _accepted(self, caller: Peer, peer: Peer, their_slot: Slot) -> None:
        """Let the caller know; it may have its partner's payload already."""
        slot = caller.slots[their_slot.fragment]
        if slot.state is not State.CALLING:
            return
        slot.waits_since = None
        slot.state = State.STAGED if self.rules.stages_first else State.AGREED
        if caller.is_over and slot.state is State.AGREED:  # it has no boundary any more
            slot.state = State.IDLE
            if their_slot.state is State.STAGED:
                self._give_up(peer, their_slot, "partner out")
            else:
                their_slot.state = State.IDLE

    def _refused(self, caller: Peer, slot: Slot) -> None:
        if slot.state is State.CALLING:
            self._call_next(caller, slot)


class Rounds(World):
    """Exchanges in agreed rounds: fragments one after another, each in pairs drawn anew.

    With unlike speeds a round begins for all at the same time, whatever their steps: nothing is
    lost by peers that are in different rounds, which is the best that rounds can be.
    """

    def __init__(self, setting: Setting, training: Training) -> None:
        super().__init__(setting, training)
        self._next = [0] * setting.peers
        """The round that each peer comes to next; each is of one fragment."""
        self._absent: set[tuple[int, int]] = set()
        """Rounds, and peers that stay out of them."""
        self._names = [peer_name(number) for number in range(setting.peers)]

    def _begin_of(self, number: int) -> float:
        return 0.0

    def _time_of(self, round: int) -> int:
        rounds, fragment = divmod(round, self.setting.fragments)
        offset = (fragment + 1) * self.setting.every // self.setting.fragments
        return rounds * self.setting.every + offset

    def _due(self, peer: Peer) -> list[Slot]:
        due: list[Slot] = []
        while self._time_of(self._next[peer.number]) <= self.now:
            round = self._next[peer.number]
            self._next[peer.number] += 1
            self.counts.turns += 1
            slot = peer.slots[round % self.setting.fragments]
            if slot.state is State.IDLE:
                slot.state = State.STAGED
                slot.number = round
                due.append(slot)
            else:  # the last exchange of the fragment is not over
                self.counts.left_out += 1
                self._stay_out(peer, round)
        return due

    def _go_on(self, peer: Peer, staged: Sequence[Slot]) -> None:
        for slot in staged:
            partner = self._partner_in(peer, slot.number)
            if partner is None:
                self._give_up(peer, slot, "odd")
            elif (slot.number, partner.number) in self._absent:
                self._give_up(peer, slot, "partner out")
            elif self._waits(partner, slot.number):
                self._move(slot.fragment, partner, peer)
        if peer.is_over:
            last = max(self._next)
            for round in range(self._next[peer.number], last + self.setting.fragments):
                self._stay_out(peer, round)

    def _stay_out(self, peer: Peer, round: int) -> None:
        """Let nobody wait for this peer in a round."""
        self._absent.add((round, peer.number))
        partner = self._partner_in(peer, round)
        if partner is not None and self._waits(partner, round):
            slot = partner.slots[round % self.setting.fragments]
            self._give_up(partner, slot, "partner out")

    def _waits(self, peer: Peer, round: int) -> bool:
        slot = peer.slots[round % self.setting.fragments]
        return slot.state is State.STAGED and slot.number == round

    def _partner_in(self, peer: Peer, round: int) -> Peer | None:
        name = self._names[peer.number]
        for group in groups(self.setting.seed, round, self._names, 2):
            if name in group and len(group) == 2:
                (other,) = set(group) - {name}
                return self.peers[self._names.index(other)]
        return None


def peer_name(number: int) -> str:
    return f"peer{number}"


def drawn(seed: int, *names: object) -> float:
    """Return a number from 0 to 1 that follows from the names."""
    digest = hashlib.sha256(f"{seed}:{names}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def turn_of_equal_bytes(setting: Setting, rules: Rules, tries: int = 4) -> float:
    """Return the rounds between two turns, ``setting.turn`` or more, with which a peer makes one
    exchange of a fragment in each round, or fewer: found by long runs without training.
    """
    turn = setting.turn
    for _ in range(tries):
        calls = Calls(replace(setting, turn=turn, steps=CALIBRATION_STEPS), NoTraining(), rules)
        calls.run()
        turn = max(turn * calls.counts.row()["exchanges"], setting.turn)
    return turn
