"""A virtual clock: an asyncio event loop whose time jumps to the next timer as soon as nothing is
left to do.

It has no sockets, no threads and no sleep, so what runs on it is a function of its inputs, and an
hour takes as long as the callbacks in it. A worker thread (``asyncio.to_thread``) becomes a call at
once, in between. Its futures and tasks are hashed by number and not by address: asyncio and
hivemind keep them in sets, whose order would differ from run to run.

A `Process` owns callbacks that can be stopped and ended: every callback belongs to the process in
whose context it was scheduled. A callback of a dead process is never called, as after ``kill -9``;
one of a sleeping process is called when it wakes, as after SIGCONT.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from asyncio.base_events import BaseEventLoop
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Literal

_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Stuck(RuntimeError):
    """An error: nothing is left that could ever happen, and something still waits."""


class Process:
    """The owner of callbacks. ``state``: whether they are called."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: Literal["awake", "asleep", "dead"] = "awake"
        self.tasks: dict[int, asyncio.Task[Any]] = {}
        """Its tasks that have not ended, by number."""
        self.begun = 0
        self.held: list[asyncio.Handle] = []
        """Callbacks that are called when it wakes, in order; of a dead process only at the end of a
        simulation.
        """
        self.context = contextvars.Context()
        self.context.run(_process.set, self)


class _Soon(asyncio.Handle):
    """A callback of a process."""

    __slots__ = ("process",)
    process: Process | None

    def _run(self) -> None:
        if self.process is None or self.process.state == "awake":
            asyncio.Handle._run(self)
        else:
            self.process.held.append(self)


class _Later(asyncio.TimerHandle):
    """A callback of a process at a set time."""

    __slots__ = ("process",)
    process: Process | None
    _loop: asyncio.AbstractEventLoop
    _scheduled: bool
    _when: float

    def _run(self) -> None:
        assert isinstance(self._loop, VirtualLoop)
        self._loop.reach(self._when)
        if self.process is None or self.process.state == "awake":
            asyncio.Handle._run(self)
        else:
            self.process.held.append(self)


class _Future(asyncio.Future[Any]):
    """A future with a place in the order of sets."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class _Task(asyncio.Task[Any]):
    """A task with a place in the order of sets."""

    number: int

    def __new__(
        cls, coroutine: Coroutine[Any, Any, Any], *, loop: VirtualLoop, **options: Any
    ) -> _Task:
        task: _Task = super().__new__(cls)
        task.number = loop.counted()  # before __init__, which hashes it
        return task

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(BaseEventLoop):
    """An event loop on virtual time.

    ``busy``: turns without progress of the clock after which it raises `Stuck`.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, busy: int = 1_000_000) -> None:
        super().__init__()
        self._now = 0.0
        self._selector = self  # where BaseEventLoop waits
        self._busy, self._at_once, self._futures = busy, 0, 0
        self.set_task_factory(_begin)  # type: ignore[arg-type]

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Let the time pass at once.

        Raises Stuck if nothing would end the wait, or if time no longer progresses.
        """
        if timeout is None:
            raise Stuck(f"at {self._now:.6f} s nothing is left that could happen")
        self._at_once = 0 if timeout else self._at_once + 1
        if self._at_once > self._busy:
            self._at_once = 0  # what spins may still be cancelled
            raise Stuck(f"at {self._now:.6f} s time no longer progresses")
        self._now += timeout
        return []

    def reach(self, when: float) -> None:
        """Set the clock to the time of a timer that is called: asyncio calls those of the next
        nanosecond too, and what compares the clock with its deadline would find it early, again and
        again.
        """
        self._now = max(self._now, when)

    def counted(self) -> int:
        self._futures += 1
        return self._futures

    def create_future(self) -> asyncio.Future[Any]:
        future = _Future(loop=self)
        future.number = self.counted()
        return future

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback of the current process."""
        handle = _Soon(callback, args, self, context)
        handle.process = _process.get() if context is None else context.get(_process)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule a callback of the current process at a set time."""
        timer = _Later(when, callback, args, self, context)
        timer.process = _process.get() if context is None else context.get(_process)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback; there is one thread only."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run the function now: a worker thread that takes no time."""
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def wake(self, process: Process) -> None:
        """Let a sleeping process go on."""
        process.state, held, process.held = "awake", process.held, []
        self._ready.extend(held)

    def _process_events(self, events: list[Any]) -> None:
        """Do nothing: there are no sockets."""


def _begin(
    loop: VirtualLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
) -> asyncio.Task[Any]:
    """Make a task of the process in whose context it begins."""
    process = _process.get()
    if process is None:
        return _Task(coroutine, loop=loop, **options)
    process.begun = number = process.begun + 1
    task = _Task(coroutine, loop=loop, name=f"{process.name}-{number}", **options)
    process.tasks[number] = task
    task.add_done_callback(lambda task: process.tasks.pop(number, None), context=process.context)
    return task
