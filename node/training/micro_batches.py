"""Equal parts of a batch, for gradient accumulation and for the ranks of a peer."""

from __future__ import annotations

from typing import Any

import torch

from shoal.node.training.errors import TrainingError


def rows(batch: Any) -> int | None:
    """Return the first dimension of the first tensor in ``batch`` that has one; None if there is no such tensor."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else None
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else ()
    return next((found for part in parts if (found := rows(part)) is not None), None)


def cut(batch: Any, parts: int) -> list[Any]:
    """Return ``parts`` equal parts of ``batch``, in order: any nesting of tuples, lists and dicts of tensors.

    Every tensor of which the first dimension is that of the first tensor (`rows`) is cut along it, as a view; all else is the same
    in each part.

    Raises:
        TrainingError: the batch has no rows, or they do not divide.
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
    return [_part(batch, count, count // parts, number) for number in range(parts)]


def _part(batch: Any, count: int, size: int, number: int) -> Any:
    if isinstance(batch, torch.Tensor):
        whole = not batch.ndim or len(batch) != count
        return batch if whole else batch[number * size : (number + 1) * size]
    if isinstance(batch, tuple | list):
        items = [_part(item, count, size, number) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)  # a named tuple takes them one by one
    if isinstance(batch, dict):
        return {key: _part(item, count, size, number) for key, item in batch.items()}
    return batch
