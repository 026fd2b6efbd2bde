"""Batches from a stream of documents: packed into windows, shuffled in blocks, and resumable from a
few numbers.

Documents are joined, each followed by its end token, and cut into windows of context + 1 tokens,
the last of which is the first of the next window. A block of windows, or the rest of an epoch, is
gathered, shuffled by a seed of (seed, shard, number of the block) and read; the next block begins
with the tokens that were left over. So the place of a reader is where its block begins (epoch,
document, tokens into it) and how many of its windows were read, whatever the size of the data or of
a block: a resumed reader gathers the same block again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal.node.batches import Batches
from shoal.node.data.sharding import stable_hash
from shoal.node.data.source import DataError, DocumentSource, Place, no_document
from shoal.node.data.tokenizer import Tokenizer
from shoal.node.task import Shard

EMPTY_EPOCHS = 64
"""Epochs without a document for this shard, as may happen with little text, after which an error is
raised.
"""


@dataclass(frozen=True)
class _Segment:
    """Tokens of one document, ``offset`` tokens into it."""

    epoch: int
    place: Place
    offset: int
    tokens: Tensor


class Reader(Batches):
    """Endless batches (inputs, targets), int64 (batch, context) each, of the shard's part of
    ``source``.

    Args:
        shuffle: approximate number of tokens to gather and shuffle at once.

    Raises DataError: on ``next``, if there is no usable document, too little text, or a read fails.
    """

    def __init__(
        self,
        source: DocumentSource,
        tokenizer: Tokenizer,
        shard: Shard,
        *,
        context: int,
        batch: int,
        shuffle: int,
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._shard = shard
        self._context = context
        self._batch = batch
        self._most = max(1, shuffle // context)
        cut = f"{source.identity} {tokenizer.digest} {shard!r} {context} {self._most}"
        self._cut = hashlib.sha256(cut.encode()).hexdigest()[:32]
        self._begin(0, None, 0)
        self._block = 0
        self._skip = 0

    def _begin(self, epoch: int, place: Place | None, offset: int) -> None:
        self._start = (epoch, place, offset)
        self._stream = self._segments(epoch, place, offset)
        self._left: list[_Segment] = []
        self._windows = torch.empty(0, device="cpu")
        self._order = torch.empty(0, dtype=torch.int64, device="cpu")
        self._drawn = 0

    def __next__(self) -> tuple[Tensor, Tensor]:
        parts: list[Tensor] = []
        need = self._batch
        while need:
            if self._drawn == len(self._order):
                self._next_block()
            taken = self._order[self._drawn : self._drawn + need]
            parts.append(self._windows[taken])
            self._drawn += len(taken)
            need -= len(taken)
        # (batch, context + 1)
        batch = torch.cat(parts).long()
        return batch[:, :-1], batch[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next batch as a few numbers."""
        epoch, place, offset = self._start
        # Before its first batch a resumed reader has not gathered its block.
        drawn = self._drawn + self._skip
        return {
            "cut": self._cut,
            "epoch": epoch,
            "place": None if place is None else dict(place),
            "offset": offset,
            "block": self._block,
            "drawn": drawn,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``.

        DataError, and no change, if it is of other data, another shard, or cut otherwise.
        """
        if state.get("cut") != self._cut:
            raise DataError(
                "The checkpoint was trained on other data, or with another tokenizer, context or "
                f"shuffle: this is {self._source.what}: give the node what it had."
            )
        place = state.get("place")
        numbers = [state.get(key) for key in ("epoch", "offset", "block", "drawn")]
        are_counts = all(isinstance(n, int) and n >= 0 for n in numbers)
        if not are_counts or not (place is None or isinstance(place, dict)):
            raise DataError(
                "The checkpoint's place in the data is damaged: take an older checkpoint."
            )
        epoch, offset, block, drawn = (int(str(n)) for n in numbers)
        self._begin(epoch, place, offset)
        self._block = block
        self._skip = drawn

    def _segments(self, epoch: int, place: Place | None, offset: int) -> Iterator[_Segment | None]:
        """Yield the segments from that place on, without end; None after each epoch."""
        while True:
            for at, document in self._source.documents(self._shard, epoch, place):
                done = 0
                for piece in self._tokenizer.encode(document.content):
                    if done + len(piece) > offset:
                        before = max(0, offset - done)
                        yield _Segment(epoch, at, done + before, piece[before:])
                    done += len(piece)
                offset = 0
            yield None
            epoch += 1
            place = None
            offset = 0

    def _gather(self) -> list[_Segment]:
        """Gather enough for a block, or the rest of the epoch if that is a window at least."""
        want = self._most * self._context + 1
        found = self._left
        epochs = 0
        total = sum(len(segment.tokens) for segment in found)
        while total < want:
            segment = next(self._stream)
            if segment is not None:
                found.append(segment)
                total += len(segment.tokens)
            elif total > self._context:
                break
            else:
                epochs += 1
                self._check(epochs, total)
        return found

    def _check(self, epochs: int, total: int) -> None:
        shard = self._shard
        source = self._source
        if total == 0 and next(source.documents(Shard(0, 1, shard.seed), 0), None) is None:
            raise no_document(source)
        if epochs == EMPTY_EPOCHS:
            raise DataError(
                f"The shard {shard.index} of {shard.of} has only {total} tokens in {epochs} epochs "
                f"of {source.what}, where {self._context + 1} are needed: name more text with "
                "--data, or use fewer shards or a shorter context."
            )

    def _next_block(self) -> None:
        segments = self._gather()
        if self._order.numel():
            self._block += 1
        begin = segments[0]
        self._start = (begin.epoch, begin.place, begin.offset)
        tokens = torch.cat([segment.tokens for segment in segments])
        count = min(self._most, (len(tokens) - 1) // self._context)
        used = tokens[: count * self._context + 1]
        # (count, context + 1): each window begins with the last token of the one before.
        self._windows = used.unfold(0, self._context + 1, self._context)
        shard = self._shard
        seed = stable_hash("block", shard.seed, shard.index, shard.of, self._block)
        self._order = torch.randperm(
            count, generator=torch.Generator().manual_seed(seed >> 1), device="cpu"
        )
        if self._skip > count:
            raise DataError(
                f"{self._source.what} has less text than when the checkpoint was saved: give the "
                "node what it had."
            )
        self._drawn = self._skip
        self._skip = 0
        self._left = _without(segments, count * self._context)


def _without(segments: list[_Segment], count: int) -> list[_Segment]:
    """Return ``segments`` without their first ``count`` tokens."""
    for index, segment in enumerate(segments):
        if count < len(segment.tokens):
            rest = replace(segment, offset=segment.offset + count, tokens=segment.tokens[count:])
            return [rest, *segments[index + 1 :]]
        count -= len(segment.tokens)
    return []
