"""Counts of events and rejections that any thread may read."""

from __future__ import annotations

import threading
from collections import Counter


class Counters:
    """Counts of events and, by reason, of rejections. One thread adds to them, others read them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()

    def add(self, event: str, count: int = 1) -> None:
        with self._lock:
            self._events[event] += count

    def reject(self, reason: str, count: int = 1) -> None:
        with self._lock:
            self._rejected[reason] += count

    def events(self) -> dict[str, int]:
        with self._lock:
            return dict(self._events)

    def rejected(self) -> dict[str, int]:
        with self._lock:
            return dict(self._rejected)
