"""A stream that never leaves this process: two ends, each with the transport that asyncio's readers, writers and protocols expect.

A node that leads its own group talks to itself over one; the simulator's hosts talk over those whose `MemoryLink` takes its time.
What asyncio's socket transports do, an `MemoryTransport` does: flow control both ways, buffered protocols, end of file, a reset.
"""

from __future__ import annotations

import asyncio
import contextvars
from asyncio.transports import _FlowControlMixin
from collections import deque
from collections.abc import Callable
from typing import Any, cast

PIECE = 1 << 16  # bytes that travel together
WINDOW = 1 << 18  # bytes on their way or not read yet, at most: as many as the buffers of a socket hold
NOTHING = contextvars.Context()  # in which no callback belongs to anybody


class MemoryLink:
    """One direction of a pipe. This one takes no time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def carry(self, nbytes: int, deliver: Callable[[], None]) -> None:
        """Call ``deliver`` when so many bytes have arrived; always in the order of the calls. An end of file has 0 bytes."""
        self._loop.call_soon(deliver, context=NOTHING)


class MemoryTransport(_FlowControlMixin):
    """One end of a pipe. ``owner``: the context of the callbacks into its protocol."""

    def __init__(self, loop: asyncio.AbstractEventLoop, road: MemoryLink, owner: contextvars.Context) -> None:
        super().__init__(None, loop)
        self._loop, self._road, self._owner = loop, road, owner
        self._protocol: Any = None
        self.other: MemoryTransport
        self._queue: deque[bytes] = deque()
        self._queued = self._away = 0
        self._inbox: deque[bytes | None] = deque()
        """What has arrived and was not read yet; None: the other side has ended."""
        self._feeding = self._reading_paused = self._closing = self._lost = False
        self._other_gone = False

    # -- what a transport does -------------------------------------------------------------------------------------------

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Whoever reads here."""
        return cast(asyncio.BaseProtocol, self._protocol)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Let it read from now on."""
        self._protocol = protocol

    def is_closing(self) -> bool:
        """Whether this end was closed, or broke."""
        return self._closing

    def is_reading(self) -> bool:
        """Whether what arrives is handed on."""
        return not self._reading_paused and not self._closing

    def pause_reading(self) -> None:
        """Keep what arrives."""
        self._reading_paused = True

    def resume_reading(self) -> None:
        """Hand it on again."""
        self._reading_paused = False
        self._feed_soon()

    def get_write_buffer_size(self) -> int:
        """Bytes that have not left."""
        return self._queued

    def can_write_eof(self) -> bool:
        """Both directions end together."""
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send a copy of ``data``."""
        if self._closing or not data:
            return
        if self._other_gone:  # nobody reads there any more
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
        """MemoryTransport at once."""
        self._break(None)

    # -- what happens to it ----------------------------------------------------------------------------------------------

    def vanish(self) -> None:
        """Its process is dead: nothing is called here any more, and the other side reads an end of file."""
        self._closing = True
        if not self._lost:
            self._lost = True
            self._queue.clear()
            self._inbox.clear()
            self._road.carry(0, self.other._arrive_end)

    def sever(self, error: Exception | None) -> None:
        """The link broke; called in nobody's context."""
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
        self._road.carry(0, self.other._arrive_end)
        self._protocol.connection_lost(error)

    def _pump(self) -> None:
        while self._queue and self._away < WINDOW:
            data = self._queue.popleft()
            piece, rest = data[:PIECE], data[PIECE:]
            if rest:
                self._queue.appendleft(rest)
            self._queued -= len(piece)
            self._away += len(piece)
            self._road.carry(len(piece), lambda piece=piece: self.other._arrive(piece))  # type: ignore[misc]

    def _taken(self, nbytes: int) -> None:
        """The other side has read so many bytes: there is room again. In nobody's context: a kernel does this."""
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

    def _arrive(self, piece: bytes) -> None:
        if self._closing:
            self.other._taken(len(piece))
            return
        self._inbox.append(piece)
        self._feed_soon()

    def _arrive_end(self) -> None:
        self._other_gone = True
        if self._queue:  # it will not be read any more
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
            piece = self._inbox.popleft()
            if piece is None:
                if not self._protocol.eof_received():
                    self.close()
                return
            used = len(piece)
            if isinstance(self._protocol, asyncio.BufferedProtocol):
                room = cast(memoryview, self._protocol.get_buffer(-1))
                used = min(len(room), len(piece))
                room[:used] = piece[:used]
                if used < len(piece):
                    self._inbox.appendleft(piece[used:])
                self._protocol.buffer_updated(used)
            else:
                self._protocol.data_received(piece)
            self._loop.call_soon(self.other._taken, used, context=NOTHING)


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def opened(end: MemoryTransport, loop: asyncio.AbstractEventLoop) -> Ends:
    """A reader and a writer on one end."""
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    end.set_protocol(protocol)
    protocol.connection_made(end)
    return reader, asyncio.StreamWriter(end, protocol, reader, loop)


def pipe() -> tuple[Ends, Ends]:
    """Both ends of a pipe on the running loop, for its caller's context."""
    loop = asyncio.get_running_loop()
    here = contextvars.copy_context()
    one, two = MemoryTransport(loop, MemoryLink(loop), here), MemoryTransport(loop, MemoryLink(loop), here)
    one.other, two.other = two, one
    return opened(one, loop), opened(two, loop)
