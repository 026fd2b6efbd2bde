"""The channel between a member and its leader, where it breaks."""

import asyncio
import gc

import pytest

from shoal.swarm.exchange.group.roster import HeartbeatChannel
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.pacing import TrafficMeter
from shoal.swarm.wire.envelope import pack
from shoal.swarm.wire.messages import GroupAlive, GroupReport
from tests.sim.clock import VirtualLoop
from tests.sim.memory_stream import stream_pair


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


def test_messages_that_come_quickly_do_not_put_off_the_heartbeats():
    """Each began the time to the next heartbeat anew: a member that heard much was taken for dead (seed 91531)."""
    loop, beats = VirtualLoop(), [0.0]

    async def work():
        one, two = (Stream("x", *ends, TrafficMeter()) for ends in stream_pair())
        channel = HeartbeatChannel(one, 1.0)

        async def hear():
            while True:
                await channel.receive(loop.time() + 10.0, GroupReport)

        async def count():
            while True:
                await two.receive(GroupAlive.LIMIT, 1.0)
                beats.append(loop.time())

        tasks = [asyncio.ensure_future(hear()), asyncio.ensure_future(count())]
        for _ in range(25):
            await asyncio.sleep(0.2)
            await two.send(pack(GroupReport(nonce=bytes(16), held=1)), 1.0)
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    loop.run_until_complete(work())
    loop.close()
    assert max(later - earlier for earlier, later in zip(beats, [*beats[1:], 5.0], strict=True)) <= 0.26
