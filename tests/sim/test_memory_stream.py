"""A stream in memory behaves as one over a socket: flow control, bulk transfers, ends of file, and links that break."""

import asyncio

import pytest

from shoal.swarm.errors import NetworkError
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.pacing import TrafficMeter
from tests.sim.memory_stream import WINDOW, stream_pair


def run(work):
    return asyncio.run(asyncio.wait_for(work, 30))


def streams():
    return [Stream(name, *ends, TrafficMeter()) for name, ends in zip(("a", "b"), stream_pair(), strict=True)]


def test_messages_in_order_both_ways():
    async def work():
        one, two = streams()
        for number in range(20):
            await one.send(bytes([number]) * number, 5)
        await two.send(b"back", 30)
        assert [await two.receive(100, 30) for _ in range(20)] == [bytes([n]) * n for n in range(20)]
        assert await one.receive(100, 30) == b"back"

    run(work())


@pytest.mark.parametrize("sizes", [(3_000_000, 1), (0, 5), (700_000, 700_001)])
def test_a_swap_and_messages_around_it(sizes):
    async def swap(stream, outgoing, size):
        incoming = bytearray(size)
        await stream.send(b"before", 30)
        assert await stream.receive(10, 30) == b"before"
        await stream.swap(
            memoryview(outgoing), memoryview(incoming), chunk_timeout=5, deadline=asyncio.get_running_loop().time() + 20
        )
        await stream.send(b"after", 30)
        assert await stream.receive(10, 30) == b"after"
        return bytes(incoming)

    async def work():
        one, two = streams()
        mine, theirs = (bytes(range(256)) * (size // 256 + 1) for size in sizes)
        mine, theirs = mine[: sizes[0]], theirs[: sizes[1]]
        assert await asyncio.gather(swap(one, mine, sizes[1]), swap(two, theirs, sizes[0])) == [theirs, mine]

    run(work())


def test_who_does_not_read_stops_the_writer():
    async def work():
        (unread, writer), (reader, other) = stream_pair()
        writer.write(bytes(4 * WINDOW))
        draining = asyncio.ensure_future(writer.drain())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not draining.done()
        assert writer.transport.get_write_buffer_size() >= 2 * WINDOW
        await reader.readexactly(4 * WINDOW)
        await draining
        assert writer.transport.get_write_buffer_size() == 0
        assert not unread.at_eof()
        other.close()

    run(work())


def test_a_close_sends_what_is_buffered_and_then_the_end():
    async def work():
        one, two = streams()
        await one.send(bytes(1000), 5)
        one.close()
        assert await two.receive(1000, 30) == bytes(1000)
        assert not await two.more(5)
        two.close()

    run(work())


def test_an_abort_loses_what_is_buffered():
    async def work():
        (unread, writer), (reader, other) = stream_pair()
        writer.write(bytes(4 * WINDOW))
        writer.transport.abort()
        assert len(await reader.read()) <= WINDOW
        other.write(b"nobody reads this")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert other.transport.is_closing()
        assert unread.at_eof()

    run(work())


def test_the_end_in_the_middle_of_a_swap_is_an_error():
    async def work():
        one, two = streams()
        swapping = asyncio.ensure_future(
            one.swap(memoryview(b"x"), memoryview(bytearray(5)), chunk_timeout=5, deadline=asyncio.get_running_loop().time() + 20)
        )
        await asyncio.sleep(0)
        two.close()
        with pytest.raises(NetworkError, match="ended early"):
            await swapping

    run(work())


def test_a_severed_end_loses_its_stream():
    async def work():
        one, two = streams()
        two._writer.transport.sever(ConnectionResetError("reset"))
        with pytest.raises(NetworkError, match="ended early"):
            await two.receive(10, 30)
        with pytest.raises(NetworkError, match="ended early"):
            await one.receive(10, 30)

    run(work())
