"""Threads that run one at a time, in virtual time: the next is the one whose time is least.

    time = VirtualTime(["a", "b"], kill={"b": 5.0})
    time.run(work)                               # {"a": work("a")}; "b" died at 5 s
    time.wait("a", until=time.now + 0.1)         # within work: others run meanwhile

So the same program gives the same results on any machine under any load.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


class _Killed(BaseException):
    """Exception that unwinds a killed thread; no ``Exception``, so that no training loop catches
    it.
    """


@dataclass
class _Thread:
    name: str
    turn: threading.Event = field(default_factory=threading.Event)
    wake: float = 0.0
    ready: Callable[[], bool] | None = None
    """The thread wakes before ``wake`` as soon as this is true."""
    over: bool = False
    value: Any = None
    error: BaseException | None = None


class VirtualTime:
    """The clock of several threads, and their order.

    Args:
        names: of the threads; of two that are to wake at the same time the first goes on.
        kill: name -> virtual time of its death; may grow while they run.
    """

    def __init__(self, names: Sequence[str], kill: Mapping[str, float]) -> None:
        self.now = 0.0
        self._kill = kill
        self._threads = {name: _Thread(name) for name in names}
        self._ended = 0
        self._turn_is_over = threading.Event()
        self._events = sorted(kill.values())
        """Heap of the times at which a thread may become ready sooner than it wakes."""

    def run(self, work: Callable[[str], T]) -> dict[str, T]:
        """Run ``work(name)`` in every thread and return the results; killed ones have no entry.

        Raises the exception of a thread.

        RuntimeError if it has run before: its time is used up.
        """
        if self._ended:
            raise RuntimeError("this simulation has run: make a new one")
        for thread in self._threads.values():
            threading.Thread(
                target=self._work, args=(thread, work), name=f"peer-{thread.name}", daemon=True
            ).start()
        while running := [thread for thread in self._threads.values() if not thread.over]:
            chosen = min(running, key=self._wakes_at)
            while self._events and self._events[0] <= self.now:
                heapq.heappop(self._events)
            if self._events and self._events[0] < self._wakes_at(chosen):
                self.now = self._events[0]  # an arrival or a death may make one ready sooner
                continue
            self.now = max(self.now, self._wakes_at(chosen))
            chosen.turn.set()
            self._turn_is_over.wait()
            self._turn_is_over.clear()
        for thread in self._threads.values():
            if thread.error is not None and not isinstance(thread.error, _Killed):
                raise thread.error
        return {
            thread.name: thread.value for thread in self._threads.values() if thread.error is None
        }

    def wait(self, name: str, until: float, ready: Callable[[], bool] | None = None) -> None:
        """Let the others run until ``until``, or until ``ready()`` is true."""
        thread = self._threads[name]
        thread.wake = until
        thread.ready = ready
        self._turn_is_over.set()
        self._wait_for_turn(thread)
        thread.ready = None

    def expect(self, at: float) -> None:
        """Take note of a time at which something happens that may make a thread ready."""
        heapq.heappush(self._events, at)

    def is_alive(self, name: str) -> bool:
        return self.now < self._kill.get(name, float("inf"))

    def is_over(self, name: str) -> bool:
        return self._threads[name].over

    @property
    def departures(self) -> tuple[int, int]:
        """How many have died, and how many have ended: while it is the same, so is who is there."""
        return sum(at <= self.now for at in self._kill.values()), self._ended

    def _work(self, thread: _Thread, work: Callable[[str], Any]) -> None:
        try:
            self._wait_for_turn(thread)
            thread.value = work(thread.name)
        except BaseException as error:
            thread.error = error
        finally:
            thread.over = True
            self._ended += 1
            self._turn_is_over.set()

    def _wait_for_turn(self, thread: _Thread) -> None:
        thread.turn.wait()
        thread.turn.clear()
        if not self.is_alive(thread.name):
            raise _Killed

    def _wakes_at(self, thread: _Thread) -> float:
        if not self.is_alive(thread.name):
            return self.now  # to unwind; it has no group any more, so ``ready`` must not be called
        if thread.ready is not None and thread.ready():
            return min(self.now, thread.wake)
        return min(thread.wake, self._kill.get(thread.name, float("inf")))
