"""The partner of this node in each round, as far as it sees the swarm, and the peers that are free when the partner is dead.

Every partner follows from the members in the directory, where a dead peer stays for some seconds. Its partner of the round is free;
all others are taken. So a node that cannot reach its partner also knows which peers are free, as far as it knows which are dead,
and need not search among the others. It considers a peer dead from when it could not be reached until it calls, or issues another
record.

A peer that wastes this node's rounds is passed over as if it were dead (`PassedOver`). The pairs of all
others stay as they are. Those whose partners are passed over, and the odd one out, meet each other: nodes that have seen the same
failures agree about that, and an odd one out that has seen any listens for a moment, for others may have seen more. A node that
would have to pass over all, and several, had more likely a fault of its own: it meets those that failed once.

`PairRounds` are the rounds that a node's meetings are in, when several are under way at once, one for each fragment. Round numbers
grow by one with every fragment sent, so those of one fragment are ``fragments`` apart; a contribution that moves to another round
keeps its remainder. All of a node's rounds move together: if the swarm is eight rounds further with one fragment, it is with all.
So a node numbers what it sends itself, and adds one ``shift`` to get the swarm's round. The optimizer, in whose thread
contributions are handed in, learns of a shift only when it applies an exchange; until then its numbers are lower.

`PairState` is the state of a node's meetings, which its own calls and its answers to the calls of others share.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from shoal.optim.exchange.base import RoundKey, candidates, groups, partner_of, rank
from shoal.swarm.exchange.context import LEAST_S, ExchangeTimeouts, PassedOver, PeerContext, RoundEvidence, TrainingTime
from shoal.swarm.exchange.pair.transfer import Attempt, Incoming, PairTransfer, PartnerContribution
from shoal.swarm.p2p.stream import first_of, race, running, short
from shoal.swarm.wire.messages import Member, Offer

if TYPE_CHECKING:
    from shoal.swarm.p2p.stream import Stream


class PairSelector:
    """Selects this peer's partner in a round from the members in view with the same model. ``fragments``: sent in turn."""

    def __init__(
        self,
        context: PeerContext,
        departed: Callable[[], Mapping[str, Member]] = dict,
        fragments: int = 1,
    ) -> None:
        self._context, self._departed = context, departed
        self.passed = PassedOver(fragments)
        self._unreached: dict[str, float] = {}
        """Peer -> the time of issue of the record that it had when it could not be reached."""

    def of(self, round: int) -> tuple[str | None, list[str]]:
        """Return the partner in ``round`` (None for the odd one out) and the others to call: the partner first, unless it is
        dead. Where partners are passed over, those left over and the odd one out are paired once more.
        """
        here, peers = self._context.members(), self._in(round)
        partner = self.partner(round)
        others = self.left_over(round)
        order = [p for p in candidates(self._context.seed, round, self._context.me, peers) if p in here]
        if others is None:
            return partner, order
        if partner is None or (self._over(partner, round) and partner not in self._unreached):
            if not others:
                if partner is not None and self.passed.costly(partner):
                    return partner, []  # to train on without a partner is better
                return partner, order if partner is None else [partner]  # there is nobody better
            partner = partner_of(self._context.seed, round, self._context.me, others)
        return partner, sorted((p for p in order if p in others), key=lambda peer: peer != partner)

    def partner(self, round: int) -> str | None:
        """Return the partner in ``round`` if nobody is dead."""
        return partner_of(self._context.seed, round, self._context.me, self._in(round))

    def left_over(self, round: int) -> set[str] | None:
        """Return the other peers without a partner if this node has none that is alive; None if it has, as far as is known."""
        here = self._context.members()
        self._unreached = {p: issued for p, issued in self._unreached.items() if p in here and here[p].issued == issued}
        dead = {peer for peer in (*self._unreached, *self.passed.misses) if peer in self._unreached or self._over(peer, round)}
        if not dead:  # the usual case: no pairs need be computed
            return None
        pairs = groups(self._context.seed, round, self._in(round) | {self._context.me})
        living = [[peer for peer in pair if peer not in dead] for pair in pairs]
        mine = next(number for number, pair in enumerate(pairs) if self._context.me in pair)
        if len(living[mine]) == 2:
            return None
        return {pair[0] for pair in living if len(pair) == 1} - {self._context.me}

    def takes(self, peer: str, round: int) -> bool:
        """Return whether ``peer`` is not passed over."""
        return not self._over(peer, round)

    def accepts(self, peer: str, round: int) -> bool:
        """Return whether a node that found nobody is free for ``peer`` if that calls unasked: also for one that failed once."""
        return self.takes(peer, round) or self.passed.once(peer)

    def _over(self, peer: str, round: int) -> bool:
        if not self.passed.at(peer, round):
            return False
        others = self._in(round)
        return not (self.passed.once(peer) and len(others) > 1 and all(self.passed.at(other, round) for other in others))

    def tried(self, peer: str, round: int) -> None:
        """Note that ``peer`` was called in vain: a failure if it is the partner; others may well be busy."""
        if peer == self.partner(round):
            self.passed.missed(peer, round)

    def ended(self, peer: str, round: int, *, met: bool, over: int = 0) -> None:
        """Note the end of a transfer; ``over``: rounds for which the peer is passed over although they met."""
        if met and not over:
            self.passed.met(peer, round)
        else:
            self.passed.missed(peer, round, over)

    def failed(self, peer: str) -> None:
        """Note that no stream to ``peer`` could be opened."""
        record = self._context.members().get(peer)
        if record is not None:
            self._unreached[peer] = record.issued

    def alive(self, peer: str) -> None:
        self._unreached.pop(peer, None)

    def _in(self, round: int) -> set[str]:
        """Return all other peers that have partners in ``round``."""
        here = {peer for peer, member in self._context.members().items() if member.model == self._context.model}
        # A peer that left after this round had a partner in it: without it the others would be paired differently
        # from how peers that are further ahead have already paired.
        gone = {peer for peer, member in self._departed().items() if member.model == self._context.model and member.round > round}
        return (here | gone) - {self._context.me}


class PairRounds:
    """The numbers of one node's rounds. Thread-safe: the training thread hands in, the host's loop begins and moves."""

    def __init__(self, fragments: int, overlap: bool = False) -> None:
        self.fragments, self.overlap = fragments, overlap
        self._lock = threading.Lock()
        self._handed_in = self._begun = -1
        """The own numbers of the newest contribution, as the training thread and as the loop sees it."""
        self._shift = self._known = 0
        """From own numbers to the swarm's rounds, and to those that the optimizer counts."""
        self._been: dict[int, int] = {}
        """The furthest round of each fragment that this node has been in."""

    @property
    def next_round(self) -> int:
        """The swarm's round of the next contribution."""
        return self._handed_in + 1 + self._shift

    @next_round.setter
    def next_round(self, round: int) -> None:
        """Note which round the optimizer will hand in next."""
        with self._lock:
            self._known = round - (self._handed_in + 1)
            self._shift = max(self._shift, self._known)

    def go_back(self, round: int) -> None:
        with self._lock:
            self._known = self._shift = round - (self._handed_in + 1)
            self._been = {}

    def hand_in(self, round: int) -> int:
        """Return the own number of a contribution that the optimizer hands in for ``round``."""
        with self._lock:
            number = round - self._known
            self._handed_in = max(self._handed_in, number)
            return number

    def leave_out(self) -> bool:
        """Let the number of the next contribution go by without one; return True. What is in flight still moves with the rest."""
        with self._lock:
            self._handed_in += 1
        return True

    def begin(self, number: int, round: int, fragment: int) -> None:
        """Note that the meeting of a contribution begins: from now on this node is in its round."""
        self._begun = max(self._begun, number)
        self._been[fragment] = max(round, self._been.get(fragment, 0))

    def move(self, number: int, round: int, fragment: int) -> None:
        """Note that a contribution moves to ``round``, and with it all that this node will send."""
        with self._lock:
            self._shift = max(self._shift, round - number)
        self._been[fragment] = max(round, self._been.get(fragment, 0))

    def instead(self, round: int, fragment: int, at: int | None) -> int | None:
        """Return the round to which a caller with ``fragment`` should move, or None: it is met in ``round``, now or once this
        node is there, or not at all (`through`). ``at``: the round of the meeting of that fragment that is under way here.
        """
        been, soon = self._been.get(fragment), self._begun + 1 + self._shift
        if at is not None and at > round:
            soon = at
        elif self.overlap and been is not None:
            soon = been
        return round + self._up(soon - round, fragment) if round != at and round < soon else None

    def through(self, round: int, fragment: int, at: int | None) -> bool:
        """Return whether this node had its meeting in ``round`` and has not begun the next, or moved beyond and will not be there.

        Where training goes on meanwhile, a caller for that round must not be sent ahead to the next one: it would be there before
        the others, who would find it gone when they come, and be sent ahead themselves, ever further. So no peer moves to a round
        that nobody has begun, and the numbers grow as the quickest peer counts.
        """
        been, soon = self._been.get(fragment), self._begun + 1 + self._shift
        return self.overlap and been is not None and round != at and been <= round < soon

    def within(self, wanted: int, fragment: int, mine: int, limit: int) -> int:
        """Return the round to move to from ``mine`` when a peer answers ``wanted``: that far, but not beyond ``limit``.

        It is one of the same fragment, whatever the peer answers.
        """
        return mine + max(min(wanted, limit) - mine, 0) // self._step(fragment) * self._step(fragment)

    def _step(self, fragment: int) -> int:
        # A fragment beyond those of the schedule is the last average of all weights, which keeps no step.
        return self.fragments if fragment < self.fragments else 1

    def _up(self, distance: int, fragment: int) -> int:
        step = self._step(fragment)
        return -(-distance // step) * step


log = logging.getLogger(__name__)

MAX_HELD = 64


class Step(IntEnum):
    """The first four, of a call of this node's own, in this order."""

    DIALING = 1  # until its call is open, the peer's own counts: of two peers perhaps only one can reach the other
    OFFERING = 2
    ACCEPTED = 3
    TRANSFERRING = 4  # both offers are there: a call from this peer no longer crosses this node's
    EXPECTING = 5  # its call, for it said "wait"
    LISTENING = 6  # to any peer without a partner
    SEARCHING = 7


@dataclass(eq=False)
class Phase:
    """What a meeting does just now. A call that is accepted takes the place of an own one that it crosses."""

    step: Step = Step.SEARCHING
    peer: str = ""
    """The one that is called."""
    outcome: asyncio.Future[PartnerContribution | None] | None = None
    """Of the call of another that this node accepted."""


@dataclass
class PairingAttempt:
    """One round of this node."""

    attempt: Attempt
    number: int
    """Of the contribution among this node's own (`PairRounds`)."""
    partner: str | None = None
    """The computed partner: only its failures are counted, since other candidates may well be busy."""
    phase: Phase = field(default_factory=Phase)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the phase is that of a call of another."""
    needed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once training waits for the outcome."""
    turned_away: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_HELD))
    """Peers that called while this node was calling somebody else: it calls them back before it listens."""
    withdrawn: set[str] = field(default_factory=set)
    """Peers that ended a call of theirs as it was accepted; of each the first time is no failure."""
    broken: bool = False
    """A transfer began and was not committed."""
    usual: bool = False
    """The contribution is as large as the last one of its fragment: the partner, whose own is too, may receive it ahead."""
    swarm_round: int = 0
    """The furthest round that a peer reported while this node tried to meet it."""

    @property
    def key(self) -> RoundKey:
        return self.attempt.key

    @property
    def moving(self) -> bool:
        """Whether a call was accepted, by either side, and its transfer is under way."""
        return self.phase.step in (Step.ACCEPTED, Step.TRANSFERRING)

    def engage(self) -> None:
        self.phase = Phase(Step.TRANSFERRING, outcome=asyncio.get_running_loop().create_future())
        self.called.set()

    async def until_called(self, until: float) -> None:
        """Wait until a call was accepted, or the loop's time is ``until``."""
        await race(self.called.wait(), timeout=max(until - asyncio.get_running_loop().time(), 0))

    async def outcome(self, timeouts: ExchangeTimeouts) -> PartnerContribution | None:
        """Wait for the end of an exchange in which this node was called; return None at once if it was not."""
        engaged = self.phase.outcome
        if engaged is None:
            return None
        # The serving coroutine sets it in every case, within its own deadlines; the bound here only guards against its death.
        bound = timeouts.longest(self.attempt.contribution.payload.nbytes) + 4 * timeouts.chunk
        try:
            await asyncio.wait({engaged}, timeout=bound)
            return engaged.result() if engaged.done() else None
        finally:
            engaged.cancel()  # if it is not done: the transfer is given up
            self.phase = Phase()
            self.called.clear()


@dataclass
class PairState:
    """One node's part in the exchanges of pairs."""

    context: PeerContext
    timeouts: ExchangeTimeouts
    transfers: PairTransfer
    selector: PairSelector
    rounds: PairRounds
    evidence: RoundEvidence
    overlap: bool
    """Training goes on while this node waits for a partner."""
    time: TrainingTime
    under_way: dict[int, PairingAttempt] = field(default_factory=dict)
    """By fragment."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of the newest contribution of each fragment."""

    async def transfer(
        self,
        stream: Stream,
        pairing: PairingAttempt,
        theirs: Offer,
        *,
        caller: bool,
        called: float = 0.0,
        incoming: Incoming | None = None,
    ) -> PartnerContribution | None:
        """Exchange payloads and commit; give up what holds training for longer than its budget (`TrainingTime`). Raises Withdrawn.

        ``called``: seconds that the call took before this. ``incoming``: what has come of the peer's payload.
        """
        loop, attempt, key = asyncio.get_running_loop(), pairing.attempt, pairing.key
        began = loop.time()
        transfer = self.transfers.run(stream, attempt, theirs, caller=caller, incoming=incoming)
        held = called if pairing.needed.is_set() else 0.0
        attempt.commit.leave_out = lambda: loop.time() - began >= LEAST_S and self.rounds.leave_out()
        try:
            async with running(transfer, pairing.needed.wait()) as (work, needed):
                await first_of(work, needed)
                since, longest = loop.time(), self.time.budget(theirs.nbytes, key.fragment, loop.time() - began)
                await first_of(work, timeout=longest)
                given_up = not work.done() and attempt.commit.close() is None
                if given_up:
                    attempt.failed(stream.peer_id, "timeout")
                    log.info("round %d: %s was too slow: given up after %.1f s", key.round, short(stream.peer_id), longest)
                received = work.result() if work.done() else attempt.commit.received
        finally:
            attempt.commit.leave_out = None
        held += loop.time() - since if pairing.needed.is_set() else 0.0
        log.debug("round %d: the transfer took %.2f s, of which training waited %.2f", key.round, loop.time() - began, held)
        over: dict[str, int] = {}
        if stream.tries and given_up:  # a slow way that both tried costs a round, and is not the peer's cost
            pairing.broken = True
            return None
        if (
            (received is not None or given_up) and held < 2 * longest + called and not stream.tries
        ):  # else broken off, or this one slept
            over = self.time.spent(stream.peer_id, key.round, key.fragment, held, whole=not given_up, took=loop.time() - began)
        self.ended(pairing, stream.peer_id, received, over.pop(stream.peer_id, 0))
        for peer, rounds in over.items():
            self.selector.passed.missed(peer, key.round, rounds)
        return received

    def ended(self, pairing: PairingAttempt, peer: str, received: PartnerContribution | None, over: int = 0) -> None:
        """Note the end of a transfer. ``over``: rounds for which its partner is passed over, because it held training for long."""
        pairing.broken = received is None
        self.selector.ended(peer, pairing.key.round, met=received is not None, over=over)
        if received is not None:
            self.evidence.met([peer], pairing.key.round)

    def at(self, fragment: int) -> int | None:
        """Return the round of the meeting of ``fragment`` that is under way, if one is."""
        pairing = self.under_way.get(fragment)
        return None if pairing is None else pairing.key.round

    def turn_away(self, peer: str, round: int, fragment: int) -> None:
        """Remember to call back, if this node is then still looking for a partner in that round."""
        pairing = self.under_way.get(fragment)
        if pairing is None or pairing.key.round != round or peer in pairing.turned_away or not self.selector.accepts(peer, round):
            return
        pairing.turned_away.append(peer)

    def rank(self, peer: str, round: int) -> bytes:
        """Return the place of ``peer`` in the order of the round."""
        return rank(self.context.seed, round, peer)
