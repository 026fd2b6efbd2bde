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
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from shoal.node.checkpoint.background_save import BackgroundSave
from shoal.node.checkpoint.folder import CheckpointError, listed
from shoal.node.checkpoint.packing import Packed, UnpackableError, pack
from shoal.node.checkpoint.save_failure import save_failure
from shoal.node.checkpoint.snapshots import Snapshots
from shoal.node.checkpoint.store import prove, save
from shoal.node.lost_output import DISK_FULL
from shoal.node.user_code import out_of_memory
from shoal.swarm.repeats import Repeats

GB = 10**9
SPARE_BYTES = 1 << 20
"""What a checkpoint takes beside its tensors."""


def used(folder: Path, uncounted: Collection[str] = ()) -> int:
    """Return the bytes of all files below ``folder``, ``uncounted`` folders in it apart; links are
    not followed.
    """
    total = 0
    for where, folders, names in os.walk(folder):
        if where == str(folder):
            folders[:] = [name for name in folders if name not in uncounted]
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # it was replaced meanwhile
                total += os.lstat(os.path.join(where, name)).st_size
    return total


PATIENCE_S = 60.0
"""What a save that is waited for may take, besides its bytes at the slowest rate."""
SLOWEST_BYTES_PER_S = 20e6


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
        gigabytes: budget of the folder's files, ``uncounted`` folders in it apart; 0: none. Only
            older checkpoints are removed for the next.
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
        uncounted: Collection[str] = (),
        copies: Callable[[int], bool] = lambda nbytes: True,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder.absolute()
        self._keep = keep
        self._state = state
        self._notify = notify
        self._at = at
        self._budget = gigabytes * GB
        self._uncounted = uncounted
        self._copies = copies
        self._check = check
        self._size = 0
        """Bytes of the tensors of the last save."""
        self._snapshots = Snapshots()
        self._current: BackgroundSave | None = None
        """The save that is under way, or whose end was not reported yet."""
        self._said = Repeats()
        self._tried = False
        """True once a state could be packed."""
        self.due = False
        """Set it to True to save the state at the next `turn` at which no other save is being
        written.
        """

    @property
    def busy(self) -> bool:
        return self._current is not None and self._current.is_running

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
                raise save_failure(error) from error
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
            room = shutil.disk_usage(self._folder).free + used(self._folder, self._uncounted)
            if room < least:
                self._notify(
                    f"The folder {str(self._folder)!r} has room for {room / GB:.3g} GB, and two "
                    f"checkpoints take {least / GB:.3g} GB: free some space or choose another "
                    "folder, or checkpoints will be missing."
                )

    def last(self, step: int, patience_s: float = PATIENCE_S) -> str | None:
        """Save the end of the run; return one sentence why that failed, or None.

        It waits ``patience_s`` and 50 s for each GB, and first as long for a save under way.
        """
        self._wait(patience_s)
        current = self._current
        if current is None or not current.is_running:
            self._report(said=True)  # what follows says how saving ended
            current = self._begin(step, last=True)
            self._wait(patience_s)
        if current.is_running:
            current.give_up()
            older = "the newest older one is whole" if listed(self._folder) else "there is no other"
            return (
                f"The last checkpoint was not saved to {str(self._folder)!r} in time: the disk is "
                f"too slow or hangs; {older}."
            )
        failure = current.failure
        self._report(said=failure is not None)
        return None if failure is None else str(failure)

    def _wait(self, patience_s: float) -> None:
        if self._current is not None:
            self._current.join(patience_s + self._size / SLOWEST_BYTES_PER_S)

    def _begin(
        self, step: int, packed: Packed | None = None, *, last: bool = False
    ) -> BackgroundSave:
        """Begin a save, of ``packed`` if given.

        The ``last`` needs no copy and is not waited for here, for no step follows it.
        """
        current = BackgroundSave()
        try:
            packed = packed or self._pack()
            self._size = _nbytes(packed)
            copied = not last and self._copies(max(self._size - self._snapshots.nbytes, 0))
            if copied:
                packed = self._snapshots.take(packed)
        except (CheckpointError, TypeError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not out_of_memory(error):
                raise
            current.failure = save_failure(error)
            self._current = current
            return current
        if not copied:
            self._snapshots.clear()
        self._current = current
        current.start(partial(self._write, current, step, packed, copied))
        if not copied and not last:
            current.wait_for_tensors(PATIENCE_S + self._size / SLOWEST_BYTES_PER_S)
        return current

    def _pack(self) -> Packed:
        packed = pack(self._state())
        self._tried = True
        return packed

    def _write(self, current: BackgroundSave, step: int, packed: Packed, copied: bool) -> None:
        """Write a save, in its own thread; again, with older checkpoints removed, if the disk is
        full.
        """

        def at(point: str) -> None:
            self._at(point)
            # What was written since may be of another step.
            if point == "block" and current.is_given_up:
                raise CheckpointError(
                    f"Cannot save a checkpoint to {str(self._folder)!r}: the disk is too slow or "
                    "hangs; choose another folder."
                )
            if point == "tensors":
                current.release()

        write = partial(
            save, self._folder, step, packed, keep=self._keep, at=at, hash_later=not copied
        )
        self._make_room(full=False)
        try:
            write()
        except CheckpointError as error:
            full = isinstance(error.__cause__, OSError) and error.__cause__.errno in DISK_FULL
            changed = current.is_released and not copied  # by training, since they were written
            if not full or changed or not self._make_room(full=True):
                raise
            write()

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
        taken = used(self._folder, self._uncounted)
        return taken + self._size + SPARE_BYTES > self._budget

    def _report(self, said: bool = False) -> None:
        """Report how the save that is over ended. ``said``: the caller says it if it failed."""
        if self._current is None:
            return
        failure = self._current.failure
        self._current = None
        if failure is None and self._said.over("failed"):
            self._notify("Checkpoints can be saved again.")
        elif failure is not None and not said and self._said.due("failed"):
            self._notify(
                f"{str(failure).rstrip('.')}; training goes on, and the next save is tried as "
                "usual."
            )


def _nbytes(packed: Packed) -> int:
    return sum(tensor.nbytes for tensor in packed.tensors.values())
