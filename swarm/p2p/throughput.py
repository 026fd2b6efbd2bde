"""The throughput between two peers: both sides send the same few MB at once, as in an exchange."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from shoal.swarm.errors import NetworkError
from shoal.swarm.p2p.messages import ask, receive_message, send_message
from shoal.swarm.p2p.rate_limit import RateLimit, TokenBuckets
from shoal.swarm.p2p.reachability import MESSAGE_S
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.wire.envelope import Message, Reason

SPEED_PROTOCOL = "/shoal/speed/1"
MAX_BYTES = 2 << 20  # each way
MOVE_S = 10.0  # for the bytes
# tests a minute with one address, and in all
MAX_TESTS_EACH = 4
MAX_TESTS = 16


class SpeedRequest(Message):
    """Request for ``nbytes`` zeros; the sender will send as many."""

    KIND = "speed-request"
    nbytes: Annotated[int, Field(ge=1, le=MAX_BYTES)]


class SpeedReply(Message):
    """Answer to a request: the bytes follow, unless there is a reason why not."""

    KIND = "speed-reply"
    LIMIT = 2048
    reason: Reason = ""


class SpeedDone(Message):
    """Message that all bytes of the asker have arrived."""

    KIND = "speed-done"


@dataclass(frozen=True)
class Throughput:
    """Bytes a second from the peer and to it; ``whole`` False: time was up before all arrived, so
    ``up`` is a bound.
    """

    down: float
    up: float
    whole: bool


class ThroughputProbe:
    """The answering side, for few at a time. Use it on one loop."""

    def __init__(self) -> None:
        self._each = TokenBuckets(
            RateLimit(messages=MAX_TESTS_EACH, nbytes=MAX_TESTS_EACH * MAX_BYTES, senders=256)
        )
        self._all = TokenBuckets(
            RateLimit(messages=MAX_TESTS, nbytes=MAX_TESTS * MAX_BYTES, senders=1)
        )

    async def answer(self, stream: Stream) -> None:
        """Serve one stream of `SPEED_PROTOCOL`. Raises NetworkError or MessageError."""
        request = await receive_message(stream, SpeedRequest, MESSAGE_S)
        reason = ""
        if not stream.origin:  # it would use up the relay's bandwidth
            reason = "the connection goes through a relay"
        elif not (
            self._each.take(stream.origin, 1, request.nbytes)
            and self._all.take("", 1, request.nbytes)
        ):
            reason = "it was asked too often, so try again in a minute"
        await send_message(stream, SpeedReply(reason=reason), MESSAGE_S)
        if not reason:
            await _swap(stream, request.nbytes)
            await send_message(stream, SpeedDone(), MESSAGE_S)


async def _swap(
    stream: Stream, nbytes: int, on_progress: Callable[[int], None] | None = None
) -> None:
    end = asyncio.get_running_loop().time() + MOVE_S
    out = memoryview(bytes(nbytes))
    into = memoryview(bytearray(nbytes))
    await stream.swap(out, into, chunk_timeout=MESSAGE_S, deadline=end, on_progress=on_progress)


async def measure(stream: Stream, nbytes: int = MAX_BYTES) -> Throughput:
    """Move ``nbytes`` each way at once, within some 25 s.

    Raises NetworkError (nothing came, or a refusal) or MessageError.
    """
    reply = await ask(stream, SpeedRequest(nbytes=nbytes), SpeedReply, MESSAGE_S)
    if reply.reason:
        raise NetworkError(f"peer {short(stream.peer_id)} does not measure: {reply.reason}.")
    loop = asyncio.get_running_loop()
    began = loop.time()
    moved = [(loop.time(), 0)]
    whole = True
    try:
        await _swap(stream, nbytes, lambda received: moved.append((loop.time(), received)))
        await receive_message(stream, SpeedDone, MOVE_S)
    except NetworkError:
        if not moved[-1][1]:
            raise
        whole = False
    took = max(loop.time() - began, 1e-6)
    at, received = moved[-1]
    return Throughput(received / max(at - began, 1e-6), nbytes / took, whole)
