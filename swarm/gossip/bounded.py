"""Containers that forget their oldest entries, so that no peer can make them grow."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedQueue(Generic[T]):
    """A first-in, first-out queue of at most ``items`` items and ``nbytes`` bytes."""

    def __init__(self, items: int, nbytes: int) -> None:
        self._items, self._nbytes = items, nbytes
        self._lock = threading.Lock()
        self._held: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._filled: asyncio.Event | None = None

    def __len__(self) -> int:
        return len(self._held)

    def put(self, item: T, nbytes: int, drops: Callable[[Sequence[T]], int] = lambda items: 0) -> list[T]:
        """Add an item of ``nbytes`` bytes without waiting; return the dropped items, oldest first. For any thread.

        ``drops``: returns which of the items, the oldest first, goes if there are too many.
        """
        dropped = []
        with self._lock:
            self._held.append((item, nbytes))
            self._bytes += nbytes
            while len(self._held) > self._items or self._bytes > self._nbytes:
                place = drops([held for held, _ in self._held])
                old, size = self._held[place]
                del self._held[place]
                self._bytes -= size
                dropped.append(old)
            loop, filled = self._loop, self._filled
        if loop is not None and filled is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(filled.set)
        return dropped

    async def get(self) -> T:
        """Remove and return the oldest item, as soon as there is one. Always called on the same loop."""
        while True:
            with self._lock:
                if self._held:
                    item, size = self._held.popleft()
                    self._bytes -= size
                    return item
                if self._filled is None:
                    self._loop, self._filled = asyncio.get_running_loop(), asyncio.Event()
                self._filled.clear()
                filled = self._filled
            await filled.wait()


class LRUSet:
    """A set of the newest ``limit`` items; older ones are forgotten. Not for several threads at once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: OrderedDict[Hashable, None] = OrderedDict()

    def __contains__(self, item: Hashable) -> bool:
        return item in self._items

    def add(self, item: Hashable) -> bool:
        """Add ``item``; return False if it was there."""
        if item in self._items:
            return False
        self._items[item] = None
        if len(self._items) > self._limit:
            self._items.popitem(last=False)
        return True
