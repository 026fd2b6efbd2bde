"""What a node's meetings with partners are in just now (`shoal.swarm.exchange.pair.exchange`).

    PairState        one node: its meetings under way, and what they share
    PairingAttempt   one meeting, of one fragment; the middle of a chain has two of a fragment
    Phase, Step      what a meeting does just now

A meeting goes through these steps; a call of another that is accepted takes the place of an own one
that it crosses, and goes on at ``TRANSFERRING``:

    SEARCHING -> DIALING -> OFFERING -> ACCEPTED -> TRANSFERRING
                                     -> EXPECTING    the other one calls
              -> LISTENING                           for any call, once nobody is left to be called
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum

from shoal.optim.exchange.base import RoundKey
from shoal.optim.exchange.pairing import rank
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.pair.selector import PairSelector
from shoal.swarm.exchange.pair.transfer import (
    Attempt,
    Incoming,
    PairTransfer,
    PartnerContribution,
)
from shoal.swarm.exchange.pair_rounds import PairRounds
from shoal.swarm.exchange.round_evidence import RoundEvidence
from shoal.swarm.exchange.round_time import LEAST_S
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.exchange.training_time import TrainingTime
from shoal.swarm.internal_errors import InternalError
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.p2p.tasks import first_of, race, running
from shoal.swarm.wire.messages import Offer

MAX_TURNED_AWAY = 64
"""Peers that a meeting remembers to call back."""

log = logging.getLogger(__name__)


class Step(IntEnum):
    """The first four, of a call of this node's own, in this order."""

    # until its call is open, the peer's own counts: of two peers perhaps only one can reach the
    # other
    DIALING = 1
    OFFERING = 2
    ACCEPTED = 3
    TRANSFERRING = 4  # both offers are there: a call from this peer no longer crosses this node's
    EXPECTING = 5  # its call, for it said "wait"
    LISTENING = 6  # to any peer without a partner
    SEARCHING = 7


@dataclass(eq=False)
class Phase:
    """What a meeting does just now.

    A call that is accepted takes the place of an own one that it crosses.
    """

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
    """The computed partner: only its failures are counted, since other candidates may well be busy.
    """
    second: PairingAttempt | None = None
    """The meeting with the second partner of this round, if there is one."""
    work: asyncio.Future[None] | None = None
    """Of the second meeting of a round, which runs beside the first."""
    phase: Phase = field(default_factory=Phase)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the phase is that of a call of another."""
    needed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once training waits for the outcome."""
    met: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once an exchange of the round is committed; of both meetings of a chain's middle."""
    since: float | None = None
    """The loop's time of that, of an overlapped one."""
    turned_away: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_TURNED_AWAY))
    """Peers that called while this node was calling somebody else: it calls them back before it
    listens.
    """
    withdrawn: set[str] = field(default_factory=set)
    """Peers that ended a call of theirs as it was accepted; of each the first time is no failure.
    """
    broken: bool = False
    """A transfer began and was not committed."""
    usual: bool = False
    """The contribution is as large as the last one of its fragment: the partner, whose own is too,
    may receive it ahead.
    """
    swarm_round: int = 0
    """The furthest round that a peer reported while this node tried to meet it."""

    @property
    def key(self) -> RoundKey:
        return self.attempt.key

    @property
    def moving(self) -> bool:
        """Whether a call was accepted, by either side, and its transfer is under way."""
        return self.phase.step in (Step.ACCEPTED, Step.TRANSFERRING)

    @property
    def counts(self) -> bool:
        """Whether the contribution is in an exchange of this round, or may soon be."""
        return self.moving or self.attempt.commit.received is not None

    def beside(self, peer: str) -> PairingAttempt:
        """Return the meeting with ``peer``, the second partner of the same round."""
        return PairingAttempt(
            self.attempt.beside(),
            self.number,
            peer,
            needed=self.needed,
            met=self.met,
            usual=self.usual,
        )

    def engage(self) -> None:
        self.phase = Phase(Step.TRANSFERRING, outcome=asyncio.get_running_loop().create_future())
        self.called.set()

    def disengage(self) -> None:
        """Give up the exchange of a call that was accepted: nothing was sent yet."""
        engaged = self.phase.outcome
        if engaged is not None and not engaged.done():
            engaged.set_result(None)

    async def until_called(self, until: float) -> None:
        """Wait until a call was accepted, or the loop's time is ``until``."""
        await race(self.called.wait(), timeout=max(until - asyncio.get_running_loop().time(), 0))

    async def outcome(self, timeouts: ExchangeTimeouts) -> PartnerContribution | None:
        """Wait for the end of an exchange in which this node was called; return None at once if it
        was not.
        """
        engaged = self.phase.outcome
        if engaged is None:
            return None
        # The serving coroutine sets it in every case, within its own deadlines; the bound here only
        # guards against its death.
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
        """Exchange payloads and commit; give up what holds training for longer than its budget
        (`TrainingTime`). Raises Withdrawn.

        ``called``: seconds that the call took before this. ``incoming``: what has come of the
        peer's payload.
        """
        loop, attempt, key = asyncio.get_running_loop(), pairing.attempt, pairing.key
        began, nbytes = loop.time(), attempt.contribution.payload.nbytes
        if self.rounds.overlap:
            self.time.waited(
                stream.peer_id, 0.0 if pairing.since is None else began - pairing.since
            )
        transfer = self.transfers.run(stream, attempt, theirs, caller=caller, incoming=incoming)
        held = called if pairing.needed.is_set() else 0.0
        attempt.commit.leave_out = lambda: (
            loop.time() - began >= LEAST_S and self.rounds.leave_out()
        )
        try:
            async with running(transfer, pairing.needed.wait()) as (work, needed):
                await first_of(work, needed)
                since = loop.time()
                longest = self.time.budget(nbytes, key.fragment, since - began)
                await first_of(work, timeout=longest)
                given_up = not work.done() and attempt.commit.close() is None
                if given_up:
                    attempt.failed(stream.peer_id, "timeout")
                    log.info(
                        "round %d: %s was too slow: given up after %.1f s",
                        key.round,
                        short(stream.peer_id),
                        longest,
                    )
                received = work.result() if work.done() else attempt.commit.received
        except InternalError:
            pairing.broken = True  # with any other partner the same would happen
            raise
        finally:
            attempt.commit.leave_out = None
        held += loop.time() - since if pairing.needed.is_set() else 0.0
        log.debug(
            "round %d: the transfer took %.2f s, of which training waited %.2f",
            key.round,
            loop.time() - began,
            held,
        )
        over: dict[str, int] = {}
        # A slow way that both tried costs a round, and is not the peer's cost.
        if stream.is_trial and given_up:
            pairing.broken = True
            return None
        has_ended = received is not None or given_up
        # Otherwise it was broken off, or this node slept.
        if has_ended and held < 2 * longest + called and not stream.is_trial:
            took = loop.time() - began
            over = self.time.spent(
                stream.peer_id,
                key.round,
                key.fragment,
                held,
                whole=not given_up,
                took=took,
                nbytes=nbytes,
            )
        self.ended(pairing, stream.peer_id, received, over.pop(stream.peer_id, 0))
        for peer, rounds in over.items():
            self.selector.passed.missed(peer, key.round, rounds)
        return received

    def ended(
        self,
        pairing: PairingAttempt,
        peer: str,
        received: PartnerContribution | None,
        over: int = 0,
    ) -> None:
        """Note the end of a transfer.

        ``over``: rounds for which its partner is passed over, because it held training for long.
        """
        pairing.broken = received is None
        self.selector.ended(peer, pairing.key.round, met=received is not None, over=over)
        if received is not None:
            pairing.met.set()
            self.evidence.met([peer], pairing.key.round)

    def meeting(self, fragment: int, peer: str) -> PairingAttempt | None:
        """Return the meeting of ``fragment`` that is under way, if one is: that to which a call of
        ``peer`` belongs.
        """
        pairing = self.under_way.get(fragment)
        if pairing is not None and pairing.second is not None and pairing.second.partner == peer:
            return pairing.second
        return pairing

    def at(self, fragment: int) -> int | None:
        """Return the round of the meeting of ``fragment`` that is under way, if one is."""
        pairing = self.under_way.get(fragment)
        return None if pairing is None else pairing.key.round

    def turn_away(self, peer: str, round: int, fragment: int) -> None:
        """Remember to call back, if this node is then still looking for a partner in that round."""
        pairing = self.meeting(fragment, peer)
        if (
            pairing is None
            or pairing.key.round != round
            or peer in pairing.turned_away
            or not self.selector.accepts(peer, round)
        ):
            return
        pairing.turned_away.append(peer)

    def rank(self, peer: str, round: int) -> bytes:
        """Return the place of ``peer`` in the order of the round."""
        return rank(self.context.seed, round, peer)
