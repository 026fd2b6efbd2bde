"""Recordings of ``--record`` and ``--replay``: files of events, one a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

from shoal.node.watch.events import MAX_LINE, Event, ReplayError, event_of, line_of
from shoal.swarm.errors import ShoalError

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
