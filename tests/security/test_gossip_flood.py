"""A stranger's noise in gossip reaches no node but the one that it is sent to, which does not read
it.
"""

import asyncio

import pytest

from shoal.swarm.topics.rollout import Rollout
from tests.security.bare_client import Connection, Key, _line
from tests.security.gossip_attack import NOISE_BYTES, noise
from tests.support import gossip_nodes as nodes
from tests.support.gossip_nodes import SWARM
from tests.support.waiting import until


class Node(nodes.Node):
    def __init__(self, bootstrap=()):
        super().__init__(bootstrap)
        self.got = []
        self.topic = self.gossip.join(Rollout, lambda author, record: self.got.append(record))


async def flood(node):
    """Send the noise on streams of gossip, and ask for GossipSub; return its answer to that."""
    _, _, host, _, port, *_ = node.host.addresses()[0].split("/")
    line = await noise(host, int(port), SWARM, 0.0)
    try:
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
