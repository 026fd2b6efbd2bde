"""The channel between a member and its leader, where it breaks."""

import asyncio
import gc

import pytest

from shoal.swarm.exchange.group.channel import HeartbeatChannel
from shoal.swarm.p2p.memory_stream import stream_pair
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.wire.group import GroupReport


def test_a_channel_that_breaks_as_its_reader_is_cancelled_leaves_no_error_behind():
    """asyncio reports an exception that nobody has looked at, and a node's log would show it as a warning."""
    reported = []

    async def work():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        one, two = (Stream("x", *ends, TrafficMeter()) for ends in stream_pair())
        hearing = asyncio.ensure_future(HeartbeatChannel(one, 5.0).receive(loop.time() + 5.0, GroupReport))
        for _ in range(3):
            await asyncio.sleep(0)
        reading = [task for task in asyncio.all_tasks() if task.get_coro().__name__ == "_receive"]  # one, before Python 3.12
        two.close()
        while not all(task.done() for task in reading):
            await asyncio.sleep(0)
        hearing.cancel()  # before it has seen what became of the reading
        with pytest.raises(asyncio.CancelledError):
            await hearing

    asyncio.run(asyncio.wait_for(work(), 30))
    gc.collect()
    assert reported == []
