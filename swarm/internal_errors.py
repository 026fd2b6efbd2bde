"""Errors of this node's own code that training survives: counted by place, logged once, shown as
what they are.

What a peer provoked is a `MessageError` or a `NetworkError` and no business of this module. An
example:

    try:
        await self._publish()
    except NetworkError as error:
        log.info("not published: %s", error)
    except Exception as error:
        self._host.internal_errors.caught("directory", error)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from shoal.swarm.errors import ShoalError, printable

Place = Literal[
    "exchange", "codec", "screen", "trial", "stream", "gossip", "directory", "clock", "weights",
    "status", "network", "verification",
]  # fmt: skip
WHAT: dict[Place, str] = {
    "exchange": "in an exchange",
    "codec": "decoding a partner's contribution",
    "screen": "screening a partner's contribution",
    "trial": "trying a partner's weights on data (outer.check_loss)",
    "stream": "answering a call",
    "gossip": "in gossip",
    "directory": "keeping the directory of members",
    "clock": "comparing the clock",
    "weights": "handing out weights",
    "status": "sending the status",
    "network": "on the network's thread",
    "verification": "verifying claims",
}
"""What this node was doing, in words."""
OWN_ERROR = "an error in this node's own code, and not in the network"
MAX_LINE_CHARS = 200
"""Of an exception's first line that are kept."""
MAX_TRACEBACKS = 8
"""That are logged of each place; what comes after them is only counted."""

log = logging.getLogger(__name__)


class InternalError(ShoalError):
    """Raised where an error of this node's own, which is counted already, ends an exchange: no peer
    is to blame.
    """


class TrialError(Exception):
    """The error ``cause`` came in the trial of a partner's weights on this node's data."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def first_line(error: BaseException) -> str:
    """Return an exception's type and first line, at most `MAX_LINE_CHARS` characters: those that a
    log shows first.
    """
    text = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, ShoalError) and text:  # a whole sentence
        return printable(text)[:MAX_LINE_CHARS].rstrip(".")
    name = type(error).__name__
    return printable(f"{name}: {text}" if text else name)[:MAX_LINE_CHARS].rstrip(".")


@dataclass
class CaughtErrors:
    """The errors of one place.

    ``first``: the first line of the newest; ``newest_at``: when it came, Unix seconds.
    """

    count: int
    first: str
    newest_at: float
    explained: bool = False
    """The newest is one that says what to do, such as that of the task's own code."""


class InternalErrors:
    """The errors of one node's own code since its start, by place.

    For any thread; bounded, for the places are.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._places: dict[Place, CaughtErrors] = {}
        self._logged: set[tuple[Place, str, str]] = set()
        self._unread: list[str] = []
        self.log_file = ""
        """The file that has the tracebacks, if this node keeps one."""

    def caught(self, place: Place, error: BaseException) -> str:
        """Count ``error``, log its traceback if it is the first of its kind, and return its first
        line.
        """
        first = first_line(error)
        kind = place, type(error).__name__, _raised_at(error)
        with self._lock:
            known = self._places.setdefault(place, CaughtErrors(0, first, 0.0))
            known.count += 1
            known.first = first
            known.newest_at = self._clock()
            known.explained = isinstance(error, ShoalError)
            of_place = sum(other[0] == place for other in self._logged)
            new = kind not in self._logged and of_place < MAX_TRACEBACKS
            if new:
                self._logged.add(kind)
                self._unread.append(
                    "an error in this node's own code, and not in the network, was caught "
                    f"{WHAT[place]} ({first}); {self._remedy(known)}"
                )
        if new:
            log.error(
                "an error in this node's own code %s; further ones like it are only counted",
                WHAT[place],
                exc_info=error,
            )
        return first

    def _remedy(self, known: CaughtErrors) -> str:
        where = f"its traceback is in {self.log_file or 'the log'}"
        return where if known.explained else f"{where}: please report it"

    def newest(self) -> str:
        """Return the first line of the newest error, where its traceback is, and what to do; "" if
        there was none.
        """
        with self._lock:
            known = max(self._places.values(), key=lambda one: one.newest_at, default=None)
        return "" if known is None else f"({known.first}); {self._remedy(known)}"

    @property
    def total(self) -> int:
        with self._lock:
            return sum(known.count for known in self._places.values())

    def counts(self) -> dict[str, int]:
        """Return the number of errors of each place that had some."""
        with self._lock:
            return {place: known.count for place, known in sorted(self._places.items())}

    def report(self) -> dict[str, dict[str, Any]]:
        """Return of each place that had errors their number, the newest's first line, and its Unix
        time, ready for JSON.
        """
        with self._lock:
            return {
                place: {"count": known.count, "first": known.first, "newest_at": known.newest_at}
                for place, known in sorted(self._places.items())
            }

    def news(self) -> list[str]:
        """Return a sentence for each new kind of error that was not returned yet."""
        with self._lock:
            unread = self._unread
            self._unread = []
        return unread


def _raised_at(error: BaseException) -> str:
    """Return the file and line that raised ``error``."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return "" if frame is None else f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
