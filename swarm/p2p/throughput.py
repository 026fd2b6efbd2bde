"""A measurement of the throughput to a peer: both sides send the same few MB at once, as in an exchange."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from shoal.swarm.errors import NetworkError
from shoal.swarm.p2p.rate_limit import RateLimit, TokenBuckets
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.wire.envelope import Message, pack, unpack
from shoal.swarm.wire.fields import Reason

SPEED_PROTOCOL = "/shoal/speed/1"
MAX_BYTES = 2 << 20  # each way
SMALL_S = 5.0  # seconds for one small message
MOVE_S = 10.0  # seconds for the bytes
EACH, ALL = 4, 16  # tests a minute with one address, and in all


class SpeedRequest(Message):
    """Request for ``nbytes`` zeros; the sender will send as many."""

    KIND = "speed-request"
    nbytes: Annotated[int, Field(ge=1, le=MAX_BYTES)]


class SpeedReply(Message):
    """Answer to a request: the bytes follow, unless there is a reason why not."""

    KIND, LIMIT = "speed-reply", 2048
    reason: Reason = ""


class SpeedDone(Message):
    """Message that all bytes of the asker have arrived."""

    KIND = "speed-done"


@dataclass(frozen=True)
class Throughput:
    """Bytes a second from the peer and to it; ``whole`` False: time was up before all arrived, so ``up`` is a bound."""

    down: float
    up: float
    whole: bool


class ThroughputProbe:
    """The answering side, for few at a time. Use it on one loop."""

    def __init__(self) -> None:
        self._each = TokenBuckets(RateLimit(messages=EACH, nbytes=EACH * MAX_BYTES, senders=256))
        self._all = TokenBuckets(RateLimit(messages=ALL, nbytes=ALL * MAX_BYTES, senders=1))

    async def answer(self, stream: Stream) -> None:
        """Serve one stream of `SPEED_PROTOCOL`. Raises NetworkError or MessageError."""
        request = unpack(await stream.receive(SpeedRequest.LIMIT, SMALL_S), SpeedRequest)
        reason = ""
        if not stream.origin:  # it would use up the relay's bandwidth
            reason = "the connection goes through a relay"
        elif not (self._each.take(stream.origin, 1, request.nbytes) and self._all.take("", 1, request.nbytes)):
            reason = "it was asked too often, so try again in a minute"
        await stream.send(pack(SpeedReply(reason=reason)), SMALL_S)
        if not reason:
            await _swap(stream, request.nbytes, bytearray(request.nbytes), None)
            await stream.send(pack(SpeedDone()), SMALL_S)


async def _swap(stream: Stream, nbytes: int, into: bytearray, moved: list[tuple[float, int]] | None) -> None:
    loop = asyncio.get_running_loop()

    def progress(received: int) -> None:
        if moved is not None:
            moved.append((loop.time(), received))

    end = loop.time() + MOVE_S
    await stream.swap(memoryview(bytes(nbytes)), memoryview(into), chunk_timeout=SMALL_S, deadline=end, on_progress=progress)


async def measure(stream: Stream, nbytes: int = MAX_BYTES) -> Throughput:
    """Move ``nbytes`` each way at once, within some 25 s. Raises NetworkError (nothing came, or a refusal) or MessageError."""
    await stream.send(pack(SpeedRequest(nbytes=nbytes)), SMALL_S)
    reply = unpack(await stream.receive(SpeedReply.LIMIT, SMALL_S), SpeedReply)
    if reply.reason:
        raise NetworkError(f"peer {short(stream.peer_id)} does not measure: {reply.reason}.")
    loop = asyncio.get_running_loop()
    began, moved = loop.time(), [(loop.time(), 0)]
    whole = True
    try:
        await _swap(stream, nbytes, bytearray(nbytes), moved)
        unpack(await stream.receive(SpeedDone.LIMIT, MOVE_S), SpeedDone)
    except NetworkError:
        if not moved[-1][1]:
            raise
        whole = False
    took = max(loop.time() - began, 1e-6)
    at, received = moved[-1]
    return Throughput(received / max(at - began, 1e-6), nbytes / took, whole)
