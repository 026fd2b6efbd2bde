"""The two halves of the matchmaking (`shoal.swarm.exchange.pair.exchange`): the calls to others,
and the answers to theirs.

Both sides make each other a signed offer. A call goes over a stream that was kept from an earlier
exchange, or a new one, while the partner's own call may come in (`KeptStreams`); one that comes
early waits until this node is at its round (`HeldCalls`). What a meeting does just now is its
`Phase` (`shoal.swarm.exchange.pair.state`), which both halves set.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any, Literal, NamedTuple

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.contribution import BARRED, ENDED, EncodedContribution
from shoal.swarm.exchange.kept_streams import ANSWERED, KeptStreams, answer_all
from shoal.swarm.exchange.pair.held_calls import HeldCalls
from shoal.swarm.exchange.pair.state import PairingAttempt, PairState, Phase, Step
from shoal.swarm.exchange.pair.transfer import Incoming, PartnerContribution, Withdrawn
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.p2p.tasks import first_of
from shoal.swarm.wire.envelope import ENVELOPE, fresh_nonce, pack, seal, unpack, unseal
from shoal.swarm.wire.messages import Answer, Offer

EXCHANGE_PROTOCOL = "/shoal/exchange/1"
PROBE_S = 1.0
"""Seconds for a candidate other than the partner to answer."""
HELD_S = 1.0
"""Seconds without an answer, after which a partner is late."""
ANSWERED_S = 0.1
"""The same beyond two round trips, where these are known."""
QUIET = 0.25
"""Of the silence that ends a transfer: until a peer that holds a call is probed."""
PROBED = 0.75
"""Of it: for the answer to that."""

Verdict = Literal["accept", "wait", "busy", "passed", "refuse"]

log = logging.getLogger(__name__)


def make_offer(context: PeerContext, contribution: EncodedContribution, nonce: bytes) -> bytes:
    """Return the sealed offer of a contribution."""
    key, codec = contribution.key, contribution.codec
    return seal(
        Offer(
            swarm=context.swarm,
            round=key.round,
            fragment=key.fragment,
            nbytes=contribution.payload.nbytes,
            shapes=contribution.shapes,
            dtype="float32",
            codec=codec.name,
            sha256=contribution.payload.sha256,
            weight=contribution.weight,
            model=context.model,
            nonce=nonce,
        ),
        context.identity,
    )


async def receive_offer(stream: Stream, seconds: float) -> Offer:
    """Receive the offer of the peer at the other end. Raises NetworkError or MessageError."""
    signer, offer = unseal(await stream.receive(Offer.LIMIT + ENVELOPE, seconds), Offer)
    if signer != stream.peer_id:
        raise MessageError(
            f"peer {short(stream.peer_id)} sent an offer that another peer signed: it was refused."
        )
    return offer


async def open_unless(called: asyncio.Event, opening: Coroutine[Any, Any, Stream]) -> Stream | None:
    """Open a stream; return None if ``called`` is set before it is open, and then end it.

    Raises NetworkError.
    """
    stream = asyncio.ensure_future(opening)
    call = asyncio.ensure_future(called.wait())
    wanted = False
    try:
        await first_of(stream, call)
        wanted = not called.is_set()
        return stream.result() if wanted else None
    finally:
        call.cancel()
        if not wanted:
            stream.add_done_callback(_hang_up)
            stream.cancel()


def _hang_up(stream: asyncio.Future[Stream]) -> None:
    if not stream.cancelled() and stream.exception() is None:
        stream.result().close()


class Unanswered(NetworkError):
    """The error that a stream ended before the offer was answered: the peer had just ended one that
    was kept, or is gone.
    """


class Caller:
    """Calls the peers that a node wants to meet. All coroutines run on the host's loop."""

    def __init__(self, state: PairState) -> None:
        self._state, self._context = state, state.context
        self._kept = KeptStreams(state.context.host)
        self._welcome = False
        """The newest call to a partner was accepted: the next one is likely to be."""

    async def call(
        self, pairing: PairingAttempt, mine: Phase, seconds: float
    ) -> PartnerContribution | None:
        """Offer, and exchange if the offer is accepted within ``seconds``: over a stream that was
        kept, or a new one. ``mine``: the phase of this call.

        Raises NetworkError or MessageError.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        if not pairing.called.is_set() and (kept := self._kept.take(mine.peer)) is not None:
            with contextlib.suppress(Unanswered):
                return await self._offer(kept, pairing, mine, until)
            mine.step = Step.DIALING
        began = loop.time()
        stream = await self._open(pairing, mine.peer, until - began)
        if stream is None:
            return None
        return await self._offer(stream, pairing, mine, until, loop.time() - began)

    async def _open(self, pairing: PairingAttempt, peer: str, seconds: float) -> Stream | None:
        """Open a stream; None if another's call was accepted meanwhile."""
        chunk = self._state.timeouts.chunk
        member = self._context.members().get(peer) or self._context.known().get(peer)
        addresses = member.addresses if member is not None else ()
        try:
            opening = self._context.host.open(
                peer, EXCHANGE_PROTOCOL, addresses=addresses, timeout=max(min(seconds, chunk), 0.01)
            )
            return await open_unless(pairing.called, opening)
        except NetworkError:
            # What was left of a search may be no time to open a stream in.
            if seconds >= PROBE_S:
                self._state.selector.failed(peer)
            raise

    async def _offer(
        self,
        stream: Stream,
        pairing: PairingAttempt,
        mine: Phase,
        until: float,
        opened: float | None = None,
    ) -> PartnerContribution | None:
        """Offer, and exchange if the offer is accepted; then keep the stream, if that ended well.

        ``opened``: seconds that it took to open; None if it was kept. Raises NetworkError or
        MessageError.
        """
        peer, well = stream.peer_id, False
        try:
            mine.step = Step.OFFERING
            nonce = fresh_nonce()
            answer = await self._ask(stream, pairing, nonce, until, is_kept=opened is None)
            if answer is None:
                return None
            if answer.verdict != "accept":
                well = answer.verdict != "refuse" and not stream.is_ahead
                self._note(pairing, mine, answer)
                return None
            mine.step = Step.ACCEPTED
            self._welcome |= peer == pairing.partner
            theirs = await receive_offer(stream, self._state.timeouts.chunk)
            self._check_accepted(pairing, peer, theirs, nonce)
            mine.step = Step.TRANSFERRING
            # The rest of the time before the answer is the wait for its training.
            received = await self._state.transfer(
                stream, pairing, theirs, caller=True, called=opened or 0.0
            )
            well = received is not None
            return received
        finally:
            self._welcome &= not stream.is_ahead
            if well:
                self._kept.keep(stream)
            else:
                stream.close()

    def _ahead_s(self, stream: Stream, pairing: PairingAttempt) -> float | None:
        """Return the seconds after an offer on a kept stream at which the payload follows without
        an answer; None if it waits for one.
        """
        state, peer = self._state, stream.peer_id
        is_welcome = self._welcome and pairing.usual and peer == pairing.partner
        if not is_welcome or stream.has_choice:
            return None
        round = pairing.key.round
        if state.rank(self._context.me, round) < state.rank(peer, round):
            return 0.0  # the other one's call, if it is there, counts less
        # From a peer that is there an answer comes at once.
        if stream.round_trip is None:
            return HELD_S
        return min(HELD_S, ANSWERED_S + 2 * stream.round_trip)

    async def _ask(
        self,
        stream: Stream,
        pairing: PairingAttempt,
        nonce: bytes,
        until: float,
        *,
        is_kept: bool,
    ) -> Answer | None:
        """Offer, and wait for the answer; None if it does not come in time where a wait costs no
        training.

        On a stream that ``is_kept`` the payload may follow before it. Raises Unanswered or
        MessageError.
        """
        loop, contribution = asyncio.get_running_loop(), pairing.attempt.contribution
        ahead: asyncio.TimerHandle | None = None
        try:
            offer = make_offer(self._context, contribution, nonce)
            await stream.send(offer, max(until - loop.time(), 0.01))
            ahead_s = self._ahead_s(stream, pairing) if is_kept else None
            if ahead_s is not None:
                ahead = loop.call_later(ahead_s, stream.send_ahead, contribution.payload)
            answered = await self._answered(stream, pairing, max(until - loop.time(), 0.01))
        except NetworkError as error:
            # It is behind, and costs no training.
            if self._state.rounds.overlap and error.reason == "timeout":
                return None
            if error.reason == "broken":
                raise Unanswered(str(error), error.reason) from None
            raise Unanswered(str(error), error.reason) from error
        finally:
            if ahead is not None:
                ahead.cancel()
        return unpack(answered, Answer)

    def _check_accepted(
        self, pairing: PairingAttempt, peer: str, theirs: Offer, nonce: bytes
    ) -> None:
        """Raise MessageError if an accepted offer comes back as another."""
        difference = pairing.attempt.contribution.differs(theirs)
        offered = (nonce, self._context.swarm, self._context.model, pairing.key.round)
        if (theirs.nonce, theirs.swarm, theirs.model, theirs.round) != offered:
            difference = difference or "the nonce, swarm, model or round"
        if difference is not None:
            raise MessageError(
                f"peer {short(peer)} accepted something else than was offered: {difference}."
            )

    async def _answered(self, stream: Stream, pairing: PairingAttempt, seconds: float) -> bytes:
        """Wait for the answer, which comes when the peer comes to the round; but not for one that
        is not there any more.
        """
        chunk = self._state.timeouts.chunk
        answer = asyncio.ensure_future(stream.receive(Answer.LIMIT, seconds))
        try:
            while not (await asyncio.wait({answer}, timeout=chunk * QUIET))[0]:
                if not pairing.needed.is_set():  # while training goes on the wait costs nothing
                    continue
                probe = asyncio.ensure_future(
                    self._state.transfers.probe(stream.peer_id, chunk * PROBED)
                )
                # The error of a probe that nobody waits for any more is retrieved.
                probe.add_done_callback(lambda done: done.cancelled() or done.exception())
                try:
                    await first_of(answer, probe)
                    if not answer.done():
                        probe.result()
                except NetworkError:
                    stream.failed()
                    if not stream.is_punched:
                        self._state.selector.failed(stream.peer_id)
                    raise
                finally:
                    probe.cancel()
                    del probe
            return answer.result()
        finally:
            answer.cancel()
            # its error names this frame: a ring, which would keep the contribution until it is
            # collected
            del answer

    def _note(self, pairing: PairingAttempt, mine: Phase, answer: Answer) -> None:
        peer = mine.peer
        log.debug(
            "round %d: %s answered %s %s",
            pairing.key.round,
            short(peer),
            answer.verdict,
            answer.reason,
        )
        self._state.evidence.heard(peer, answer.round)
        if answer.verdict == "passed":
            rounds, key = self._state.rounds, pairing.key
            most = self._state.evidence.furthest(
                peer, answer.round, asyncio.get_running_loop().time()
            )
            wanted = rounds.within(answer.round, key.fragment, key.round, most)
            pairing.swarm_round = max(pairing.swarm_round, wanted)
        elif answer.verdict == "wait":
            mine.step = Step.EXPECTING
        elif answer.verdict == "refuse":
            log.warning("peer %s will not exchange with this node: %s", short(peer), answer.reason)
            pairing.attempt.failed(peer, "refused")


class Judgement(NamedTuple):
    """The answer to a call; with "accept" also the meeting, which is then engaged, and what has
    come of the payload.
    """

    pairing: PairingAttempt | None
    answer: Answer
    incoming: Incoming | None


class CallAnswerer:
    """Answers the calls that one node gets. All coroutines run on the host's loop."""

    def __init__(self, state: PairState, held: HeldCalls) -> None:
        self._state, self._context, self._held = state, state.context, held
        self._kept = StreamPlaces(ANSWERED)
        self._has_ended = False
        """This node is in no more rounds."""

    async def end(self) -> None:
        """Turn away all calls, also those that are held."""
        self._has_ended = True
        self._held.give_up()

    async def serve(self, stream: Stream) -> None:
        """Answer the calls that come on a stream, one after another."""
        await answer_all(self._context.host, EXCHANGE_PROTOCOL, stream, self._serve, self._kept)

    async def _serve(self, stream: Stream) -> bool:
        """Answer one call; return whether another may follow it."""
        patience = self._state.timeouts.chunk
        try:
            offer = await receive_offer(stream, patience)
        except MessageError as error:
            # Most likely it has another version: tell the peer, whose user can mend it.
            refusal = Answer(
                verdict="refuse", reason=str(error), round=self._state.rounds.next_round
            )
            await stream.send(pack(refusal), patience)
            return False
        pairing, answer, incoming = await self._judge(stream, offer)
        if pairing is None:
            await stream.send(pack(answer), patience)
            return answer.verdict != "refuse"
        engaged = pairing.phase.outcome
        assert engaged is not None
        meeting = asyncio.ensure_future(self._meet(stream, pairing, offer, answer, incoming))
        del incoming  # the mean is computed in it, and it is gone with that
        try:
            await first_of(meeting, engaged)
        finally:
            if not meeting.done():  # this node gave the exchange up
                meeting.cancel()
                await asyncio.wait({meeting})
            if not engaged.done():
                engaged.set_result(
                    None
                    if meeting.cancelled() or meeting.exception() is not None
                    else meeting.result()
                )
        try:
            return not meeting.cancelled() and meeting.result() is not None
        finally:
            # its error names this frame: a ring, which would keep both contributions until it is
            # collected
            del meeting

    async def _meet(
        self,
        stream: Stream,
        pairing: PairingAttempt,
        offer: Offer,
        answer: Answer,
        incoming: Incoming | None,
    ) -> PartnerContribution | None:
        """Do the callee's half of a meeting."""
        patience, peer = self._state.timeouts.chunk, stream.peer_id
        try:
            await stream.send(pack(answer), patience)
            await stream.send(
                make_offer(self._context, pairing.attempt.contribution, offer.nonce), patience
            )
            return await self._state.transfer(
                stream, pairing, offer, caller=False, incoming=incoming
            )
        except Withdrawn as error:
            # Nobody's failure: its call and its going on crossed the answer.
            if peer not in pairing.withdrawn:
                pairing.withdrawn.add(peer)
                return None
            pairing.attempt.failed(peer, error)
            self._state.ended(pairing, peer, None)
            return None

    async def _judge(self, stream: Stream, offer: Offer) -> Judgement:
        """Judge a call; one for a round to which this node comes is held until then."""
        state, peer = self._state, stream.peer_id
        state.selector.alive(peer)
        refusal = self._refusal(peer, offer)
        if refusal is not None:
            return self._answer("refuse", refusal)
        if self._has_ended:
            return self._answer("busy", ENDED)
        passed = self._passed(peer, offer)
        if passed is not None:
            return passed
        if state.rounds.through(offer.round, offer.fragment, state.at(offer.fragment)):
            return self._answer("busy", "this node is through with that round")
        pairing = state.meeting(offer.fragment, peer)
        if pairing is not None and pairing.key.round == offer.round:
            return self._judge_now(pairing, peer, offer)
        taking, incoming = await self._held.hold(stream, offer)
        if taking is None and self._has_ended:
            return self._answer("busy", ENDED)
        # The round may have been given up just now.
        if taking is None or taking.phase.outcome is None:
            too_late = "this node did not come to that round in time"
            return self._passed(peer, offer) or self._turn_away(peer, offer, too_late)
        difference = taking.attempt.contribution.differs(offer)
        if difference is not None:
            taking.disengage()
            return self._answer("refuse", difference)
        return self._accept(taking, incoming)

    def _judge_now(self, pairing: PairingAttempt, peer: str, offer: Offer) -> Judgement:
        """Judge a call for the round in which ``pairing`` is."""
        difference = pairing.attempt.contribution.differs(offer)
        if difference is not None:
            return self._answer("refuse", difference)
        if not self._is_free(pairing.phase, peer, offer.round):
            return self._turn_away(peer, offer)
        if self._calls_first(pairing.phase, peer, offer.round):
            # It is called back in case it has just turned this node's call away.
            self._state.turn_away(peer, offer.round, offer.fragment)
            return self._answer("wait")
        pairing.engage()
        return self._accept(pairing, None)

    def _is_free(self, phase: Phase, peer: str, round: int) -> bool:
        """Return whether a meeting takes a call of ``peer``, if no own call to it goes first."""
        if phase.step == Step.LISTENING:
            return self._state.selector.accepts(peer, round)
        return phase.peer == peer and phase.step != Step.TRANSFERRING

    def _calls_first(self, phase: Phase, peer: str, round: int) -> bool:
        """Return whether the own call to ``peer``, which crosses its call, is the one that counts:
        that of the peer which comes first in the order of the round.
        """
        if phase.step not in (Step.OFFERING, Step.ACCEPTED):
            return False
        return self._state.rank(self._context.me, round) < self._state.rank(peer, round)

    def _accept(self, pairing: PairingAttempt, incoming: Incoming | None) -> Judgement:
        return Judgement(pairing, Answer(verdict="accept", round=pairing.key.round), incoming)

    def _passed(self, peer: str, offer: Offer) -> Judgement | None:
        """Return the answer to a caller that is late, which names a later round; None if it is
        not.
        """
        later = self._later_round(peer, offer)
        if later is None:
            return None
        if offer.model == self._context.model:
            self._state.evidence.called(peer, offer.round)
        return self._answer("passed", round=later)

    def _turn_away(self, peer: str, offer: Offer, reason: str = "") -> Judgement:
        """Answer a call that this node does not take; a much slower peer may wait for its next
        round.
        """
        state = self._state
        if state.selector.is_too_slow(peer, offer.round):
            following = state.rounds.next_of(offer.round, offer.fragment)
            if following is not None:
                return self._answer("passed", round=following)
        state.turn_away(peer, offer.round, offer.fragment)
        return self._answer("busy", reason)

    def _answer(self, verdict: Verdict, reason: str = "", round: int | None = None) -> Judgement:
        at = self._state.rounds.next_round if round is None else round
        return Judgement(None, Answer(verdict=verdict, reason=reason, round=at), None)

    def _refusal(self, peer: str, offer: Offer) -> str | None:
        """Return why an offer is never taken, or None; note in which round ``peer`` is."""
        state, context = self._state, self._context
        # It is no member here, and must not be taken for a newcomer.
        if context.is_barred(peer):
            return BARRED
        if peer not in context.members() and peer not in context.known():
            # a newcomer: the sooner it is known here, the sooner it gets partners
            context.look()
        if offer.swarm != context.swarm:
            return f"this node is in swarm {context.swarm}, the offer is for {offer.swarm}"
        if offer.model == context.model:
            state.evidence.heard(peer, offer.round)
        elif state.meeting(offer.fragment, peer) is None:
            return "the models differ in the names, shapes or types of their parameters"
        if offer.fragment > state.rounds.fragments:  # one beyond the schedule's: the last average
            return (
                f"there are {state.rounds.fragments} fragments here, the offer is for number "
                f"{offer.fragment}"
            )
        return None

    def _later_round(self, peer: str, offer: Offer) -> int | None:
        """Return the round to which the caller should move; None if it is not late."""
        rounds, at = self._state.rounds, self._state.at(offer.fragment)
        if at is None and self._state.selector.is_too_slow(peer, offer.round):
            return rounds.next_of(offer.round, offer.fragment)
        return rounds.instead(offer.round, offer.fragment, at)
