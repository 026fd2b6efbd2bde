"""Messages of one kind over a stream, and bytes whose number they have agreed on.

    reply = await ask(stream, ManifestRequest(swarm=swarm), ManifestReply, 10.0)

What comes is at most as large as its kind allows. Each raises NetworkError when the stream ends or
the time is up, and MessageError for what is no such message.
"""

from __future__ import annotations

from typing import TypeVar

from shoal.swarm.p2p.stream import Stream
from shoal.swarm.wire.envelope import Message, pack, unpack

_M = TypeVar("_M", bound=Message)


async def send_message(stream: Stream, message: Message, timeout: float) -> None:
    await stream.send(pack(message), timeout)


async def receive_message(stream: Stream, kind: type[_M], timeout: float) -> _M:
    return unpack(await stream.receive(kind.LIMIT, timeout), kind)


async def ask(stream: Stream, request: Message, kind: type[_M], timeout: float) -> _M:
    """Send ``request`` and return the answer, within ``timeout`` seconds each."""
    await send_message(stream, request, timeout)
    return await receive_message(stream, kind, timeout)


async def send_bytes(
    stream: Stream,
    data: memoryview,
    *,
    chunk_timeout: float,
    deadline: float,
    longest: float = 0.0,
) -> None:
    """Send ``data``, and nothing comes back (`Stream.swap`)."""
    nothing = memoryview(bytearray())
    await stream.swap(
        data, nothing, chunk_timeout=chunk_timeout, deadline=deadline, longest=longest
    )


async def receive_bytes(
    stream: Stream,
    room: memoryview,
    *,
    chunk_timeout: float,
    deadline: float,
    longest: float = 0.0,
) -> None:
    """Fill ``room`` from the peer, and send nothing (`Stream.swap`)."""
    nothing = memoryview(b"")
    await stream.swap(
        nothing, room, chunk_timeout=chunk_timeout, deadline=deadline, longest=longest
    )
