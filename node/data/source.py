"""Sources of documents: what the built-in text task reads, in epochs and by shards.

A source is a list in memory (`Listed`), files that are read by line (`record_files.RecordFiles`),
or a dataset of Hugging Face (`hub_dataset.HubDataset`). `Training` is a stream without the
documents that are kept for evaluation.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.node.data.sharding import assigned, is_held_out
from shoal.node.task import Shard
from shoal.swarm.errors import ShoalError

logger = logging.getLogger(__name__)

MAX_REASON_CHARS = 200
"""Of another library's error inside a sentence of ours."""


class DataError(ShoalError):
    """Unreadable or insufficient text, a missing tokenizer, or an option of the text task out of
    range.
    """


def reason(error: BaseException) -> str:
    """Return the first line of ``error``, short, for use inside a sentence."""
    said = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
    return str(said)[:MAX_REASON_CHARS].rstrip(" .:") or type(error).__name__


Place = dict[str, int | str]
"""Place in an epoch of a source at which a document begins: small enough for a checkpoint."""


@dataclass(frozen=True)
class Document:
    """File or part of one. ``name`` is its path below the named folder, with ``/``."""

    name: str
    content: bytes


@dataclass
class Skipped:
    """Counter of unusable records, of which the first is logged as a warning."""

    count: int = 0

    def add(self, where: str, why: str) -> None:
        """Count one more, with ``where`` and ``why`` in words."""
        self.count += 1
        if self.count == 1:
            logger.warning(
                "%s %s, so it is skipped, and others like it will be without a word.", where, why
            )


class DocumentSource(Protocol):
    """Documents in epochs, assigned to shards (`shoal.node.data.sharding`)."""

    what: str
    """Description for people."""
    identity: str
    """Digest of the data; a place of one source means nothing in another."""

    def documents(
        self, shard: Shard, epoch: int, place: Place | None = None
    ) -> Iterator[tuple[Place, Document]]:
        """Yield the shard's documents of ``epoch``, from the one at ``place`` on, each with its
        place. DataError.
        """


@dataclass
class Listed:
    """Source of documents in memory."""

    known: Sequence[Document]
    what: str
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(b"listed\0")
        for document in self.known:
            entry = f"{document.name}\0{len(document.content)}\0"
            digest.update(entry.encode("utf-8", "surrogateescape"))
        self.identity = digest.hexdigest()

    def documents(
        self, shard: Shard, epoch: int, place: Place | None = None
    ) -> Iterator[tuple[Place, Document]]:
        """Implement `DocumentSource.documents`; a place is a number in the order of the epoch."""
        names = [document.name for document in self.known]
        mine = assigned(names, shard, epoch)
        for at in range(place_number(place, "document"), len(mine)):
            yield {"document": at}, self.known[mine[at]]


@dataclass
class Training:
    """Part of a stream for training."""

    stream: DocumentSource

    def __post_init__(self) -> None:
        self.what = self.stream.what
        self.identity = self.stream.identity

    def documents(
        self, shard: Shard, epoch: int, place: Place | None = None
    ) -> Iterator[tuple[Place, Document]]:
        """Implement `DocumentSource.documents`, without held-out documents."""
        for at, document in self.stream.documents(shard, epoch, place):
            if not is_held_out(document.content):
                yield at, document


def no_document(source: DocumentSource) -> DataError:
    return DataError(
        f"There is no usable document in {source.what}: name other data, or the field that has the "
        "text."
    )


def place_number(place: Place | None, key: str) -> int:
    """Return the number ``key`` of ``place``; 0 without a place.

    DataError if it is missing, as in a place of another source.
    """
    found = 0 if place is None else place.get(key)
    if not isinstance(found, int) or found < 0:
        raise DataError(
            f"The checkpoint's place in the data is damaged (its {key!r} is {found!r}): take an "
            "older checkpoint."
        )
    return found
