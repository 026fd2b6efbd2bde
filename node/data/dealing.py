"""Assignment of documents to shards in each epoch, by pure functions, so that nobody has to coordinate it.

Where all documents are known beforehand they are shuffled for each (seed, epoch) and assigned in turn, so that the sizes of shards
differ by one document at most. The length of a stream is not known, so there a hash of (seed, epoch, document) gives the shard.
Either way the shards of an epoch have each document once, and the next epoch assigns them anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from shoal.node.task import Shard
from shoal.swarm.errors import ShoalError

# Errors of data.


class DataError(ShoalError):
    """Unreadable or insufficient text, a missing tokenizer, or an option of the text task out of range."""


def reason(error: BaseException) -> str:
    """Return the first line of ``error``, short, for use inside a sentence."""
    said = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
    return str(said)[:200].rstrip(" .:") or type(error).__name__


HELD_OUT_ONE_IN = 10
"""One document of a stream in this many, chosen by its text, is never trained on."""


def number(*parts: int | str) -> int:
    """Return 64 bits of a hash of ``parts``, the same on every machine."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def belongs(shard: Shard, epoch: int, document: str) -> bool:
    """Return whether ``document`` of a stream, by its name, is the shard's in ``epoch``."""
    return shard.of == 1 or number("document", shard.seed, epoch, document) % shard.of == shard.index


def dealt(names: Sequence[str], shard: Shard, epoch: int) -> list[int]:
    """Return the indices of the shard's ``names`` in ``epoch``, in reading order."""
    order = sorted(range(len(names)), key=lambda i: (number("order", shard.seed, epoch, names[i]), names[i], i))
    # The first shard changes too: fewer documents than shards would else always go to the first ones.
    return order[(shard.index + number("turn", shard.seed, epoch)) % shard.of :: shard.of]


def held_out(content: bytes) -> bool:
    """Return whether this document of a stream is for evaluation alone."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % HELD_OUT_ONE_IN == 0
