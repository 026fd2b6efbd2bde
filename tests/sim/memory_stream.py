"""Streams within this process: two connected transports, as asyncio's readers, writers and
protocols expect them.

The simulator's hosts use links that take time. A `MemoryTransport` has
the features of asyncio's socket transports: flow control both ways, buffered protocols, end of
file, reset.
"""

from __future__ import annotations

import asyncio
import contextvars
from asyncio.transports import _FlowControlMixin
from collections import deque
from collections.abc import Callable
from typing import Any, cast

CHUNK = 1 << 16  # bytes that travel together
WINDOW = (
    1 << 18
)  # bytes on their way or not read yet, at most: as many as the buffers of a socket hold
NOTHING = contextvars.Context()  # for callbacks that belong to no node


class MemoryLink:
    """One direction of a stream; it takes no time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def carry(self, nbytes: int, deliver: Callable[[], None]) -> None:
        """Call ``deliver`` when ``nbytes`` bytes have arrived; in the order of the calls.

        An end of file has 0 bytes.
        """
        self._loop.call_soon(deliver, context=NOTHING)


class MemoryTransport(_FlowControlMixin):
    """One end of a stream.

    ``link`` carries what it sends; ``owner``: the context of the callbacks into its protocol.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, link: MemoryLink, owner: contextvars.Context
    ) -> None:
        super().__init__(None, loop)
        self._loop, self._link, self._owner = loop, link, owner
        self._protocol: Any = None
        self.other: MemoryTransport
        self._queue: deque[bytes] = deque()
        self._queued = self._away = 0
        self._inbox: deque[bytes | None] = deque()
        """Data that has arrived and was not read yet; None: the other side has ended."""
        self._feeding = self._reading_paused = self._closing = self._lost = False
        self._peer_closed = False

    # -- asyncio's interface of a transport --------------------------------------------------------

    def get_protocol(self) -> asyncio.BaseProtocol:
        return cast(asyncio.BaseProtocol, self._protocol)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return not self._reading_paused and not self._closing

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self) -> None:
        self._reading_paused = False
        self._feed_soon()

    def get_write_buffer_size(self) -> int:
        return self._queued

    def can_write_eof(self) -> bool:
        """Return False: both directions end together."""
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send a copy of ``data``."""
        if self._closing or not data:
            return
        if self._peer_closed:
            self._break(BrokenPipeError("the other side has closed"))
            return
        self._queue.append(bytes(data))
        self._queued += len(data)
        self._pump()
        self._maybe_pause_protocol()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Send what is buffered, then end."""
        if not self._closing:
            self._closing = True
            self._inbox.clear()
            if not self._queue:
                self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        """End at once; what is buffered is lost."""
        self._break(None)

    # -- events ------------------------------------------------------------------------------------

    def vanish(self) -> None:
        """Act as if this process had died: call nothing here any more, and let the other side read
        an end of file.
        """
        self._closing = True
        if not self._lost:
            self._lost = True
            self._queue.clear()
            self._inbox.clear()
            self._link.carry(0, self.other._arrive_end)

    def sever(self, error: Exception | None) -> None:
        """Break the link. To be called in the context `NOTHING`."""
        self._loop.call_soon(self._break, error, context=self._owner)

    def _break(self, error: Exception | None) -> None:
        if self._lost or (self._closing and not self._queue):
            return
        self._closing = True
        self._queue.clear()
        self._queued = 0
        self._inbox.clear()
        self._loop.call_soon(self._lose, error)

    def _lose(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._lost = True
        self._link.carry(0, self.other._arrive_end)
        self._protocol.connection_lost(error)

    def _pump(self) -> None:
        while self._queue and self._away < WINDOW:
            data = self._queue.popleft()
            chunk, rest = data[:CHUNK], data[CHUNK:]
            if rest:
                self._queue.appendleft(rest)
            self._queued -= len(chunk)
            self._away += len(chunk)
            self._link.carry(len(chunk), lambda chunk=chunk: self.other._arrive(chunk))  # type: ignore[misc]

    def _taken(self, nbytes: int) -> None:
        """Make room for the bytes that the other side has read.

        In the context `NOTHING`, for a kernel does this.
        """
        self._away -= nbytes
        if not self._lost:
            self._pump()
            self._loop.call_soon(self._after_pump, context=self._owner)

    def _after_pump(self) -> None:
        if self._lost:
            return
        if self._closing and not self._queue:
            self._lose(None)
        else:
            self._maybe_resume_protocol()  # type: ignore[attr-defined]

    def _arrive(self, chunk: bytes) -> None:
        if self._closing:
            self.other._taken(len(chunk))
            return
        self._inbox.append(chunk)
        self._feed_soon()

    def _arrive_end(self) -> None:
        self._peer_closed = True
        if self._queue:  # it will not be read
            self.sever(BrokenPipeError("the other side has closed"))
        elif not self._closing:
            self._inbox.append(None)
            self._feed_soon()

    def _feed_soon(self) -> None:
        if self._inbox and not self._feeding and not self._reading_paused:
            self._feeding = True
            self._loop.call_soon(self._feed, context=self._owner)

    def _feed(self) -> None:
        self._feeding = False
        while self._inbox and not self._reading_paused and not self._closing:
            chunk = self._inbox.popleft()
            if chunk is None:
                if not self._protocol.eof_received():
                    self.close()
                return
            used = len(chunk)
            if isinstance(self._protocol, asyncio.BufferedProtocol):
                room = cast(memoryview, self._protocol.get_buffer(-1))
                used = min(len(room), len(chunk))
                room[:used] = chunk[:used]
                if used < len(chunk):
                    self._inbox.appendleft(chunk[used:])
                self._protocol.buffer_updated(used)
            else:
                self._protocol.data_received(chunk)
            self._loop.call_soon(self.other._taken, used, context=NOTHING)


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def streams_of(end: MemoryTransport, loop: asyncio.AbstractEventLoop) -> Ends:
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    end.set_protocol(protocol)
    protocol.connection_made(end)
    return reader, asyncio.StreamWriter(end, protocol, reader, loop)


def stream_pair() -> tuple[Ends, Ends]:
    """Return both ends of a stream on the running loop; callbacks have the caller's context."""
    loop = asyncio.get_running_loop()
    here = contextvars.copy_context()
    one, two = (
        MemoryTransport(loop, MemoryLink(loop), here),
        MemoryTransport(loop, MemoryLink(loop), here),
    )
    one.other, two.other = two, one
    return streams_of(one, loop), streams_of(two, loop)
