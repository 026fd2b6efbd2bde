"""Real strangers that ask without end: their address range's processor time is bounded, and who
comes from elsewhere is answered.
"""

import asyncio
import contextlib

import pytest

from shoal.swarm.identity import Identity
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.processor_time import ProcessorTime, TimeLimits
from tests.security.bare_client import Connection, Key
from tests.support.clock import Clock

ECHO = "/test/echo/1"
CROWD, HOME = "127.1.0.1", "127.2.0.1"
LITTLE = TimeLimits(of_peer_s=0.01, of_range_s=0.015, period_s=60.0)
MOST_ANSWERS = 200
"""More than fit into that, at `STREAM_S` each."""


async def echo(stream):
    await stream.send(await stream.receive(100, 60), 5)


async def ask_without_end(line):
    """Ask until the connection ends; return how many answers came."""
    for number in range(MOST_ANSWERS):
        try:
            await line.ask(ECHO, b"again")
        except (EOFError, OSError):
            return number
    pytest.fail("it was answered without end")


@pytest.mark.ci
def test_strangers_have_little_time_together():
    clock = Clock()
    with Host.start(Identity.ephemeral(), timeout=60) as victim:
        victim.serve(ECHO, echo)
        member = Key(b"member")
        victim.resource_manager.known = member.peer_id.__eq__
        victim.resource_manager.processor_time = ProcessorTime(clock, strangers=LITTLE)
        _, _, host, _, port, *_ = victim.addresses()[0].split("/")

        async def flood():
            async with contextlib.AsyncExitStack() as lines:

                async def connect(key, source):
                    line = await Connection.to(host, int(port), key, source)
                    lines.callback(line.close)
                    return line

                answers = []
                for number in range(3):
                    line = await connect(Key(b"%d" % number), CROWD)
                    answers.append(await ask_without_end(line))
                    await line.task  # the node has ended the connection
                assert answers[0] > answers[2] == 0, "the third key finds the range's time spent"
                for key, source in ((member, CROWD), (Key(b"honest"), HOME)):
                    line = await connect(key, source)
                    assert await line.ask(ECHO, b"here") == b"here"
                clock.now += 60.0
                line = await connect(Key(b"4"), CROWD)
                assert await line.ask(ECHO, b"later") == b"later"

        asyncio.run(asyncio.wait_for(flood(), 60))
        assert victim.resource_manager.refused()["time"] >= 3
