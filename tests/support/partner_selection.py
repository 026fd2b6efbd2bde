"""The choice of a partner, in a directory that a test fills."""

from types import SimpleNamespace

from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.pair.selector import PairSelector

SEED, MODEL = 3, "0" * 64


class Directory(dict):
    def see(self, peer, issued=1.0, model=MODEL, round=0, steps_per_s=0.0):
        self[peer] = SimpleNamespace(
            model=model, issued=issued, round=round, steps_per_s=steps_per_s
        )


def directory(count):
    made = Directory()
    for number in range(count):
        made.see(f"peer-{number}")
    return made


def selector(me, here):
    return PairSelector(
        PeerContext(None, SimpleNamespace(peer_id=me), "swarm", MODEL, SEED, lambda: here),
        speed=lambda member: member.steps_per_s,
    )
