"""A stranger's noise in gossip reaches no node but the one that it is sent to, which does not read
it.
"""

import asyncio
import os
import struct

import pytest

from shoal.swarm.gossip.frames import GossipTopics, frame_of, topic_of
from shoal.swarm.topics.rollout import Rollout
from shoal.swarm.wire.envelope import pack
from shoal.swarm.wire.messages import GOSSIP_PROTOCOL
from tests.security.bare_client import DATA, Connection, Key, _line
from tests.support import gossip_nodes as nodes
from tests.support.gossip_nodes import SWARM
from tests.support.waiting import until

MESSAGES = 588
NOISE_BYTES = 60_000
STREAMS = 12


class Node(nodes.Node):
    def __init__(self, bootstrap=()):
        super().__init__(bootstrap)
        self.got = []
        self.topic = self.gossip.join(Rollout, lambda author, record: self.got.append(record))


def framed(message):
    return struct.pack(">I", len(message)) + message


async def flood(node):
    """Send the noise on streams of gossip, and ask for GossipSub; return its answer to that."""
    _, _, host, _, port, *_ = node.host.addresses()[0].split("/")
    told = framed(pack(GossipTopics(swarm=SWARM, topics=(topic_of(Rollout),))))
    line = await Connection.to(host, int(port), Key(b"noise"))
    try:
        streams = [line.stream(GOSSIP_PROTOCOL, told) for _ in range(STREAMS)]
        await streams[0][1].readuntil(_line(GOSSIP_PROTOCOL))
        for number in range(MESSAGES):
            noise = framed(frame_of(0, os.urandom(NOISE_BYTES)))
            line._send(DATA, 0, streams[number % STREAMS][0], noise)
            await asyncio.sleep(0)
        asked = await Connection.to(host, int(port), Key(b"asks"))
        _, answers = asked.stream("/meshsub/1.1.0")
        await answers.readuntil(_line("/multistream/1.0.0"))
        answer = await answers.readuntil(b"\n")
        asked.close()
        return answer
    finally:
        line.close()


@pytest.mark.ci
def test_a_strangers_noise_reaches_no_other_node():
    with nodes.two(Node) as (victim, other):
        until(lambda: other.topic.listeners() and victim.topic.listeners())
        before = [node.host.traffic.received for node in (victim, other)]
        answer = asyncio.run(asyncio.wait_for(flood(victim), 60))
        assert answer == _line("na"), "the daemon itself passes nothing on"
        record = nodes.rollout_of(victim.identity.peer_id)
        victim.topic.publish(record)
        until(lambda: other.got == [record])
        assert other.topic.counts["received"] == 1
        assert victim.topic.counts["received"] == 0
        received = [node.host.traffic.received for node in (victim, other)]
        assert received[1] - before[1] < 3000
        assert received[0] - before[0] < NOISE_BYTES, "its hellos, of which most are refused"
