"""Which documents are a shard's in each epoch: by pure functions, so nobody has to coordinate it.

Where all documents are known beforehand, `assigned` shuffles them for each (seed, epoch) and hands
them out in turn, so the sizes of shards differ by one document at most. The length of a stream is
not known; there `is_in_shard` decides by a hash of (seed, epoch, document). Either way the shards
of an epoch have each document once, and the next epoch assigns them anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from shoal.node.task import Shard

HELD_OUT_ONE_IN = 10
"""One document of a stream in this many, chosen by its text, is never trained on."""


def stable_hash(*parts: int | str) -> int:
    """Return 64 bits of a hash of ``parts``, the same on every machine."""
    text = "\0".join(map(str, parts)).encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def is_in_shard(shard: Shard, epoch: int, document: str) -> bool:
    """Return whether ``document`` of a stream, by its name, is the shard's in ``epoch``."""
    if shard.of == 1:
        return True
    return stable_hash("document", shard.seed, epoch, document) % shard.of == shard.index


def assigned(names: Sequence[str], shard: Shard, epoch: int) -> list[int]:
    """Return the indices of the shard's ``names`` in ``epoch``, in reading order."""

    def place(index: int) -> tuple[int, str, int]:
        name = names[index]
        return stable_hash("order", shard.seed, epoch, name), name, index

    order = sorted(range(len(names)), key=place)
    # The first shard changes too: fewer documents than shards would else always go to the first
    # ones.
    first = (shard.index + stable_hash("turn", shard.seed, epoch)) % shard.of
    return order[first :: shard.of]


def is_held_out(content: bytes) -> bool:
    """Return whether this document of a stream is for evaluation alone."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % HELD_OUT_ONE_IN == 0
