"""A copy of a state's tensors, from which a checkpoint is written while training goes on."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.node.checkpoint.packing import Packed
from shoal.optim.device import copies_beside, give_pinned_back, pinned_bytes, pinned_like, wait_for


class Snapshots:
    """Copies of nested state in memory that is reused, because fresh pages cost more than the
    copying.

    Tensors on a GPU are copied to pinned memory together, and waited for once. Torch keeps pinned
    memory for later, in powers of two: it is taken in few pieces, and given back to the system with
    the copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._pinned: list[Tensor] = []

    @torch.no_grad()
    def take(self, packed: Packed) -> Packed:
        """Return a copy, consistent if nothing changes the state meanwhile.

        The previous copy is overwritten.

        Raises MemoryError or RuntimeError: memory does not suffice.
        """
        beside: dict[str, Tensor] = {}
        before = self._buffers
        self._buffers = {}
        for name, tensor in packed.tensors.items():
            if copies_beside(tensor.device):
                beside[name] = tensor
                continue
            buffer = before.pop(name, None)
            if buffer is None or _shaped(buffer) != _shaped(tensor):
                buffer = None  # before there is another
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            self._buffers[name] = buffer.copy_(tensor)
        if list(map(_shaped, self._pinned)) != list(map(_shaped, beside.values())):
            self._unpin()
            self._pinned = pinned_like(list(beside.values()))
        copies = dict(self._buffers)
        for (name, tensor), room in zip(beside.items(), self._pinned, strict=True):
            copies[name] = room.copy_(tensor, non_blocking=True)
        wait_for(tensor.device for tensor in beside.values())
        return Packed(packed.tree, {name: copies[name] for name in packed.tensors})

    def _unpin(self) -> None:
        if self._pinned:
            self._pinned.clear()
            give_pinned_back()

    def clear(self) -> None:
        self._buffers.clear()
        self._unpin()

    @property
    def nbytes(self) -> int:
        """Bytes of memory kept for the next copy."""
        return sum(buffer.nbytes for buffer in self._buffers.values()) + pinned_bytes(self._pinned)


def _shaped(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)
