"""Matchmaking of peers that finish a round at different times, without a coordinator and without waiting for the dead.

Each peer computes its partner of the round (`shoal.optim.exchange.pairing`) and calls it. A call is answered

    accept    I am at that round and free for you
    (held)    I am not at that round yet: the answer comes when I am
    wait      I am calling you myself, and of calls that cross, mine counts
    busy      I am taken, or about to call somebody else
    passed    I am beyond that round; my next one is ``round``
    refuse    our contributions differ, and this is the difference, or the caller is barred: it will not work in any round

When partners call each other at the same moment, the call of the peer with the lower rank in the round counts, once its stream
is open; the other waits for it. A peer whose partner is not available (busy, other view of the membership) tries the next
candidates, then calls back those that it turned away meanwhile, then listens for a moment for other peers without a partner,
then goes on without one. So of two free peers that called each other too early, neither listens before it has called the other
again. If it knows beforehand that its partner is dead, it calls only peers that are free too, and goes on at once if there are
none (`PairSelector`). If a transfer breaks off it goes on at once, because the time of the round is spent. A peer that gets
"passed" moves its contribution to the swarm's round and tries there: so a slow peer, or one that slept, meets the others again.
A call is held only by a peer that is behind its caller, so no cycle of peers can wait for each other; every wait also ends at
the round's deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.optim.exchange.base import RoundKey
from shoal.optim.exchange.pairing import rank
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.exchange.context import ExchangeTimeouts, Patience, PeerContext
from shoal.swarm.exchange.contribution import BARRED, Contribution
from shoal.swarm.exchange.pair.dialing import open_unless
from shoal.swarm.exchange.pair.pairing import PairSelector
from shoal.swarm.exchange.pair.transfer import Attempt, PairTransfer, PartnerContribution
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.envelope import ENVELOPE, pack, seal, unpack, unseal
from shoal.swarm.wire.member import Member
from shoal.swarm.wire.nonce import fresh_nonce
from shoal.swarm.wire.pair import Answer, Offer

if TYPE_CHECKING:
    from shoal.swarm.p2p.stream import Stream

EXCHANGE_PROTOCOL = "/shoal/exchange/1"
TRIED = 8  # candidates called in one round, so that a large swarm of busy peers is not called through
PROBE_S = 1.0  # seconds for a candidate other than the partner to answer
SEARCH, SEARCH_S = 0.15, 1.5  # part of the round's wait, and seconds at most, for all other candidates
MAX_HELD = 64
LINGER, LINGER_S = 0.1, 1.0  # part of the round's wait, and seconds at most, that a free peer listens for others
WORTH = 0.1  # of the time from one round to the next, at most for either: after a short round there soon is another partner

log = logging.getLogger(__name__)


@dataclass
class PairingAttempt:
    """One round of this node."""

    attempt: Attempt
    partner: str | None = None
    """The computed partner: only its failures are counted, since other candidates may well be busy."""
    dialing: str | None = None
    offering: bool = False
    """The call to ``dialing`` is open. Until then its own counts: of two peers perhaps only one can reach the other."""
    expecting: str | None = None
    """A peer that said "wait"."""
    listening: bool = False
    engaged: asyncio.Future[PartnerContribution | None] | None = None
    """Set as soon as a call was accepted; its result is the exchange's."""
    called: asyncio.Event = field(default_factory=asyncio.Event)
    """Set together with ``engaged``."""
    turned_away: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_HELD))
    """Peers that called while this node was calling somebody else: it calls them back before it listens."""
    broken: bool = False
    """A transfer began and was not committed."""
    swarm_round: int = 0
    """The furthest round that a peer reported while this node tried to meet it."""

    @property
    def key(self) -> RoundKey:
        """The round that this node is in."""
        return self.attempt.key


class PairMatchmaker:
    """Finds a partner for each round. All coroutines run on the host's loop."""

    def __init__(
        self,
        context: PeerContext,
        timeouts: ExchangeTimeouts,
        transfers: PairTransfer,
        departed: Callable[[], Mapping[str, Member]] = dict,
        patience: Patience | None = None,
    ) -> None:
        self._context, self._timeouts, self._transfers, self._patience = context, timeouts, transfers, patience or Patience()
        self._pairing: PairingAttempt | None = None
        self._selector = PairSelector(context, departed)
        self._held: dict[str, tuple[int, asyncio.Future[PairingAttempt | None]]] = {}
        self.next_round = 0
        """The round that this node will be in next; it is the answer to callers for earlier ones."""
        context.host.serve(EXCHANGE_PROTOCOL, self._serve)

    async def meet(self, attempt: Attempt) -> tuple[PartnerContribution | None, RoundKey]:
        """Find a partner and exchange. Returns the received contribution, or None, and the round in which it happened."""
        pairing = self._pairing = PairingAttempt(attempt)
        self.next_round = attempt.key.round
        try:
            return await self._meet(pairing), pairing.key
        except Exception:  # an error that a peer provoked costs one round, never the training
            log.warning("round %d was given up because of an error in shoal; please report it", pairing.key.round, exc_info=True)
            return attempt.commit.received, pairing.key
        finally:
            if self._pairing is pairing:  # a round that was called off may end only after the next one has begun
                self.next_round = pairing.key.round + 1
                self._pairing = None

    async def _meet(self, pairing: PairingAttempt) -> PartnerContribution | None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        period, wait = self._patience.begin(began), self._patience.of(self._timeouts)
        deadline = began + wait
        linger = min(wait * LINGER, LINGER_S, period * WORTH)
        while True:
            partner, order = self._selector.of(pairing.key.round)
            pairing.partner = partner
            self._release_held(keep=partner)
            if partner is None and order:
                pairing.attempt.stats.odd += 1  # the odd one out
                return await self._listen(pairing, linger) if self._selector.wary(pairing.key.round) else None
            if not order:
                return None  # the last one here, or a peer whose partner is dead while nobody is free
            moved = False
            queue, called_back, until = deque(order[:TRIED]), 0, deadline
            while queue or (pairing.turned_away and called_back < TRIED):
                if not queue:
                    called_back += 1
                peer = queue.popleft() if queue else pairing.turned_away.popleft()
                if peer != partner and until == deadline:  # most others are taken: not worth the round's whole wait
                    until = min(deadline, loop.time() + min(wait * SEARCH, SEARCH_S, period * WORTH))
                left = until - loop.time()
                if left <= 0:
                    break
                received = await self._try(pairing, peer, left if peer == partner else min(left, PROBE_S))
                if received is not None or pairing.broken:
                    return received
                if pairing.swarm_round <= pairing.key.round:
                    self._selector.tried(peer, pairing.key.round)
                else:
                    pairing.attempt = pairing.attempt.moved_to(pairing.swarm_round)
                    self.next_round = pairing.swarm_round
                    moved = True
                    break
                if loop.time() >= deadline:
                    return None
            if moved:
                continue
            return await self._listen(pairing, min(deadline - loop.time(), linger))

    async def _try(self, pairing: PairingAttempt, peer: str, seconds: float) -> PartnerContribution | None:
        """Try one candidate: take its held call, or call it; meanwhile its call, or another's, may have been accepted."""
        until = asyncio.get_running_loop().time() + seconds
        held = self._held.get(peer)
        if held is not None and held[0] == pairing.key.round and not held[1].done():
            self._engage(pairing)
            held[1].set_result(pairing)
            return await self._outcome(pairing)
        pairing.dialing = peer
        try:
            received = await self._call(pairing, peer, seconds)
        except (NetworkError, MessageError) as error:
            log.info("round %d: %s", pairing.key.round, error)
            if peer == pairing.partner:
                pairing.attempt.failed(peer, error)
            received = None
        finally:
            pairing.dialing, pairing.offering = None, False
        if received is None and pairing.expecting == peer:
            await self._until_called(pairing, until)
            pairing.expecting = None
        return received or await self._outcome(pairing)

    async def _listen(self, pairing: PairingAttempt, seconds: float) -> PartnerContribution | None:
        """Let any other peer without a partner call for a while."""
        pairing.listening = True
        await self._until_called(pairing, asyncio.get_running_loop().time() + seconds)
        pairing.listening = False
        return await self._outcome(pairing)

    async def _until_called(self, pairing: PairingAttempt, until: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(pairing.called.wait(), max(until - asyncio.get_running_loop().time(), 0))

    def _engage(self, pairing: PairingAttempt) -> None:
        pairing.engaged = asyncio.get_running_loop().create_future()
        pairing.called.set()

    async def _outcome(self, pairing: PairingAttempt) -> PartnerContribution | None:
        """Wait for the end of an exchange in which this node was called; return None at once if it was not."""
        if pairing.engaged is None:
            return None
        # The serving coroutine sets it in every case, within its own deadlines; the bound here only guards against its death.
        bound = self._timeouts.moving(pairing.attempt.contribution.payload.nbytes) + 4 * self._timeouts.chunk
        try:
            return await asyncio.wait_for(pairing.engaged, bound)
        except asyncio.TimeoutError:
            return None
        finally:
            pairing.engaged = None
            pairing.called.clear()

    def _offer(self, contribution: Contribution, nonce: bytes) -> bytes:
        key, codec = contribution.key, contribution.codec
        return seal(
            Offer(
                swarm=self._context.swarm,
                round=key.round,
                fragment=key.fragment,
                nbytes=contribution.payload.nbytes,
                shapes=contribution.shapes,
                dtype="float32",
                codec=codec.name,
                sha256=contribution.sha256,
                weight=contribution.weight,
                model=self._context.model,
                nonce=nonce,
            ),
            self._context.identity,
        )

    async def _call(self, pairing: PairingAttempt, peer: str, seconds: float) -> PartnerContribution | None:
        """Open a stream, offer, and exchange if the offer is accepted within ``seconds``."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        member = self._context.members().get(peer)
        addresses = member.addresses if member is not None else ()
        try:
            opening = self._context.host.open(peer, EXCHANGE_PROTOCOL, addresses=addresses, timeout=max(seconds, 0.01))
            stream = await open_unless(pairing.called, opening)
        except NetworkError:
            self._selector.failed(peer)
            raise
        if stream is None:
            return None
        try:
            pairing.offering = True
            nonce = fresh_nonce()
            await stream.send(self._offer(pairing.attempt.contribution, nonce), max(until - loop.time(), 0.01))
            answer = unpack(await stream.receive(Answer.LIMIT, max(until - loop.time(), 0.01)), Answer)
            if answer.verdict != "accept":
                self._note(pairing, peer, answer)
                return None
            theirs = await self._receive_offer(stream)
            difference = pairing.attempt.contribution.differs(theirs)
            offered = (nonce, self._context.swarm, self._context.model, pairing.key.round)
            if difference is not None or (theirs.nonce, theirs.swarm, theirs.model, theirs.round) != offered:
                what = difference or "the nonce, swarm, model or round"
                raise MessageError(f"peer {short(peer)} accepted something else than was offered: {what}.")
            pairing.dialing = None  # a call from this peer no longer crosses this node's
            received = await self._transfers.run(stream, pairing.attempt, theirs, caller=True)
            self._ended(pairing, peer, received)
            return received
        finally:
            stream.close()

    def _ended(self, pairing: PairingAttempt, peer: str, received: PartnerContribution | None) -> None:
        pairing.broken = received is None
        self._selector.ended(peer, pairing.key.round, met=received is not None)

    def _note(self, pairing: PairingAttempt, peer: str, answer: Answer) -> None:
        log.debug("round %d: %s answered %s %s", pairing.key.round, short(peer), answer.verdict, answer.reason)
        if answer.verdict == "passed":
            # No further than half of the members report: one peer must not send this node to a round where nobody is.
            # Records are seconds old; this peer's answer is newer than its own.
            rounds = {other: member.round for other, member in self._context.members().items()} | {peer: answer.round}
            usual = sorted(rounds.values())[len(rounds) // 2] + 1
            pairing.swarm_round = max(pairing.swarm_round, min(answer.round, usual))
        elif answer.verdict == "wait":
            pairing.expecting = peer
        elif answer.verdict == "refuse":
            log.warning("peer %s will not exchange with this node: %s", short(peer), answer.reason)
            pairing.attempt.failed(peer, "refused")

    async def _receive_offer(self, stream: Stream) -> Offer:
        data = await stream.receive(Offer.LIMIT + ENVELOPE, self._timeouts.chunk)
        signer, offer = unseal(data, Offer)
        if signer != stream.peer_id:
            raise MessageError(f"peer {short(stream.peer_id)} sent an offer that another peer signed: it was refused.")
        return offer

    async def _serve(self, stream: Stream) -> None:
        """Answer one call."""
        patience = self._timeouts.chunk
        try:
            offer = await self._receive_offer(stream)
        except MessageError as error:  # most likely another version: tell the peer, whose user can mend it
            await stream.send(pack(Answer(verdict="refuse", reason=str(error), round=self.next_round)), patience)
            return
        pairing, answer = await self._judge(stream, offer)
        if pairing is None:
            await stream.send(pack(answer), patience)
            return
        engaged, received = pairing.engaged, None
        assert engaged is not None
        try:
            await stream.send(pack(answer), patience)
            await stream.send(self._offer(pairing.attempt.contribution, offer.nonce), patience)
            received = await self._transfers.run(stream, pairing.attempt, offer, caller=False)
            self._ended(pairing, stream.peer_id, received)
        finally:
            if not engaged.done():
                engaged.set_result(received)

    async def _judge(self, stream: Stream, offer: Offer) -> tuple[PairingAttempt | None, Answer]:
        """Return the answer to a call; with "accept" also the meeting, which is then engaged."""
        peer = stream.peer_id
        self._selector.alive(peer)

        def reply(verdict: str, reason: str = "") -> tuple[None, Answer]:
            return None, Answer.model_validate({"verdict": verdict, "reason": reason, "round": self.next_round})

        if self._context.is_barred(peer):  # it is no member here, and must not be taken for a newcomer
            return reply("refuse", BARRED)
        if peer not in self._context.members():
            self._context.look()  # a newcomer: the sooner it is known here, the sooner it gets partners
        if offer.swarm != self._context.swarm:
            return reply("refuse", f"this node is in swarm {self._context.swarm}, the offer is for {offer.swarm}")
        if offer.model != self._context.model and self._pairing is None:
            return reply("refuse", "the models differ in the shapes or types of their parameters")
        pairing = self._pairing
        taken = False
        if pairing is None or pairing.key.round < offer.round:
            if offer.round < self.next_round:
                return reply("passed")
            if len(self._held) >= MAX_HELD:
                return reply("busy", "too many wait for this node")
            pairing = await self._hold(stream, offer.round)
            taken = pairing is not None
            if pairing is None:
                self._turn_away(peer, offer.round)
                return reply("busy", "this node did not come to that round in time")
        if pairing.key.round > offer.round:
            return reply("passed")
        difference = pairing.attempt.contribution.differs(offer)
        if difference is not None:
            if taken and pairing.engaged is not None and not pairing.engaged.done():
                pairing.engaged.set_result(None)
            return reply("refuse", difference)
        if not taken:
            crossing = pairing.dialing == peer
            unasked = pairing.listening and self._selector.takes(peer, offer.round)
            if pairing.engaged is not None or not (crossing or pairing.expecting == peer or unasked):
                self._turn_away(peer, offer.round)
                return reply("busy")
            if crossing and pairing.offering and self._rank(peer, offer.round) > self._rank(self._context.me, offer.round):
                self._turn_away(peer, offer.round)  # in case this node's call, for which it waits, was just turned away there
                return reply("wait")
            self._engage(pairing)
        return pairing, Answer(verdict="accept", round=offer.round)

    def _turn_away(self, peer: str, round: int) -> None:
        """Remember to call back, if this node is then still looking for a partner in that round."""
        pairing = self._pairing
        if pairing is None or pairing.key.round != round or peer in pairing.turned_away or not self._selector.takes(peer, round):
            return
        pairing.turned_away.append(peer)

    def _rank(self, peer: str, round: int) -> bytes:
        return rank(self._context.seed, round, peer)

    async def _hold(self, stream: Stream, round: int) -> PairingAttempt | None:
        """Wait until this node is at ``round`` and takes the call; None if it does not in the time a caller waits."""
        peer = stream.peer_id
        if peer in self._held:
            return None
        taken: asyncio.Future[PairingAttempt | None] = asyncio.get_running_loop().create_future()
        self._held[peer] = (round, taken)
        # A caller says nothing more until it is answered.
        gone: asyncio.Future[bool] = asyncio.ensure_future(stream.drained(self._patience.of(self._timeouts)))
        try:
            either: set[asyncio.Future[Any]] = {taken, gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return taken.result() if taken.done() else None
        finally:
            del self._held[peer]
            gone.cancel()
            await asyncio.wait({gone})  # only one may read from a stream

    def _release_held(self, keep: str | None) -> None:
        """Answer "busy" to the calls held for this round or an earlier one, except the partner's."""
        for peer, (round, taken) in self._held.items():
            past = round < self.next_round or (round == self.next_round and peer != keep)
            if past and not taken.done():
                taken.set_result(None)
