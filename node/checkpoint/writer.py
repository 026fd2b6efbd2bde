"""Saving checkpoints: the state is copied between two steps, and a thread writes it while training
goes on.

Where memory does not suffice for a copy, of up to 20 bytes a parameter, training stands still until
the tensors themselves are written, which takes about as long as the first copy did, or as the disk
is slow; the rest of the save goes on beside training.

There is one copy and one writer. A save that comes due while the previous one is being written is
postponed until that is done, and then saves the state of that moment: so a slow disk makes
checkpoints rarer, and neither queues nor memory grow. (In-memory snapshots and lazy writing:
DataStates-LLM, 2406.10707. Its copy in the background, during the next forward pass, is not used:
it saves little where slow weights and momentum are on the CPU anyway.)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shoal.node.checkpoint.folder import CheckpointError, listed
from shoal.node.checkpoint.packing import ABLE, Packed, UnpackableError, pack, shown
from shoal.node.checkpoint.snapshots import Snapshots
from shoal.node.checkpoint.store import prove, save
from shoal.node.lost_output import DISK_FULL
from shoal.node.user_code import device_failed, out_of_memory
from shoal.swarm.repeats import Repeats

GB = 10**9
SPARE_BYTES = 1 << 20
"""What a checkpoint takes beside its tensors."""


def used(folder: Path) -> int:
    """Return the bytes of all files below ``folder``; links are not followed."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # it was replaced meanwhile
                total += os.lstat(os.path.join(where, name)).st_size
    return total


PATIENCE_S = 60.0
"""What a save that is waited for may take, besides its bytes at the slowest rate."""
SLOWEST_BYTES_PER_S = 20e6
HOLDERS = {
    "model": "the model",
    "optimizer": "the optimizer",
    "inner": "the optimizer",
    "scheduler": "the learning-rate scheduler",
    "data": "the place in the data",
    "extra": "run.extra",
}
"""Whoever keeps what is found under a key of the state, for sentences."""


class CheckpointWriter:
    """Writer of one run's checkpoints; all calls come from its training thread.

    A save that fails costs only the checkpoint: training goes on, the newest stays, and ``notify``
    is called once, and once more when saving works again. But a state that no checkpoint can hold
    is an error at the first `turn`, before hours of training.

    Args:
        keep: number of checkpoints to keep.
        state: returns the state to save; called between two steps. Its tensors are copied before it
            is called again.
        at: called with each of `shoal.node.checkpoint.store.POINTS`, in the writing thread.
        gigabytes: budget of the folder's files; 0: none. Only older checkpoints are removed to make
            room for the next.
        copies: called with the bytes of memory that a copy would take, returns whether it may.
        check: called at the first `turn`; raises ShoalError if a run could not go on from the
            state.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        state: Callable[[], Any],
        notify: Callable[[str], None],
        at: Callable[[str], None] = lambda point: None,
        gigabytes: float = 0.0,
        copies: Callable[[int], bool] = lambda nbytes: True,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder.absolute()
        self._keep = keep
        self._state = state
        self._notify = notify
        self._at = at
        self._budget = gigabytes * GB
        self._copies = copies
        self._check = check
        self._size = 0
        """Bytes of the tensors of the last save."""
        self._released = threading.Event()
        """Set when training may change the tensors that are being written."""
        self._given_up = threading.Event()
        """Set when it does before it may."""
        self._snapshots = Snapshots()
        self._writer: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._said = Repeats()
        self._tried = False
        """True once a state could be packed."""
        self.due = False
        """Set it to True to save the state at the next `turn` at which no other save is being
        written.
        """

    @property
    def busy(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    @property
    def nbytes(self) -> int:
        """Bytes of memory kept for the copy."""
        return self._snapshots.nbytes

    def turn(self, step: int) -> None:
        """Begin a save that is due, and report how the previous one ended; call it between two
        steps.

        It waits for the disk only where there is no memory for a copy, 60 s and 50 s for each GB at
        most.

        Raises CheckpointError: at the first call: a checkpoint cannot hold the state, or no run
        could go on from it, and the sentence names who keeps what; or the budget cannot hold two of
        them.
        """
        if self.busy:
            return
        self._report()
        packed = None
        if not self._tried:
            try:
                packed = self._pack()
                prove(packed)
                self._check()
            except UnpackableError as error:
                raise _as_failure(error) from error
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                self._tried = True  # a later save says so
            else:
                # The newest stays until the next is whole.
                least = 2 * (_nbytes(packed) + SPARE_BYTES)
                if self._budget and least > self._budget:
                    raise CheckpointError(
                        f"node.disk allows {self._budget / GB:.3g} GB, and two checkpoints take "
                        f"{least / GB:.3g}: allow more."
                    )
                self._tell_room(least)
        if self.due:
            self.due = False
            self._begin(step, packed)
            if not self.busy:
                self._report()

    def _tell_room(self, least: int) -> None:
        """Say it if the disk has no room for the next two checkpoints, in place of those that are
        there.
        """
        with contextlib.suppress(OSError):  # the save says it
            self._folder.mkdir(parents=True, exist_ok=True)
            room = shutil.disk_usage(self._folder).free + used(self._folder)
            if room < least:
                self._notify(
                    f"The folder {str(self._folder)!r} has room for {room / GB:.3g} GB, and two "
                    f"checkpoints take {least / GB:.3g} GB: free some space or choose another "
                    "folder, or checkpoints will be missing."
                )

    def last(self, step: int, patience_s: float = PATIENCE_S) -> str | None:
        """Save the end of the run and wait ``patience_s`` and 50 s for each GB; return one sentence
        why that failed, or None.
        """
        end = time.monotonic() + patience_s
        self._wait(end)
        if not self.busy:
            self._report(said=True)  # what follows says how saving ended
            self._begin(step, last=True)
            self._wait(end + self._size / SLOWEST_BYTES_PER_S)
        if self.busy:
            self._given_up.set()
            return (
                f"The last checkpoint was not saved to {str(self._folder)!r} in time: the disk is "
                "too slow or hangs; the newest of the older checkpoints is whole."
            )
        failure = self._failure
        self._report(said=failure is not None)
        return None if failure is None else str(failure)

    def _wait(self, end: float) -> None:
        if self._writer is not None:
            self._writer.join(max(end - time.monotonic(), 0.0))

    def _begin(self, step: int, packed: Packed | None = None, *, last: bool = False) -> None:
        """Begin a save, of ``packed`` if given.

        The ``last`` needs no copy and is not waited for here, for no step follows it.
        """
        try:
            packed = packed or self._pack()
            self._size = _nbytes(packed)
            copied = not last and self._copies(max(self._size - self._snapshots.nbytes, 0))
            if copied:
                packed = self._snapshots.take(packed)
        except (CheckpointError, TypeError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not out_of_memory(error):
                raise
            self._failure = _as_failure(error)
            return
        if not copied:
            self._snapshots.clear()
        self._released = threading.Event()
        self._given_up = threading.Event()
        # A daemon: a disk that hangs must not keep the process from ending.
        arguments = (step, packed, copied, self._released, self._given_up)
        self._writer = threading.Thread(
            target=self._write, args=arguments, name="shoal-checkpoint", daemon=True
        )
        self._writer.start()
        if not copied and not last:
            is_free = self._released.wait(PATIENCE_S + self._size / SLOWEST_BYTES_PER_S)
            if not is_free:
                self._given_up.set()

    def _pack(self) -> Packed:
        packed = pack(self._state())
        self._tried = True
        return packed

    def _write(
        self,
        step: int,
        packed: Packed,
        copied: bool,
        free: threading.Event,
        given_up: threading.Event,
    ) -> None:
        def at(point: str) -> None:
            self._at(point)
            # What was written since may be of another step.
            if point == "block" and given_up.is_set():
                raise CheckpointError(
                    f"Cannot save a checkpoint to {str(self._folder)!r}: the disk is too slow or "
                    "hangs; choose another folder."
                )
            if point == "tensors":
                free.set()

        write = partial(
            save, self._folder, step, packed, keep=self._keep, at=at, hash_later=not copied
        )
        try:
            self._make_room(full=False)
            try:
                write()
            except CheckpointError as error:
                full = isinstance(error.__cause__, OSError) and error.__cause__.errno in DISK_FULL
                changed = free.is_set() and not copied  # by training, since they were written
                if not full or changed or not self._make_room(full=True):
                    raise
                write()
        # Whatever it is: a thread that ends without a word would look like a save that went well.
        except Exception as error:
            self._failure = _as_failure(error)
        finally:
            free.set()

    def _make_room(self, *, full: bool) -> bool:
        """Remove checkpoints, oldest first but never the last, until the next one fits, or all of
        them if the disk is ``full``.

        Return whether there were any. Raises CheckpointError: it does not fit into the budget.
        """
        older = [path for _, path in listed(self._folder)][:0:-1]
        found = bool(older)
        while (full and older) or self._exceeds_budget():
            if not older:
                needed = self._size + SPARE_BYTES
                raise CheckpointError(
                    f"The next checkpoint of {needed / GB:.3g} GB does not fit into "
                    f"the {self._budget / GB:.3g} GB that node.disk allows for "
                    f"{str(self._folder)!r}, besides the newest one: allow more."
                )
            shutil.rmtree(older.pop(0), ignore_errors=True)
        return found

    def _exceeds_budget(self) -> bool:
        """Return True if the next checkpoint does not fit beside what is there."""
        if not self._budget:
            return False
        return used(self._folder) + self._size + SPARE_BYTES > self._budget

    def _report(self, said: bool = False) -> None:
        """Report how the save that is over ended. ``said``: the caller says it if it failed."""
        if self._writer is None and self._failure is None:
            return
        failure = self._failure
        self._writer = None
        self._failure = None
        if failure is None and self._said.over("failed"):
            self._notify("Checkpoints can be saved again.")
        elif failure is not None and self._said.due("failed") and not said:
            self._notify(
                f"{str(failure).rstrip('.')}; training goes on, and the next save is tried as "
                "usual."
            )


def _nbytes(packed: Packed) -> int:
    return sum(tensor.nbytes for tensor in packed.tensors.values())


def _as_failure(error: Exception) -> CheckpointError:
    """Return the error as CheckpointError.

    What is not known here is caused by the task: a type that no file holds.
    """
    if isinstance(error, CheckpointError):
        return error
    if out_of_memory(error):
        return CheckpointError(
            "There is no memory for the copy that a checkpoint is written from: train a smaller "
            "model, or save at the end only (node.checkpoint_every_rounds = 0)."
        )
    if device_failed(error):
        said = next(iter(str(error).splitlines()), "")[:200]
        return CheckpointError(
            f"Cannot save a checkpoint, for the device has failed ({said}): go on from the last "
            "one with --resume."
        )
    if isinstance(error, UnpackableError):
        known = [HOLDERS[key] for key in error.place if key in HOLDERS]
        holder = known[0] if known else "the state"
        where = "".join(f"[{key!r:.40}]" for key in error.place)
        kept = f"{type(error.value).__name__}{error.why} ({shown(error.value)})"
        return CheckpointError(
            f"Cannot save a checkpoint: {holder} keeps a {kept} at {where}, and a checkpoint holds "
            f"{ABLE}: keep one of them in its place."
        )
    return CheckpointError(
        f"Cannot save a checkpoint ({type(error).__name__}: {error}): change what the task's "
        "optimizer keeps."
    )
