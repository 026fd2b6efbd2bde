"""Which documents belong to which shard in which epoch: pure functions, so that nobody has to coordinate it.

Where all documents are known beforehand they are shuffled for each (seed, epoch) and dealt round by round, so no shard has more
than one document more than another. Of a stream nobody knows the length, so there a hash of (seed, epoch, document) says whose it
is. Either way the shards of an epoch have each document once, and the next epoch deals anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from shoal.node.task import Shard

HELD_OUT_ONE_IN = 10
"""Of a stream one document in so many, chosen by its text and so wherever it stands, is never trained on."""


def number(*parts: int | str) -> int:
    """64 bits of a hash of ``parts``, the same on every machine."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def belongs(shard: Shard, epoch: int, document: str) -> bool:
    """Whether ``document`` of a stream, by its name, is the shard's in ``epoch``."""
    return shard.of == 1 or number("document", shard.seed, epoch, document) % shard.of == shard.index


def dealt(names: Sequence[str], shard: Shard, epoch: int) -> list[int]:
    """The indices of those ``names`` that are the shard's in ``epoch``, in the order in which it reads them."""
    order = sorted(range(len(names)), key=lambda i: (number("order", shard.seed, epoch, names[i]), names[i], i))
    # Where to begin changes too: of fewer documents than shards each would else be always with the first ones.
    return order[(shard.index + number("turn", shard.seed, epoch)) % shard.of :: shard.of]


def held_out(content: bytes) -> bool:
    """Whether this document of a stream is for evaluation alone."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % HELD_OUT_ONE_IN == 0
