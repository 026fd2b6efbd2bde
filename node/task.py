"""The interface of a user's own task: a class with these methods (``examples/custom_model.py``).

A class that has the methods need not derive from ``Task``; deriving brings the defaults of the
optional ones. What a batch may be: `shoal.node.batch_contents`; what else than an iterator
``batches`` may return: `shoal.node.batches`.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from shoal.node.batch_contents import elements
from shoal.node.batches import LoadedBatches, NumberedBatches, iterator_of
from shoal.optim.layers import hidden_matrices
from shoal.swarm.errors import OuterError
from shoal.swarm.training.shard import Shard as Shard

NAMED = "named_parameters"
"""Argument by which ``inner_optimizer`` asks for names."""


class Task:
    """A model, its data and its loss. The same class with the same options runs on every peer."""

    def model(self) -> torch.nn.Module:
        """Return the fresh model, on the CPU.

        The global torch seed is set before, so all peers begin equal.
        """
        raise NotImplementedError("a task needs model()")

    draws_with_model: bool = False
    """True if ``batches`` computes with the model, as reinforcement learning does: then no other
    process can draw them.
    """

    def batches(self, shard: Shard) -> Iterator[Any] | Dataset[Any] | DataLoader[Any]:
        """Yield batches without end: CPU tensors in any nesting of mappings, sequences, dataclasses
        and objects with a ``to``.

        The sequence must depend on ``shard`` alone, else a resumed run cannot continue where it
        was. Besides an iterator it may be

        * `shoal.node.batches.Batches`, which save their position;
        * a map-style Dataset whose item n is batch n: several workers then draw at once, and a
          resumed run need not draw again;
        * a torch DataLoader, with workers of its own if it has some; each pass is an epoch,
          shuffled by the shard's seed. A resumed run draws again what the epoch had, unless the
          loader has a state, as torchdata's StatefulDataLoader.
        """
        raise NotImplementedError("a task needs batches(shard)")

    def batches_from(self, shard: Shard, step: int) -> Iterator[Any]:
        """Return ``batches(shard)`` after the first ``step`` ones, for a resumed run.

        Default: draw these and drop them.
        """
        found = iterator_of(self.batches(shard), shard)
        if isinstance(found, NumberedBatches):
            found.next_number = step
            return found
        if isinstance(found, LoadedBatches):
            found.skip(step)
            return found
        return itertools.islice(found, step, None)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the training loss of one batch, a scalar; ``batch`` is already on the model's
        device.
        """
        raise NotImplementedError("a task needs loss(model, batch)")

    def evaluate(self, model: torch.nn.Module) -> float:
        """Return the loss in nats on held-out data: the same data on every peer, on which no peer
        trains.
        """
        raise NotImplementedError("a task needs evaluate(model)")

    def tokens(self, batch: Any) -> int:
        """Return the tokens of a batch, for weights of peers and lengths of rounds.

        Default: the size of its first tensor.
        """
        return elements(batch)

    def agreed_options(self) -> dict[str, int | float | str | bool]:
        """Return further options that all peers must share, such as a digest of a file.

        Default: none.
        """
        return {}

    def extra_results(self, loss: float) -> dict[str, int | float]:
        """Return further results of a run that ended with ``loss`` of ``evaluate``, for
        result.json. Default: none.
        """
        return {}

    def inner_optimizer(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of the local steps. Default: AdamW, lr 3e-4, betas (0.9, 0.99).

        ``params``: those that require a gradient. A method whose argument is called
        ``named_parameters`` gets pairs (name, parameter) in place of them, for groups by name.
        """
        return torch.optim.AdamW(params, lr=3e-4, betas=(0.9, 0.99))

    def optimizer_takes_names(self) -> bool:
        """Return whether ``inner_optimizer`` asks for names, by what its argument is called."""
        return NAMED in inspect.signature(self.inner_optimizer).parameters

    def hidden_matrices(self, model: torch.nn.Module) -> Iterable[str]:
        """Return the names of the parameters that Muon trains where the swarm has ``train.optimizer
        = "muon"``.

        Each is a trained parameter of two dimensions, by its name in ``model.named_parameters()``;
        AdamW trains all others. Default: ``shoal.hidden_matrices``.
        """
        return hidden_matrices(model)

    def lr_scheduler(
        self, optimizer: torch.optim.Optimizer, steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Return a scheduler, stepped after each inner step, for a run of ``steps`` (0: no end).

        Default: none.
        """
        return None


def tokens_in(task: Any, batch: Any) -> int:
    """Return the task's ``tokens(batch)``, or if it has none the number of elements of the first
    tensor, else 1.

    Raises OuterError unless that is at least 1.
    """
    own = getattr(task, "tokens", None)
    tokens = int(own(batch)) if callable(own) else elements(batch)
    if tokens < 1:
        raise OuterError(
            f"A batch counts {tokens} tokens: the task's tokens(batch) must return a whole number "
            "of at least 1."
        )
    return tokens
