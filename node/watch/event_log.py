"""Log of what has happened in a swarm, in sentences for people."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_LINES = 256


@dataclass(frozen=True)
class LogLine:
    """Line of the event log: ``kind`` is peer, change, fault or verdict."""

    time: float
    kind: str
    text: str


class EventLog:
    """The newest `MAX_LINES` lines, and the count of all so far, with those that are forgotten."""

    def __init__(self) -> None:
        self.lines: deque[LogLine] = deque(maxlen=MAX_LINES)
        self.count = 0

    def add(self, line: LogLine) -> None:
        self.lines.append(line)
        self.count += 1
