"""Equal parts of a batch, for gradient accumulation and for the ranks of a peer.

    cut_batch({"x": torch.zeros(6, 3), "mask": torch.ones(3)}, 2)

These are two dicts: rows 0 to 2 and 3 to 5 of x; the mask, of another length, is whole in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch

from shoal.node.batch_contents import leaves, mapped
from shoal.node.batch_contents import parts as parts_of
from shoal.node.training.training_error import TrainingError


def batch_rows(batch: Any) -> int | None:
    """Return the first dimension of the first tensor or array in ``batch`` that has one; None if
    there is none.
    """
    for leaf in leaves(batch):
        if _has_rows(leaf):
            return len(leaf)
    return None


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def _uneven(batch: Any, count: int) -> str | None:
    """Return the type of an object of a library's own in ``batch`` whose tensors do not all have
    ``count`` rows, or None.

    In a dict, tuple, list or dataclass a tensor of another length is the same for all rows, such as
    a mask.
    """
    inside = parts_of(batch)
    if inside is None:
        return None
    if not isinstance(batch, Mapping | tuple | list) and not is_dataclass(batch):
        lengths = {len(leaf) for leaf in leaves(batch) if _has_rows(leaf)}
        if lengths - {count}:
            return type(batch).__name__
    for part in inside.values():
        kind = _uneven(part, count)
        if kind is not None:
            return kind
    return None


def cut_batch(batch: Any, parts: int) -> list[Any]:
    """Return ``parts`` equal parts of ``batch``, in order, whatever holds its tensors
    (`shoal.node.batch_contents`).

    Every tensor and array of which the first dimension is that of the first one (`batch_rows`) is
    cut along it, as a view; all else is the same in each part.

    Raises TrainingError: the batch has no rows, or they do not divide.
    """
    if parts == 1:
        return [batch]
    count = batch_rows(batch)
    if not count:
        kind = "None" if batch is None else f"an object of type {type(batch).__name__}"
        raise TrainingError(
            f"The task's batch, {kind}, has no tensor with rows to cut into {parts} parts: leave "
            "train.accumulate at 1, on one device."
        )
    if count % parts:
        raise TrainingError(
            f"A batch of {count} rows cannot be cut into {parts} equal parts: choose "
            "train.accumulate (times the devices) so that it divides the batch, or another batch "
            "size."
        )
    uneven = _uneven(batch, count)
    if uneven is not None:
        raise TrainingError(
            f"The batch holds an object of type {uneven} with tensors of other lengths than "
            f"{count}, such as a graph's edges, and cannot be cut into {parts} parts: leave "
            "train.accumulate at 1, on one device, or yield dicts of tensors with a row for each "
            "example."
        )
    size = count // parts

    def part(number: int) -> Any:
        rows = slice(number * size, (number + 1) * size)

        def cut(leaf: Any) -> Any:
            return leaf[rows] if _has_rows(leaf) and len(leaf) == count else leaf

        return mapped(batch, cut)

    return [part(number) for number in range(parts)]
