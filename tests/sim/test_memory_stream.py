"""A stream in memory behaves as one over a socket: flow control, bulk transfers, ends of file, and
links that break.
"""

import asyncio

from shoal.swarm.errors import NetworkError
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.pacing.meter import TrafficMeter
from tests.sim.memory_stream import WINDOW, stream_pair
from tests.support.reasons import raises_for


def run(work):
    return asyncio.run(asyncio.wait_for(work, 30))


def streams():
    return [
        Stream(name, *ends, TrafficMeter())
        for name, ends in zip(("a", "b"), stream_pair(), strict=True)
    ]


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


def test_a_severed_end_loses_its_stream():
    async def work():
        one, two = streams()
        two._writer.transport.sever(ConnectionResetError("reset"))
        with raises_for("broken", NetworkError):
            await two.receive(10, 30)
        with raises_for("broken", NetworkError):
            await one.receive(10, 30)

    run(work())
