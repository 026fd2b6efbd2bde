"""Records of verification in transit, the bodies behind them, and logs of them; none of their
content is judged here.

A record is small, and signed by its author, so that any peer can pass it on and show it: the seal
of the message that carries it is the transport's and ends with it. Gossip is no log, so a peer that
was away, or whose records differ, fetches a log by stream: as many bytes as the other states,
bounded, whole or not at all. A claim names its evidence by SHA-256 alone; a verifier states how
many bytes it will take at most, and gets the bytes with that digest or an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from shoal.swarm.errors import MessageError
from shoal.swarm.gossip.bodies import BodyStore, deadline
from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.identity import SIGNATURE_SIZE, Identity, verify
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.p2p.rate_limit import RateLimit, TokenBuckets
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.wire.envelope import KIB, Count, Message, PeerId, Reason, SwarmId, pack, unpack

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

CONTEXT = "shoal/verification/1"
MAX_RECORD = 2048  # bytes
# In a swarm of 100 in which each claims once in a round of 60 s and all claims are checked by 3, a
# peer is drawn 3 times a round, and the busiest hardly ever more than 12 times. Each makes a
# commitment, a reveal and a verdict, in 3 draws at most: 108, and some five others (entry, claim,
# view, dispute, opening). This is five times as much: for rounds of 12 s, or for five claims.
QUOTA = RateLimit(messages=600, nbytes=2 << 20)
# Whole draws vote in the same moment, so more arrive at once than a busy node opens at once.
INBOX = (4096, 16 << 20)

Handler = Callable[[str, bytes, bytes], None]
"""(author, record, signature)"""


class Attestation(Message):
    """A record of ``peer`` and its signature over it in the context "shoal/verification/1"
    (`sign_record`).
    """

    KIND = "attestation"
    LIMIT = 4 * KIB
    AUTHOR = "peer"
    swarm: SwarmId
    peer: PeerId
    record: Annotated[bytes, Field(min_length=1, max_length=MAX_RECORD)]
    signature: Annotated[bytes, Field(min_length=SIGNATURE_SIZE, max_length=SIGNATURE_SIZE)]


def sign_record(identity: Identity, data: bytes) -> bytes:
    return identity.sign(CONTEXT, data)


def verify_record(peer: str, data: bytes, signature: bytes) -> bool:
    """Return whether ``peer`` signed the encoded record ``data``.

    Never raises, whatever it is given.
    """
    return isinstance(data, bytes) and verify(peer, CONTEXT, data, signature)


class Attestations:
    """The records of ``gossip``'s swarm. For any thread but the host's own.

    ``handler(author, record, signature)`` is called once for each record of another peer, on the
    host's loop, after its signature was verified (a wrong one is refused as ``forged``); it must
    not wait. It refuses a record by MessageError, whose reason is counted.
    """

    def __init__(self, gossip: Gossip, handler: Handler) -> None:
        self._swarm = gossip.swarm
        self._peer = gossip.identity.peer_id
        self._handler = handler
        self.topic = gossip.join(Attestation, self._take, QUOTA, INBOX)

    def publish(self, record: bytes, signature: bytes) -> None:
        """Send a record of this node to everybody, soon; never waits.

        The own handler is not called.

        Raises MessageError if it is empty or larger than 2048 bytes (reason ``oversized``), or if
        the signature is not this node's (``forged``).
        """
        if not 0 < len(record) <= MAX_RECORD:
            raise MessageError(
                f"A record of {len(record)} bytes cannot be published: 1 to {MAX_RECORD} are "
                "allowed.",
                "oversized",
            )
        if not verify_record(self._peer, record, signature):
            raise MessageError(
                "A record cannot be published: its signature is not this node's.", "forged"
            )
        self.topic.publish(
            Attestation(swarm=self._swarm, peer=self._peer, record=record, signature=signature)
        )

    # -- on the loop -------------------------------------------------------------------------------

    def _take(self, author: str, attestation: Attestation) -> None:
        if attestation.swarm != self._swarm:
            raise MessageError("A record of another swarm was refused.", "foreign-swarm")
        if not verify_record(author, attestation.record, attestation.signature):
            raise MessageError("A record was refused: its signature is not its author's.", "forged")
        self._handler(author, attestation.record, attestation.signature)


EVIDENCE_PROTOCOL = "/shoal/evidence/1"
MAX_BODIES = 1024  # own ones, held at a time
MAX_BYTES = 256 << 20  # of all of them
# Bytes of others' bodies, which are handed out too and never push out an own one.
MAX_FETCHED = 64 << 20
# Handed out to one peer in a minute. In bytes, everything once: no peer can drain a node's uplink
# by asking again and again.
BODY_QUOTA = RateLimit(messages=600, nbytes=MAX_BYTES)
GRACE_S = 1.0  # seconds beyond a caller's deadline for the loop to report what went wrong


class EvidenceStore:
    """The bodies that this node hands out: of its own the newest 1024 and at most 256 MiB, and
    those that it fetched lately.

    ``addresses``: returns the known addresses of a peer; also of a barred one
    (``Directory.everyone``), which may still be judged. For any thread but the host's own.
    """

    def __init__(
        self, host: Host, swarm: str, addresses: Callable[[str], Sequence[str]] = lambda peer: ()
    ) -> None:
        self._host = host
        self._fetched: OrderedDict[bytes, bytes] = OrderedDict()  # least recently used here first
        self._store = BodyStore(
            host,
            swarm,
            addresses,
            protocol=EVIDENCE_PROTOCOL,
            bodies=MAX_BODIES,
            nbytes=MAX_BYTES,
            quota=BODY_QUOTA,
            more=self._fetched.get,
        )
        self._lock = threading.Lock()  # guards the order of what was fetched

    def put(self, body: bytes) -> bytes:
        """Hand out ``body`` (1 byte to 256 MiB, else ValueError) from now on; never waits.

        Returns its SHA-256, 32 bytes.
        """
        if not 0 < len(body) <= MAX_BYTES:
            raise ValueError(f"a body of {len(body)} bytes: between 1 and {MAX_BYTES} are allowed")
        return self._store.put(body)

    def get(self, peer: str, sha256: bytes, most: int, timeout: float) -> bytes:
        """Return the body with this digest, of at most ``most`` bytes: an own one, one fetched
        lately, or from ``peer``.

        Waits at most ``timeout`` seconds, and one more. Raises NetworkError if the peer cannot be
        had or is too slow; MessageError if it hands out nothing (reason ``unavailable``), something
        larger (``oversized``) or other (``digest``).
        """
        body = self._again(sha256) or self._store.get(sha256)
        if body is None:
            body = self._host.call(
                self._store.fetch(peer, sha256, most, timeout, up_to=True), timeout + GRACE_S
            )
            self._keep(sha256, body)
        if len(body) > most:
            raise MessageError(
                f"A body of {len(body)} bytes was refused: at most {most} are allowed.", "oversized"
            )
        return body

    def _again(self, sha256: bytes) -> bytes | None:
        with self._lock:
            if sha256 in self._fetched:
                self._fetched.move_to_end(sha256)
            return self._fetched.get(sha256)

    def _keep(self, sha256: bytes, body: bytes) -> None:
        with self._lock:
            if len(body) <= MAX_FETCHED:
                self._fetched[sha256] = body
            while sum(map(len, self._fetched.values())) > MAX_FETCHED:
                self._fetched.popitem(last=False)


LOG_PROTOCOL = "/shoal/verification-log/2"
MAX_LOG = 8 << 20  # bytes
LOG_QUOTA = RateLimit(messages=4)  # logs that one peer is handed out in a minute
FRESH_S = 1.0  # seconds for which a log is handed out again
KEPT = 4  # logs kept for that
SMALL_S = 5.0  # seconds for one small message, or without a byte
MAKE_S = 20.0  # seconds in which a log must be made, the wait for others included
SERVE_S = 60.0  # seconds in which it must be taken


class LogRequest(Message):
    """A request for the log of verification from round ``since`` on."""

    KIND = "log-request"
    swarm: SwarmId
    since: Count


class LogReply(Message):
    """The number of bytes that follow; None, and the reason, if the peer serves no log."""

    KIND = "log-reply"
    LIMIT = 4 * KIB
    nbytes: Annotated[int, Field(ge=0, le=MAX_LOG)] | None
    reason: Reason = ""


class LogServer:
    """The server of this node's log to the peers of ``swarm``, to each 4 times a minute.

    ``make(since)`` returns the log from round ``since`` on. It runs in a worker thread of its own,
    never twice at once, and its result is handed out again for a second. A log of more than 8 MiB
    is not handed out.
    """

    def __init__(
        self,
        host: Host,
        swarm: str,
        make: Callable[[int], bytes],
        *,
        quota: RateLimit = LOG_QUOTA,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._swarm = swarm
        self._make = make
        self._clock = clock
        self._quotas = TokenBuckets(quota)
        self._worker = ThreadPoolExecutor(1, "shoal-log")
        self._made = Newest[int, tuple[float, bytes]](
            KEPT
        )  # in the worker only: since -> when, log
        host.serve(LOG_PROTOCOL, self._answer)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, stream: Stream) -> None:
        request = unpack(await stream.receive(LogRequest.LIMIT, SMALL_S), LogRequest)
        log = b""
        reason = ""
        if request.swarm != self._swarm:
            reason = f"this peer belongs to swarm {self._swarm}"
        elif not self._quotas.take(stream.peer_id, 1, 0):
            reason = "it was asked too often: ask again in a minute"
        else:
            log, reason = await self._log(request.since)
        await stream.send(
            pack(LogReply(nbytes=None if reason else len(log), reason=reason)), SMALL_S
        )
        if log and not reason:
            end, _ = deadline(SERVE_S)
            await stream.swap(
                memoryview(log), memoryview(bytearray()), chunk_timeout=SMALL_S, deadline=end
            )

    async def _log(self, since: int) -> tuple[bytes, str]:
        """Return the log, or the reason why there is none."""
        try:
            making = asyncio.get_running_loop().run_in_executor(self._worker, self._newest, since)
        except RuntimeError:  # closed
            return b"", "this peer is leaving"
        try:
            log = await asyncio.wait_for(making, MAKE_S)
        except TimeoutError:
            return b"", f"it could not be made in {MAKE_S:g} s"
        except ValueError as error:  # a log without any record would be too large
            return b"", str(error)
        if len(log) > MAX_LOG:
            return (
                b"",
                f"it has {len(log)} bytes, of which at most {MAX_LOG} may be sent: ask for a later "
                "round",
            )
        return log, ""

    def _newest(self, since: int) -> bytes:
        made = self._made.pop(since, None)
        if made is None or not self._clock() - made[0] < FRESH_S:
            log = self._make(since)
            made = self._clock(), log
        self._made[since] = made
        return made[1]


async def _fetch(
    host: Host, peer: str, addresses: Sequence[str], request: LogRequest, timeout: float
) -> bytes:
    end, left = deadline(timeout)
    with contextlib.closing(
        await host.open(peer, LOG_PROTOCOL, addresses=addresses, timeout=left(timeout))
    ) as stream:
        await stream.send(pack(request), left(SMALL_S))
        reply = unpack(await stream.receive(LogReply.LIMIT, left(MAKE_S + SMALL_S)), LogReply)
        if reply.nbytes is None:
            raise MessageError(f"Peer {short(peer)} serves no log: {reply.reason}.", "unavailable")
        log = bytearray(reply.nbytes)
        if log:
            await stream.swap(memoryview(b""), memoryview(log), chunk_timeout=SMALL_S, deadline=end)
    return bytes(log)


def fetch_log(
    host: Host, peer: str, addresses: Sequence[str], swarm: str, since: int, timeout: float
) -> bytes:
    """Return the log of ``peer`` from round ``since`` on, at most 8 MiB.

    For any thread but the host's own.

    Waits at most ``timeout`` seconds, and one more. Raises NetworkError if the peer cannot be had
    or is too slow; MessageError if it hands out none (reason ``unavailable``: asked too often,
    another swarm, too long), or violates the protocol.
    """
    return host.call(
        _fetch(host, peer, addresses, LogRequest(swarm=swarm, since=since), timeout),
        timeout + GRACE_S,
    )
