"""The state of a node's meetings, which its own calls and its answers to the calls of others share."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from shoal.optim.exchange.base import RoundKey, rank
from shoal.swarm.exchange.context import LEAST_S, ExchangeTimeouts, Patience, PeerContext, TrainingTime
from shoal.swarm.exchange.pair.pairing import PairRounds, PairSelector
from shoal.swarm.exchange.pair.transfer import Attempt, Incoming, PairTransfer, PartnerContribution
from shoal.swarm.exchange.round_evidence import RoundEvidence
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.messages import Offer

if TYPE_CHECKING:
    from shoal.swarm.p2p.stream import Stream

log = logging.getLogger(__name__)

MAX_HELD = 64


class Phase(IntEnum):
    """What a meeting does with one ``peer``: the first four in this order."""

    DIALING = 1  # until its call is open, the peer's own counts: of two peers perhaps only one can reach the other
    OFFERING = 2
    ACCEPTED = 3
    TRANSFERRING = 4  # both offers are there: a call from this peer no longer crosses this node's
    EXPECTING = 5  # its call, for it said "wait"
    LISTENING = 6  # to any peer without a partner
    SEARCHING = 7


@dataclass
class PairingAttempt:
    """One round of this node."""

    attempt: Attempt
    number: int
    """Of the contribution among this node's own (`PairRounds`)."""
    partner: str | None = None
    """The computed partner: only its failures are counted, since other candidates may well be busy."""
    phase: Phase = Phase.SEARCHING
    peer: str = ""
    """The one that was called last."""
    engaged: asyncio.Future[PartnerContribution | None] | None = None
    """Set as soon as a call was accepted; its result is the exchange's."""
    called: asyncio.Event = field(default_factory=asyncio.Event)
    """Set together with ``engaged``."""
    needed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once training waits for the outcome."""
    turned_away: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_HELD))
    """Peers that called while this node was calling somebody else: it calls them back before it listens."""
    withdrawn: set[str] = field(default_factory=set)
    """Peers that ended a call of theirs as it was accepted; of each the first time is no failure."""
    failing: bool = False
    """The newest call ended with an error."""
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
        return self.engaged is not None or self.phase in (Phase.ACCEPTED, Phase.TRANSFERRING)

    def engage(self) -> None:
        self.engaged = asyncio.get_running_loop().create_future()
        self.called.set()

    async def until_called(self, until: float) -> None:
        """Wait until a call was accepted, or the loop's time is ``until``."""
        # Not wait_for, which may swallow that this meeting is cancelled if the event is set at that moment.
        waiting = asyncio.ensure_future(self.called.wait())
        try:
            await asyncio.wait({waiting}, timeout=max(until - asyncio.get_running_loop().time(), 0))
        finally:
            waiting.cancel()

    async def outcome(self, timeouts: ExchangeTimeouts) -> PartnerContribution | None:
        """Wait for the end of an exchange in which this node was called; return None at once if it was not."""
        engaged = self.engaged
        if engaged is None:
            return None
        # The serving coroutine sets it in every case, within its own deadlines; the bound here only guards against its death.
        bound = timeouts.longest(self.attempt.contribution.payload.nbytes) + 4 * timeouts.chunk
        try:
            await asyncio.wait({engaged}, timeout=bound)
            return engaged.result() if engaged.done() else None
        finally:
            engaged.cancel()  # if it is not done: the transfer is given up
            self.engaged = None
            self.called.clear()


@dataclass
class PairState:
    """One node's part in the exchanges of pairs."""

    context: PeerContext
    timeouts: ExchangeTimeouts
    transfers: PairTransfer
    selector: PairSelector
    patience: Patience
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
        work = asyncio.ensure_future(self.transfers.run(stream, attempt, theirs, caller=caller, incoming=incoming))
        needed = asyncio.ensure_future(pairing.needed.wait())
        held = called if pairing.needed.is_set() else 0.0
        given_up = False
        attempt.commit.leave_out = lambda: loop.time() - began >= LEAST_S and self.rounds.leave_out()
        try:
            await asyncio.wait({work, needed}, return_when=asyncio.FIRST_COMPLETED)
            since, longest = loop.time(), self.time.budget(theirs.nbytes, key.fragment, loop.time() - began)
            await asyncio.wait({work}, timeout=longest)
            given_up = not work.done() and attempt.commit.close() is None
            if given_up:
                attempt.failed(stream.peer_id, "timeout")
                log.info("round %d: %s was too slow: given up after %.1f s", key.round, short(stream.peer_id), longest)
            received = work.result() if work.done() else attempt.commit.received
        finally:
            attempt.commit.leave_out = None
            for task in (work, needed):
                task.cancel()
            await asyncio.wait({work, needed})
            if not work.cancelled():
                work.exception()  # retrieved
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
