"""A sink that may be slow (a disk, somebody's server) in a thread of its own: training never waits for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from shoal.node.metrics.catalogue import Fields
from shoal.node.metrics.sink import About, MetricsError, Sink

MOST_WAITING = 10_000  # events: with two a second, what an hour's outage leaves
END_S = 30.0  # seconds for what waits, once the run is over

_Call = Callable[[], None]


class SinkError(Exception):
    """The sink fell so far behind, or took so long at the end, that it was given up."""


class Background:
    """``sink``, a call behind the other in its thread. What it raised there, the next call raises here."""

    def __init__(self, sink: Sink, most: int = MOST_WAITING, end_s: float = END_S) -> None:
        self.name, self._sink, self._end_s = sink.name, sink, end_s
        self._calls: queue.Queue[_Call | None] = queue.Queue(most)
        self._failed: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"metrics to {sink.name}", daemon=True)

    def begin(self, about: About) -> str:
        """At once and here, so that what cannot be had ends the start."""
        said = self._sink.begin(about)
        self._thread.start()
        return said

    def event(self, name: str, time: float, fields: Fields) -> None:
        """Soon. Raises what an earlier call raised, and SinkError if too much waits."""
        self._check()
        try:
            self._calls.put_nowait(lambda: self._sink.event(name, time, fields))
        except queue.Full:
            raise SinkError(f"it takes nothing, and {self._calls.maxsize} events wait") from None

    def close(self) -> None:
        """Write what waits, then end. SinkError: that took longer than its deadline."""
        if self._closed:
            return
        self._closed = True
        if not self._thread.is_alive():
            self._check()  # nothing was begun, or what was has ended by itself
            return
        try:
            self._calls.put(None, timeout=self._end_s)
        except queue.Full:
            raise SinkError("it takes nothing") from None
        self._thread.join(self._end_s)
        if self._thread.is_alive():
            raise SinkError(f"it was not done within {self._end_s:g} s")
        self._check()

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        try:
            while (call := self._calls.get()) is not None:
                call()
        except Exception as error:
            self._failed = error
        try:
            self._sink.close()
        except Exception as error:
            self._failed = self._failed or error


def installed(module: str, what: str, extra: str) -> None:
    """Raise MetricsError unless ``module``, which ``what`` needs, can be imported; ``extra`` of shoal's holds it."""
    from importlib.util import find_spec

    try:
        found = find_spec(module) is not None
    except (ImportError, ValueError):  # a package above it is missing, or was put in place by hand
        found = False
    if not found:
        raise MetricsError(f"{what} needs the package {module}, which is not installed: run pip install 'shoal[{extra}]'.")
