"""The display of a run: a live bar on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

import rich.progress
from rich.console import Console, RenderableType
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from shoal.node.console import figure, plural
from shoal.node.metrics.log import Metrics, RoundRecord
from shoal.swarm.errors import printable
from shoal.swarm.figures import amount, duration
from shoal.swarm.internal_errors import OWN_ERROR

if TYPE_CHECKING:
    from shoal.node.training.meter import Progress

log = logging.getLogger(__name__)

LINE_EVERY_S = 10.0


def per_second(tokens_per_s: float, mfu: float | None) -> str:
    """Return tokens a second, and model FLOPs utilisation where it is known, for people."""
    return f"{figure(tokens_per_s, ',.0f')} tokens/s" + (
        "" if mfu is None else f", {figure(100 * mfu, '.0f')} % MFU"
    )


def lag_words(lag: int, auto: bool = False, *, late: bool = False) -> str:
    """Return a lag in inner steps for people: whether the node chose it, and whether an exchange
    came later than expected.
    """
    return plural(lag, "step") + (" (auto)" if auto else "") + (" (late)" if late else "")


def describe(info: RoundRecord) -> str:
    lag = f", lag {lag_words(info.lag_steps, late=info.late)}" if info.lag_steps else ""
    if info.error:
        where = "its traceback is in node.log"
        failed = f"{OWN_ERROR}, ended the exchange ({printable(info.error)}); {where}"
        return f"round {info.round // info.fragments}: {failed}"
    alone = f"without a partner ({printable(info.why)})" if info.why else "without a partner"
    partner = alone if info.partner is None else f"with {printable(info.partner)}"
    if info.partner is not None and info.members > 2:
        partner += f" and {info.members - 2} more"
    part = (
        f", fragment {info.fragment + 1} of {info.fragments},"
        if info.fragment < info.fragments > 1
        else ""
    )
    loss = (
        "" if (known := figure(info.loss, ".4f")) == "-" else f"loss {known}, "
    )  # none where no step was between two exchanges
    moved = f"up {amount(info.bytes_sent)}, down {amount(info.bytes_received)}"
    return (
        f"round {info.round // info.fragments}{part} {partner}: {loss}{moved}, wait "
        f"{duration(info.wait_s)}{lag}"
    )


class LineDisplay:
    """A display of a run in plain lines: one for each round and message, and one on the progress
    every ten seconds.

    All calls return at once and may come from any thread.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._total = 0
        self._next = clock() + LINE_EVERY_S
        self._over = False

    def start(self, total_steps: int) -> None:
        """Begin; ``total_steps`` of 0 means without end."""
        self._total = total_steps
        self._next = self._clock() + LINE_EVERY_S

    def resize(self, total_steps: int) -> None:
        """Go on with another number of steps; it may come before `start`."""
        self._total = total_steps

    def update(self, progress: Progress) -> None:
        """Print at most every ten seconds."""
        if self._clock() >= self._next and not self._over:
            self._next = self._clock() + LINE_EVERY_S
            of = f" of {self._total}" if self._total else ""
            speed = progress.rates
            tokens = (
                f", {per_second(speed.tokens_per_s, speed.mfu)}" if speed.tokens_per_s > 0 else ""
            )
            loss = figure(progress.loss, ".4f")
            self.message(
                f"step {progress.step}{of}: loss {loss}, {figure(speed.steps_per_s, '.1f')} "
                f"steps/s{tokens}"
            )

    def round(self, info: RoundRecord) -> None:
        self.message(describe(info))

    def activity(self, text: str) -> None:
        """Show what the node has been doing for a while, such as an evaluation."""
        if not self._over:
            self.message(text)

    def message(self, text: str) -> None:
        log.info("%s", printable(text))  # for the log file
        print(printable(text), file=self._stream, flush=True)

    def close(self) -> None:
        """End the progress: only messages are shown from now on. A second call does nothing."""
        self._over = True


class _ProgressAndRound(rich.progress.Progress):
    """A progress bar, and below it the tokens a second and the newest round, in as many lines as
    they need.
    """

    tokens = ""
    newest = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.tokens:
            yield Text(self.tokens)
        yield Text(self.newest)  # Text: the partner's name is a stranger's, and no rich markup


class LiveDisplay:
    """A progress bar and the newest round on the last lines; messages scroll above."""

    def __init__(self, console: Console) -> None:
        self._bar = _ProgressAndRound(
            TextColumn("step {task.completed:.0f}{task.fields[of]}"),
            BarColumn(bar_width=16),
            TimeRemainingColumn(),
            TextColumn("loss {task.fields[loss]}, {task.fields[speed]} steps/s"),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None

    def start(self, total_steps: int) -> None:
        of = f" of {total_steps}" if total_steps else ""
        self._task = self._bar.add_task("", total=total_steps or None, loss="-", speed="-", of=of)
        self._bar.start()

    def resize(self, total_steps: int) -> None:
        of = f" of {total_steps}" if total_steps else ""
        if self._task is not None:
            # rich takes a total of None for one that is not given: such a bar keeps its old end.
            self._bar.update(self._task, total=total_steps or None, of=of)

    def update(self, progress: Progress) -> None:
        if self._task is not None:
            speed = progress.rates
            loss = figure(progress.loss, ".3f")
            self._bar.tokens = (
                per_second(speed.tokens_per_s, speed.mfu) if speed.tokens_per_s > 0 else ""
            )
            self._bar.update(
                self._task,
                completed=progress.step,
                loss=loss,
                speed=figure(speed.steps_per_s, ".1f"),
            )

    def round(self, info: RoundRecord) -> None:
        self._bar.newest = describe(info)
        log.info("%s", self._bar.newest)

    def activity(self, text: str) -> None:
        self._bar.newest = printable(text)

    def message(self, text: str) -> None:
        """Print ``text`` above the bar, in one line whatever the terminal's width, so that a link
        can be copied.
        """
        log.info("%s", printable(text))
        self._bar.console.print(
            Text(printable(text)), soft_wrap=True
        )  # Text: a stranger's name is no rich markup

    def close(self) -> None:
        """Take the bar away, so that what is said next stands last. A second call does nothing."""
        self._bar.stop()


Display = LineDisplay | LiveDisplay


def make_display(stream: TextIO | None = None) -> Display:
    """Return the display that suits ``stream`` (default: stderr): live on a terminal, else
    lines.
    """
    stream = stream or sys.stderr
    console = Console(file=stream)
    return LiveDisplay(console) if console.is_terminal else LineDisplay(stream)


# What a node is doing, and whether it moves: in its metrics, on its display and in its status while
# nothing else is written.
#
# A step, an evaluation, a compilation or a download of a large model may take minutes. Meanwhile a
# second thread looks at the one that trains, so that nobody takes silence for death, and a node
# that hangs is found out.

ACTIVITY = "activity"
"""Name of the event in the metrics."""
BEAT_S = 10.0  # seconds of silence after which a line says what the node is doing
# part of the time for which a thread that computes has a processor at least, also on a loaded
# machine
BUSY = 0.05
MOVED = (
    100_000  # bytes, between two lines, that are more than what a node sends while it only waits
)


def processor_time() -> Callable[[], float]:
    """Return a clock of the seconds for which the calling thread has had a processor; of the whole
    process on macOS.
    """
    try:
        clock = time.pthread_getcpuclockid(threading.get_ident())
    except (AttributeError, OSError):
        return time.process_time
    return lambda: time.clock_gettime(clock)


class Activity:
    """The activity of the thread that makes it. While its block lasts, another thread calls `beat`.

    ``metrics`` gets an event ``activity`` whenever it got no other for `BEAT_S` seconds, and
    ``display`` shows it.
    """

    _clock = staticmethod(time.monotonic)

    def __init__(self, metrics: Metrics, display: Display) -> None:
        self._metrics = metrics
        self._display = display
        self._busy = processor_time()
        self._now, self._since, self._bounded = "starting", self._clock(), False
        self._told = False
        self._phases: list[dict[str, str | float]] | None = []
        self._phase("starting")
        self._last = (self._clock(), self._busy(), (0, 0))
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.progress: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Returns the inner steps done and the bytes moved so far, once there is a trainer and a
        host. Gossip is none of them: a node that hangs still sends statuses.
        """
        self.on_change: Callable[[str], None] = lambda doing: None
        """Called with the name of each new activity."""
        self.detail: Callable[[], str] = str
        """Returns how far the present activity is, for people; the next one has none."""

    @contextmanager
    def doing(self, what: str, *, bounded: bool = False, told: bool = False) -> Iterator[None]:
        """Be at ``what``, such as "evaluating", in this block; then again at what it was before.

        ``bounded``: it waits for a disk or the network with a deadline of its own, and so counts as
        alive throughout. ``told``: other lines say on the display how it goes, so only the metrics
        get the activity.
        """
        before = (self._now, self._bounded, self._told)
        self._bounded = bounded
        self._told = told
        self._begin(what)
        try:
            yield
        finally:
            doing, self._bounded, self._told = before
            self._begin(doing)

    def _begin(self, what: str) -> None:
        self._now, self._since, self.detail = what, self._clock(), str
        self._phase(what)
        self.on_change(what)

    def _phase(self, doing: str) -> None:
        if self._phases is not None:
            self._phases.append({"doing": doing, "time": time.time(), "cpu_s": time.process_time()})

    def stepped(self) -> None:
        """Write what the node did up to now, if this was its first step: Unix time and processor
        time at each beginning.
        """
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
        moves = (
            busy - used >= BUSY * (now - before)
            or steps > steps_then
            or moved - moved_then >= MOVED
        )
        alive = moves or self._bounded
        doing = self._now
        seconds = now - self._since
        self._metrics.note(
            "activity",
            doing=doing,
            seconds=seconds,
            busy_s=busy - used,
            step=steps,
            moved=moved,
            alive=alive,
        )
        if self._told:
            return
        detail = self.detail()
        self._display.activity(
            f"{doing}, {duration(round(seconds))} so far"
            + (f": {detail}" if detail else "")
            + ("" if alive else " (idle: nothing computed or received)")
        )

    def __enter__(self) -> Activity:
        self._thread = threading.Thread(target=self._run, name="shoal-activity", daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._ended.wait(BEAT_S / 5):
            self.beat()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
