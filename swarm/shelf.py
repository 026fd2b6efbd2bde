"""Bodies too large to be gossiped: handing out those of this node by stream, and fetching those of others."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from swarm.errors import MessageError
from swarm.parcel import BodyReply, BodyRequest
from swarm.wire import pack, unpack

if TYPE_CHECKING:
    from swarm.host import Host
    from swarm.stream import Stream

BODY_PROTOCOL = "/shoal/body/1"
MAX_BODIES = 64
MAX_SHELF = 64 << 20  # bytes of all bodies together
CHUNK_S = 5.0  # seconds for one small message, or without a byte


class Shelf:
    """What this node can hand out: the newest 64 bodies, at most 64 MiB. Coroutines and `put` are for the host's loop."""

    def __init__(
        self,
        host: Host,
        swarm: str,
        addresses: Callable[[str], Sequence[str]] = lambda peer: (),
        *,
        bodies: int = MAX_BODIES,
        nbytes: int = MAX_SHELF,
    ) -> None:
        self._host, self._swarm, self._addresses = host, swarm, addresses
        self._max_bodies, self._max_bytes = bodies, nbytes
        self._bodies: OrderedDict[bytes, bytes] = OrderedDict()
        host.serve(BODY_PROTOCOL, self._answer)

    def put(self, body: bytes) -> None:
        """Hand out ``body`` from now on; the oldest go for it."""
        digest = hashlib.sha256(body).digest()
        self._bodies[digest] = body
        self._bodies.move_to_end(digest)
        while self._bodies and (len(self._bodies) > self._max_bodies or self._held() > self._max_bytes):
            self._bodies.popitem(last=False)

    def _held(self) -> int:
        return sum(map(len, self._bodies.values()))

    async def fetch(self, peer: str, sha256: bytes, nbytes: int, timeout: float) -> bytes:
        """The body with this digest and size from ``peer``, whole and checked, within ``timeout`` seconds.

        Raises NetworkError if the peer cannot be had or is too slow; MessageError if it holds no such body (reason
        ``unavailable``) or sends another one (``digest``).
        """
        clock = asyncio.get_running_loop().time
        end = clock() + timeout

        def left(at_most: float = CHUNK_S) -> float:
            return max(0.01, min(at_most, end - clock()))

        stream = await self._host.open(peer, BODY_PROTOCOL, addresses=self._addresses(peer), timeout=left(timeout))
        try:
            await stream.send(pack(BodyRequest(swarm=self._swarm, sha256=sha256)), left())
            reply = unpack(await stream.receive(BodyReply.LIMIT, left()), BodyReply)
            if not reply.nbytes:
                raise MessageError("The peer does not hold the body any more.", "unavailable")
            if reply.nbytes != nbytes:
                raise MessageError(f"A body of {reply.nbytes} bytes was refused: {nbytes} were announced.", "digest")
            body = bytearray(nbytes)
            await stream.swap(memoryview(b""), memoryview(body), chunk_timeout=CHUNK_S, deadline=end)
        finally:
            stream.close()
        whole = bytes(body)
        if hashlib.sha256(whole).digest() != sha256:
            raise MessageError("A body was refused: it is not the one that was announced.", "digest")
        return whole

    async def _answer(self, stream: Stream) -> None:
        request = unpack(await stream.receive(BodyRequest.LIMIT, CHUNK_S), BodyRequest)
        body = self._bodies.get(request.sha256, b"") if request.swarm == self._swarm else b""
        await stream.send(pack(BodyReply(nbytes=len(body))), CHUNK_S)
        if body:
            deadline = asyncio.get_running_loop().time() + 60.0
            await stream.swap(memoryview(body), memoryview(bytearray()), chunk_timeout=CHUNK_S, deadline=deadline)
