"""The answers to calls: the callee's half of the matchmaking (`shoal.swarm.exchange.pair.matchmaking`)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from shoal.swarm.errors import MessageError
from shoal.swarm.exchange.contribution import BARRED
from shoal.swarm.exchange.pair import offers
from shoal.swarm.exchange.pair.dialing import KEPT_S
from shoal.swarm.exchange.pair.held import HeldCalls
from shoal.swarm.exchange.pair.meeting import PairingAttempt, PairState
from shoal.swarm.exchange.pair.transfer import Incoming, PartnerContribution, Withdrawn
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.wire.envelope import pack
from shoal.swarm.wire.pair import Answer, Offer

if TYPE_CHECKING:
    from shoal.swarm.p2p.stream import Stream

EXCHANGE_PROTOCOL = "/shoal/exchange/1"
KEPT = 64  # streams that wait for their next call, at most


class CallAnswerer:
    """Answers the calls that one node gets. All coroutines run on the host's loop."""

    def __init__(self, state: PairState, held: HeldCalls) -> None:
        self._state, self._context, self._held = state, state.context, held
        self._kept = StreamPlaces(KEPT)

    async def serve(self, stream: Stream) -> None:
        """Answer the calls that come on a stream, one after another."""
        while await self._serve(stream) and self._kept.take(stream):
            try:
                more = await stream.more(KEPT_S)
            finally:
                self._kept.free(stream)
            if not (more and self._context.host.resource_manager.renew(stream, EXCHANGE_PROTOCOL)):
                return

    async def _serve(self, stream: Stream) -> bool:
        """Answer one call; return whether another may follow it."""
        patience = self._state.timeouts.chunk
        try:
            offer = await offers.receive_offer(stream, patience)
        except MessageError as error:  # most likely another version: tell the peer, whose user can mend it
            await stream.send(pack(Answer(verdict="refuse", reason=str(error), round=self._state.rounds.next_round)), patience)
            return False
        pairing, answer, incoming = await self._judge(stream, offer)
        if pairing is None:
            await stream.send(pack(answer), patience)
            return answer.verdict != "refuse"
        engaged = pairing.engaged
        assert engaged is not None
        meeting = asyncio.ensure_future(self._meet(stream, pairing, offer, answer, incoming))
        del incoming  # the mean is computed in it, and it is gone with that
        try:
            await asyncio.wait({meeting, engaged}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not meeting.done():  # this node gave the exchange up
                meeting.cancel()
                await asyncio.wait({meeting})
            if not engaged.done():
                engaged.set_result(None if meeting.cancelled() or meeting.exception() is not None else meeting.result())
        try:
            return not meeting.cancelled() and meeting.result() is not None
        finally:
            del meeting  # its error names this frame: a ring, which would keep both contributions until it is collected

    async def _meet(
        self, stream: Stream, pairing: PairingAttempt, offer: Offer, answer: Answer, incoming: Incoming | None
    ) -> PartnerContribution | None:
        """Do the callee's half of a meeting."""
        patience, peer = self._state.timeouts.chunk, stream.peer_id
        try:
            await stream.send(pack(answer), patience)
            await stream.send(offers.make_offer(self._context, pairing.attempt.contribution, offer.nonce), patience)
            return await self._state.transfer(stream, pairing, offer, caller=False, incoming=incoming)
        except Withdrawn as error:
            if peer not in pairing.withdrawn:  # nobody's failure: its call and its going on crossed the answer
                pairing.withdrawn.add(peer)
                return None
            pairing.attempt.failed(peer, error)
            self._state.ended(pairing, peer, None)
            return None

    async def _judge(self, stream: Stream, offer: Offer) -> tuple[PairingAttempt | None, Answer, Incoming | None]:
        """Return the answer to a call; with "accept" also the meeting, which is then engaged, and what has come of the payload."""
        state, peer = self._state, stream.peer_id
        state.selector.alive(peer)

        def reply(verdict: str, reason: str = "", round: int | None = None) -> tuple[None, Answer, None]:
            at = state.rounds.next_round if round is None else round
            return None, Answer.model_validate({"verdict": verdict, "reason": reason, "round": at}), None

        def instead() -> int | None:
            return state.rounds.instead(offer.round, offer.fragment, state.at(offer.fragment))

        if self._context.is_barred(peer):  # it is no member here, and must not be taken for a newcomer
            return reply("refuse", BARRED)
        if peer not in self._context.members() and peer not in self._context.known():
            self._context.look()  # a newcomer: the sooner it is known here, the sooner it gets partners
        if offer.swarm != self._context.swarm:
            return reply("refuse", f"this node is in swarm {self._context.swarm}, the offer is for {offer.swarm}")
        pairing = state.under_way.get(offer.fragment)
        if offer.model == self._context.model:
            state.evidence.heard(peer, offer.round)
        elif pairing is None:
            return reply("refuse", "the models differ in the shapes or types of their parameters")
        if offer.fragment > state.rounds.fragments:  # one beyond the schedule's: the last average
            return reply("refuse", f"there are {state.rounds.fragments} fragments here, the offer is for number {offer.fragment}")
        late, taken, incoming = instead(), False, None
        if state.rounds.through(offer.round, offer.fragment, state.at(offer.fragment)):
            return reply("busy", "this node is through with that round")
        if late is None and (pairing is None or pairing.key.round != offer.round):
            pairing, incoming = await self._held.hold(stream, offer)
            taken = pairing is not None and pairing.engaged is not None  # the round may have been given up just now
            if not taken and (late := instead()) is None:
                state.turn_away(peer, offer.round, offer.fragment)
                return reply("busy", "this node did not come to that round in time")
        if late is not None or pairing is None:
            if offer.model == self._context.model:
                state.evidence.called(peer, offer.round)
            return reply("passed", round=late)
        difference = pairing.attempt.contribution.differs(offer)
        if difference is not None:
            if taken and pairing.engaged is not None and not pairing.engaged.done():
                pairing.engaged.set_result(None)
            return reply("refuse", difference)
        if not taken:
            crossing = pairing.dialing == peer
            unasked = pairing.listening and state.selector.accepts(peer, offer.round)
            if pairing.engaged is not None or not (crossing or pairing.expecting == peer or unasked):
                state.turn_away(peer, offer.round, offer.fragment)
                return reply("busy")
            if crossing and pairing.offering and state.rank(peer, offer.round) > state.rank(self._context.me, offer.round):
                # In case this node's call, for which it waits, was just turned away there.
                state.turn_away(peer, offer.round, offer.fragment)
                return reply("wait")
            pairing.engage()
        return pairing, Answer(verdict="accept", round=offer.round), incoming
