"""Bodies too large to be gossiped: those of this node are served by stream, those of others fetched."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shoal.swarm.errors import MessageError
from shoal.swarm.gossip.envelope import BodyReply, BodyRequest
from shoal.swarm.p2p.rate_limit import RateLimit, TokenBuckets
from shoal.swarm.wire.envelope import pack, unpack

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host
    from shoal.swarm.p2p.stream import Stream

BODY_PROTOCOL = "/shoal/body/1"
MAX_BODIES = 64
MAX_STORED = 64 << 20  # bytes of all bodies together
CHUNK_S = 5.0  # seconds for one small message, or without a byte
SERVE_S = 60.0  # seconds in which a body must be taken


class BodyStore:
    """The bodies that this node serves: the newest ``bodies``, at most ``nbytes`` bytes. Coroutines are for the host's loop.

    ``addresses``: returns the known addresses of a peer. ``protocol``: each store of a host has its own. ``quota``: the limit of
    what one peer gets in a minute; further requests are answered as if nothing were held. None: no limit.
    """

    def __init__(
        self,
        host: Host,
        swarm: str,
        addresses: Callable[[str], Sequence[str]] = lambda peer: (),
        *,
        protocol: str = BODY_PROTOCOL,
        bodies: int = MAX_BODIES,
        nbytes: int = MAX_STORED,
        quota: RateLimit | None = None,
    ) -> None:
        self._host, self._swarm, self._addresses, self._protocol = host, swarm, addresses, protocol
        self._max_bodies, self._max_bytes = bodies, nbytes
        self._quotas = None if quota is None else TokenBuckets(quota)
        self._lock = threading.Lock()
        self._bodies: OrderedDict[bytes, bytes] = OrderedDict()
        host.serve(protocol, self._answer)

    def put(self, body: bytes) -> bytes:
        """Serve ``body`` from now on, dropping the oldest if need be; return its SHA-256. For any thread."""
        digest = hashlib.sha256(body).digest()
        with self._lock:
            self._bodies[digest] = body
            self._bodies.move_to_end(digest)
            while self._bodies and (len(self._bodies) > self._max_bodies or self._held() > self._max_bytes):
                self._bodies.popitem(last=False)
        return digest

    def get(self, sha256: bytes) -> bytes | None:
        """Return the body with this digest, if it is held. For any thread."""
        with self._lock:
            return self._bodies.get(sha256)

    def _held(self) -> int:
        return sum(map(len, self._bodies.values()))

    async def fetch(self, peer: str, sha256: bytes, nbytes: int, timeout: float) -> bytes:
        """Fetch the body with this digest and size from ``peer``, whole and checked, within ``timeout`` seconds.

        Raises NetworkError if the peer cannot be reached or is too slow; MessageError if it holds no such body (reason
        ``unavailable``) or sends another one (``digest``).
        """

        def check(size: int) -> None:
            if size != nbytes:
                raise MessageError(f"A body of {size} bytes was refused: {nbytes} were announced.", "digest")

        return await self._take(peer, sha256, check, timeout)

    async def fetch_up_to(self, peer: str, sha256: bytes, most: int, timeout: float) -> bytes:
        """Fetch a body of any size up to ``most`` bytes; a larger one is refused unread (``oversized``). Else as ``fetch``."""

        def check(size: int) -> None:
            if size > most:
                raise MessageError(f"A body of {size} bytes was refused: at most {most} are allowed.", "oversized")

        return await self._take(peer, sha256, check, timeout)

    async def _take(self, peer: str, sha256: bytes, check: Callable[[int], None], timeout: float) -> bytes:
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout

        def left(at_most: float = CHUNK_S) -> float:
            return max(0.01, min(at_most, end - loop.time()))

        stream = await self._host.open(peer, self._protocol, addresses=self._addresses(peer), timeout=left(timeout))
        try:
            await stream.send(pack(BodyRequest(swarm=self._swarm, sha256=sha256)), left())
            reply = unpack(await stream.receive(BodyReply.LIMIT, left()), BodyReply)
            if not reply.nbytes:
                raise MessageError("The peer does not hold the body any more.", "unavailable")
            check(reply.nbytes)
            body = bytearray(reply.nbytes)
            await stream.swap(memoryview(b""), memoryview(body), chunk_timeout=CHUNK_S, deadline=end)
        finally:
            stream.close()
        whole = bytes(body)
        # Hashing some hundred megabytes here would block the loop, and so every exchange, for as many milliseconds.
        if await loop.run_in_executor(None, lambda: hashlib.sha256(whole).digest()) != sha256:
            raise MessageError("A body was refused: it is not the one that was announced.", "digest")
        return whole

    async def _answer(self, stream: Stream) -> None:
        request = unpack(await stream.receive(BodyRequest.LIMIT, CHUNK_S), BodyRequest)
        body = (self.get(request.sha256) if request.swarm == self._swarm else None) or b""
        if self._quotas is not None and not self._quotas.take(stream.peer_id, 1, len(body)):
            body = b""
        await stream.send(pack(BodyReply(nbytes=len(body))), CHUNK_S)
        if body:
            deadline = asyncio.get_running_loop().time() + SERVE_S
            await stream.swap(memoryview(body), memoryview(bytearray()), chunk_timeout=CHUNK_S, deadline=deadline)
