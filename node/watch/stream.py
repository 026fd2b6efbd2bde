"""Stream of events from a source to a view: a bounded queue, a recording on the way, and plain lines of JSON."""

from __future__ import annotations

import contextlib
import queue
import sys
import time
from collections.abc import Callable

from shoal.node.logs import is_lost
from shoal.node.watch.events import Event, line_of
from shoal.node.watch.recording import Recorder
from shoal.node.watch.source import EventSource

LOOK_S = 0.1


def event_sink(inbox: queue.Queue[Event], recorder: Recorder | None, *, drop: bool) -> Callable[[Event], None]:
    """Return the function that records and queues a source's events. If the queue is full the oldest event goes, or with ``drop``
    False (a replay) the source waits.
    """

    def send(event: Event) -> None:
        if recorder is not None:
            recorder.take(event)
        if not drop:
            inbox.put(event)
            return
        while True:
            try:
                inbox.put_nowait(event)
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    inbox.get_nowait()

    return send


def print_lines(inbox: queue.Queue[Event], source: EventSource, seconds: float | None) -> None:
    """Print events until the source ends and all are printed, time is up, or nobody reads them."""
    end = None if seconds is None else time.monotonic() + seconds
    while end is None or time.monotonic() < end:
        ended = source.ended.is_set()
        try:
            event = inbox.get(timeout=LOOK_S)
        except queue.Empty:
            if ended:
                return
            continue
        sys.stdout.write(line_of(event) + "\n")
        sys.stdout.flush()
        if is_lost(sys.stdout):
            return
