"""What a node is doing, and whether it moves: in its metrics, on its display and in its status while nothing else is written.

A step, an evaluation, a compilation or a download of a large model may take minutes. Meanwhile a second thread looks at the one
that trains, so that nobody takes silence for death, and a node that hangs is found out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from shoal.node.metrics.log import Metrics
from shoal.node.runtime.display import Display

ACTIVITY = "activity"
"""Name of the event in the metrics."""
BEAT_S = 10.0  # seconds of silence after which a line says what the node is doing
BUSY = 0.05  # part of the time for which a thread that computes has a processor at least, also on a loaded machine
MOVED = 100_000  # bytes, between two lines, that are more than what a node sends while it only waits


def processor_time() -> Callable[[], float]:
    """Return a clock of the seconds for which the calling thread has had a processor; of the whole process on macOS."""
    try:
        clock = time.pthread_getcpuclockid(threading.get_ident())
    except (AttributeError, OSError):
        return time.process_time
    return lambda: time.clock_gettime(clock)


class Activity:
    """The activity of the thread that makes it. While its block lasts, another thread calls `beat`.

    Args:
        metrics: gets an event ``activity`` whenever it got no other for `BEAT_S` seconds.
        display: shows it.
        clock, busy: seconds that have passed, and seconds for which the thread had a processor.
    """

    def __init__(
        self,
        metrics: Metrics,
        display: Display,
        *,
        clock: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] | None = None,
    ) -> None:
        self._metrics, self._display, self._clock = metrics, display, clock
        self._busy = busy or processor_time()
        self._now, self._since, self._bounded = "starting", clock(), False
        self._phases: list[dict[str, str | float]] | None = []
        self._phase("starting")
        self._last = (clock(), self._busy(), (0, 0))
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.progress: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Returns the inner steps done and the bytes moved so far, once there is a trainer and a host."""
        self.on_change: Callable[[str], None] = lambda doing: None
        """Called with the name of each new activity."""

    @contextmanager
    def doing(self, what: str, *, bounded: bool = False) -> Iterator[None]:
        """Be at ``what``, such as "evaluating", in this block; then again at what it was before.

        ``bounded``: it waits for a disk or the network with a deadline of its own, and so counts as alive throughout.
        """
        before, self._bounded = (self._now, self._bounded), bounded
        self._begin(what)
        try:
            yield
        finally:
            doing, self._bounded = before
            self._begin(doing)

    def _begin(self, what: str) -> None:
        self._now, self._since = what, self._clock()
        self._phase(what)
        self.on_change(what)

    def _phase(self, doing: str) -> None:
        if self._phases is not None:
            self._phases.append({"doing": doing, "time": time.time(), "cpu_s": time.process_time()})

    def stepped(self) -> None:
        """Write what the node did up to now, if this was its first step: Unix time and processor time at each beginning."""
        self._phase("first step done")
        if self._phases is not None:
            self._metrics.note("begun", phases=self._phases)
            self._phases = None

    def beat(self) -> None:
        """Write and show what the node is doing, if nothing was written for a while."""
        now, silent = self._clock(), self._metrics.silent()
        if silent < BEAT_S:
            return
        busy, (steps, moved) = self._busy(), self.progress()
        before, used, (steps_then, moved_then) = self._last
        self._last = (now, busy, (steps, moved))
        moves = busy - used >= BUSY * (now - before) or steps > steps_then or moved - moved_then >= MOVED
        alive = moves or self._bounded
        doing, seconds = self._now, now - self._since
        self._metrics.note("activity", doing=doing, seconds=seconds, busy_s=busy - used, step=steps, moved=moved, alive=alive)
        self._display.activity(f"{doing}, {seconds:.0f} s so far" + ("" if alive else " (nothing moves)"))

    def __enter__(self) -> Activity:
        self._thread = threading.Thread(target=self._run, name="shoal-activity", daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._ended.wait(BEAT_S / 5):
            self.beat()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
