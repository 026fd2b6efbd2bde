"""The user's task as Shoal calls it: each method behind a boundary, and each result of the type that training needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shoal.node.task import Batches, LoadedBatches, NumberedBatches, Shard, Task, iterator_of
from shoal.node.user_code import UserCodeError, calling

_END = object()


class Guarded(Task):
    """Task that calls the user's ``task``; ``name`` is that of its class. Other attributes are the task's own.

    Methods raise UserCodeError, or a ShoalError that the task raised itself.
    """

    user_subject: str

    def __init__(self, task: Task, name: str) -> None:
        self._task, self.user_subject = task, f"Your task {name!r}"
        self.draws_with_model = bool(task.draws_with_model)

    def __getattr__(self, name: str) -> Any:
        if name in ("_task", "user_subject"):  # not there yet while it is copied
            raise AttributeError(name)
        return getattr(self._task, name)

    def _wrong(self, function: str, found: Any, needed: str) -> UserCodeError:
        kind = "None" if found is None else f"an object of type {type(found).__name__}"
        return UserCodeError(f"{self.user_subject}: {function} returned {kind}, and must return {needed}.")

    def _fault(self, function: str, what: str) -> UserCodeError:
        return UserCodeError(f"{self.user_subject}: {function} {what}.")

    def model(self) -> nn.Module:
        """Return the user's model, with at least one trainable parameter, all of known shape."""
        with calling(self, "model()"):
            found = self._task.model()
        if not isinstance(found, nn.Module):
            raise self._wrong("model()", found, "a torch.nn.Module")
        trained = [parameter for parameter in found.parameters() if parameter.requires_grad]
        if not trained:
            raise self._fault("model()", "returned a model of which every parameter is frozen: let some require a gradient")
        if any(nn.parameter.is_lazy(parameter) for parameter in trained):
            raise self._fault("model()", "returned a model with lazy layers: call it once with an example before you return it")
        return found

    def batches(self, shard: Shard) -> Iterator[Any]:
        """Return the user's batches; their iterator is guarded too."""
        with calling(self, "batches()"):
            found = self._task.batches(shard)
        return self._iterator(found, shard, "batches()")

    def batches_from(self, shard: Shard, step: int) -> Iterator[Any]:
        """Return the user's batches after the first ``step`` ones; their iterator is guarded too."""
        with calling(self, "batches_from()"):
            found = self._task.batches_from(shard, step)
        return self._iterator(found, shard, "batches_from()")

    def _iterator(self, found: Any, shard: Shard, function: str) -> Iterator[Any]:
        with calling(self, function):
            found = iterator_of(found, shard)
        if not hasattr(found, "__next__"):
            raise self._wrong(
                function, found, "an iterator without end (write `while True: yield batch`), a Dataset or a DataLoader"
            )
        if isinstance(found, NumberedBatches):
            return _Numbered(self, found, function)
        return _OwnPlace(self, found, function) if isinstance(found, Batches) else _Iterator(self, found, function)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the user's loss, a scalar with a gradient."""
        with calling(self, "loss()"):
            found = self._task.loss(model, batch)
        needed = "a scalar tensor with a gradient"
        if not isinstance(found, torch.Tensor):
            raise self._wrong("loss()", found, needed)
        if found.ndim != 0 or found.is_complex():
            raise self._fault("loss()", f"returned a {found.dtype} tensor of shape {list(found.shape)}, and must return {needed}")
        if torch.is_grad_enabled() and not found.requires_grad:
            raise self._fault("loss()", "returned a tensor without a gradient: compute it from the model, without detach()")
        return found

    def evaluate(self, model: nn.Module) -> float:
        """Return the user's held-out loss."""
        with calling(self, "evaluate()"):
            found = self._task.evaluate(model)
        return self._number("evaluate()", found, "the held-out loss as a number")

    def _number(self, function: str, found: Any, needed: str) -> float:
        try:
            return float(found)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise self._wrong(function, found, needed) from None

    def tokens(self, batch: Any) -> int:
        """Return the user's number of tokens of a batch."""
        with calling(self, "tokens()"):
            found = self._task.tokens(batch)
        number = self._number("tokens()", found, "a whole number of at least 1")
        if not math.isfinite(number) or number < 1:
            raise self._fault("tokens()", f"returned {number:g}, and must return a whole number of at least 1")
        return int(number)

    def agreed_options(self) -> dict[str, int | float | str | bool]:
        """Return the user's further options of the swarm."""
        with calling(self, "agreed_options()"):
            found = self._task.agreed_options()
        if not _is_flat(found, (int, float, str)):
            raise self._wrong("agreed_options()", found, "a dict of names with numbers, texts or truth values")
        return found

    def extra_results(self, loss: float) -> dict[str, int | float]:
        """Return the user's further results."""
        with calling(self, "extra_results()"):
            found = self._task.extra_results(loss)
        if not _is_flat(found, (int, float)):
            raise self._wrong("extra_results()", found, "a dict of names with Python's own numbers")
        return found

    def inner_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the user's optimizer."""
        with calling(self, "inner_optimizer()"):
            found = self._task.inner_optimizer(params)
        if not isinstance(found, torch.optim.Optimizer):
            raise self._wrong("inner_optimizer()", found, "a torch.optim.Optimizer")
        return found

    def hidden_matrices(self, model: nn.Module) -> list[str]:
        """Return the user's names of the parameters that Muon trains."""
        with calling(self, "hidden_matrices()"):
            found = self._task.hidden_matrices(model)
            names = None if isinstance(found, str) else list(found)
        if names is None or not all(isinstance(name, str) for name in names):
            raise self._wrong("hidden_matrices()", found, "a list of names of parameters")
        return names

    def lr_scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Return the user's scheduler, or None."""
        with calling(self, "lr_scheduler()"):
            found = self._task.lr_scheduler(optimizer, steps)
        if found is not None and not (hasattr(found, "step") and hasattr(found, "state_dict")):
            raise self._wrong("lr_scheduler()", found, "a scheduler of torch.optim.lr_scheduler, or None")
        return found


def _is_flat(found: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(found, dict) and all(isinstance(key, str) and isinstance(value, kinds) for key, value in found.items())


class _Iterator(Iterator[Any]):
    """The user's batches."""

    def __init__(self, task: Guarded, inner: Iterator[Any], function: str) -> None:
        self._of, self._inner, self._function = task, inner, function
        self.own_workers = inner.own_workers if isinstance(inner, LoadedBatches) else None

    def __next__(self) -> Any:
        with calling(self._of, self._function):
            batch = next(self._inner, _END)
        if batch is _END:
            raise StopIteration
        return batch


class _Numbered(NumberedBatches):
    """The user's batches by number."""

    def __init__(self, task: Guarded, inner: NumberedBatches, function: str) -> None:
        self._of, self._inner, self._function = task, inner, function
        self.next_number = inner.next_number

    def batch(self, number: int) -> Any:
        """Return the user's batch ``number``."""
        with calling(self._of, self._function):
            return self._inner.batch(number)


class _OwnPlace(_Iterator, Batches):
    """The user's batches that save their position."""

    _inner: Batches

    def state_dict(self) -> dict[str, Any]:
        """Return the user's position."""
        with calling(self._of, "batches().state_dict()"):
            return self._inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position of the user's."""
        with calling(self._of, "batches().load_state_dict()"):
            self._inner.load_state_dict(state)
