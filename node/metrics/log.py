"""Metrics of a run: the file ``metrics.jsonl``, a JSON object a line, and sinks for the same events
(docs/metrics.md).

When a sink fails, a sentence says so and training continues.
"""

from __future__ import annotations

import math
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shoal.node.console import dumps, finite
from shoal.swarm.errors import ShoalError, write_remedy
from shoal.swarm.repeats import Repeats
from shoal.swarm.wire.record import NodeRecord, Progress, Round

if TYPE_CHECKING:
    from shoal.optim import RoundInfo
    from shoal.swarm.training.record_keeper import RoundReport

Fields = Mapping[str, Any]
Value = None | bool | int | float | str | Sequence["Value"] | Mapping[str, "Value"]


class MetricsError(ShoalError):
    """Failure to write the metrics file, or to open a sink that the user asked for."""


@dataclass(frozen=True, kw_only=True)
class About:
    """Description of a run, constant throughout it."""

    swarm: str
    """Name of the swarm, for people."""
    swarm_id: str
    node: str
    peer: str
    method: str
    task: str
    device: str
    version: str


class MetricsSink(Protocol):
    """Receiver of events.

    All calls come from one thread, and return at once but for ``begin`` and ``close``.
    """

    name: str
    """Name for use in sentences."""

    def begin(self, about: About) -> str:
        """Begin before the first event; return a sentence for people, or nothing.

        MetricsError: it is not available.
        """

    def event(self, name: str, time: float, fields: Fields) -> None:
        """Take an event of ``time`` (Unix seconds).

        ``fields`` as in the file: plain, and without NaN.
        """

    def close(self) -> None:
        """End: write what is buffered, or give it up at a deadline. A second call does nothing."""


class Sinks:
    """All sinks of a node. A sink that raises is reported once, closed, and not used again."""

    def __init__(self, sinks: Sequence[MetricsSink], say: Callable[[str], None]) -> None:
        self._sinks = list(sinks)
        self._say = say

    def begin(self, about: About) -> None:
        """Begin all sinks before the first event. MetricsError: one is not available."""
        for sink in self._sinks:
            if said := sink.begin(about):
                self._say(said)

    def event(self, name: str, time: float, fields: dict[str, Any]) -> None:
        for sink in tuple(self._sinks):
            try:
                sink.event(name, time, fields)
            except Exception as error:  # a run must not depend on other people's code
                self._sinks.remove(sink)
                self._give_up(sink, error)

    def close(self) -> None:
        while self._sinks:
            sink = self._sinks.pop()
            try:
                sink.close()
            except Exception as error:
                self._say(f"{sink.name} did not get the last of the metrics ({one_line(error)}).")

    def _give_up(self, sink: MetricsSink, error: Exception) -> None:
        sentence = (
            f"{sink.name} gets no metrics any more ({one_line(error)}); training goes on, "
            "and metrics.jsonl has them all."
        )
        self._say(sentence)
        try:
            sink.close()
        except Exception as second:
            if one_line(second) != one_line(error):  # else all is said
                self._say(f"{sink.name} did not end well either ({one_line(second)}).")


def one_line(error: Exception) -> str:
    text = " ".join((getattr(error, "strerror", None) or str(error)).split()).rstrip(".")
    return text[:200] or type(error).__name__


def number(value: object) -> float | None:
    """Return ``value`` if it is a finite number, or the length of a list; None for all else."""
    if isinstance(value, (list, tuple)):
        return float(len(value))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


class RoundRecord(Round):
    """One exchange of this node, in a round of as many as there are fragments."""

    fragment: int = 0
    """Part of the model that was exchanged; ``fragments``: all of it, in the last average."""
    fragments: int = 1
    partner: str | None = None
    """Name or peer id of the partner; None when nobody answered."""
    why: str = ""
    """Why there was no partner, for people."""
    error: str = ""
    """First line of the error of this node's own code that ended the exchange; "" if none did."""
    lag_steps: int = 0
    """Inner steps between sending and applying."""
    late: bool = False
    """True if the mean came after the lag that its exchange was begun with."""
    weights: str | None = None
    """Digest of the fragment's slow weights, where all nodes of a group should hold the same."""
    contributions_refused: int = 0
    """Contributions that were refused since the last round because they were too far away."""
    progress: Progress = Progress()
    """That of the node when the exchange had ended."""

    @classmethod
    def of(
        cls,
        done: Round,
        info: RoundInfo,
        report: RoundReport,
        progress: Progress,
        fragments: int,
        *,
        partner: str | None,
        weights: str | None = None,
    ) -> RoundRecord:
        """Return the record of the exchange of ``info``, of which ``done`` is what others see."""
        return cls(
            **dict(done),
            fragment=info.key.fragment,
            fragments=fragments,
            partner=partner,
            why=report.why,
            error=report.error,
            lag_steps=info.lag,
            late=info.late,
            weights=weights,
            contributions_refused=len(report.rejected),
            progress=progress,
        )


class Metrics:
    """Writer of events to a file; each line has left the process when the call returns, so a kill
    loses none.

    ``say`` is given a sentence when lines cannot be written (a full disk), and when they can again;
    those in between are lost, and the run continues. Without it a failure is an error. ``sinks``
    get every event, whether it can be written or not.

    Raises:
        MetricsError: the file cannot be opened or written.
    """

    _clock = staticmethod(time.monotonic)

    def __init__(
        self, path: Path, say: Callable[[str], None] | None = None, sinks: Sinks | None = None
    ) -> None:
        self._path = path
        self._say = say
        self._sinks = sinks
        self._said = Repeats(self._clock)
        self._lock = threading.Lock()  # of the file: `note` is for any thread
        self._written = self._clock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: FileIO = path.open("ab", buffering=0)
            # Left by a process that was killed; do not spoil the next line too.
            self._in_mid_line = _ends_in_mid_line(path)
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> MetricsError:
        return MetricsError(
            f"Cannot write the metrics {str(self._path)!r} ({error.strerror}): "
            f"{write_remedy(error)} or choose another folder."
        )

    def begin(self, about: About) -> None:
        """Tell the sinks what run this is, before the first event."""
        if self._sinks is not None:
            self._sinks.begin(about)

    def write(self, event: str, **fields: Value) -> None:
        """Append one line: ``event``, ``time`` (Unix seconds) and the fields."""
        now = time.time()
        plain = {name: finite(value) for name, value in fields.items()}
        if self._sinks is not None:
            self._sinks.event(event, now, plain)
        self._write(event, now, plain)

    def note(self, event: str, **fields: Value) -> None:
        """Append one line that the sinks do not get; for any thread."""
        self._write(event, time.time(), {name: finite(value) for name, value in fields.items()})

    def silent(self) -> float:
        return self._clock() - self._written

    def _write(self, event: str, now: float, plain: Mapping[str, Value]) -> None:
        line = dumps({"event": event, "time": now, **plain}) + "\n"
        try:
            with self._lock:
                self._written = self._clock()
                self._append((b"\n" if self._in_mid_line else b"") + line.encode())
        except OSError as error:
            if self._say is None:
                raise self._error(error) from error
            if self._said.due("failed"):
                self._say(f"{str(self._error(error)).rstrip('.')}; training goes on without them.")
            return
        if self._said.over("failed") and self._say is not None:
            self._say("Metrics can be written again.")

    def _append(self, data: bytes) -> None:
        while data:
            done = self._file.write(data) or 0
            self._in_mid_line = data[:done][-1:] not in (b"\n", b"")
            data = data[done:]

    def live(self, event: str, **fields: Value) -> None:
        """Give an event to the sinks alone."""
        if self._sinks is not None:
            self._sinks.event(
                event, time.time(), {name: finite(value) for name, value in fields.items()}
            )

    def round(self, info: RoundRecord) -> None:
        self.write("round", **info.model_dump(mode="json"))

    def progress(self, record: NodeRecord) -> None:
        """Give the sinks the record of this node; the file gets none."""
        self.live("progress", **record.model_dump(mode="json"))

    def close(self) -> None:
        """Close the file, and remove it if it has no line; a second call does nothing."""
        if self._file.closed:
            return
        self._file.close()
        with suppress(OSError):
            about = self._path.lstat()
            # A device has no size either, and root may remove it.
            if stat.S_ISREG(about.st_mode) and about.st_size == 0:
                self._path.unlink()


def _ends_in_mid_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
