"""Saving without stopping: a copy in memory between two steps, and a thread that writes it while training goes on.

There is one copy and one writer, never two. A save that comes due while the one before is still being written is put off until
that is done, and then saves the state as it is then: so a slow disk makes checkpoints rarer, and neither queues nor memory grow.
(In-memory snapshots and lazy writing: DataStates-LLM, 2406.10707. Its copy in the background, during the next forward pass, is not
followed: it saves little where slow weights and momentum are on the CPU anyway.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.node.checkpoint.store import CheckpointError, Packed, pack, save

PATIENCE_S = 60.0  # seconds that the last save may take, besides ...
SLOWEST = 20e6  # ... its bytes over so many a second

_Shaped = tuple[torch.dtype, tuple[int, ...], bool]


class Snapshots:
    """Copies of nested state, in memory that is taken once and used again: fresh pages cost more than the copying.

    A tensor on a GPU is copied to pinned memory, all at once, and waited for.
    """

    def __init__(self) -> None:
        self._buffers: dict[_Shaped, list[Tensor]] = {}

    @torch.no_grad()
    def take(self, state: Any) -> Packed:
        """A consistent copy of ``state``, if nothing changes it meanwhile; the copy before is overwritten.

        Raises:
            CheckpointError: there is no memory for it.
            TypeError: a checkpoint cannot hold ``state``.
        """
        packed = pack(state)
        free = {shaped: list(buffers) for shaped, buffers in self._buffers.items()}
        try:
            copies = {name: self._copy(tensor, free) for name, tensor in packed.tensors.items()}
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "memory" not in str(error):
                raise
            raise CheckpointError(
                "There is no memory for the copy that a checkpoint is written from: train a smaller model, or save at the end only "
                "(node.checkpoint_every_rounds = 0)."
            ) from error
        for device in {tensor.device for tensor in packed.tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        for shaped, buffers in free.items():  # what was not needed this time will not be the next
            unused = set(map(id, buffers))
            self._buffers[shaped] = [buffer for buffer in self._buffers[shaped] if id(buffer) not in unused]
        return Packed(packed.tree, copies)

    def _copy(self, tensor: Tensor, free: dict[_Shaped, list[Tensor]]) -> Tensor:
        shaped = (tensor.dtype, tuple(tensor.shape), tensor.is_cuda)
        buffers = free.setdefault(shaped, [])
        if buffers:
            buffer = buffers.pop()
        else:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers.setdefault(shaped, []).append(buffer)
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are kept for the next copy."""
        return sum(buffer.nbytes for buffers in self._buffers.values() for buffer in buffers)


class CheckpointWriter:
    """Saves checkpoints of one run; all calls come from its training thread.

    A save that fails costs nothing but the checkpoint: training goes on, the older ones stay, and ``say`` is told once, and once
    more when saving works again.

    Args:
        folder: where the checkpoints go.
        keep: how many are kept.
        state: what to save; called between two steps. Its tensors are copied before it is called again.
        say: told in one sentence each.
        at: told of each of ``checkpoint.POINTS``, in the writing thread.
        room: called with the bytes of a checkpoint before it is written, in that thread; CheckpointError if there is no room.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        state: Callable[[], Any],
        say: Callable[[str], None],
        at: Callable[[str], None] = lambda point: None,
        room: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._folder, self._keep, self._state, self._say, self._at = folder, keep, state, say, at
        self._room = room
        self._snapshots = Snapshots()
        self._writer: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._failing = False
        self.due = False
        """Set it true to have the state saved at the next ``turn`` at which no other save is being written."""

    @property
    def busy(self) -> bool:
        """A checkpoint is being written."""
        return self._writer is not None and self._writer.is_alive()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are kept for the copy."""
        return self._snapshots.nbytes

    def turn(self, step: int) -> None:
        """Between two steps: begin a save that is due, and say what became of the one before. Never waits for the disk."""
        if self.busy:
            return
        self._settle()
        if self.due:
            self.due = False
            self._begin(step)

    def last(self, step: int, patience_s: float = PATIENCE_S) -> str | None:
        """Save the end of the run and wait, ``patience_s`` and 50 s for each GB; why that failed, in one sentence, or None."""
        end = time.monotonic() + patience_s
        self._wait(end)
        if not self.busy:
            self._settle()
            self._begin(step)
            self._wait(end + self.nbytes / SLOWEST)
        if self.busy:
            return (
                f"The last checkpoint was not saved to {str(self._folder)!r} in time: the disk is too slow or hangs; the older "
                "checkpoints are as they were."
            )
        failure = self._failure
        self._settle()
        return None if failure is None else str(failure)

    def _wait(self, end: float) -> None:
        if self._writer is not None:
            self._writer.join(max(end - time.monotonic(), 0.0))

    def _begin(self, step: int) -> None:
        try:
            packed = self._snapshots.take(self._state())
        except (CheckpointError, TypeError) as error:
            self._failure = _as_failure(error)
            self._settle(done=True)
            return
        # A daemon: a disk that hangs must not keep the process from ending.
        self._writer = threading.Thread(target=self._write, args=(step, packed), name="shoal-checkpoint", daemon=True)
        self._writer.start()

    def _write(self, step: int, packed: Packed) -> None:
        try:
            self._room(sum(tensor.nbytes for tensor in packed.tensors.values()))
            save(self._folder, step, packed, keep=self._keep, at=self._at)
        except (CheckpointError, MemoryError, ValueError) as error:
            self._failure = _as_failure(error)

    def _settle(self, done: bool = False) -> None:
        """Say what became of the save that is over."""
        if self._writer is None and not done:
            return
        self._writer, failure, self._failure = None, self._failure, None
        if failure is not None and not self._failing:
            self._say(f"{str(failure).rstrip('.')}; training goes on, and the next save is tried as usual.")
        elif failure is None and self._failing:
            self._say("Checkpoints can be saved again.")
        self._failing = failure is not None


def _as_failure(error: Exception) -> CheckpointError:
    """What is no CheckpointError is of the task's making: a type that no file can hold, a state too large for memory."""
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"Cannot save a checkpoint ({type(error).__name__}: {error}): change what the task's optimizer keeps.")
