"""The part of the data that a peer trains on."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from shoal.swarm.wire.messages import Member


@dataclass(frozen=True)
class Shard:
    """Part ``index`` (from 0) of the data, cut into ``of`` parts with the random seed ``seed``."""

    index: int
    of: int
    seed: int

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"


def least_used(members: Mapping[str, Member], shards: int, peer: str) -> int:
    """Return the shard, of ``shards``, that the fewest other members hold; each peer breaks ties
    differently.
    """
    return _next(
        Counter(m.shard for m in members.values() if m.shards == shards and m.peer != peer),
        shards,
        peer,
    )


def settled(
    members: Mapping[str, Member], shard: Shard, peer: str, before: Collection[str]
) -> Shard:
    """Return the shard to train on for ``peer``, which chose ``shard`` when it knew of the peers
    ``before``, and has not begun.

    Peers that came at the same moment may have chosen the same. Who trains keeps it, or else the
    one with the lowest id; the others choose again one after another, so those that see each other
    end with different ones.
    """
    others = [m for m in members.values() if m.peer != peer and m.shards == shard.of]
    same = [m for m in others if m.shard == shard.index and m.peer not in before]
    waiting = [m.peer for m in same if m.state != "training"]
    held = Counter(m.shard for m in others if m.peer not in waiting)
    queue = sorted([*waiting, peer])
    if len(same) == len(waiting):
        held[shard.index] += 1
        if queue.pop(0) == peer:
            return shard
    for each in queue[: queue.index(peer)]:
        held[_next(held, shard.of, each)] += 1
    return replace(shard, index=_next(held, shard.of, peer))


def _next(held: Counter[int], shards: int, peer: str) -> int:
    """Return the index held by the fewest; each peer breaks ties differently."""
    return min(
        range(shards),
        key=lambda index: (held[index], hashlib.sha256(f"{peer}:{index}".encode()).digest()),
    )
