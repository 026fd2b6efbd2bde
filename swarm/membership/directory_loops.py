"""When a directory reads and when it publishes: two loops, since others must hear of this node
however long its reading takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from shoal.swarm.errors import NetworkError
from shoal.swarm.internal_errors import InternalErrors

log = logging.getLogger(__name__)

PERIOD_S = 5.0
"""Between two publications, and between two readings."""
# Shares of a period after which one is due: less than the pauses below, which are random, so that
# nodes that started at the same moment do not stay in step.
DUE_SHARE = 0.75
MIN_PAUSE_SHARE = 0.8
MIN_GAP_S = 1.0
"""Between two publications or two readings."""
HASTE_S = 0.5
"""Between readings while a caller waits for members."""
# After work that took longer than the first, so many times as long there is none: on a machine or
# a link with too much to do, peers in haste would starve each other.
SLOW_WORK_S = 1.0
REST_FACTOR = 3.0

Work = Callable[[], Awaitable[object]]


class Published(Protocol):
    """What is published, as far as the loops depend on it."""

    urgent: bool
    prefix: str | None

    @property
    def announced(self) -> bool: ...


class DirectoryLoops:
    """The loops of one directory; `run` is for the host's loop, all else for any thread.

    ``read`` and ``publish`` do it once. ``period``: seconds between two of either. ``max_rest``:
    seconds of a rest, at most.
    """

    def __init__(
        self,
        read: Work,
        publish: Work,
        published: Published,
        errors: Callable[[], InternalErrors],
        *,
        period: float,
        max_rest: Callable[[], float],
    ) -> None:
        self.closed = False
        self._look_soon = False
        self._lock = threading.Lock()  # guards the next one
        self._waiting = 0  # callers in haste
        self._read = read
        self._publish = publish
        self._published = published
        self._errors = errors
        self._period = period
        self._max_rest = max_rest
        self._wakes_reader = asyncio.Event()
        self._wakes_publisher = asyncio.Event()
        self._was_read = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def look(self) -> None:
        """Read soon, at most once a second."""
        self._look_soon = True
        self.wake()

    def wake(self) -> None:
        """Look at once whether something is due."""
        if self._loop is None or self.closed:
            return
        try:
            self._loop.call_soon_threadsafe(self._wakes_reader.set)
            self._loop.call_soon_threadsafe(self._wakes_publisher.set)
        except RuntimeError:
            log.debug("the host closed before the directory")

    @contextlib.contextmanager
    def in_haste(self) -> Iterator[None]:
        """Return a block in which readings follow each other quickly."""
        with self._lock:
            self._waiting += 1
        self.wake()
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        await asyncio.gather(self._keep_reading(), self._keep_publishing())

    async def _keep_reading(self) -> None:
        read_at = float("-inf")
        while not self.closed:
            self._wakes_reader.clear()
            now = time.monotonic()
            wait_s = MIN_GAP_S if self._look_soon else self._period * DUE_SHARE
            if self._waiting or self._published.prefix is None or now - read_at >= wait_s:
                read_at = now
                self._look_soon = False
                await self._guarded(self._read)
            self._was_read.set()
            await self._rest(now)
            is_hasty = self._waiting or self._look_soon or self._is_unplaced()
            await self._sleep(self._wakes_reader, HASTE_S if is_hasty else self._pause_s())

    async def _keep_publishing(self) -> None:
        await self._was_read.wait()  # where the record belongs follows from what the keys hold
        published_at = float("-inf")
        while not self.closed:
            self._wakes_publisher.clear()
            now = time.monotonic()
            is_due = self._published.urgent or now - published_at >= self._period * DUE_SHARE
            if is_due and self._published.announced:
                published_at = now
                await self._guarded(self._publish)
                await self._rest(now)
            pause_s = HASTE_S if self._is_unplaced() else self._pause_s()
            await self._sleep(self._wakes_publisher, pause_s)
            since = time.monotonic() - published_at
            if self._published.urgent and since < MIN_GAP_S:
                await asyncio.sleep(MIN_GAP_S - since)

    def _is_unplaced(self) -> bool:
        """Return whether there is a record to publish, and none was yet."""
        return self._published.announced and self._published.prefix is None

    async def _guarded(self, work: Work) -> None:
        try:
            await work()
        except NetworkError as error:
            log.info("the directory is not up to date: %s", error)
        except Exception as error:  # a bug must not make this node vanish from the swarm
            self._errors().caught("directory", error)

    async def _rest(self, since: float) -> None:
        """Wait after work that took long."""
        took = time.monotonic() - since
        if took > SLOW_WORK_S:
            await asyncio.sleep(min(REST_FACTOR * took, self._max_rest()))

    def _pause_s(self) -> float:
        """Return seconds until the next look or record."""
        return self._period * random.uniform(MIN_PAUSE_SHARE, 1.0)

    async def _sleep(self, wake: asyncio.Event, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(wake.wait(), seconds)
