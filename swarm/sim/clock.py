"""A virtual clock: an asyncio event loop whose time jumps to the next timer as soon as nothing is left to do.

It has no sockets, no threads and no sleep, so what runs on it is a function of its inputs, and an hour takes as long as the
callbacks in it. What runs in worker threads elsewhere (``asyncio.to_thread``) runs at once, in between.

A `Process` is whose callbacks can be stopped and ended: every callback belongs to the process in whose context it was left. That
of one that is dead is never called, as after ``kill -9``; that of one that sleeps is called when it wakes, as after SIGCONT.
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
    """Nothing is left that could ever happen, and something is still waited for."""


class Process:
    """Whose callbacks those are. ``state``: whether they are called."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: Literal["awake", "asleep", "dead"] = "awake"
        self.tasks: dict[int, asyncio.Task[Any]] = {}
        """Those that have not ended, by a number."""
        self.begun = 0
        self.held: list[asyncio.Handle] = []
        """Callbacks that are called when it wakes, in order; of a dead process never, unless somebody winds it up."""
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
    """A callback of a process at a time."""

    __slots__ = ("process",)
    process: Process | None
    _scheduled: bool

    def _run(self) -> None:
        if self.process is None or self.process.state == "awake":
            asyncio.Handle._run(self)
        else:
            self.process.held.append(self)


class VirtualLoop(BaseEventLoop):
    """See the module. ``busy``: turns between two moments of the clock after which it says that it is stuck."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, busy: int = 1_000_000) -> None:
        super().__init__()
        self._now = 0.0
        self._selector = self  # where BaseEventLoop waits
        self._busy, self._at_once = busy, 0
        self.set_task_factory(_begin)  # type: ignore[arg-type]

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Let time pass: all of it, at once. Stuck if nothing would end the wait, or if time does not move any more."""
        if timeout is None:
            raise Stuck(f"at {self._now:.6f} s nothing is left that could happen")
        self._at_once = 0 if timeout else self._at_once + 1
        if self._at_once > self._busy:
            raise Stuck(f"at {self._now:.6f} s time does not move any more")
        self._now += timeout
        return []

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """As everywhere, but for its process."""
        handle = _Soon(callback, args, self, context)
        handle.process = _process.get() if context is None else context.get(_process)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """As everywhere, but for its process."""
        timer = _Later(when, callback, args, self, context)
        timer.process = _process.get() if context is None else context.get(_process)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """There is one thread only."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run it now: a worker thread that takes no time."""
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def wake(self, process: Process) -> None:
        """Let a process that slept go on."""
        process.state, held, process.held = "awake", process.held, []
        self._ready.extend(held)

    def _process_events(self, events: list[Any]) -> None:
        """There are none."""


def _begin(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    """A task of the process in whose context it begins."""
    process = _process.get()
    if process is None:
        return asyncio.Task(coroutine, loop=loop, **options)
    process.begun = number = process.begun + 1
    task = asyncio.Task(coroutine, loop=loop, name=f"{process.name}-{number}", **options)
    process.tasks[number] = task
    task.add_done_callback(lambda task: process.tasks.pop(number, None), context=process.context)
    return task
