"""Protocol of sinks of metrics besides the file. When a sink fails, a sentence says so and training continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from shoal.node.metrics.catalogue import Fields
from shoal.swarm.errors import ShoalError


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
    """Receiver of events. All calls come from one thread, and return at once but for ``begin`` and ``close``."""

    name: str
    """Name for use in sentences."""

    def begin(self, about: About) -> str:
        """Begin before the first event; return a sentence for people, or nothing. MetricsError: it is not available."""

    def event(self, name: str, time: float, fields: Fields) -> None:
        """Take an event of ``time`` (Unix seconds). ``fields`` as in the file: plain, and without NaN."""

    def close(self) -> None:
        """End: write what is buffered, or give it up at a deadline. A second call does nothing."""


class Sinks:
    """All sinks of a node. A sink that raises is reported once, closed, and not used again."""

    def __init__(self, sinks: Sequence[MetricsSink], say: Callable[[str], None]) -> None:
        self._sinks, self._say = list(sinks), say

    def begin(self, about: About) -> None:
        """Begin all sinks before the first event. MetricsError: one is not available."""
        for sink in self._sinks:
            if said := sink.begin(about):
                self._say(said)

    def event(self, name: str, time: float, fields: dict[str, Any]) -> None:
        """Pass an event to all sinks."""
        for sink in tuple(self._sinks):
            try:
                sink.event(name, time, fields)
            except Exception as error:  # a run must not depend on other people's code
                self._sinks.remove(sink)
                self._give_up(sink, error)

    def close(self) -> None:
        """Close all sinks."""
        while self._sinks:
            sink = self._sinks.pop()
            try:
                sink.close()
            except Exception as error:
                self._say(f"{sink.name} did not get the last of the metrics ({one_line(error)}).")

    def _give_up(self, sink: MetricsSink, error: Exception) -> None:
        sentence = f"{sink.name} gets no metrics any more ({one_line(error)}); training goes on, and metrics.jsonl has them all."
        self._say(sentence)
        try:
            sink.close()
        except Exception as second:
            if one_line(second) != one_line(error):  # else all is said
                self._say(f"{sink.name} did not end well either ({one_line(second)}).")

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def one_line(error: Exception) -> str:
    """Return the text of an error in one line, or its type if it has none."""
    text = " ".join((getattr(error, "strerror", None) or str(error)).split()).rstrip(".")
    return text[:200] or type(error).__name__
