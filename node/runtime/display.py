"""The display of a run: a live bar on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from typing import Protocol, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from shoal.node.metrics.log import RoundRecord
from shoal.swarm.errors import printable

LINE_EVERY_S = 10.0


class Display(Protocol):
    """A display of a run. All calls return at once and may come from any thread."""

    def start(self, total_steps: int) -> None:
        """Begin; ``total_steps`` of 0 means without end."""

    def update(self, step: int, loss: float, steps_per_s: float, tokens_per_s: float = 0.0, mfu: float | None = None) -> None:
        """Show an inner step: the number of steps done, its training loss in nats, and the speed without waiting."""

    def round(self, info: RoundRecord) -> None:
        """Show a round."""

    def activity(self, text: str) -> None:
        """Show what the node has been doing for a while, such as an evaluation."""

    def message(self, text: str) -> None:
        """Show one line about an event."""

    def close(self) -> None:
        """End and leave the terminal as it was; a second call does nothing."""


def _number(value: float | None, form: str) -> str:
    return format(value, form) if value is not None and math.isfinite(value) else "-"


def per_second(tokens_per_s: float, mfu: float | None) -> str:
    """Return tokens a second, and model FLOPs utilisation where it is known, for people."""
    return f"{_number(tokens_per_s, ',.0f')} tokens/s" + ("" if mfu is None else f", {_number(100 * mfu, '.0f')} % MFU")


def lag_words(lag: int, auto: bool = False, *, late: bool = False) -> str:
    """Return a lag in inner steps for people: whether the node chose it, and whether an exchange came later than expected."""
    return f"{lag} step{'' if lag == 1 else 's'}" + (" (auto)" if auto else "") + (" (late)" if late else "")


def describe(info: RoundRecord) -> str:
    """Describe one exchange in one line."""
    lag = f", lag {lag_words(info.lag, late=info.late)}" if info.lag else ""
    alone = f"without a partner ({printable(info.why)})" if info.why else "without a partner"
    partner = alone if info.partner is None else f"with {printable(info.partner)}"
    part = f", fragment {info.fragment + 1} of {info.fragments}," if info.fragment < info.fragments > 1 else ""
    loss = "" if (known := _number(info.loss, ".4f")) == "-" else f"loss {known}, "  # none where no step was between two exchanges
    moved = f"up {info.bytes_sent / 1e6:.2f} MB, down {info.bytes_received / 1e6:.2f} MB"
    return f"round {info.round // info.fragments}{part} {partner}: {loss}{moved}, wait {info.wait_s:.2f} s{lag}"


class LineDisplay:
    """A display in plain lines: one for each round and message, and one on the progress every ten seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._total = 0
        self._next = clock() + LINE_EVERY_S

    def start(self, total_steps: int) -> None:
        """Remember the total."""
        self._total = total_steps
        self._next = self._clock() + LINE_EVERY_S

    def update(self, step: int, loss: float, steps_per_s: float, tokens_per_s: float = 0.0, mfu: float | None = None) -> None:
        """Print at most every ten seconds."""
        if self._clock() >= self._next:
            self._next = self._clock() + LINE_EVERY_S
            of = f" of {self._total}" if self._total else ""
            tokens = f", {per_second(tokens_per_s, mfu)}" if tokens_per_s > 0 else ""
            self.message(f"step {step}{of}: loss {_number(loss, '.4f')}, {_number(steps_per_s, '.1f')} steps/s{tokens}")

    def round(self, info: RoundRecord) -> None:
        """Print the round."""
        self.message(describe(info))

    def activity(self, text: str) -> None:
        """Print ``text``."""
        self.message(text)

    def message(self, text: str) -> None:
        print(printable(text), file=self._stream, flush=True)

    def close(self) -> None:
        """Do nothing."""


class _ProgressAndRound(Progress):
    """A progress bar, and below it the tokens a second and the newest round, in as many lines as they need."""

    tokens = ""
    newest = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield all of it."""
        yield from super().get_renderables()
        if self.tokens:
            yield Text(self.tokens)
        yield Text(self.newest)  # Text: the partner's name is a stranger's, and no rich markup


class LiveDisplay:
    """A progress bar and the newest round on the last lines; messages scroll above."""

    def __init__(self, console: Console) -> None:
        self._progress = _ProgressAndRound(
            TextColumn("step {task.completed:.0f}{task.fields[of]}"),
            BarColumn(bar_width=16),
            TimeRemainingColumn(),
            TextColumn("loss {task.fields[loss]}, {task.fields[speed]} steps/s"),
            console=console,
        )
        self._task: TaskID | None = None

    def start(self, total_steps: int) -> None:
        """Show the bar."""
        of = f" of {total_steps}" if total_steps else ""
        self._task = self._progress.add_task("", total=total_steps or None, loss="-", speed="-", of=of)
        self._progress.start()

    def update(self, step: int, loss: float, steps_per_s: float, tokens_per_s: float = 0.0, mfu: float | None = None) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.tokens = per_second(tokens_per_s, mfu) if tokens_per_s > 0 else ""
            speed = _number(steps_per_s, ".1f")
            self._progress.update(self._task, completed=step, loss=_number(loss, ".3f"), speed=speed)

    def round(self, info: RoundRecord) -> None:
        """Show the round below the bar."""
        self._progress.newest = describe(info)

    def activity(self, text: str) -> None:
        """Show ``text`` below the bar, in the place of the newest round."""
        self._progress.newest = printable(text)

    def message(self, text: str) -> None:
        """Print ``text`` above the bar, in one line whatever the terminal's width, so that a link can be copied."""
        self._progress.console.print(Text(printable(text)), soft_wrap=True)  # Text: a stranger's name is no rich markup

    def close(self) -> None:
        """Stop the bar."""
        self._progress.stop()


def make_display(stream: TextIO | None = None) -> Display:
    """Return the display that suits ``stream`` (default: stderr): live on a terminal, else lines."""
    stream = stream or sys.stderr
    console = Console(file=stream)
    return LiveDisplay(console) if console.is_terminal else LineDisplay(stream)
