"""The record of a member that is as usual, of which a test says what is not."""

from shoal.swarm.wire.messages import Member

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
