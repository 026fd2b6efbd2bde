"""The interface of a user's own task: a class with these methods (``examples/custom_model.py``).

A class that has the methods need not derive from ``Task``; deriving brings the defaults of the optional ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from shoal.swarm.errors import OuterError
from shoal.swarm.training.shard import Shard as Shard


def elements(batch: Any) -> int:
    """Return the number of elements of the first tensor in ``batch``; 1 if there is none."""
    first = _first_tensor(batch)
    return 1 if first is None else first.numel()


def _first_tensor(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else ()
    return next((found for part in parts if (found := _first_tensor(part)) is not None), None)


class Batches(Iterator[Any]):
    """Batches with a position that a checkpoint holds, so that a resumed run need not draw earlier ones again."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch: dicts and lists of numbers, texts and tensors; small."""
        raise NotImplementedError("batches that can be continued need state_dict()")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position ``state``, with the same batches. ShoalError, and no change, if it cannot."""
        raise NotImplementedError("batches that can be continued need load_state_dict(state)")


class Task:
    """A model, its data and its loss. The same class with the same options runs on every peer."""

    def model(self) -> torch.nn.Module:
        """Return the fresh model, on the CPU. The global torch seed is set before, so all peers begin equal."""
        raise NotImplementedError("a task needs model()")

    def batches(self, shard: Shard) -> Iterator[Any]:
        """Yield batches without end: CPU tensors in any nesting of tuples, lists and dicts.

        The sequence must depend on ``shard`` alone, else a resumed run cannot continue where it was. It may be ``Batches``.
        """
        raise NotImplementedError("a task needs batches(shard)")

    def batches_from(self, shard: Shard, step: int) -> Iterator[Any]:
        """Return ``batches(shard)`` after the first ``step`` ones, for a resumed run. Default: draw these and drop them."""
        return itertools.islice(self.batches(shard), step, None)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the training loss of one batch, a scalar; ``batch`` is already on the model's device."""
        raise NotImplementedError("a task needs loss(model, batch)")

    def evaluate(self, model: torch.nn.Module) -> float:
        """Return the loss in nats on held-out data: the same data on every peer, on which no peer trains."""
        raise NotImplementedError("a task needs evaluate(model)")

    def tokens(self, batch: Any) -> int:
        """Return the tokens of a batch, for weights of peers and lengths of rounds. Default: the size of its first tensor."""
        return elements(batch)

    def agreed_options(self) -> dict[str, int | float | str | bool]:
        """Return further options that all peers must share, such as a digest of a file. Default: none."""
        return {}

    def extra_results(self, loss: float) -> dict[str, int | float]:
        """Return further results of a run that ended with ``loss`` of ``evaluate``, for result.json. Default: none."""
        return {}

    def inner_optimizer(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of the local steps. Default: AdamW, lr 3e-4, betas (0.9, 0.99)."""
        return torch.optim.AdamW(params, lr=3e-4, betas=(0.9, 0.99))

    def lr_scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Return a scheduler, stepped after each inner step, for a run of ``steps`` (0: no end). Default: none."""
        return None


def tokens_in(task: Any, batch: Any) -> int:
    """Return the task's ``tokens(batch)``, or if it has none the number of elements of the first tensor, else 1.

    OuterError unless that is at least 1.
    """
    own = getattr(task, "tokens", None)
    tokens = int(own(batch)) if callable(own) else elements(batch)
    if tokens < 1:
        raise OuterError(f"A batch counts {tokens} tokens: the task's tokens(batch) must return a whole number of at least 1.")
    return tokens
