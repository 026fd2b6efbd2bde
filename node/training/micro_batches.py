"""Equal parts of a batch, for gradient accumulation and for the ranks of a peer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shoal.node.batch import leaves, mapped
from shoal.node.training.errors import TrainingError


def rows(batch: Any) -> int | None:
    """Return the first dimension of the first tensor or array in ``batch`` that has one; None if there is none."""
    return next((len(leaf) for leaf in leaves(batch) if _has_rows(leaf)), None)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def cut(batch: Any, parts: int) -> list[Any]:
    """Return ``parts`` equal parts of ``batch``, in order, whatever holds its tensors (`shoal.node.batch`).

    Every tensor and array of which the first dimension is that of the first one (`rows`) is cut along it, as a view; all else is
    the same in each part.

    Raises TrainingError: the batch has no rows, or they do not divide.
    """
    if parts == 1:
        return [batch]
    count = rows(batch)
    if not count:
        kind = "None" if batch is None else f"an object of type {type(batch).__name__}"
        raise TrainingError(
            f"The task's batch, {kind}, has no tensor with rows to cut into {parts} parts: leave train.accumulate at 1, on one "
            "device."
        )
    if count % parts:
        raise TrainingError(
            f"A batch of {count} rows cannot be cut into {parts} equal parts: choose train.accumulate (times the devices) so that "
            "it divides the batch, or another batch size."
        )
    size = count // parts

    def part(number: int) -> Any:
        at = slice(number * size, (number + 1) * size)
        return mapped(batch, lambda leaf: leaf[at] if _has_rows(leaf) and len(leaf) == count else leaf)

    return [part(number) for number in range(parts)]
