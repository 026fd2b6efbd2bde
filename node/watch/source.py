"""Sources of events: the swarm itself, or a recording. Each runs in a thread of its own until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from copy import deepcopy
from io import FileIO
from pathlib import Path
from typing import Protocol

from shoal.node.extras import uncollected
from shoal.node.logs import is_lost
from shoal.node.watch.events import MAX_LINE, Event, ReplayError, event_of, line_of
from shoal.node.watch.swarm_view import SwarmView
from shoal.swarm.access import Link
from shoal.swarm.errors import ShoalError

# Recordings of ``--record`` and ``--replay``: files of events, one a line.

PAUSE_MAX = 10.0  # longest pause of a replay, in seconds


class RecordError(ShoalError):
    """Failure to write a recording."""


class Recorder:
    """Writer of events to a new file; each line has left the process when `take` returns. Raises RecordError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: FileIO = path.open("xb", buffering=0)
        except FileExistsError:
            raise RecordError(f"{str(path)!r} exists already: name a new file, or move it away.") from None
        except OSError as error:
            raise self._error(error) from None

    def take(self, event: Event) -> None:
        """Append ``event``."""
        data = memoryview(line_of(event).encode() + b"\n")
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as error:
            raise self._error(error) from None

    def close(self) -> None:
        self._file.close()

    def _error(self, error: OSError) -> RecordError:
        return RecordError(f"Cannot record to {str(self._path)!r} ({error.strerror}): free some space or name another file.")


def recorded(path: Path) -> Iterator[Event]:
    """Yield the events in a recording, in order, without a last line that was cut short (by a kill). Raises ReplayError."""
    try:
        with path.open("r", encoding="utf-8", errors="replace") as file:
            number = 0
            while line := file.readline(MAX_LINE + 2):
                number += 1
                if not line.endswith("\n") and len(line) <= MAX_LINE:
                    return
                yield event_of(line.rstrip("\n"), f"line {number} of {str(path)!r}")
    except OSError as error:
        raise ReplayError(f"Cannot replay {str(path)!r} ({error.strerror}): give a file that --record wrote.") from None


def replay(path: Path, send: Callable[[Event], None], wait: Callable[[float], bool], speed: float = 1.0) -> None:
    """Send the events of a recording with their pauses, ``speed`` times as fast (0: without pauses).

    ``wait(seconds)`` returns True if the replay is to end. Raises ReplayError.
    """
    before: float | None = None
    for event in recorded(path):
        pause = min(max(event.time - before, 0.0), PAUSE_MAX) if before is not None else 0.0
        if speed > 0 and pause > 0 and wait(pause / speed):
            return
        before = event.time
        send(event)


# A recording as a whole, of which the view at any time can be asked for.

MAX_EVENTS = 500_000  # a longer recording has its slider over the first ones
KEPT_EACH = 5_000  # events after which a copy of the view is kept, so that going back is quick too


class Timeline:
    """The events in ``path``, read now. Not for several threads at once. Raises ReplayError."""

    def __init__(self, path: Path) -> None:
        self._events: list[Event] = []
        self._times: list[float] = []
        for event in recorded(path):
            if len(self._events) == MAX_EVENTS:
                break
            self._events.append(event)
            self._times.append(max(event.time, self._times[-1] if self._times else event.time))
        self._kept: dict[int, SwarmView] = {0: SwarmView()}
        self._at, self._view = 0, SwarmView()

    @property
    def span(self) -> tuple[float, float]:
        """Unix times of the first and the last event; two zeros if there is none."""
        return (self._times[0], self._times[-1]) if self._times else (0.0, 0.0)

    def view_at(self, time: float) -> tuple[SwarmView, bool]:
        """Return the view of all events up to ``time``, valid until the next call, and whether these are all."""
        wanted = bisect_right(self._times, time)
        near = max(number for number in self._kept if number <= wanted)
        if not near <= self._at <= wanted:
            self._at, self._view = near, deepcopy(self._kept[near])
        while self._at < wanted:
            self._view.take(self._events[self._at])
            self._at += 1
            if self._at % KEPT_EACH == 0 and self._at not in self._kept:
                self._kept[self._at] = deepcopy(self._view)
        return self._view, wanted == len(self._events)


END_S = 2.0  # seconds

Send = Callable[[Event], None]


class WatchError(ShoalError):
    """Failure to watch a swarm."""


class EventSource(Protocol):
    """Source of events for one receiver. ``ended`` is set when there will be no more."""

    ended: threading.Event

    def start(self) -> None:
        """Start the thread."""

    def stop(self) -> None:
        """End soon."""

    def check(self) -> None:
        """Raise the error with which it ended, if it ended with one."""


class _Thread:
    """Source whose work is `_work`; ``stop`` makes ``self._stopped`` true."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End, and wait `END_S` at most for the network daemon, which ends with this process in any case."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(END_S)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            self.ended.set()

    def _work(self) -> None:
        raise NotImplementedError


class Replay(_Thread):
    """Replay of the recording in ``path``, ``speed`` times as fast (0: at once)."""

    def __init__(self, path: Path, speed: float, send: Send) -> None:
        super().__init__()
        self._path, self._speed, self._send = path, speed, send

    def _work(self) -> None:
        replay(self._path, self._send, self._stopped.wait, self._speed)


class Live(_Thread):
    """Live events of the swarm of ``link``. Slow imports happen in its thread."""

    def __init__(self, link: Link, send: Send) -> None:
        super().__init__()
        self._link, self._send = link, send

    def _work(self) -> None:
        with uncollected():
            from shoal.node.watch.light_client import LightClient
        client = LightClient(self._link, self._send)

        async def until_stopped() -> None:
            watching = asyncio.ensure_future(client.run())
            while not self._stopped.is_set() and not watching.done():
                await asyncio.sleep(0.05)
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

        asyncio.run(until_stopped())


# Stream of events from a source to a view: a bounded queue, a recording on the way, and plain lines of JSON.

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
