"""Memory for payloads, which goes back to the system when they are gone."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

SMALL = 1 << 20
"""Bytes below which it does not matter what malloc keeps."""
ALIGNMENT = 8
"""Bytes at whose multiples values of every type may begin."""


def buffer(nbytes: int) -> Tensor:
    """Return an uninitialised uint8 tensor on the CPU of ``nbytes`` elements, in memory that
    nothing else uses, and that goes back to the system with the last tensor in it.
    """
    if nbytes < SMALL:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {nbytes} bytes") from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return uninitialised tensors of the same types, shapes and devices, contiguous; those on the
    CPU are in one ``buffer``.
    """
    sizes = []
    for tensor in tensors:
        here = tensor.device.type == "cpu"
        sizes.append(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT if here else 0)
    pieces = torch.split(buffer(sum(sizes)), sizes)
    rooms = []
    for tensor, piece, size in zip(tensors, pieces, sizes, strict=True):
        if size:
            room = piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        else:
            room = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        rooms.append(room)
    return rooms
