"""Hosts with gossip of their own, and a rollout that is as usual, of which a test says what is
not.
"""

import contextlib
import os

from shoal.swarm.gossip.envelope import make_body, make_envelope
from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import swarm_id
from shoal.swarm.p2p.host import Host
from shoal.swarm.topics.rollout import Rollout

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


class Node:
    def __init__(self, bootstrap=()):
        self.identity = Identity.ephemeral()
        self.host = Host.start(self.identity, bootstrap=bootstrap, timeout=60)
        self.gossip = Gossip(self.host, self.identity, SWARM, fetch_s=5.0)

    def publish_raw(self, topic, data):
        self.host.call(self.host.pubsub.publish(topic.name, data), 60)

    def seal(self, message):
        """Return ``message`` as this node gossips it."""
        return make_envelope(SWARM, make_body(message, self.identity))

    def close(self):
        self.gossip.close()
        self.host.close()


@contextlib.contextmanager
def two(make, **second):
    """Make two nodes, of which the second, made with these options, knows the first."""
    with (
        contextlib.closing(make()) as first,
        contextlib.closing(make(first.host.addresses(), **second)) as other,
    ):
        yield first, other
