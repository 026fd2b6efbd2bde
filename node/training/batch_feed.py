"""The batches of one shard, on the device of the model.

    feed.open(shard)
    batch = feed.next(step)      # then learn from it
    feed.done()                  # now a checkpoint may hold the place after it

It keeps the place in the data, from which a resumed run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shoal.node.batch_contents import to_device
from shoal.node.batches import Batches, iterator_of
from shoal.node.task import Shard, Task
from shoal.node.training.loader import Loader
from shoal.node.training.training_error import BatchesEndedError
from shoal.optim.device import copies_beside


class BatchFeed:
    """Batches of ``task``, drawn by ``workers`` processes."""

    def __init__(self, task: Task, device: torch.device, workers: int) -> None:
        self.shard: Shard
        self._task = task
        self._device = device
        self._workers = workers
        self._loader: Loader | None = None
        self._is_learning = False
        """True while a batch is drawn and not learnt from."""

    def open(self, shard: Shard) -> None:
        """Begin with the first batch of ``shard``."""
        self.shard = shard
        self._load(self._begin())

    def resume(self, state: Any, steps: int) -> None:
        """Go on from a saved ``state``, or if there is none after as many ``steps``."""
        batches = self.find(state)
        if batches is None:
            batches = self._task.batches_from(self.shard, steps)
        self._load(batches)

    def find(self, state: Any) -> Iterator[Any] | None:
        """Return the batches that follow a saved ``state``, if these can.

        ShoalError if it is a place in other data.
        """
        if state is None:
            return None
        batches = self._begin()
        if not isinstance(batches, Batches):
            return None
        batches.load_state_dict(state)
        return batches

    def next(self, step: int) -> Any:
        """Return the next batch, on the device. BatchesEndedError if there is none at ``step``."""
        assert self._loader is not None  # since `open`
        try:
            batch = to_device(next(self._loader), self._device)
        except StopIteration:
            raise BatchesEndedError(
                f"The task's batches ended after {step} steps: batches(shard) must go on without "
                "end."
            ) from None
        self._is_learning = True
        return batch

    def done(self) -> None:
        """Take note that the last batch was learnt from."""
        self._is_learning = False

    def state_dict(self) -> Any:
        """Return the place in the data; None if there is none, as within a step."""
        if self._loader is None or self._is_learning:
            return None
        return self._loader.state_dict()

    def close(self) -> None:
        """End the workers that draw batches, if there are any; a second call does nothing."""
        if self._loader is not None:
            self._loader.close()

    def _begin(self) -> Iterator[Any]:
        batches: Iterator[Any] = iterator_of(self._task.batches(self.shard), self.shard)
        return batches

    def _load(self, batches: Iterator[Any]) -> None:
        self.close()
        self._loader = Loader(
            self._task,
            batches,
            workers=self._workers,
            pin=copies_beside(self._device),
            seed=(self.shard.seed + self.shard.index) % 2**63,
        )
