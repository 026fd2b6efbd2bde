"""The interface of a user's own task, a class with these methods (``examples/custom_model.py``),
and its batches.

A class that has the methods need not derive from ``Task``; deriving brings the defaults of the
optional ones. Containers in a batch are mappings (transformers' BatchEncoding), sequences, named
tuples, dataclasses, and, by their attributes, other objects that have a ``to``. All else is a leaf.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import itertools
import logging
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shoal.node.user_code import UserCodeError, failed, summary
from shoal.optim.layers import hidden_matrices
from shoal.swarm.errors import OuterError
from shoal.swarm.training.shard import Shard as Shard

log = logging.getLogger(__name__)

NAMED = "named_parameters"
"""Argument by which ``inner_optimizer`` asks for names."""

_SEQUENCES = (tuple, list, UserList, deque)  # others may be ranges, or draw their items from a disk
_PLAIN = (
    torch.Tensor,
    np.ndarray,
    np.generic,
    Number,
    str,
    bytes,
    bytearray,
    torch.dtype,
    torch.device,
    type(None),
)


def parts(value: Any) -> dict[Any, Any] | None:
    """Return what the container ``value`` holds, by key, place or attribute, in order; None if it
    is a leaf.
    """
    if isinstance(value, (*_PLAIN, type)):
        return None
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, _SEQUENCES):
        return dict(enumerate(value))
    own = getattr(value, "__dict__", {})
    if is_dataclass(value):
        return {
            field.name: getattr(value, field.name)
            for field in fields(value)
            if hasattr(value, field.name)
        } | own
    return dict(own) if own and _has_to(value) else None


def leaves(batch: Any) -> Iterator[Any]:
    """Yield the leaves of ``batch``, in order."""
    inside = parts(batch)
    if inside is None:
        yield batch
    else:
        for part in inside.values():
            yield from leaves(part)


def mapped(batch: Any, change: Callable[[Any], Any], *, anew: bool = False) -> Any:
    """Return ``batch`` with each leaf replaced by ``change(leaf)``, in containers of the same
    types; ``batch`` is not changed.

    A container of which nothing changed is kept as it is, unless ``anew``.

    Raises:
        UserCodeError: a container cannot be made anew with other parts.
    """
    inside = parts(batch)
    if inside is None:
        return change(batch)
    return _with(batch, inside, lambda part: mapped(part, change, anew=anew), anew=anew)


def _with(
    batch: Any, inside: dict[Any, Any], change: Callable[[Any], Any], *, anew: bool = False
) -> Any:
    changed = {key: change(part) for key, part in inside.items()}
    if not anew and all(changed[key] is part for key, part in inside.items()):
        return batch
    try:
        return _filled(batch, changed)
    except Exception as error:
        raise UserCodeError(
            f"The batch holds an object of type {type(batch).__name__}, which cannot be copied "
            f"with other tensors in it ({summary(error)}): yield dicts, lists or dataclasses of "
            "tensors."
        ) from error


def _filled(like: Any, inside: dict[Any, Any]) -> Any:
    make: Any = type(like)
    if make is dict:
        return inside
    if isinstance(like, Mapping):
        if not isinstance(like, MutableMapping):
            return make(inside) if make.__init__ is not object.__init__ else inside
        if getattr(like, "__dict__", None) is like:  # its keys are its attributes
            return make(inside)
        new = copy.copy(like)  # keeps all that such a type has beside its items
        for key, part in inside.items():
            new[key] = part
        return new
    if isinstance(like, _SEQUENCES):
        items = inside.values()
        return (
            type(like)(*items) if hasattr(like, "_fields") else type(like)(items)
        )  # a named tuple takes them one by one
    new = copy.copy(like)
    for name, part in inside.items():
        object.__setattr__(new, name, part)  # the dataclass may be frozen
    return new


def elements(batch: Any) -> int:
    """Return the number of elements of the first tensor in ``batch``, else of the first NumPy
    array; 1 if there is neither.
    """
    found: Any = None
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            return leaf.numel()
        found = leaf if found is None and isinstance(leaf, np.ndarray) else found
    if found is not None:
        return int(found.size)
    for leaf in leaves(batch):
        if not isinstance(leaf, _PLAIN):
            _say_opaque(type(leaf).__name__)
    return 1


def to_device(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with every tensor in it on ``device``; an object that is no dict moves
    itself, if it has a ``to``.

    Raises:
        UserCodeError: it failed to, or a container cannot be made anew with other parts.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    inside = parts(batch)
    if _has_to(batch) and not isinstance(
        batch, dict | UserDict
    ):  # those move their values only, not what lies deeper
        held = () if inside is None else leaves(batch)
        if device.type == "cpu" and all(
            leaf.device == device for leaf in held if isinstance(leaf, torch.Tensor)
        ):
            return batch
        try:
            new = copy.copy(batch)  # which may be the data set's own
            moved = new.to(device)
        except Exception as error:
            raise failed(
                f"The object of type {type(batch).__name__} in a batch", "to(device)", error
            ) from error
        return new if moved is None else moved
    if inside is None:
        if device.type != "cpu" and not isinstance(batch, _PLAIN):
            _say_opaque(type(batch).__name__)
        return batch
    return _with(batch, inside, lambda part: to_device(part, device))


def _has_to(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "to", None))


@cache  # once for each type
def _say_opaque(kind: str) -> None:
    log.warning(
        "A batch holds an object of type %s, which Shoal cannot look into: its tensors are neither "
        "counted nor moved, so yield a dict, a list or a dataclass of tensors, or give it a "
        "to(device) and the task a tokens(batch).",
        kind,
    )


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

        ShoalError, and no change, if it cannot.
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
        return self._dataset[
            number % len(self._dataset) if hasattr(self._dataset, "__len__") else number
        ]


class LoadedBatches(Batches):
    """Batches of a torch DataLoader, epoch after epoch, drawn by its own workers if it has some.

    Its generators are seeded anew for each epoch, from the shard and the number of the epoch, so
    that its order is known without the epochs before it; torch's and torchdata's own is not.
    ``set_epoch`` of its sampler and its dataset is called too.
    """

    def __init__(self, loader: Any, shard: Shard) -> None:
        self._loader = loader
        self._shard = shard
        self._epoch = self._drawn = self._to_drop = 0
        self._inner: Iterator[Any] | None = None
        self._parts = [loader, loader.sampler, loader.batch_sampler, loader.dataset]
        for part in self._parts:
            if isinstance(getattr(part, "generator", ""), torch.Generator | None):
                part.generator = torch.Generator()  # and not the global one, which is the model's

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
        for _ in range(
            2
        ):  # an epoch may have ended just now; a second one without any batch is the end
            if self._inner is None:
                self._begin_epoch()
            try:
                batch = next(self._inner)  # type: ignore[arg-type]
            except StopIteration:
                self._inner, self._drawn, self._epoch = None, 0, self._epoch + 1
                continue
            self._drawn += 1
            return batch
        raise StopIteration

    def _begin_epoch(self) -> None:
        text = f"epoch {self._shard.seed} {self._shard.index} {self._shard.of} {self._epoch}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
        for part in self._parts:
            if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                generator.manual_seed(seed)
            if callable(set_epoch := getattr(part, "set_epoch", None)):
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
        if (
            state["loader"] is not None
            and state["workers"] == self._loader.num_workers
            and hasattr(self._loader, "load_state_dict")
        ):
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

        * ``Batches``, which save their position;
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

    OuterError unless that is at least 1.
    """
    own = getattr(task, "tokens", None)
    tokens = int(own(batch)) if callable(own) else elements(batch)
    if tokens < 1:
        raise OuterError(
            f"A batch counts {tokens} tokens: the task's tokens(batch) must return a whole number "
            "of at least 1."
        )
    return tokens
