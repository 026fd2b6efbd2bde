"""A recording as a whole, of which the view at any time can be asked for."""

from __future__ import annotations

from bisect import bisect_right
from copy import deepcopy
from pathlib import Path

from shoal.node.watch.events import Event
from shoal.node.watch.recording import recorded
from shoal.node.watch.swarm_view import SwarmView

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
