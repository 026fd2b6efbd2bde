"""The transfer of two contributions between two peers, and the commit that makes it count for both
or for neither.

The *caller* opened the stream, the *callee* accepted. After the offers are agreed
(`shoal.swarm.exchange.pair.calls`):

    both     send their payload and receive the other's into scratch, checking size, digest and
             finiteness
    callee   READY  -> caller      "I hold your whole contribution"
    caller   decides: commits      (or ABORT, if its own copy is not whole)
    caller   COMMIT -> callee      callee commits
    callee   OUTCOME -> caller     only if no COMMIT comes: it asks once more, over a new stream

With a codec for pairs READY and COMMIT name the blocks that their sender refused, which then count
on neither side.

Each side ends with the whole pair or with its own contribution alone, and the callee commits only
if the caller has. The one case in which the two disagree: docs/internals.md, "A lost COMMIT".
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from shoal.optim.codecs.memory import buffer
from shoal.optim.codecs.pair_message import Reading
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.exchange.contribution import ExchangeAttempt, Problem, Received
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.internal_errors import InternalError
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.wire.envelope import KIB, HashList, M, Message, fresh_nonce, pack, unpack
from shoal.swarm.wire.messages import Abort, Commit, Offer, OutcomeReply, OutcomeRequest, Ready

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

OUTCOME_PROTOCOL = "/shoal/outcome/1"
# outcomes remembered for callees that ask again, at once; each may name many refused blocks
REMEMBERED = 64
# values a second, at least, that a partner decodes and verifies, also with more nodes than
# processors
VERIFIED = 3e6
KNOWN = 4096  # peers and fragments that were exchanged with

Outcome = Literal["committed", "aborted"]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PartnerContribution:
    """A partner's whole, verified contribution."""

    peer: str
    weight: float
    values: Received
    refused: bytes = b""
    """The blocks of the own contribution that the partner refused."""

    @property
    def bits(self) -> bytes:
        """The blocks of this contribution that this node refused."""
        return self.values.bits if isinstance(self.values, Reading) else b""

    @property
    def far(self) -> bool:
        return isinstance(self.values, Reading) and self.values.far


class Withdrawn(NetworkError):
    """The error that a stream ended before a byte came after the call was accepted.

    The caller's: it had gone on by then.
    """


class Incoming:
    """A payload of ``nbytes`` bytes as it comes in, and its digest."""

    def __init__(self, nbytes: int) -> None:
        self.payload = buffer(nbytes)
        self.view = self.payload.numpy().data
        self.arrived = 0
        self.hashes = HashList(self.view)

    def advance(self, arrived: int) -> None:
        """Note that so many bytes, from the first, are there."""
        self.arrived = arrived
        self.hashes.advance(arrived)


Attempt = ExchangeAttempt[PartnerContribution]


class PairTransfer:
    """The transfers of one host. All coroutines run on the host's loop."""

    def __init__(self, host: Host, timeouts: ExchangeTimeouts) -> None:
        self._host, self._timeouts = host, timeouts
        self._undecided: set[tuple[str, bytes]] = set()
        self._outcomes = Newest[tuple[str, bytes], tuple[Outcome, bytes]](REMEMBERED)
        """The decisions, and with them the blocks that this node refused."""
        self._met = Newest[tuple[str, int], None](KNOWN)
        """The peers, each with a fragment, that this node has exchanged with.

        At first neither knows how far they are apart, and
        most of what a late joiner sends cannot be read: that makes nobody suspicious."""
        host.serve(OUTCOME_PROTOCOL, self._answer_outcome)

    async def run(
        self,
        stream: Stream,
        attempt: Attempt,
        theirs: Offer,
        *,
        caller: bool,
        incoming: Incoming | None = None,
    ) -> PartnerContribution | None:
        """Exchange payloads with the peer at the other end of ``stream``; None unless it was
        committed. Raises Withdrawn.

        ``incoming``: what has come of the peer's payload.
        """
        exchange = (stream.peer_id, theirs.nonce)
        if caller:
            self._undecided.add(exchange)
        began = asyncio.get_running_loop().time()
        until = began + self._timeouts.longest(theirs.nbytes)
        try:
            # The size equals our own payload's (matchmaking checked it), so a peer cannot make this
            # node allocate more.
            incoming = Incoming(theirs.nbytes) if incoming is None else incoming
            deadline = began + self._timeouts.moving(theirs.nbytes)
            received = await self._swap(stream, attempt, theirs, incoming, deadline, until)
            confirm = self._decide if caller else self._follow
            await confirm(stream, theirs, received, attempt, self._patience(attempt, until))
        except (NetworkError, MessageError) as error:
            if isinstance(error, Withdrawn) and not caller:
                raise
            log.info(
                "round %d: no exchange with %s: %s", attempt.key.round, short(stream.peer_id), error
            )
            attempt.failed(stream.peer_id, error)
        except Exception as error:  # this node's own: no peer is to blame
            raise attempt.caught("exchange", error) from error
        else:
            known = (stream.peer_id, attempt.key.fragment)
            far = attempt.commit.received is not None and attempt.commit.received.far
            if far and known in self._met:
                # What could be read counts, yet it is as good as turned down.
                attempt.failed(stream.peer_id, "suspicious")
            elif far:
                attempt.stats.unread(attempt.handed_in, stream.peer_id)
            elif attempt.commit.received is not None:
                seconds = asyncio.get_running_loop().time() - began
                attempt.stats.done(attempt.handed_in, [stream.peer_id], seconds)
            if attempt.commit.received is not None:
                self._met[known] = None
        finally:
            if exchange in self._undecided:
                self._settle(exchange, "aborted")
        return attempt.commit.received

    def _settle(self, exchange: tuple[str, bytes], outcome: Outcome, refused: bytes = b"") -> None:
        """Record the one decision of an exchange in which this node is the caller; later questions
        find it made.
        """
        self._undecided.discard(exchange)
        self._outcomes[exchange] = outcome, refused

    def _patience(self, attempt: Attempt, until: float) -> float:
        """Return the seconds that the partner may need to verify a payload, of which this node sees
        nothing, and to answer.
        """
        values = sum(math.prod(shape) for shape in attempt.contribution.shapes)
        left = until - asyncio.get_running_loop().time()
        return max(
            min(self._timeouts.chunk + values / VERIFIED + self._timeouts.trial, left),
            self._timeouts.chunk,
        )

    async def _swap(
        self,
        stream: Stream,
        attempt: Attempt,
        theirs: Offer,
        incoming: Incoming,
        deadline: float,
        longest: float,
    ) -> PartnerContribution:
        """Exchange payloads, into scratch, and verify.

        Raises NetworkError or MessageError; then nothing of the scratch is used.
        """
        before = incoming.arrived
        try:
            await stream.swap(
                attempt.contribution.payload,
                incoming.view,
                arrived=before,
                chunk_timeout=self._timeouts.chunk,
                deadline=deadline,
                longest=longest,
                on_progress=incoming.advance,
            )
        except NetworkError as error:
            raise (
                error
                if incoming.arrived > before or error.reason != "broken"
                else Withdrawn(str(error))
            ) from None
        problem: Problem | None = Problem("damaged", "it does not match the digest it announced")
        values: Received = []
        if incoming.hashes.digest() == theirs.sha256:
            try:
                problem, values = await asyncio.to_thread(
                    attempt.problem, stream.peer_id, incoming.payload
                )
            except InternalError as error:  # the partner need not wait, nor wonder
                await self._send(stream, Abort(nonce=theirs.nonce, reason=str(error)))
                raise
        if problem is not None:
            await self._send(stream, Abort(nonce=theirs.nonce, reason=problem.text))
            raise MessageError(
                f"the contribution of peer {short(stream.peer_id)} was refused: {problem.text}.",
                problem.kind,
            )
        return PartnerContribution(stream.peer_id, theirs.weight, values)

    async def _decide(
        self,
        stream: Stream,
        offer: Offer,
        received: PartnerContribution,
        attempt: Attempt,
        patience: float,
    ) -> None:
        """Do the caller's half of the commit."""
        reply = await self._receive(stream, patience, _room(attempt), Ready, Abort)
        if not isinstance(reply, Ready) or reply.nonce != offer.nonce:
            raise _called_off(reply)
        exchange, whole = (stream.peer_id, offer.nonce), _agreed(attempt, received, reply.refused)
        # Not if the callee gave up, asked and was answered "aborted", nor if this node's own time
        # was up.
        if exchange in self._undecided and attempt.commit.commit(whole):
            self._settle(exchange, "committed", received.bits)
            await self._send(stream, Commit(nonce=offer.nonce, refused=received.bits))

    async def _follow(
        self,
        stream: Stream,
        offer: Offer,
        received: PartnerContribution,
        attempt: Attempt,
        patience: float,
    ) -> None:
        """Do the callee's half of the commit."""
        try:
            ready = Ready(nonce=offer.nonce, sha256=offer.sha256, refused=received.bits)
            await stream.send(pack(ready), self._timeouts.chunk)
        except NetworkError:
            # It may have sent its reason before.
            reason = await self._receive(stream, self._timeouts.chunk, Abort.LIMIT, Abort)
            raise _called_off(reason) from None
        try:
            reply = await self._receive(stream, patience, _room(attempt), Commit, Abort)
            if isinstance(reply, Abort):
                raise _called_off(reply)
            refused = (
                reply.refused if isinstance(reply, Commit) and reply.nonce == offer.nonce else None
            )
        except NetworkError:
            refused = await self._ask(stream.peer_id, offer.nonce, _room(attempt))
        if refused is not None:
            attempt.commit.commit(_agreed(attempt, received, refused))

    async def _ask(self, peer: str, nonce: bytes, room: int) -> bytes | None:
        """Ask the caller once more, over a new stream, after its confirmation was lost; return what
        it refused, if it committed.

        A slow link needs several round trips for that. Training waits no longer for it than for the
        rest of the exchange (`TrainingTime.budget`).
        """
        seconds = self._timeouts.asking
        try:
            reply = await asyncio.wait_for(self._asked(peer, nonce, seconds, room), seconds)
        except (TimeoutError, NetworkError, MessageError) as error:
            why = str(error) or f"no answer within {seconds:g} s"
            log.warning(
                "the confirmation of an exchange was lost and its peer cannot be asked (%s): the "
                "round is given up",
                why,
            )
            return None
        return reply.refused if reply.outcome == "committed" else None

    async def probe(self, peer: str, seconds: float) -> None:
        """Ask ``peer`` for an outcome that it does not know: libp2p opens a stream without its
        help, so only an answer shows that it is there. Raises NetworkError or MessageError.
        """
        try:
            await asyncio.wait_for(self._asked(peer, fresh_nonce(), seconds), seconds)
        except TimeoutError:
            raise NetworkError(
                f"peer {short(peer)} did not answer within {seconds:.3g} s.", "timeout"
            ) from None

    async def _asked(
        self, peer: str, nonce: bytes, seconds: float, room: int = KIB
    ) -> OutcomeReply:
        again = await self._host.open(peer, OUTCOME_PROTOCOL, timeout=seconds)
        try:
            await again.send(pack(OutcomeRequest(nonce=nonce)), seconds)
            return unpack(await again.receive(room, seconds), OutcomeReply)
        finally:
            again.close()

    async def _answer_outcome(self, stream: Stream) -> None:
        request = unpack(
            await stream.receive(OutcomeRequest.LIMIT, self._timeouts.chunk), OutcomeRequest
        )
        exchange = (stream.peer_id, request.nonce)
        # The callee gives up, so it is aborted; a READY still in flight comes too late.
        if exchange in self._undecided:
            self._settle(exchange, "aborted")
        outcome: Literal["committed", "aborted", "unknown"]
        outcome, refused = self._outcomes.get(exchange, ("unknown", b""))
        await stream.send(
            pack(OutcomeReply(outcome=outcome, refused=refused)), self._timeouts.chunk
        )

    async def _receive(self, stream: Stream, seconds: float, room: int, *types: type[M]) -> M:
        return unpack(await stream.receive(room, seconds), *types)

    async def _send(self, stream: Stream, message: Message) -> None:
        """Send a message that need not arrive: without it the peer's deadline or its question has
        the same effect.
        """
        try:
            await stream.send(pack(message), self._timeouts.chunk)
        except NetworkError as error:
            log.info("%s was not sent: %s", message.KIND, error)


def _room(attempt: Attempt) -> int:
    """Return the bytes of the largest message that ends the exchange."""
    message = attempt.contribution.payload.message
    return Abort.LIMIT + (0 if message is None else len(message.own) // 8)


def _agreed(attempt: Attempt, received: PartnerContribution, refused: bytes) -> PartnerContribution:
    """Return what was received, with the blocks that its sender refused.

    Raises MessageError if these are none of this exchange.
    """
    message = attempt.contribution.payload.message
    try:
        if message is not None:
            message.refused(refused)
        elif refused:
            raise ValueError(
                f"{len(refused)} bytes name refused blocks, which "
                f"{attempt.contribution.codec.name} has not"
            )
    except ValueError as error:
        raise MessageError(
            f"peer {short(received.peer)} refused what was not sent: {error}."
        ) from None
    return replace(received, refused=refused)


def _called_off(reply: Message) -> MessageError:
    return MessageError(
        f"the peer called it off: {reply.reason if isinstance(reply, Abort) else 'other nonce'}.",
        "refused",
    )
