"""The calls to others: the caller's half of the matchmaking (`shoal.swarm.exchange.pair.matchmaking`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.exchange.pair import offers
from shoal.swarm.exchange.pair.answering import EXCHANGE_PROTOCOL
from shoal.swarm.exchange.pair.dialing import KeptStreams, open_unless
from shoal.swarm.exchange.pair.meeting import PairingAttempt, PairState
from shoal.swarm.exchange.pair.transfer import PartnerContribution
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.envelope import fresh_nonce, unpack
from shoal.swarm.wire.pair import Answer

if TYPE_CHECKING:
    from shoal.swarm.p2p.stream import Stream

PROBE_S = 1.0  # seconds for a candidate other than the partner to answer
HELD_S = 1.0  # seconds without an answer, after which a partner is most likely not at the round yet
QUIET, PROBED = 0.25, 0.75  # of the silence that ends a transfer: until a peer that holds a call is probed, and for that

log = logging.getLogger(__name__)


class Unanswered(NetworkError):
    """The error that a stream ended before the offer was answered: the peer had just ended one that was kept, or is gone."""


class Caller:
    """Calls the peers that a node wants to meet. All coroutines run on the host's loop."""

    def __init__(self, state: PairState) -> None:
        self._state, self._context = state, state.context
        self._kept = KeptStreams(state.context.host)
        self._welcome = False
        """The newest call to a partner was accepted: the next one is likely to be."""

    async def call(self, pairing: PairingAttempt, peer: str, seconds: float) -> PartnerContribution | None:
        """Offer, and exchange if the offer is accepted within ``seconds``: over a stream that was kept, or a new one.

        Raises NetworkError or MessageError.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        if not pairing.called.is_set() and (kept := self._kept.take(peer)) is not None:
            with contextlib.suppress(Unanswered):
                return await self._offer(kept, pairing, until)
            pairing.offering = False
        began = loop.time()
        stream = await self._open(pairing, peer, until - began)
        return None if stream is None else await self._offer(stream, pairing, until, loop.time() - began)

    async def _open(self, pairing: PairingAttempt, peer: str, seconds: float) -> Stream | None:
        """Open a stream; None if another's call was accepted meanwhile."""
        chunk = self._state.timeouts.chunk
        member = self._context.members().get(peer) or self._context.known().get(peer)
        addresses = member.addresses if member is not None else ()
        try:
            opening = self._context.host.open(peer, EXCHANGE_PROTOCOL, addresses=addresses, timeout=max(min(seconds, chunk), 0.01))
            return await open_unless(pairing.called, opening)
        except NetworkError as error:
            if error.reason != "timeout" or seconds >= PROBE_S:  # what was left of a search is no time to open a stream in
                self._state.selector.failed(peer)
            raise

    async def _offer(
        self, stream: Stream, pairing: PairingAttempt, until: float, opened: float | None = None
    ) -> PartnerContribution | None:
        """Offer, and exchange if the offer is accepted; then keep the stream, if that ended well. ``opened``: seconds that it took
        to open; None if it was kept. Raises NetworkError or MessageError.
        """
        loop, peer, well = asyncio.get_running_loop(), stream.peer_id, False
        ahead: asyncio.TimerHandle | None = None
        try:
            pairing.offering = True
            nonce = fresh_nonce()
            offer = offers.make_offer(self._context, pairing.attempt.contribution, nonce)
            try:
                await stream.send(offer, max(until - loop.time(), 0.01))
                welcome = self._welcome and pairing.usual and peer == pairing.partner
                if opened is None and welcome and not stream.chosen:
                    # The other one's call, if it is there, counts less. From a peer that is there an answer comes at once.
                    first = self._state.rank(self._context.me, pairing.key.round) < self._state.rank(peer, pairing.key.round)
                    ahead = loop.call_later(0.0 if first else HELD_S, stream.send_ahead, pairing.attempt.contribution.payload)
                answered = await self._answered(stream, pairing, max(until - loop.time(), 0.01))
            except NetworkError as error:
                if self._state.overlap and error.reason == "timeout":  # it is behind, and costs no training
                    return None
                raise Unanswered(str(error)) from None if error.reason == "broken" else error
            finally:
                if ahead is not None:
                    ahead.cancel()
            answer = unpack(answered, Answer)
            if answer.verdict != "accept":
                well = answer.verdict != "refuse" and not stream.ahead
                self._note(pairing, peer, answer)
                return None
            pairing.accepted = True
            self._welcome |= peer == pairing.partner
            theirs = await offers.receive_offer(stream, self._state.timeouts.chunk)
            difference = pairing.attempt.contribution.differs(theirs)
            offered = (nonce, self._context.swarm, self._context.model, pairing.key.round)
            if difference is not None or (theirs.nonce, theirs.swarm, theirs.model, theirs.round) != offered:
                what = difference or "the nonce, swarm, model or round"
                raise MessageError(f"peer {short(peer)} accepted something else than was offered: {what}.")
            pairing.dialing = None  # a call from this peer no longer crosses this node's
            # The rest of the time before the answer is the wait for its training.
            received = await self._state.transfer(stream, pairing, theirs, caller=True, called=opened or 0.0)
            well = received is not None
            return received
        finally:
            pairing.accepted = False
            self._welcome &= not stream.ahead
            self._kept.keep(stream) if well else stream.close()

    async def _answered(self, stream: Stream, pairing: PairingAttempt, seconds: float) -> bytes:
        """Wait for the answer, which comes when the peer comes to the round; but not for one that is not there any more."""
        chunk = self._state.timeouts.chunk
        answer = asyncio.ensure_future(stream.receive(Answer.LIMIT, seconds))
        try:
            while not (await asyncio.wait({answer}, timeout=chunk * QUIET))[0]:
                if not pairing.needed.is_set():  # while training goes on the wait costs nothing
                    continue
                probe = asyncio.ensure_future(self._state.transfers.probe(stream.peer_id, chunk * PROBED))
                probe.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved
                try:
                    await asyncio.wait({answer, probe}, return_when=asyncio.FIRST_COMPLETED)
                    if not answer.done():
                        probe.result()
                except NetworkError:
                    stream.failed()
                    if stream.way == stream.peer_id:
                        self._state.selector.failed(stream.peer_id)
                    raise
                finally:
                    probe.cancel()
                    del probe
            return answer.result()
        finally:
            answer.cancel()
            del answer  # its error names this frame: a ring, which would keep the contribution until it is collected

    def _note(self, pairing: PairingAttempt, peer: str, answer: Answer) -> None:
        log.debug("round %d: %s answered %s %s", pairing.key.round, short(peer), answer.verdict, answer.reason)
        self._state.evidence.heard(peer, answer.round)
        if answer.verdict == "passed":
            rounds, key = self._state.rounds, pairing.key
            most = self._state.evidence.furthest(peer, answer.round, asyncio.get_running_loop().time())
            wanted = rounds.within(answer.round, key.fragment, key.round, most)
            pairing.swarm_round = max(pairing.swarm_round, wanted)
        elif answer.verdict == "wait":
            pairing.expecting = peer
        elif answer.verdict == "refuse":
            log.warning("peer %s will not exchange with this node: %s", short(peer), answer.reason)
            pairing.attempt.failed(peer, "refused")
