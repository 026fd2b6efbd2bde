"""Tensors in files that are mapped into memory, of which the system keeps there what there is room for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

ALIGNED = 64  # bytes


def in_file(folder: Path, like: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros of the same types and shapes in a file of their own in ``folder``, which is made if it is missing.

    The file has no name, so nothing is left of it when the tensors are gone, however the process ends.

    Raises:
        OSError: the folder cannot be written, or has no room for all of them.
    """
    sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in like]
    total = max(sum(sizes), ALIGNED)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, path = tempfile.mkstemp(prefix=".shoal-offload-", dir=folder)
    try:
        if hasattr(os, "posix_fallocate"):  # a disk that fills up later would end the process without a word
            os.posix_fallocate(descriptor, 0, total)
        storage = torch.UntypedStorage.from_file(path, True, total)
    finally:
        os.close(descriptor)
        os.unlink(path)
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)  # type: ignore[arg-type]  # torch's own annotation is too narrow
    pieces = torch.split(flat, [*sizes, total - sum(sizes)])
    return [piece[: t.nbytes].view(t.dtype).view(t.shape) for piece, t in zip(pieces, like, strict=False)]
