"""Wrapper that runs a slow sink (a disk, a remote server) in a thread of its own, so that training never waits for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from shoal.node.metrics.catalogue import Fields
from shoal.node.metrics.sink import About, MetricsSink

MOST_WAITING = 10_000  # events: an hour's outage at two a second
END_S = 30.0  # seconds to write waiting events at the end of the run

_Call = Callable[[], None]


class SinkError(Exception):
    """Sink that was given up, because it fell too far behind or took too long at the end."""


class Background:
    """Runner of ``sink``'s calls, in order, in a thread. An error there is raised by the next call here."""

    def __init__(self, sink: MetricsSink, most: int = MOST_WAITING, end_s: float = END_S) -> None:
        self.name, self._sink, self._end_s = sink.name, sink, end_s
        self._calls: queue.Queue[_Call | None] = queue.Queue(most)
        self._failed: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"metrics to {sink.name}", daemon=True)

    def begin(self, about: About) -> str:
        """Begin the sink in the caller's thread, so that an error ends the start."""
        said = self._sink.begin(about)
        self._thread.start()
        return said

    def event(self, name: str, time: float, fields: Fields) -> None:
        """Queue an event. Raises the error of an earlier call, and SinkError if too many wait."""
        self._check()
        try:
            self._calls.put_nowait(lambda: self._sink.event(name, time, fields))
        except queue.Full:
            raise SinkError(f"it takes nothing, and {self._calls.maxsize} events wait") from None

    def close(self) -> None:
        """Write waiting events, then end. Raises SinkError if that took longer than its deadline."""
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
