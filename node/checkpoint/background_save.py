"""A save that a thread writes while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shoal.node.checkpoint.folder import CheckpointError
from shoal.node.checkpoint.save_failure import save_failure


class BackgroundSave:
    """One save, from its begin until its end is reported.

    Where there is no copy of the state, the tensors themselves are written: training waits until
    they are released, or gives the save up and changes them.
    """

    def __init__(self) -> None:
        self.failure: CheckpointError | None = None
        """Why it failed; None while it runs, and if it went well."""
        self._released = threading.Event()
        self._given_up = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_released(self) -> bool:
        """True when training may change the tensors that are being written."""
        return self._released.is_set()

    @property
    def is_given_up(self) -> bool:
        """True when training changes them all the same, so that what follows may be mixed."""
        return self._given_up.is_set()

    def start(self, write: Callable[[], None]) -> None:
        """Call ``write`` in a thread of its own; what it raises is the failure."""
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="shoal-checkpoint", daemon=True
        )
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        # Whatever it is: a thread that ends without a word would look like a save that went well.
        except Exception as error:
            self.failure = save_failure(error)
        finally:
            self.release()

    def release(self) -> None:
        self._released.set()

    def give_up(self) -> None:
        self._given_up.set()

    def wait_for_tensors(self, seconds: float) -> None:
        """Wait until training may change the tensors, and give the save up if that takes longer."""
        if not self._released.wait(seconds):
            self.give_up()

    def join(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(max(seconds, 0.0))
