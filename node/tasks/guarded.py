"""The user's task as Shoal calls it: each method behind a boundary, and each result of the type
that training needs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shoal.node.batches import Batches, LoadedBatches, NumberedBatches, iterator_of
from shoal.node.task import NAMED, Shard, Task
from shoal.node.user_code import UserCodeError, calling
from shoal.optim.outer.averaged import fault_of

_END = object()


class Guarded(Task):
    """Task that calls the user's ``task``; ``name`` is that of its class.

    Other attributes are the task's own.

    Methods raise UserCodeError, or a ShoalError that the task raised itself.
    """

    user_subject: str

    def __init__(self, task: Task, name: str) -> None:
        self._task = task
        self.user_subject = f"Your task {name!r}"
        self.draws_with_model = bool(task.draws_with_model)

    def __getattr__(self, name: str) -> Any:
        if name in ("_task", "user_subject"):  # not there yet while it is copied
            raise AttributeError(name)
        return getattr(self._task, name)

    def _wrong(self, function: str, found: Any, needed: str) -> UserCodeError:
        kind = "None" if found is None else f"an object of type {type(found).__name__}"
        return UserCodeError(
            f"{self.user_subject}: {function} returned {kind}, and must return {needed}."
        )

    def _fault(self, function: str, what: str) -> UserCodeError:
        return UserCodeError(f"{self.user_subject}: {function} {what}.")

    def _call(self, name: str, *args: Any) -> Any:
        with calling(self, f"{name}()"):
            return getattr(self._task, name)(*args)

    def model(self) -> nn.Module:
        """Return the user's model, with at least one trainable parameter, all of known shape."""
        found = self._call("model")
        if not isinstance(found, nn.Module):
            raise self._wrong("model()", found, "a torch.nn.Module")
        trained = [parameter for parameter in found.parameters() if parameter.requires_grad]
        if not trained:
            raise self._fault(
                "model()",
                "returned a model of which every parameter is frozen: let some require a gradient",
            )
        for name, parameter in found.named_parameters():
            fault = fault_of(parameter) if parameter.requires_grad else ""
            if fault:
                raise self._fault("model()", f"returned a model whose {name!r} {fault}")
        return found

    def batches(self, shard: Shard) -> Iterator[Any]:
        return self._iterator(self._call("batches", shard), shard, "batches()")

    def batches_from(self, shard: Shard, step: int) -> Iterator[Any]:
        """Return the user's batches after the first ``step`` ones; their iterator is guarded
        too.
        """
        return self._iterator(self._call("batches_from", shard, step), shard, "batches_from()")

    def _iterator(self, found: Any, shard: Shard, function: str) -> Iterator[Any]:
        with calling(self, function):
            found = iterator_of(found, shard)
        if not hasattr(found, "__next__"):
            raise self._wrong(
                function,
                found,
                "an iterator without end (write `while True: yield batch`), a Dataset or a "
                "DataLoader",
            )
        if isinstance(found, NumberedBatches):
            return _Numbered(self, found, function)
        if isinstance(found, Batches):
            return _OwnPlace(self, found, function)
        return _Iterator(self, found, function)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        found = self._call("loss", model, batch)
        needed = "a scalar tensor with a gradient"
        if not isinstance(found, torch.Tensor):
            raise self._wrong("loss()", found, needed)
        if found.ndim != 0 or found.is_complex():
            raise self._fault(
                "loss()",
                f"returned a {found.dtype} tensor of shape {list(found.shape)}, and must return "
                f"{needed}",
            )
        if torch.is_grad_enabled() and not found.requires_grad:
            raise self._fault(
                "loss()",
                "returned a tensor without a gradient: compute it from the model, without detach()",
            )
        return found

    def evaluate(self, model: nn.Module) -> float:
        found = self._call("evaluate", model)
        return self._number("evaluate()", found, "the held-out loss as a number")

    def _number(self, function: str, found: Any, needed: str) -> float:
        try:
            return float(found)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise self._wrong(function, found, needed) from None

    def tokens(self, batch: Any) -> int:
        found = self._call("tokens", batch)
        number = self._number("tokens()", found, "a whole number of at least 1")
        is_default = type(self._task).tokens is Task.tokens
        if is_default and number == 0:
            raise self._fault("batches()", "yielded an empty batch, and must leave it out")
        if not math.isfinite(number) or number < 1:
            raise self._fault(
                "tokens()", f"returned {number:g}, and must return a whole number of at least 1"
            )
        return int(number)

    def agreed_options(self) -> dict[str, int | float | str | bool]:
        found: dict[str, int | float | str | bool] = self._call("agreed_options")
        if not _is_flat(found, (int, float, str)):
            raise self._wrong(
                "agreed_options()", found, "a dict of names with numbers, texts or truth values"
            )
        return found

    def extra_results(self, loss: float) -> dict[str, int | float]:
        found: dict[str, int | float] = self._call("extra_results", loss)
        if not _is_flat(found, (int, float)):
            raise self._wrong("extra_results()", found, "a dict of names with Python's own numbers")
        return found

    def optimizer_takes_names(self) -> bool:
        return NAMED in inspect.signature(self._task.inner_optimizer).parameters

    def inner_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the user's optimizer of ``params``, or of pairs with names if it asks for them."""
        found = self._call("inner_optimizer", params)
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

    def lr_scheduler(
        self, optimizer: torch.optim.Optimizer, steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler | None:
        found: torch.optim.lr_scheduler.LRScheduler | None = self._call(
            "lr_scheduler", optimizer, steps
        )
        if found is not None and not (hasattr(found, "step") and hasattr(found, "state_dict")):
            raise self._wrong(
                "lr_scheduler()", found, "a scheduler of torch.optim.lr_scheduler, or None"
            )
        return found


def _is_flat(found: Any, kinds: tuple[type, ...]) -> bool:
    if not isinstance(found, dict):
        return False
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, kinds):
            return False
    return True


class _Iterator(Iterator[Any]):
    """The user's batches."""

    def __init__(self, task: Guarded, inner: Iterator[Any], function: str) -> None:
        self._of = task
        self._inner = inner
        self._function = function
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
        self._of = task
        self._inner = inner
        self._function = function
        self.next_number = inner.next_number

    def batch(self, number: int) -> Any:
        with calling(self._of, self._function):
            return self._inner.batch(number)


class _OwnPlace(_Iterator, Batches):
    """The user's batches that save their position."""

    _inner: Batches

    def state_dict(self) -> dict[str, Any]:
        with calling(self._of, "batches().state_dict()"):
            return self._inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with calling(self._of, "batches().load_state_dict()"):
            self._inner.load_state_dict(state)
