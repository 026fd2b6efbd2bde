"""A byte stream to one peer: small framed messages, and bulk tensors both ways at once without a
copy.

The transport is the local socket of the daemon, which carries the bytes encrypted to the peer. A
daemon that dies, here or there, ends the stream with a clean EOF, so EOF before the last expected
byte is always a failure and never a short message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.p2p.bulk import CHUNK_BYTES, Blocks, BulkProtocol, Outgoing
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.pacing.progress import Progress
from shoal.swarm.pacing.routes import MEASURED_BYTES

# Of one piece sent ahead of a swap, which begins only when the socket has taken that piece.
AHEAD_CHUNK_BYTES = 64 << 10
HEAD_BYTES = 4  # of the length before each small message
LOOK_S = 0.25  # between two looks at the progress of a transfer, at most
SHORTEST_S = 1e-6  # of a time that bytes are divided by
_GONE = (ConnectionError, EOFError)  # IncompleteReadError is an EOFError

_T = TypeVar("_T")


def short(peer_id: str) -> str:
    """Return the end of a peer id, enough to recognise it in a sentence (all ids begin alike)."""
    return "…" + peer_id[-8:]


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
        daemon_id: str = "",
    ) -> None:
        self.peer_id = peer_id
        self.daemon_id = daemon_id or peer_id
        """The id of the daemon at the other end: the peer's, or its second one past the relay."""
        self.is_trial = False
        """Whether the exchange tries the route that is not the better one, as far as is known
        (`shoal.swarm.pacing.routes`): both ends' choice.
        """
        self.origin = origin
        """The IP address from which the peer opened it; empty if it came through a relay, or this
        node opened it.
        """
        self.partner = False
        """Whether this node has exchanged with the peer, which opened it."""
        self.is_gossip = False
        """Whether its bytes also count as gossip's from now on."""
        self.sent = 0
        self.received = 0
        self._reader = reader
        self._writer = writer
        self._traffic = traffic
        self._sent_ahead: Outgoing | None = None  # what the next swap sends, begun already
        self._ahead: asyncio.Task[None] | None = None  # which sends it
        self._announced: int | None = None  # length of a message whose body has not arrived yet

    async def send(self, data: bytes, timeout: float) -> None:
        """Send one message, at most 4 GiB; returns when the socket took nearly all of it.

        ``timeout`` in seconds.
        """
        await self._within(
            self._send(len(data).to_bytes(HEAD_BYTES, "big") + data),
            timeout,
            "did not take a message",
        )

    async def _send(self, data: bytes) -> None:
        start = 0
        with self._traffic.pace(self.daemon_id, len(data)) as pace:
            while start < len(data):
                size = len(data) if pace is None else await pace.room(len(data) - start)
                if self._writer.transport.is_closing():
                    raise EOFError
                self._writer.write(data[start : start + size])
                self._count_sent(min(size, len(data) - start))
                start += size
                await self._writer.drain()

    def _count_sent(self, nbytes: int) -> None:
        """Count bytes that were handed to the socket.

        Small messages never wait for the upload budget, but use it up.
        """
        self.sent += nbytes
        self._traffic.sent += nbytes
        if self.is_gossip:
            self._traffic.gossip_sent += nbytes
        if self._traffic.upload is not None:
            self._traffic.upload.spend(nbytes)

    def _count_received(self, nbytes: int) -> None:
        self.received += nbytes
        self._traffic.received += nbytes
        if self.is_gossip:
            self._traffic.gossip_received += nbytes

    async def receive(self, limit: int, timeout: float) -> bytes:
        """Receive the next message, at most ``limit`` bytes, within ``timeout`` seconds.

        A timeout loses nothing: the call may be repeated. Raises MessageError, and ends the stream,
        when the peer announces more than ``limit``.
        """
        return await self._within(self._receive(limit), timeout, "did not send a message")

    async def _head(self) -> int:
        if self._announced is None:
            self._announced = int.from_bytes(await self._reader.readexactly(HEAD_BYTES), "big")
            self._count_received(HEAD_BYTES)
        return self._announced

    async def _receive(self, limit: int) -> bytes:
        announced = await self._head()
        if announced > limit:
            self.abort()
            raise MessageError(
                f"peer {short(self.peer_id)} announced a message of {announced} bytes where at "
                f"most {limit} are allowed: it was refused; update shoal here or there."
            )
        data = await self._reader.readexactly(announced)
        self._announced = None
        self._count_received(len(data))
        return data

    def send_ahead(self, outgoing: memoryview | Blocks) -> None:
        """Begin to send what the next `swap` sends, while messages come in.

        A stream that ends without this swap is aborted.
        """
        self._sent_ahead = Outgoing(outgoing)
        self._ahead = asyncio.ensure_future(
            self._pump(self._sent_ahead, AHEAD_CHUNK_BYTES, self._writer.drain)
        )
        # Its error is retrieved here; the swap finds the same one.
        self._ahead.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def is_punched(self) -> bool:
        """Whether it goes past the relay (`shoal.swarm.p2p.punch`)."""
        return self.daemon_id != self.peer_id

    @property
    def round_trip(self) -> float | None:
        """Seconds of a round trip on this route, as earlier bulk found it; None while that is not
        known.
        """
        pacer = self._traffic.pacer
        return None if pacer is None else pacer.round_trip(self.daemon_id)

    @property
    def has_choice(self) -> bool:
        """Whether there are two routes to the peer, whose next exchanges are measured to choose
        between them.
        """
        return self._traffic.routes.has_choice(self.peer_id)

    @property
    def is_ahead(self) -> bool:
        """Whether a swap was begun by `send_ahead` and not gone on with."""
        return self._sent_ahead is not None

    async def receive_ahead(self, incoming: memoryview, arrived: Callable[[int], None]) -> None:
        """Receive what the peer has sent ahead of a `swap`: call ``arrived`` with how much of
        ``incoming`` is there, until all is or the peer ends. It may be cancelled, and the swap goes
        on from there.
        """
        there = 0
        while there < len(incoming):
            data = await self._reader.read(min(CHUNK_BYTES, len(incoming) - there))
            if not data:
                return
            incoming[there : there + len(data)] = data
            self._count_received(len(data))
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
        ``arrived`` bytes of ``incoming`` are there already. ``on_progress`` gets the bytes received
        so far, on the loop. ``chunk_timeout``: seconds without a byte (`_watch`). ``deadline``: an
        instant of ``time.monotonic()``; ``longest``: the same for a transfer that moves so fast
        that it will be over by then.

        What `more` took for the head of a message is the payload's beginning. Raises NetworkError
        when time is up or the stream ends early; the stream is then closed and ``incoming`` holds
        an unusable part. When it returns, nobody refers to the buffers any more, and no byte beyond
        ``incoming`` was read, so messages work afterwards.
        """
        if self._announced is not None and len(incoming) - arrived >= HEAD_BYTES:
            beginning = self._announced.to_bytes(HEAD_BYTES, "big")
            incoming[arrived : arrived + HEAD_BYTES] = beginning
            arrived += HEAD_BYTES
            self._announced = None
        loop = asyncio.get_running_loop()
        out = await self._taken_over(outgoing)
        # The protocol that is replaced must not be waiting for the socket, for it gets no callbacks
        # meanwhile.
        await self._within(
            self._writer.drain(), min(chunk_timeout, deadline - loop.time()), "took no bytes"
        )
        bulk = BulkProtocol(
            self._reader,
            self._writer,
            incoming.cast("B"),
            arrived,
            out,
            self._count_received,
            on_progress,
        )
        sender = loop.create_task(self._send_bulk(bulk, out))
        is_whole = False
        began = loop.time()
        is_measured = min(outgoing.nbytes, incoming.nbytes) >= MEASURED_BYTES and not arrived
        self.is_trial = is_measured and self._traffic.routes.is_trial(self.peer_id, self.is_punched)
        try:
            await self._watch(
                bulk, sender, outgoing.nbytes, chunk_timeout, Progress(deadline, longest)
            )
            is_whole = True
        except _GONE:
            is_measured = is_measured and bulk.received > 0  # else the peer had gone on
            raise self._ended() from None
        finally:
            sender.cancel()
            try:
                bulk.restore()
            except RuntimeError:  # uvloop's, of a transport that has closed meanwhile
                if is_whole:
                    raise self._ended() from None
            finally:
                if is_measured:
                    self._note_rate(bulk.received / max(loop.time() - began, SHORTEST_S), is_whole)
                if not is_whole:
                    self.abort()

    async def _taken_over(self, outgoing: memoryview | Blocks) -> Outgoing:
        """Return what `send_ahead` has begun to send; else ``outgoing``."""
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.wait({self._ahead})
        out = self._sent_ahead or Outgoing(outgoing)
        self._sent_ahead = None
        self._ahead = None
        return out

    def _note_rate(self, rate: float, is_whole: bool) -> None:
        """Note the bytes a second of a swap by this route."""
        if is_whole:
            self._traffic.routes.note(self.peer_id, self.is_punched, rate)
        else:
            self._traffic.routes.failed(self.peer_id, self.is_punched, rate)

    async def _send_bulk(self, bulk: BulkProtocol, out: Outgoing) -> None:
        """Write everything, and wait until the transport holds no reference to it."""
        self._writer.transport.set_write_buffer_limits(high=2 * CHUNK_BYTES)
        await self._pump(out, CHUNK_BYTES, bulk.can_write)
        # Now "writable" means "nothing buffered".
        self._writer.transport.set_write_buffer_limits(high=0)
        await bulk.can_write()

    async def _pump(
        self, out: Outgoing, most: int, can_write: Callable[[], Awaitable[None]]
    ) -> None:
        """Write what is left of ``out``, in pieces of ``most`` bytes, at the pace of the route; may
        be called off, and again.
        """
        upload = self._traffic.upload
        with self._traffic.pace(self.daemon_id, out.nbytes) as pace:
            while left := out.next_size():
                await can_write()
                size = min(most, left)
                if upload is not None:
                    # In small chunks: the other side gives up when nothing arrives for seconds.
                    size = min(size, upload.chunk)
                    await upload.wait()
                if pace is not None:
                    size = await pace.room(size)
                if upload is not None or pace is not None:
                    await can_write()
                if self._writer.transport.is_closing():
                    raise EOFError
                self._writer.transport.write(out.take(size))
                self._count_sent(size)

    async def _watch(
        self,
        bulk: BulkProtocol,
        sender: asyncio.Task[None],
        nbytes: int,
        chunk_timeout: float,
        progress: Progress,
    ) -> None:
        """Wait for both directions.

        Raises NetworkError when the peer sent nothing for ``chunk_timeout`` seconds, or took
        nothing once it has sent all: a relay takes bytes for one that is gone. At first either
        counts, for twice that: it may have to wait for its pace. Progress is counted in bytes that
        the socket took, not in whole chunks: links are slow.
        """
        loop = asyncio.get_running_loop()
        pending: set[asyncio.Future[Any]] = {sender, bulk.arrived}
        began = loop.time()
        moved = -1
        received = -1
        moved_at = began  # when the peer last sent or took anything
        heard_at = began  # when it last sent anything
        while True:
            now = loop.time()
            if bulk.moved() != moved:
                moved = bulk.moved()
                moved_at = now
            if bulk.received != received:
                received = bulk.received
                heard_at = now
            left = bulk.left(nbytes)
            still_receives = left[0] > 0
            if still_receives:
                moved_at = heard_at if received else min(moved_at, began + chunk_timeout)
            if progress.overdue(now, left):
                raise NetworkError(
                    f"the transfer with peer {short(self.peer_id)} was not complete at its "
                    "deadline.",
                    "timeout",
                )
            if now - moved_at >= chunk_timeout:
                moves = "sent" if still_receives else "took"
                raise NetworkError(
                    f"peer {short(self.peer_id)} {moves} no byte for {chunk_timeout:g} s in the "
                    "middle of a transfer.",
                    "timeout",
                )
            wait = min(chunk_timeout / 4, LOOK_S, progress.next(now))
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
        """Note that the peer does not answer by this route: the next stream takes the other, if
        there is one.
        """
        self._traffic.routes.failed(self.peer_id, self.is_punched)

    def close(self) -> None:
        """Send what is buffered, then end the stream."""
        if self.is_ahead:
            self.abort()
        self._writer.close()

    async def more(self, timeout: float) -> bool:
        """Wait until the peer sends more; False when it has ended its side, or ``timeout`` seconds
        passed, before.

        Nothing is lost: `receive` takes what comes as a message, `swap` as a payload.
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
        if self._announced is not None or self._sent_ahead or reader._buffer:
            return False
        return not reader.at_eof() and not self._writer.transport.is_closing()

    def abort(self) -> None:
        """End the stream at once; what is buffered is lost."""
        if self._ahead is not None:
            self._ahead.cancel()
            self._sent_ahead = None
            self._ahead = None
        self._writer.transport.abort()
