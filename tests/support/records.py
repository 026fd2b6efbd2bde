"""The record of a member that is as usual, of which a test says what is not."""

from shoal.swarm.wire.messages import Member
from shoal.swarm.wire.record import (
    Checks,
    Exchanges,
    Faults,
    LinkUse,
    Loss,
    Progress,
    Rollouts,
)

SWARM, MODEL = "a" * 52, "0" * 64
ABOUT = {
    "name": "x",
    "round": 0,
    "step": 0,
    "loss": None,
    "steps_per_s": 0.0,
    "shard": 0,
    "shards": 1,
    "model": MODEL,
    "state": "training",
    "version": "0",
}
"""What a node says of itself."""


def member_of(peer, /, **changes):
    return Member(
        **{"swarm": SWARM, "peer": peer, "addresses": (), "issued": 0.0, **ABOUT, **changes}
    )


GROUPS = {
    "progress": Progress,
    "exchanges": Exchanges,
    "link": LinkUse,
    "loss": Loss,
    "faults": Faults,
    "rollouts": Rollouts,
    "checks": Checks,
}


def in_groups(message, fields):
    """Return ``fields`` with those that the class ``message`` has in a group of the record in it:
    ``step=3`` becomes ``progress=Progress(step=3)``.
    """
    found, inside = {}, {}
    for field, value in fields.items():
        if field in message.model_fields:
            found[field] = value
        else:
            (name,) = [name for name, group in GROUPS.items() if field in group.model_fields]
            inside.setdefault(name, {})[field] = value
    return {**found, **{name: GROUPS[name](**values) for name, values in inside.items()}}
