"""What is inside a batch: its leaves, their number, and moving them to a device.

Containers in a batch are mappings (transformers' BatchEncoding), sequences, named tuples,
dataclasses, and, by their attributes, other objects that have a ``to``. All else is a leaf.
"""

from __future__ import annotations

import copy
import logging
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Number
from typing import Any

import numpy as np
import torch

from shoal.node.user_code import UserCodeError, failed, summary

log = logging.getLogger(__name__)

_SEQUENCES = (tuple, list, UserList, deque)
"""Others may be ranges, or draw their items from a disk."""
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
        names = [field.name for field in fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)} | own
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
        # Its keys are its attributes.
        if getattr(like, "__dict__", None) is like:
            return make(inside)
        # Keeps all that such a type has beside its items.
        new = copy.copy(like)
        for key, part in inside.items():
            new[key] = part
        return new
    if isinstance(like, _SEQUENCES):
        items = inside.values()
        # A named tuple takes them one by one.
        return make(*items) if hasattr(like, "_fields") else make(items)
    new = copy.copy(like)
    for name, part in inside.items():
        # The dataclass may be frozen.
        object.__setattr__(new, name, part)
    return new


def elements(batch: Any) -> int:
    """Return the number of elements of the first tensor in ``batch``, else of the first NumPy
    array; 1 if there is neither.
    """
    first_array: Any = None
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            return leaf.numel()
        if first_array is None and isinstance(leaf, np.ndarray):
            first_array = leaf
    if first_array is not None:
        return int(first_array.size)
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
    # Dicts move their values only, not what lies deeper.
    if _has_to(batch) and not isinstance(batch, dict | UserDict):
        held = () if inside is None else leaves(batch)
        tensors = [leaf for leaf in held if isinstance(leaf, torch.Tensor)]
        if device.type == "cpu" and all(tensor.device == device for tensor in tensors):
            return batch
        return _moved(batch, device)
    if inside is None:
        if device.type != "cpu" and not isinstance(batch, _PLAIN):
            _say_opaque(type(batch).__name__)
        return batch
    return _with(batch, inside, lambda part: to_device(part, device))


def _moved(value: Any, device: torch.device) -> Any:
    """Return the object ``value`` as its own ``to`` moves it. Raises UserCodeError."""
    try:
        # It may be the data set's own.
        new = copy.copy(value)
        moved = new.to(device)
    except Exception as error:
        subject = f"The object of type {type(value).__name__} in a batch"
        raise failed(subject, "to(device)", error) from error
    return new if moved is None else moved


def _has_to(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "to", None))


@cache
def _say_opaque(kind: str) -> None:
    """Warn of an object that nobody can look into, once for each type."""
    log.warning(
        "A batch holds an object of type %s, which Shoal cannot look into: its tensors are neither "
        "counted nor moved, so yield a dict, a list or a dataclass of tensors, or give it a "
        "to(device) and the task a tokens(batch).",
        kind,
    )
