"""Hosts with gossip of their own, and a rollout that is as usual, of which a test says what is
not.
"""

import contextlib
import os

from blake3 import blake3

from shoal.swarm.gossip.envelope import make_body, make_envelope
from shoal.swarm.gossip.frames import frame_of
from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import swarm_id
from shoal.swarm.p2p.host import Host
from shoal.swarm.topics.rollout import Rollout
from tests.support.waiting import until

SWARM = swarm_id(b"")


def rollout_of(peer, /, **changes):
    fields = {
        "swarm": SWARM,
        "peer": peer,
        "env": "add",
        "env_version": "1",
        "env_config": b"\x80",
        "seed": 2**63 - 1,
        "index": 2,
        "completions": ("one", "two"),
        "finish": ("stop", "length"),
        "policy_version": 3,
        "temperature": 1.0,
        "round": 10,
        "nonce": os.urandom(16),
        "issued": 1e9,
    }
    return Rollout(**{**fields, **changes})


LIVE = {}
"""Nodes of this module that were not closed, by peer id."""
MEMBERS = set()
"""Peer ids of all that ever were."""


def members_beside(peer):
    """Return what gossip asks for: the addresses of the other live nodes."""
    return lambda: {
        each: node.host.addresses() for each, node in list(LIVE.items()) if each != peer
    }


async def push(gossip, topic, data):
    """Send ``data`` to the neighbours, unchecked, as a node that lies does."""
    gossip.neighbours.push(topic.name, blake3(data).digest(), data)


async def send_frames(gossip, topic, *envelopes):
    """Send frames to all neighbours as they are, also what they have."""
    neighbours = gossip.neighbours
    for neighbour in list(neighbours._linked.values()):
        for envelope in envelopes:
            number = neighbours._own.topics.index(topic.name)
            await neighbour.stream.send(frame_of(number, envelope), 10)


class Node:
    def __init__(self, bootstrap=(), **options):
        self.identity = Identity.ephemeral()
        peer = self.identity.peer_id
        self.host = Host.start(self.identity, bootstrap=bootstrap, timeout=60, **options)
        self.gossip = Gossip(
            self.host,
            self.identity,
            SWARM,
            members=members_beside(peer),
            is_member=MEMBERS.__contains__,
            fetch_s=5.0,
        )
        LIVE[peer] = self
        MEMBERS.add(peer)

    def publish_raw(self, topic, data):
        self.host.call(push(self.gossip, topic, data), 60)

    def send_frames(self, topic, *envelopes):
        self.host.call(send_frames(self.gossip, topic, *envelopes), 60)

    def seal(self, message):
        """Return ``message`` as this node gossips it."""
        return make_envelope(SWARM, make_body(message, self.identity))

    def close(self):
        LIVE.pop(self.identity.peer_id, None)
        self.gossip.close()
        self.host.close()


def are_linked(node, other):
    """Whether one stream leads from one to the other, and no second one is being opened: of two
    that were opened at once one is given up, and frames that were sent over it are lost.
    """
    opened = []
    for here, there in ((node, other), (other, node)):
        neighbours, peer = here.gossip.neighbours, there.identity.peer_id
        linked = neighbours._linked.get(peer)
        if linked is None or linked.is_drawn != (peer in neighbours._dialling):
            return False
        opened.append(linked.is_drawn)
    return opened[0] != opened[1]


@contextlib.contextmanager
def two(make, **second):
    """Make two nodes, of which the second, made with these options, knows the first; and wait until
    they are neighbours.
    """
    with (
        contextlib.closing(make()) as first,
        contextlib.closing(make(first.host.addresses(), **second)) as other,
    ):
        until(lambda: are_linked(first, other))
        yield first, other
