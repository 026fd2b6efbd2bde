"""The two halves of the matchmaking (`shoal.swarm.exchange.pair.exchange`): the calls to others,
and the answers to theirs.

Both sides make each other a signed offer. A call goes over a stream that was kept from an earlier
exchange, or a new one, while the partner's own call may come in (`KeptStreams`); one that comes
early waits until this node is at its round (`HeldCalls`). What a meeting does just now is its
`Phase`, which both halves set.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from shoal.optim.exchange.base import RoundKey
from shoal.optim.exchange.pairing import rank
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.contribution import BARRED, EncodedContribution
from shoal.swarm.exchange.kept_streams import ANSWERED, KeptStreams, answer_all
from shoal.swarm.exchange.pair.selector import PairSelector
from shoal.swarm.exchange.pair.transfer import (
    Attempt,
    Incoming,
    PairTransfer,
    PartnerContribution,
    Withdrawn,
)
from shoal.swarm.exchange.pair_rounds import PairRounds
from shoal.swarm.exchange.round_evidence import RoundEvidence
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.exchange.training_time import LEAST_S, OVERLAPPED_S, TrainingTime
from shoal.swarm.internal_errors import InternalError
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.p2p.tasks import first_of, race, running, stop
from shoal.swarm.wire.envelope import ENVELOPE, fresh_nonce, pack, seal, unpack, unseal
from shoal.swarm.wire.messages import Answer, Offer

log = logging.getLogger(__name__)


MAX_HELD = 64


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
    work: asyncio.Future[PartnerContribution | None] | None = None
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
    turned_away: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_HELD))
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
                since, longest = (
                    loop.time(),
                    self.time.budget(nbytes, key.fragment, loop.time() - began),
                )
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
    stream, call, wanted = (
        asyncio.ensure_future(opening),
        asyncio.ensure_future(called.wait()),
        False,
    )
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


RECEIVED = 2  # later rounds of a fragment in which payloads are received before this node is there


class HeldCalls:
    """The held calls of one node, at most one of each peer with each fragment."""

    def __init__(self, state: PairState) -> None:
        self._state = state
        self._places: defaultdict[int, StreamPlaces] = defaultdict(lambda: StreamPlaces(MAX_HELD))
        self._receiving: Counter[int] = Counter()  # payloads that come in, by fragment
        self.calls: dict[tuple[int, str], tuple[int, asyncio.Future[PairingAttempt | None]]] = {}

    async def hold(
        self, stream: Stream, offer: Offer
    ) -> tuple[PairingAttempt | None, Incoming | None]:
        """Wait until this node is at the round of ``offer`` and takes the call; None if it does not
        in the time a caller waits, or too many calls with that fragment are held. Also return what
        has come of the payload meanwhile. It is received from a partner of that round, `RECEIVED`
        times with each fragment and partner, if it is as large as this node's own.
        """
        round, fragment = offer.round, offer.fragment
        call = (fragment, stream.peer_id)
        if call in self.calls or not (places := self._places[fragment]).take(stream):
            return None, None
        taken: asyncio.Future[PairingAttempt | None] = asyncio.get_running_loop().create_future()
        self.calls[call] = (round, taken)
        state, incoming = self._state, None
        partners = state.selector.partners(round)
        ahead = state.sizes.get(fragment) == offer.nbytes and stream.peer_id in partners
        if ahead and self._receiving[fragment] < RECEIVED * len(partners):
            self._receiving[fragment] += 1
            incoming = Incoming(offer.nbytes)
        gone = asyncio.ensure_future(self._until_gone(stream, incoming, ahead))
        try:
            await first_of(
                taken,
                gone,
                timeout=OVERLAPPED_S if state.rounds.overlap else state.time.patience(fragment),
            )
            return (taken.result() if taken.done() else None), incoming
        finally:
            del self.calls[call]
            if incoming is not None:
                self._receiving[fragment] -= 1
            places.free(stream)
            # Not if this call gave way, and others came and went.
            if not places.peers and self._places.get(fragment) is places:
                del self._places[fragment]
            await stop(gone)  # only one may read from a stream

    async def _until_gone(self, stream: Stream, incoming: Incoming | None, ahead: bool) -> None:
        """Wait until the caller has gone on, or says anything beside its payload before it is
        answered.
        """
        if incoming is not None:
            await stream.receive_ahead(incoming.view, incoming.advance)
        elif ahead:  # of a payload that may wait in the stream nothing is lost
            await asyncio.sleep(OVERLAPPED_S)
        await stream.more(OVERLAPPED_S)

    def take(self, pairing: PairingAttempt, peer: str) -> bool:
        """Accept the call of ``peer`` if one for this round is held; return whether it was."""
        held = self.calls.get((pairing.key.fragment, peer))
        if held is None or held[0] != pairing.key.round or held[1].done():
            return False
        pairing.engage()
        held[1].set_result(pairing)
        return True

    def release(self, pairing: PairingAttempt) -> None:
        """Answer the calls that this node no longer takes, now that it is in the round of
        ``pairing``: those for that round or an earlier one, except its partner's, and those for
        rounds of other fragments that it will not be in.
        """
        state, key = self._state, pairing.key
        for (fragment, peer), (round, taken) in self.calls.items():
            if fragment == key.fragment:
                expects = pairing.partner == peer or state.meeting(fragment, peer) is not pairing
                past = round < key.round or (round == key.round and not expects)
            else:
                call = (round, fragment, state.at(fragment))
                past = state.rounds.instead(*call) is not None or state.rounds.through(*call)
            if past and not taken.done():
                taken.set_result(None)


PROBE_S = 1.0  # seconds for a candidate other than the partner to answer
HELD_S = 1.0  # seconds without an answer, after which a partner is late
ANSWERED_S = 0.1  # the same beyond two round trips, where these are known
# of the silence that ends a transfer: until a peer that holds a call is probed, and for that
QUIET = 0.25
PROBED = 0.75


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
        return (
            None
            if stream is None
            else await self._offer(stream, pairing, mine, until, loop.time() - began)
        )

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
        except NetworkError as error:
            # What was left of a search is no time to open a stream in.
            if error.reason != "timeout" or seconds >= PROBE_S:
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

        ``opened``: seconds that it took
        to open; None if it was kept. Raises NetworkError or MessageError.
        """
        loop, peer, well = asyncio.get_running_loop(), stream.peer_id, False
        ahead: asyncio.TimerHandle | None = None
        try:
            mine.step = Step.OFFERING
            nonce = fresh_nonce()
            offer = make_offer(self._context, pairing.attempt.contribution, nonce)
            try:
                await stream.send(offer, max(until - loop.time(), 0.01))
                welcome = self._welcome and pairing.usual and peer == pairing.partner
                if opened is None and welcome and not stream.has_choice:
                    # The other one's call, if it is there, counts less. From a peer that is there
                    # an answer comes at once.
                    first = self._state.rank(
                        self._context.me, pairing.key.round
                    ) < self._state.rank(peer, pairing.key.round)
                    heard = (
                        HELD_S
                        if stream.round_trip is None
                        else min(HELD_S, ANSWERED_S + 2 * stream.round_trip)
                    )
                    ahead = loop.call_later(
                        0.0 if first else heard,
                        stream.send_ahead,
                        pairing.attempt.contribution.payload,
                    )
                answered = await self._answered(stream, pairing, max(until - loop.time(), 0.01))
            except NetworkError as error:
                # It is behind, and costs no training.
                if self._state.rounds.overlap and error.reason == "timeout":
                    return None
                raise Unanswered(str(error), error.reason) from (
                    None if error.reason == "broken" else error
                )
            finally:
                if ahead is not None:
                    ahead.cancel()
            answer = unpack(answered, Answer)
            if answer.verdict != "accept":
                well = answer.verdict != "refuse" and not stream.is_ahead
                self._note(pairing, mine, answer)
                return None
            mine.step = Step.ACCEPTED
            self._welcome |= peer == pairing.partner
            theirs = await receive_offer(stream, self._state.timeouts.chunk)
            difference = pairing.attempt.contribution.differs(theirs)
            offered = (nonce, self._context.swarm, self._context.model, pairing.key.round)
            if (
                difference is not None
                or (theirs.nonce, theirs.swarm, theirs.model, theirs.round) != offered
            ):
                what = difference or "the nonce, swarm, model or round"
                raise MessageError(
                    f"peer {short(peer)} accepted something else than was offered: {what}."
                )
            mine.step = Step.TRANSFERRING
            # The rest of the time before the answer is the wait for its training.
            received = await self._state.transfer(
                stream, pairing, theirs, caller=True, called=opened or 0.0
            )
            well = received is not None
            return received
        finally:
            self._welcome &= not stream.is_ahead
            self._kept.keep(stream) if well else stream.close()

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


EXCHANGE_PROTOCOL = "/shoal/exchange/1"


class CallAnswerer:
    """Answers the calls that one node gets. All coroutines run on the host's loop."""

    def __init__(self, state: PairState, held: HeldCalls) -> None:
        self._state, self._context, self._held = state, state.context, held
        self._kept = StreamPlaces(ANSWERED)

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

    async def _judge(
        self, stream: Stream, offer: Offer
    ) -> tuple[PairingAttempt | None, Answer, Incoming | None]:
        """Return the answer to a call; with "accept" also the meeting, which is then engaged, and
        what has come of the payload.
        """
        state, peer = self._state, stream.peer_id
        state.selector.alive(peer)

        def reply(
            verdict: str, reason: str = "", round: int | None = None
        ) -> tuple[None, Answer, None]:
            at = state.rounds.next_round if round is None else round
            return (
                None,
                Answer.model_validate({"verdict": verdict, "reason": reason, "round": at}),
                None,
            )

        def instead() -> int | None:
            return state.rounds.instead(offer.round, offer.fragment, state.at(offer.fragment))

        # It is no member here, and must not be taken for a newcomer.
        if self._context.is_barred(peer):
            return reply("refuse", BARRED)
        if peer not in self._context.members() and peer not in self._context.known():
            # a newcomer: the sooner it is known here, the sooner it gets partners
            self._context.look()
        if offer.swarm != self._context.swarm:
            return reply(
                "refuse",
                f"this node is in swarm {self._context.swarm}, the offer is for {offer.swarm}",
            )
        pairing = state.meeting(offer.fragment, peer)
        if offer.model == self._context.model:
            state.evidence.heard(peer, offer.round)
        elif pairing is None:
            return reply(
                "refuse", "the models differ in the names, shapes or types of their parameters"
            )
        if offer.fragment > state.rounds.fragments:  # one beyond the schedule's: the last average
            return reply(
                "refuse",
                f"there are {state.rounds.fragments} fragments here, the offer is for number "
                f"{offer.fragment}",
            )
        late, taken, incoming = instead(), False, None
        if state.rounds.through(offer.round, offer.fragment, state.at(offer.fragment)):
            return reply("busy", "this node is through with that round")
        if late is None and (pairing is None or pairing.key.round != offer.round):
            pairing, incoming = await self._held.hold(stream, offer)
            # The round may have been given up just now.
            taken = pairing is not None and pairing.phase.outcome is not None
            if not taken and (late := instead()) is None:
                state.turn_away(peer, offer.round, offer.fragment)
                return reply("busy", "this node did not come to that round in time")
        if late is not None or pairing is None:
            if offer.model == self._context.model:
                state.evidence.called(peer, offer.round)
            return reply("passed", round=late)
        difference = pairing.attempt.contribution.differs(offer)
        if difference is not None:
            if taken and (engaged := pairing.phase.outcome) is not None and not engaged.done():
                engaged.set_result(None)
            return reply("refuse", difference)
        if not taken:
            phase = pairing.phase
            crossing = phase.peer == peer and phase.step <= Step.ACCEPTED
            expected = phase.peer == peer and phase.step == Step.EXPECTING
            unasked = phase.step == Step.LISTENING and state.selector.accepts(peer, offer.round)
            if not (crossing or expected or unasked):
                state.turn_away(peer, offer.round, offer.fragment)
                return reply("busy")
            mine, theirs = (state.rank(one, offer.round) for one in (self._context.me, peer))
            if crossing and phase.step != Step.DIALING and theirs > mine:
                # In case this node's call, for which it waits, was just turned away there.
                state.turn_away(peer, offer.round, offer.fragment)
                return reply("wait")
            pairing.engage()
        return pairing, Answer(verdict="accept", round=offer.round), incoming
