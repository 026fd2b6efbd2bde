"""Statuses of peers that exist here alone, and the bytes in which they would arrive."""

import threading

from shoal.node.watch.events import Heard
from shoal.swarm.gossip.envelope import make_body, make_envelope
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import swarm_id
from shoal.swarm.topics.status import Status
from shoal.swarm.wire.record import TAIL, Round
from tests.support.records import in_groups

SWARM = swarm_id(b"")

NOW = 1_800_000_000.0


class Source:
    """A source of no events."""

    def __init__(self):
        self.ended = threading.Event()


class Author:
    """A peer that says how it is."""

    def __init__(self, name):
        self.name = name
        self.identity = Identity.ephemeral()
        self.peer = self.identity.peer_id
        self.tail = self.peer[-TAIL:]

    def round(self, number, partners=(), **changes):
        fields = {
            "round": number,
            "step": 10 * (number + 1),
            "loss": 4.0 / (number + 1),
            "members": 1 + len(partners),
            "partners": tuple(partner.tail for partner in partners),
            "bytes_sent": 1000,
            "bytes_received": 900,
            "wait_s": 0.1,
        }
        return Round(**{**fields, **changes})

    def status(self, *rounds, **changes):
        last = rounds[-1] if rounds else self.round(0)
        fields = {
            "swarm": SWARM,
            "peer": self.peer,
            "name": self.name,
            "addresses": (),
            "state": "training",
            "round": last.round,
            "step": last.step,
            "training": last.loss,
            "steps_per_s": 5.0,
            "bytes_sent": 1000,
            "bytes_received": 900,
            "rounds": rounds,
            "issued": NOW,
            "version": "0.1.0",
        }
        return Status(**in_groups(Status, {**fields, **changes}))

    def heard(self, *rounds, at=NOW, **changes):
        return Heard(
            time=at, peer=self.peer, status=self.status(*rounds, **{"issued": at, **changes})
        )

    def bytes(self, **changes):
        return make_envelope(SWARM, make_body(self.status(**changes), self.identity))
