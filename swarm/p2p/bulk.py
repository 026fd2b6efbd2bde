"""One direction each way of a bulk transfer: what is sent, and the protocol that receives.

Bytes go from the socket straight into the caller's buffer, without a copy. For this the transport's
protocol is replaced while the transfer runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Protocol

CHUNK_BYTES = 1 << 20  # offered to the socket, or read from it, at a time


class Blocks(Protocol):
    """Bytes to be sent that are made block by block."""

    @property
    def nbytes(self) -> int: ...

    def blocks(self) -> Iterator[memoryview]:
        """Return the blocks, in order; each is done with before the next is made, or soon after."""
        ...


class Outgoing:
    """Bytes that are sent in one direction of a swap, and how many of them were written."""

    def __init__(self, outgoing: memoryview | Blocks) -> None:
        self.nbytes = outgoing.nbytes
        self.written = 0
        self._blocks = _blocks_of(outgoing)
        self._rest = memoryview(b"")

    def next_size(self) -> int:
        """Return how many bytes can be taken at once, at most; 0 at the end."""
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = block
        return len(self._rest)

    def take(self, size: int) -> memoryview:
        """Return the next ``size`` bytes, which are then written."""
        taken = self._rest[:size]
        self._rest = self._rest[size:]
        self.written += size
        return taken


def _blocks_of(outgoing: memoryview | Blocks) -> Iterator[memoryview]:
    if isinstance(outgoing, memoryview):
        return iter([outgoing.cast("B")])
    return outgoing.blocks()


class BulkProtocol(asyncio.BufferedProtocol):
    """The protocol of the transport while a bulk transfer runs, in place of the stream's.

    ``reader``, ``writer``: asyncio's of the socket, as Any: their private parts are needed.
    ``arrived``: bytes of ``incoming`` that are there already. ``count_received`` gets the number of
    bytes of each piece that comes in, ``on_progress`` that of all so far.
    """

    def __init__(
        self,
        reader: Any,
        writer: Any,
        incoming: memoryview,
        arrived: int,
        out: Outgoing,
        count_received: Callable[[int], None],
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self.arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.received = arrived
        self._reader = reader
        self._transport = writer.transport
        self._usual_protocol = writer.transport.get_protocol()
        self._incoming = incoming
        self._out = out
        self._count_received = count_received
        self._on_progress = on_progress
        self._lost = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._take_over()

    def _take_over(self) -> None:
        """Become the transport's protocol, with the bytes that came in with the last message."""
        self._transport.pause_reading()
        missing = len(self._incoming) - self.received
        early = bytes(self._reader._buffer[:missing])
        del self._reader._buffer[: len(early)]
        self._incoming[self.received : self.received + len(early)] = early
        self._transport.set_protocol(self)
        self.buffer_updated(len(early))
        if self.arrived.done():
            return
        if self._reader.at_eof() or self._transport.is_closing():
            self.arrived.set_exception(EOFError())
        else:
            self._transport.resume_reading()

    def moved(self) -> int:
        """Return the bytes received plus those that the socket took."""
        return self.received + self._out.written - int(self._transport.get_write_buffer_size())

    def left(self, nbytes: int) -> tuple[int, int]:
        """Return the bytes that are still to be received, and those of ``nbytes`` that the socket
        has yet to take.
        """
        return len(self._incoming) - self.received, nbytes - self.moved() + self.received

    async def can_write(self) -> None:
        """Wait until the transport takes more. Raises ConnectionResetError."""
        await self._writable.wait()
        if self._lost or self._transport.is_closing():
            raise ConnectionResetError

    def restore(self) -> None:
        """Give the transport back to the stream."""
        self._transport.pause_reading()
        if self.arrived.done() and not self.arrived.cancelled():
            self.arrived.exception()  # retrieved, so asyncio does not log it
        if not self._writable.is_set():
            # it failed: the usual protocol does not expect a paused transport
            self._transport.abort()
        self._transport.set_write_buffer_limits()
        self._transport.set_protocol(self._usual_protocol)
        # uvloop refers to the methods of a buffered protocol for as long as the stream is kept, and
        # so to what this one refers to.
        self._incoming = memoryview(b"")
        self._out = Outgoing(memoryview(b""))
        self._on_progress = None
        self._reader._paused = False
        self._transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._incoming[self.received : self.received + CHUNK_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self.received += nbytes
        self._count_received(nbytes)
        if self.arrived.done():
            return
        try:
            if nbytes and self._on_progress is not None:
                self._on_progress(self.received)
        except Exception as error:  # the caller's, so it is raised there and not in the loop
            self._transport.pause_reading()
            self.arrived.set_exception(error)
            return
        if self.received == len(self._incoming):
            self._transport.pause_reading()  # what follows is the next message
            self.arrived.set_result(None)

    def eof_received(self) -> bool:
        self._reader.feed_eof()
        if not self.arrived.done():
            self.arrived.set_exception(EOFError())
        return True  # the other direction may go on; the stream decides

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._writable.set()
        if not self.arrived.done():
            self.arrived.set_exception(exc or EOFError())
        self._usual_protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
