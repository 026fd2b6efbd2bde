"""Batches with a position: what a task may return besides an iterator, so that a resumed run need
not draw earlier ones again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shoal.swarm.training.shard import Shard


class Batches(Iterator[Any]):
    """Batches with a position that a checkpoint holds, so that a resumed run need not draw earlier
    ones again.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch: dicts and lists of numbers, texts and tensors;
        small.
        """
        raise NotImplementedError("batches that can be continued need state_dict()")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position ``state``, with the same batches.

        Raises ShoalError, and changes nothing, if it cannot.
        """
        raise NotImplementedError("batches that can be continued need load_state_dict(state)")


class NumberedBatches(Iterator[Any]):
    """Batches that a map-style dataset gives by number: item n is batch n.

    Any of them can be had without those before it.

    A dataset with a length begins anew after its last item.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.next_number = 0

    def __next__(self) -> Any:
        self.next_number += 1
        return self.batch(self.next_number - 1)

    def batch(self, number: int) -> Any:
        """Return batch ``number``, counted over all epochs."""
        if hasattr(self._dataset, "__len__"):
            number %= len(self._dataset)
        return self._dataset[number]


class LoadedBatches(Batches):
    """Batches of a torch DataLoader, epoch after epoch, drawn by its own workers if it has some.

    Its generators are seeded anew for each epoch, from the shard and the number of the epoch, so
    that its order is known without the epochs before it; torch's and torchdata's own is not.
    ``set_epoch`` of its sampler and its dataset is called too.
    """

    def __init__(self, loader: Any, shard: Shard) -> None:
        self._loader = loader
        self._shard = shard
        self._epoch = 0
        self._drawn = 0
        """Batches of the epoch that were drawn."""
        self._to_drop = 0
        """Batches to draw and drop before the next one."""
        self._inner: Iterator[Any] | None = None
        self._parts = [loader, loader.sampler, loader.batch_sampler, loader.dataset]
        for part in self._parts:
            # The global one is the model's.
            if isinstance(getattr(part, "generator", ""), torch.Generator | None):
                part.generator = torch.Generator()

    @property
    def own_workers(self) -> Any:
        return self._loader if self._loader.num_workers else None

    def skip(self, count: int) -> None:
        """Draw ``count`` batches and drop them, before the next one."""
        self._to_drop += count

    def __next__(self) -> Any:
        while self._to_drop:
            self._next()
            self._to_drop -= 1
        return self._next()

    def _next(self) -> Any:
        # An epoch may have ended just now; a second one without any batch is the end.
        for _ in range(2):
            if self._inner is None:
                self._begin_epoch()
            try:
                batch = next(self._inner)  # type: ignore[arg-type]
            except StopIteration:
                self._inner = None
                self._drawn = 0
                self._epoch += 1
                continue
            self._drawn += 1
            return batch
        raise StopIteration

    def _begin_epoch(self) -> None:
        text = f"epoch {self._shard.seed} {self._shard.index} {self._shard.of} {self._epoch}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
        for part in self._parts:
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._epoch)
        self._inner = iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the place in it; of a loader with a state (torchdata's
        StatefulDataLoader) that too.
        """
        found = {
            "epoch": self._epoch,
            "drawn": self._drawn,
            "dropping": self._to_drop,
            "workers": self._loader.num_workers,
        }
        known = self._inner is not None and hasattr(self._loader, "load_state_dict")
        return {**found, "loader": self._loader.state_dict() if known else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``: from the loader's own, or if that is of another number of
        workers by drawing in its epoch.
        """
        self._epoch = int(state["epoch"])
        self._drawn = 0
        self._inner = None
        self._to_drop = int(state["drawn"]) + int(state["dropping"])
        is_of_loader = state["loader"] is not None and hasattr(self._loader, "load_state_dict")
        if is_of_loader and state["workers"] == self._loader.num_workers:
            self._loader.load_state_dict(state["loader"])
            self._drawn = int(state["drawn"])
            self._to_drop = int(state["dropping"])


def iterator_of(found: Any, shard: Shard) -> Any:
    """Return ``found``, what a task's ``batches(shard)`` returned, as an iterator; anything else
    than batches as it is.
    """
    if isinstance(found, DataLoader):
        return LoadedBatches(found, shard)
    if isinstance(found, Dataset) and not isinstance(found, IterableDataset):
        return NumberedBatches(found)
    return iter(found) if isinstance(found, IterableDataset) else found
