"""The thread in which a node verifies, beside training."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from shoal.optim.device import device_setter

STEP_EVERY_S = 0.1
JOIN_S = 10.0
"""To wait for the thread's end."""


class ServiceThread:
    """Thread on the accelerator of the thread that makes it; ``stopping`` is set when it is to
    end.
    """

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self._use_device = device_setter()
        self._thread: threading.Thread | None = None

    def start(
        self,
        prepare: Callable[[], None],
        step: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Call ``prepare`` once, then ``step`` every 0.1 s until `stop`; an error of either ends
        the thread and is given to ``failed``.
        """
        self._thread = threading.Thread(
            target=self._run, args=(prepare, step, failed), name="verification", daemon=True
        )
        self._thread.start()

    def _run(
        self,
        prepare: Callable[[], None],
        step: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        torch.set_num_threads(1)
        self._use_device()
        try:
            prepare()
            while not self.stopping.wait(STEP_EVERY_S):
                step()
        # Training must go on whatever happens here.
        except Exception as error:
            failed(error)

    def stop(self) -> None:
        """End the thread, and wait for that for `JOIN_S` at most."""
        self.stopping.set()
        self.join(JOIN_S)

    def join(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)
