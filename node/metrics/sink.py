"""Who else is told what a run measured, and what happens when one of them fails: one sentence, and training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from shoal.node.metrics.catalogue import Fields
from shoal.swarm.errors import ShoalError


class MetricsError(ShoalError):
    """The metrics file cannot be written, or what the user asked for besides cannot be had."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What is the same throughout a run."""

    swarm: str
    """Name of the swarm, for people."""
    swarm_id: str
    node: str
    peer: str
    method: str
    task: str
    device: str
    version: str


class Sink(Protocol):
    """Takes events. All calls come from one thread, and return at once but for ``begin`` and ``close``."""

    name: str
    """In sentences."""

    def begin(self, about: About) -> str:
        """Before the first event; returns a sentence for people, or nothing. MetricsError: it cannot be had after all."""

    def event(self, name: str, time: float, fields: Fields) -> None:
        """Something happened at ``time`` (Unix seconds). ``fields`` as in the file: plain, and without NaN."""

    def close(self) -> None:
        """The run is over: what is held back is written, or given up at a deadline. A second call does nothing."""


class Sinks:
    """All of a node. One that raises is told of once, closed, and not asked again."""

    def __init__(self, sinks: Sequence[Sink], say: Callable[[str], None]) -> None:
        self._sinks, self._say = list(sinks), say

    def begin(self, about: About) -> None:
        """Before the first event. MetricsError: what the user asked for cannot be had after all."""
        for sink in self._sinks:
            if said := sink.begin(about):
                self._say(said)

    def event(self, name: str, time: float, fields: dict[str, Any]) -> None:
        """To all."""
        for sink in tuple(self._sinks):
            try:
                sink.event(name, time, fields)
            except Exception as error:  # other people's code, of which a run must not depend
                self._sinks.remove(sink)
                self._give_up(sink, error)

    def close(self) -> None:
        """The run is over."""
        while self._sinks:
            sink = self._sinks.pop()
            try:
                sink.close()
            except Exception as error:
                self._say(f"{sink.name} did not get the last of the metrics ({one_line(error)}).")

    def _give_up(self, sink: Sink, error: Exception) -> None:
        told = f"{sink.name} gets no metrics any more ({one_line(error)}); training goes on, and metrics.jsonl has them all."
        self._say(told)
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
    """What an error says, within a line; its kind if it says nothing."""
    text = " ".join((getattr(error, "strerror", None) or str(error)).split()).rstrip(".")
    return text[:200] or type(error).__name__
