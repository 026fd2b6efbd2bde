"""The part of the data that a peer trains on."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.swarm.wire.member import Member


@dataclass(frozen=True)
class Shard:
    """Part ``index`` (from 0) of the data, cut into ``of`` parts with the random seed ``seed``."""

    index: int
    of: int
    seed: int


def least_used(members: Mapping[str, Member], shards: int, peer: str) -> int:
    """Return the shard, of ``shards``, that the fewest other members hold; each peer breaks ties differently."""
    held = Counter(m.shard for m in members.values() if m.shards == shards and m.peer != peer)

    def preference(index: int) -> tuple[int, bytes]:
        return held[index], hashlib.sha256(f"{peer}:{index}".encode()).digest()

    return min(range(shards), key=preference)
