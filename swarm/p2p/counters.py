"""Counters that one thread moves and others read."""

from __future__ import annotations

import threading
from collections import Counter


class Counters:
    """What came and went on one topic. A rejected message has a reason; ``received`` are all that others published."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()

    def add(self, event: str, count: int = 1) -> None:
        """Count an event, such as ``sent``."""
        with self._lock:
            self._events[event] += count

    def reject(self, reason: str, count: int = 1) -> None:
        """Count a rejected message."""
        with self._lock:
            self._rejected[reason] += count

    def events(self) -> dict[str, int]:
        """Event -> how often, now."""
        with self._lock:
            return dict(self._events)

    def rejected(self) -> dict[str, int]:
        """Reason -> how many messages, now."""
        with self._lock:
            return dict(self._rejected)
