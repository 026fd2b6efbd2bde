"""Where documents come from, one after another: what files, datasets and lists have in common, and which one ``data`` names."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.node.data.dealing import dealt, held_out
from shoal.node.data.errors import DataError
from shoal.node.task import Shard

logger = logging.getLogger(__name__)

Place = dict[str, int | str]
"""Where in an epoch of a source a document begins: small, and what a checkpoint can hold."""


@dataclass(frozen=True)
class Document:
    """A file or a piece of one. ``name`` is its path below the folder that was named, with ``/``."""

    name: str
    content: bytes


@dataclass
class Skipped:
    """Records that could not be used. The first is told as a warning, the others are counted."""

    count: int = 0

    def add(self, where: str, why: str) -> None:
        """One more, ``where`` and ``why`` in words."""
        self.count += 1
        if self.count == 1:
            logger.warning("%s %s, so it is skipped, and others like it will be without a word.", where, why)


class Source(Protocol):
    """Documents in epochs, dealt to shards (node/data/dealing.py)."""

    what: str
    """In words, for people."""
    identity: str
    """A digest of which data it is; a place in it means nothing in another."""

    def documents(self, shard: Shard, epoch: int, place: Place | None = None) -> Iterator[tuple[Place, Document]]:
        """The shard's documents of ``epoch``, from the one at ``place`` on, each with its place. DataError."""


@dataclass
class Listed:
    """Documents that are all in memory."""

    known: Sequence[Document]
    what: str
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        found = hashlib.sha256(b"listed\0")
        for document in self.known:
            found.update(f"{document.name}\0{len(document.content)}\0".encode("utf-8", "surrogateescape"))
        self.identity = found.hexdigest()

    def documents(self, shard: Shard, epoch: int, place: Place | None = None) -> Iterator[tuple[Place, Document]]:
        """As ``Source`` says; a place is a number in the order of the epoch."""
        mine = dealt([document.name for document in self.known], shard, epoch)
        for at in range(place_number(place, "document"), len(mine)):
            yield {"document": at}, self.known[mine[at]]


@dataclass
class Training:
    """What of a stream is trained on."""

    stream: Source

    def __post_init__(self) -> None:
        self.what, self.identity = self.stream.what, self.stream.identity

    def documents(self, shard: Shard, epoch: int, place: Place | None = None) -> Iterator[tuple[Place, Document]]:
        """As ``Source`` says, without what is held out."""
        return (found for found in self.stream.documents(shard, epoch, place) if not held_out(found[1].content))


def no_document(source: Source) -> DataError:
    """What to raise where ``source`` has nothing to read."""
    return DataError(f"There is no usable document in {source.what}: name other data, or the field that has the text.")


def place_number(place: Place | None, key: str) -> int:
    """The number ``key`` of ``place``; 0 without a place. DataError if there is none, as in a place of another source."""
    found = 0 if place is None else place.get(key)
    if not isinstance(found, int) or found < 0:
        raise DataError(f"The checkpoint's place in the data is damaged (its {key!r} is {found!r}): take an older checkpoint.")
    return found
