"""Streams over a socket pair: no daemon is needed to show what bytes go where."""

import asyncio
import contextlib
import gc
import os
import socket
import time
import weakref

import pytest
import uvloop

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.p2p.bulk import CHUNK_BYTES
from shoal.swarm.p2p.stream import HEAD_BYTES, Stream
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.pacing.routes import MEASURED_BYTES

PEER = "12D3KooWB5YCshUynkNTqaGZ3buERF4QogWMrr7uUFi1KExCHGZk"


@contextlib.asynccontextmanager
async def pair():
    """Yield both ends of a stream, for 30 seconds at most."""
    async with asyncio.timeout(30):
        ends = [
            Stream(PEER, *await asyncio.open_connection(sock=end), TrafficMeter())
            for end in socket.socketpair()
        ]
        try:
            yield ends
        finally:
            for end in ends:
                end.close()


def soon(seconds=20.0):
    return time.monotonic() + seconds


async def swap(stream, out, into, **options):
    options = {"chunk_timeout": 5.0, "deadline": soon(), **options}
    await stream.swap(memoryview(out), memoryview(into), **options)


@pytest.mark.parametrize(
    ("out", "into", "measured"),
    [
        (MEASURED_BYTES, MEASURED_BYTES, True),
        (MEASURED_BYTES, MEASURED_BYTES - 1, False),
        (4 * MEASURED_BYTES, 0, False),
    ],
)
async def test_many_bytes_each_way_measure_their_way(out, into, measured):
    async with pair() as (a, b):
        a.daemon_id = "past"
        await asyncio.gather(
            swap(a, bytes(out), bytearray(into)), swap(b, bytes(into), bytearray(out))
        )
        assert (a._traffic.routes.rate() > 0) is measured
        assert a._traffic.routes.best(PEER) is not measured  # the other way is not known


async def test_dead_way_is_left_for_the_other():
    """A way by which nothing comes is left for the other."""
    async with pair() as (a, _b):
        a.daemon_id = "past"
        a._traffic.routes.note(PEER, True, 2e6)
        a._traffic.routes.note(PEER, False, 1e6)
        with pytest.raises(NetworkError) as failure:
            await swap(a, bytes(MEASURED_BYTES), bytearray(MEASURED_BYTES), chunk_timeout=0.05)
        assert failure.value.reason == "timeout"
        assert not a._traffic.routes.choose(PEER)


async def test_moved_on_peer_spares_its_way():
    """A peer that had gone on does not count against its way."""
    async with pair() as (a, b):
        a._traffic.routes.note(PEER, False, 2e6)
        b.close()
        with pytest.raises(NetworkError):
            await swap(a, bytes(MEASURED_BYTES), bytearray(MEASURED_BYTES))
        assert a._traffic.routes.rate() == 2e6


async def test_messages_keep_their_order_and_bounds():
    async with pair() as (a, b):
        for data in (b"", b"x", os.urandom(300_000)):
            sending = asyncio.ensure_future(a.send(data, 30))
            assert await b.receive(300_000, 30) == data
            await sending


async def test_a_timeout_loses_nothing():
    async with pair() as (a, b):
        with pytest.raises(NetworkError) as failure:
            await b.receive(10, 0.01)
        assert failure.value.reason == "timeout"
        a._writer.write((5).to_bytes(4, "big") + b"he")
        with pytest.raises(NetworkError):
            await b.receive(10, 0.05)
        a._writer.write(b"llo")
        assert await b.receive(10, 30) == b"hello"


async def test_an_announced_size_over_the_limit_is_refused_unread():
    async with pair() as (a, b):
        a._writer.write((1 << 31).to_bytes(4, "big"))
        with pytest.raises(MessageError):
            await b.receive(100, 30)


@pytest.mark.parametrize(
    ("left", "right"),
    [(5 * CHUNK_BYTES + 3, 2 * CHUNK_BYTES), (0, 3 * CHUNK_BYTES), (1, 0), (0, 0), (70_000, 7)],
)
async def test_swap_both_ways_then_messages_again(left, right):
    async with pair() as (a, b):
        out, back = os.urandom(left), os.urandom(right)
        into_a, into_b = bytearray(right), bytearray(left)
        seen = []

        async def one(stream, data, into, last):
            await stream.send(b"begin", 30)
            assert await stream.receive(5, 30) == b"begin"
            await swap(stream, data, into, on_progress=seen.append if stream is a else None)
            await stream.send(
                last, 30
            )  # right behind the bulk, where the peer may still be busy with it
            return await stream.receive(1 << 20, 30)

        got = await asyncio.gather(
            one(a, out, into_a, b"from a" * 30_000), one(b, back, into_b, b"from b")
        )
        assert got == [b"from b", b"from a" * 30_000]
        assert into_b == out
        assert into_a == back
        assert seen == sorted(seen)
        assert (seen or [0])[-1] == right
        framing = 4 + 5 + 4
        assert a._traffic.sent == b._traffic.received == framing + left + 180_000
        assert b._traffic.sent == a._traffic.received == framing + right + 6
        assert a._traffic.beside_gossip() == a._traffic.sent + a._traffic.received


async def test_many_swaps_on_one_stream():
    async with pair() as (a, b):
        for size in (1, CHUNK_BYTES, 3 * CHUNK_BYTES - 1, 10):
            x, y = os.urandom(size), os.urandom(size)
            into_a, into_b = bytearray(size), bytearray(size)
            await asyncio.gather(swap(a, x, into_a), swap(b, y, into_b))
            assert (into_a, into_b) == (y, x)


async def test_the_outgoing_buffer_is_free_when_swap_returns():
    async with pair() as (a, b):
        out, into = bytearray(b"1" * 3 * CHUNK_BYTES), bytearray(3 * CHUNK_BYTES)

        async def send():
            await swap(a, out, bytearray())
            out[:] = b"2" * len(out)

        await asyncio.gather(send(), swap(b, b"", into))
        assert into == b"1" * len(into)


def test_kept_stream_keeps_no_buffer():
    """A stream that is kept keeps neither buffer nor who was told of progress."""

    class Told:
        def __call__(self, received):
            pass

    async def kept():
        async with pair() as (a, b):
            out, into, told = bytearray(3 * CHUNK_BYTES), bytearray(3 * CHUNK_BYTES), Told()
            gone = weakref.ref(told)
            await asyncio.gather(
                swap(a, out, into, on_progress=told),
                swap(b, bytes(3 * CHUNK_BYTES), bytearray(3 * CHUNK_BYTES)),
            )
            del told
            gc.collect()
            assert gone() is None
            into.append(0)  # BufferError while anybody refers to it
            out.append(0)
            await a.send(b"after", 30)
            assert await b.receive(5, 30) == b"after"

    uvloop.run(
        kept()
    )  # a host's loop, which refers to the last protocol that took bytes into a buffer


async def test_eof_before_the_last_byte_is_a_failure():
    async with pair() as (a, b):
        a._writer.write(b"x" * 1000)
        a.close()
        with pytest.raises(NetworkError) as failure:
            await swap(b, b"y" * 10, bytearray(1001))
        assert failure.value.reason == "broken"
        with pytest.raises(NetworkError):
            await b.receive(10, 1)
        with pytest.raises(NetworkError):
            await b.send(b"x", 1)


async def test_a_peer_that_vanishes_while_we_send():
    async with pair() as (a, b):
        task = asyncio.ensure_future(swap(a, bytes(50 * CHUNK_BYTES), bytearray(CHUNK_BYTES)))
        await b._reader.readexactly(10)
        b.abort()
        with pytest.raises(NetworkError) as failure:
            await task
        assert failure.value.reason == "broken"


async def test_a_silent_peer_is_given_up_after_the_chunk_timeout():
    async with pair() as (a, _b):
        began = time.monotonic()
        with pytest.raises(NetworkError) as failure:
            await swap(a, bytes(50 * CHUNK_BYTES), bytearray(CHUNK_BYTES), chunk_timeout=0.3)
        assert failure.value.reason == "timeout"
        assert time.monotonic() - began > 0.25


@pytest.mark.parametrize("first", [b"", b"x"])
async def test_relay_buffering_is_silence(first):
    """A peer whose relay takes bytes while it sends none is silent."""
    async with pair() as (a, b):

        async def take():
            b._writer.write(first)
            while await b._reader.read(CHUNK_BYTES // 4):
                await asyncio.sleep(0.05)

        taking = asyncio.ensure_future(take())
        with pytest.raises(
            NetworkError, match=r"sent no byte for 0\.3 s"
        ):  # and not only at the deadline
            await swap(
                a,
                bytes(500 * CHUNK_BYTES),
                bytearray(CHUNK_BYTES),
                chunk_timeout=0.3,
                deadline=time.monotonic() + 20,
            )
        taking.cancel()


async def test_a_slow_peer_is_not_silent():
    async with pair() as (a, b):
        size = (
            2 * CHUNK_BYTES
        )  # all fits the write buffer at once: only its draining shows that the peer lives

        async def slowly():
            left = size
            while left:
                left -= len(await b._reader.readexactly(min(left, CHUNK_BYTES // 4)))
                await asyncio.sleep(0.1)

        await asyncio.gather(swap(a, bytes(size), bytearray(), chunk_timeout=0.4), slowly())


async def test_the_deadline_ends_a_transfer_that_progresses():
    async with pair() as (a, b):

        async def drip():
            while not a._writer.transport.is_closing():
                b._writer.write(b"x")
                await asyncio.sleep(0.02)

        dripping = asyncio.ensure_future(drip())
        with pytest.raises(NetworkError) as failure:
            await swap(a, b"", bytearray(CHUNK_BYTES), chunk_timeout=5, deadline=soon(0.3))
        assert failure.value.reason == "timeout"
        await dripping


async def test_a_failing_progress_callback_reaches_the_caller():
    async with pair() as (a, b):

        def fail(received):
            raise ZeroDivisionError(received)

        b._writer.write(b"abc")
        with pytest.raises(ZeroDivisionError):
            await swap(a, b"", bytearray(10), on_progress=fail)


@pytest.mark.parametrize("size", [1, MEASURED_BYTES, 5 * CHUNK_BYTES + 7])
@pytest.mark.parametrize("there", [False, True])
async def test_sent_ahead_bytes_continue_in_the_swap(size, there):
    """While messages come the other way; ``there``: what came ahead was received before the
    swap.
    """

    async with pair() as (a, b):
        out, back, into, taken = (
            os.urandom(size),
            os.urandom(size),
            bytearray(size),
            bytearray(size),
        )
        a.send_ahead(memoryview(out))
        assert a.is_ahead
        assert not a.idle
        await b.send(b"word", 5)
        assert await a.receive(10, 5) == b"word"
        arrived = [0]
        if there:
            receiving = asyncio.ensure_future(b.receive_ahead(memoryview(into), arrived.append))
            while arrived[-1] < min(
                size, CHUNK_BYTES
            ):  # of a large one the rest has to wait for the swap
                await asyncio.sleep(0.001)
            receiving.cancel()
            await asyncio.wait({receiving})
        await asyncio.gather(swap(a, out, taken), swap(b, back, into, arrived=arrived[-1]))
        assert (into, taken) == (out, back)
        assert a.idle
        assert b.idle
        assert (a.sent, b._traffic.received) == (size, size)
        await a.send(b"after", 5)
        assert await b.receive(10, 5) == b"after"


@pytest.mark.parametrize("size", [HEAD_BYTES, HEAD_BYTES + 1, 2 * CHUNK_BYTES])
async def test_a_payload_taken_for_a_message_is_whole(size):
    """Mutants: the swap loses what `more` has read, or refuses to begin."""
    async with pair() as (a, b):
        out, back = os.urandom(size), os.urandom(size)
        into = bytearray(size)
        taken = bytearray(size)
        a.send_ahead(memoryview(out))
        assert await b.more(5)
        await asyncio.gather(swap(a, out, taken), swap(b, back, into))
        assert (into, taken) == (out, back)
        assert (a.sent, b._traffic.received) == (size, size)
        await a.send(b"after", 5)
        assert await b.receive(10, 5) == b"after"


async def test_stream_end_leaves_unsent_rest():
    """A stream that ends before the swap leaves the rest of what was sent ahead."""
    async with pair() as (a, b):
        a.send_ahead(memoryview(bytes(8 * CHUNK_BYTES)))
        await asyncio.sleep(0)
        a.close()
        arrived = [0]
        await b.receive_ahead(memoryview(bytearray(8 * CHUNK_BYTES)), arrived.append)  # to its end
        assert arrived[-1] < 8 * CHUNK_BYTES
        assert not await b.more(5)


async def test_more_waits_and_loses_nothing():
    """More waits for a message or the end and loses nothing."""
    async with pair() as (a, b):
        assert not await b.more(0.01)
        await a.send(b"hello", 5)
        assert await b.more(5)
        assert not b.idle
        assert await b.more(5)
        assert await b.receive(10, 5) == b"hello"
        assert b.idle
        a.close()
        assert not await b.more(5)
        assert not b.idle
