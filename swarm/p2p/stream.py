"""A byte stream to one peer: small framed messages, and bulk tensors both ways at once without a
copy.

The transport is the local socket of the daemon, which carries the bytes encrypted to the peer. A
daemon that dies, here or there, ends the stream with a clean EOF, so EOF before the last expected
byte is always a failure and never a short message.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Protocol, TypeVar

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.pacing import LARGE, Progress, TrafficMeter

CHUNK = 1 << 20  # bytes offered to the socket, or read from it, at a time
AHEAD = (
    1 << 16
)  # of what is sent ahead of a swap, which begins when the socket has taken such a piece
_HEAD = 4  # bytes of the length before each small message
_GONE = (ConnectionError, EOFError)  # IncompleteReadError is an EOFError

_T = TypeVar("_T")


class Blocks(Protocol):
    """Bytes to be sent that are made block by block."""

    @property
    def nbytes(self) -> int: ...

    def blocks(self) -> Iterator[memoryview]:
        """Return the blocks, in order; each is done with before the next is made, or soon after."""
        ...


def short(peer_id: str) -> str:
    """Return the end of a peer id, enough to recognise it in a sentence (all ids begin alike)."""
    return "…" + peer_id[-8:]


async def first_of(*tasks: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Wait until one of ``tasks`` is done, ``timeout`` seconds at most; none of them is
    cancelled.
    """
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


async def stop(*tasks: asyncio.Future[Any]) -> None:
    """Cancel ``tasks`` and wait for their end.

    What they raise is retrieved, also if this is cancelled too, as asyncio wants.
    """
    for task in tasks:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


@contextlib.asynccontextmanager
async def running(*works: Awaitable[Any]) -> AsyncIterator[list[asyncio.Future[Any]]]:
    """Run ``works`` as tasks in this block; at its end they are cancelled, and have ended."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(work) for work in works]
    try:
        yield tasks
    finally:
        await stop(*tasks)


async def race(*works: Awaitable[Any], timeout: float) -> None:
    """Wait until one of ``works`` is done, ``timeout`` seconds at most, and cancel the others.

    Unlike ``asyncio.wait_for`` it never swallows that the caller is cancelled at the moment at
    which one is done.
    """
    async with running(*works) as tasks:
        await first_of(*tasks, timeout=timeout)


class Stream:
    """One stream to ``peer_id``, which libp2p has authenticated. Use it on the host's loop only.

    Every method raises NetworkError when the stream ends or the time is up.
    """

    def __init__(
        self,
        peer_id: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        traffic: TrafficMeter,
        origin: str = "",
        way: str = "",
    ) -> None:
        self.peer_id = peer_id
        self.way = (
            way or peer_id
        )  # the id of the daemon at the other end: the peer's, or its second one, past the relay
        # the exchange tries a way that is not the better one (`shoal.swarm.pacing.Ways`): both
        # ends' choice
        self.tries = False
        self.origin = origin
        """The IP address from which the peer opened it; empty if it came through a relay, or this
        node opened it.
        """
        self.partner = False  # this node has exchanged with the peer, which opened it
        self._reader, self._writer, self._traffic = reader, writer, traffic
        self.sent = 0  # bytes sent on this stream
        self.received = 0  # bytes received on it
        self._sent_ahead: _Outgoing | None = (
            None  # what the next swap sends, of which a part was sent
        )
        self._ahead: asyncio.Task[None] | None = None
        self._announced: int | None = None  # length of a message whose body has not arrived yet

    async def send(self, data: bytes, timeout: float) -> None:
        """Send one message, at most 4 GiB; returns when the socket took nearly all of it.

        ``timeout`` in seconds.
        """
        await self._within(
            self._send(len(data).to_bytes(_HEAD, "big") + data), timeout, "did not take a message"
        )

    async def _send(self, data: bytes) -> None:
        start = 0
        with self._traffic.pace(self.way, len(data)) as pace:
            while start < len(data):
                size = len(data) if pace is None else await pace.room(len(data) - start)
                if self._writer.transport.is_closing():
                    raise EOFError
                self._writer.write(data[start : start + size])
                self._count(min(size, len(data) - start))
                start += size
                await self._writer.drain()

    def _count(self, nbytes: int) -> None:
        """Count bytes that were handed to the socket.

        Small messages never wait for the upload budget, but use it up.
        """
        self.sent += nbytes
        self._traffic.sent += nbytes
        if self._traffic.upload is not None:
            self._traffic.upload.spend(nbytes)

    def _took(self, nbytes: int) -> None:
        self.received += nbytes
        self._traffic.received += nbytes

    async def receive(self, limit: int, timeout: float) -> bytes:
        """Receive the next message, at most ``limit`` bytes, within ``timeout`` seconds.

        A timeout loses nothing: the call may be repeated. Raises MessageError, and ends the stream,
        when the peer announces more than ``limit``.
        """
        return await self._within(self._receive(limit), timeout, "did not send a message")

    async def _head(self) -> int:
        if self._announced is None:
            self._announced = int.from_bytes(await self._reader.readexactly(_HEAD), "big")
            self._took(_HEAD)
        return self._announced

    async def _receive(self, limit: int) -> bytes:
        announced = await self._head()
        if announced > limit:
            self.abort()
            raise MessageError(
                f"peer {short(self.peer_id)} announced a message of {announced} bytes where at "
                f"most {limit} are "
                "allowed: it was refused; update shoal here or there."
            )
        data = await self._reader.readexactly(announced)
        self._announced = None
        self._took(len(data))
        return data

    def send_ahead(self, outgoing: memoryview | Blocks) -> None:
        """Begin to send what the next `swap` sends, while messages come in.

        A stream that ends without this swap is aborted.
        """
        self._sent_ahead = _Outgoing(outgoing)
        self._ahead = asyncio.ensure_future(self._pump(self._sent_ahead, AHEAD, self._writer.drain))
        self._ahead.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # the swap finds the same

    @property
    def round_trip(self) -> float | None:
        """Seconds of a round trip by this way, as earlier bulk found it; None while that is not
        known.
        """
        return None if self._traffic.pacer is None else self._traffic.pacer.round_trip(self.way)

    @property
    def chosen(self) -> bool:
        """Whether there are two ways to the peer, whose next exchanges are measured to choose
        between them.
        """
        return self._traffic.ways.several(self.peer_id)

    @property
    def ahead(self) -> bool:
        """Whether a swap was begun by `send_ahead` and not gone on with."""
        return self._sent_ahead is not None

    async def receive_ahead(self, incoming: memoryview, arrived: Callable[[int], None]) -> None:
        """Receive what the peer has sent ahead of a `swap`: call ``arrived`` with how much of
        ``incoming`` is there, until all is or the peer ends. It may be cancelled, and the swap goes
        on from there.
        """
        there = 0
        while there < len(incoming) and (
            data := await self._reader.read(min(CHUNK, len(incoming) - there))
        ):
            incoming[there : there + len(data)] = data
            self._took(len(data))
            there += len(data)
            arrived(there)

    async def swap(
        self,
        outgoing: memoryview | Blocks,
        incoming: memoryview,
        *,
        arrived: int = 0,
        chunk_timeout: float,
        deadline: float,
        longest: float = 0.0,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """Send all of ``outgoing`` while ``incoming`` is filled from the peer; either may be empty.

        Both are contiguous, ``outgoing`` or each block of it, and their sizes were agreed before.
        Bytes go straight into ``incoming``, of which ``arrived`` are there already, and none beyond
        it is read, so that messages work afterwards. ``on_progress`` gets the bytes received so
        far, on the loop.

        Raises NetworkError when the peer sent nothing for ``chunk_timeout`` seconds, or took
        nothing once it has sent all (at first either counts, for twice that: it may have to wait
        for its pace; a relay takes bytes for one that is gone), at ``deadline`` (an instant of
        ``time.monotonic()``) unless it moves so fast that it will be over by ``longest``, or when
        the stream ends early; the stream is then closed and ``incoming`` holds an unusable part.
        When it returns, nobody refers to the buffers any more.
        """
        if self._announced is not None:
            raise ValueError("a message is half received: receive it before the swap")
        loop = asyncio.get_running_loop()
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.wait({self._ahead})
        out, self._sent_ahead, self._ahead = self._sent_ahead or _Outgoing(outgoing), None, None
        # The protocol that is replaced must not be waiting for the socket, for it gets no callbacks
        # meanwhile.
        await self._within(
            self._writer.drain(), min(chunk_timeout, deadline - loop.time()), "took no bytes"
        )
        bulk = _Bulk(
            self._reader, self._writer, incoming.cast("B"), arrived, out, self._took, on_progress
        )
        sender = loop.create_task(self._send_bulk(bulk, out))
        whole, began, ways, way = (
            False,
            loop.time(),
            self._traffic.ways,
            (self.peer_id, self.way != self.peer_id),
        )
        measured = min(outgoing.nbytes, incoming.nbytes) >= LARGE and not arrived
        self.tries = measured and ways.tries(*way)
        try:
            await self._watch(
                bulk, sender, outgoing.nbytes, chunk_timeout, Progress(deadline, longest)
            )
            whole = True
        except _GONE:
            measured = measured and bulk.received > 0  # else the peer had gone on
            raise self._ended() from None
        finally:
            sender.cancel()
            try:
                bulk.restore()
            except RuntimeError:  # uvloop's, of a transport that has closed meanwhile
                if whole:
                    raise self._ended() from None
            finally:
                if measured:
                    (ways.note if whole else ways.failed)(
                        *way, bulk.received / max(loop.time() - began, 1e-6)
                    )
                if not whole:
                    self.abort()

    async def _send_bulk(self, bulk: _Bulk, out: _Outgoing) -> None:
        """Write everything, and wait until the transport holds no reference to it."""
        self._writer.transport.set_write_buffer_limits(high=2 * CHUNK)
        await self._pump(out, CHUNK, bulk.can_write)
        self._writer.transport.set_write_buffer_limits(
            high=0
        )  # now "writable" means "nothing buffered"
        await bulk.can_write()

    async def _pump(
        self, out: _Outgoing, most: int, can_write: Callable[[], Awaitable[None]]
    ) -> None:
        """Write what is left of ``out``, in pieces of ``most`` bytes, at the pace of the way; may
        be called off, and again.
        """
        upload = self._traffic.upload
        with self._traffic.pace(self.way, out.nbytes) as pace:
            while left := out.block():
                await can_write()
                # In small chunks under a budget: the other side gives up when nothing arrives for
                # some seconds.
                size = min(most if upload is None else min(most, upload.chunk), left)
                if upload is not None:
                    await upload.wait()
                if pace is not None:
                    size = await pace.room(size)
                if upload is not None or pace is not None:
                    await can_write()
                if self._writer.transport.is_closing():
                    raise EOFError
                self._writer.transport.write(out.take(size))
                self._count(size)

    async def _watch(
        self,
        bulk: _Bulk,
        sender: asyncio.Task[None],
        nbytes: int,
        chunk_timeout: float,
        progress: Progress,
    ) -> None:
        """Wait for both directions.

        Progress is counted in bytes the socket took, not in whole chunks: links are slow.
        """
        loop = asyncio.get_running_loop()
        pending: set[asyncio.Future[Any]] = {sender, bulk.arrived}
        moved, received, began = -1, -1, loop.time()
        since = heard = began
        while True:
            now = loop.time()
            if bulk.moved() != moved:
                moved, since = bulk.moved(), now
            here, left = bulk.received, bulk.left(nbytes)[0]
            if here != received:
                received, heard = here, now
            if left:
                since = heard if here else min(since, began + chunk_timeout)
            if progress.overdue(now, bulk.left(nbytes)):
                raise NetworkError(
                    f"the transfer with peer {short(self.peer_id)} was not complete at its "
                    "deadline.",
                    "timeout",
                )
            if now - since >= chunk_timeout:
                moves = "sent" if left else "took"
                raise NetworkError(
                    f"peer {short(self.peer_id)} {moves} no byte for {chunk_timeout:g} s in the "
                    "middle of a transfer.",
                    "timeout",
                )
            wait = min(chunk_timeout / 4, 0.25, progress.next(now))
            done, pending = await asyncio.wait(
                pending, timeout=wait, return_when=asyncio.FIRST_COMPLETED
            )
            for future in done:
                future.result()
            if not pending:
                return

    async def _within(self, work: Awaitable[_T], timeout: float, what: str) -> _T:
        try:
            return await asyncio.wait_for(work, timeout)
        except TimeoutError:
            raise NetworkError(
                f"peer {short(self.peer_id)} {what} within {timeout:.3g} s.", "timeout"
            ) from None
        except _GONE:
            raise self._ended() from None

    def _ended(self) -> NetworkError:
        return NetworkError(
            f"the stream to peer {short(self.peer_id)} ended early: it stopped, or the link broke."
        )

    def failed(self) -> None:
        """Note that the peer does not answer by this way: the next stream takes the other, if there
        is one.
        """
        self._traffic.ways.failed(self.peer_id, self.way != self.peer_id)

    def close(self) -> None:
        """Send what is buffered, then end the stream."""
        if self.ahead:
            self.abort()
        self._writer.close()

    async def more(self, timeout: float) -> bool:
        """Wait until the peer begins another message; False when it has ended its side, or
        ``timeout`` seconds passed, before.

        Nothing is lost: `receive` takes that message.
        """
        try:
            await asyncio.wait_for(self._head(), timeout)
        except (TimeoutError, *_GONE):
            return False
        return True

    @property
    def idle(self) -> bool:
        """True while both sides hold it open and nothing has come that was not received."""
        reader: Any = self._reader
        nothing = self._announced is None and not self._sent_ahead and not reader._buffer
        return nothing and not reader.at_eof() and not self._writer.transport.is_closing()

    def abort(self) -> None:
        """End the stream at once; what is buffered is lost."""
        if self._ahead is not None:
            self._ahead.cancel()
            self._sent_ahead = self._ahead = None
        self._writer.transport.abort()


class _Outgoing:
    """Bytes that are sent in one direction of a swap, and how many of them were written."""

    def __init__(self, outgoing: memoryview | Blocks) -> None:
        self.nbytes, self.written = outgoing.nbytes, 0
        self._blocks = (
            iter([outgoing.cast("B")]) if isinstance(outgoing, memoryview) else outgoing.blocks()
        )
        self._rest = memoryview(b"")

    def block(self) -> int:
        """Return how many bytes can be taken at once, at most; 0 at the end."""
        while not self._rest and (following := next(self._blocks, None)) is not None:
            self._rest = following
        return len(self._rest)

    def take(self, size: int) -> memoryview:
        """Return the next ``size`` bytes, which are then written."""
        taken, self._rest = self._rest[:size], self._rest[size:]
        self.written += size
        return taken


class _Bulk(asyncio.BufferedProtocol):
    """The protocol of the transport while a bulk transfer runs, in place of the stream's."""

    def __init__(
        self,
        reader: Any,
        writer: Any,
        incoming: memoryview,
        arrived: int,
        out: _Outgoing,
        took: Callable[[int], None],
        on_progress: Callable[[int], None] | None,
    ) -> None:
        # The asyncio reader and writer of a socket, as Any: their private parts are needed below.
        self.arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader, self._transport, self._usual = (
            reader,
            writer.transport,
            writer.transport.get_protocol(),
        )
        self._incoming, self._out, self._took, self._on_progress = incoming, out, took, on_progress
        self.received, self._lost, self._writable = arrived, False, asyncio.Event()
        self._writable.set()
        self._transport.pause_reading()
        early = bytes(
            self._reader._buffer[: len(incoming) - arrived]
        )  # came in together with the last message
        del self._reader._buffer[: len(early)]
        incoming[arrived : arrived + len(early)] = early
        self._transport.set_protocol(self)
        self.buffer_updated(len(early))
        if not self.arrived.done():
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
        self._transport.set_protocol(self._usual)
        # uvloop refers to the methods of a buffered protocol for as long as the stream is kept, and
        # so to what this one refers to.
        self._incoming, self._out, self._on_progress = (
            memoryview(b""),
            _Outgoing(memoryview(b"")),
            None,
        )
        self._reader._paused = False
        self._transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._incoming[self.received : self.received + CHUNK]

    def buffer_updated(self, nbytes: int) -> None:
        self.received += nbytes
        self._took(nbytes)
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
        self._usual.connection_lost(exc)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
