"""Sources of events: the swarm itself, or a recording. Each runs in a thread of its own until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from shoal.node.uncollected import uncollected
from shoal.node.watch.events import Event
from shoal.node.watch.recording import replay
from shoal.swarm.access.link import Link
from shoal.swarm.errors import ShoalError

END_S = 2.0  # seconds

Send = Callable[[Event], None]


class WatchError(ShoalError):
    """Failure to watch a swarm."""


class EventSource(Protocol):
    """Source of events for one receiver. ``ended`` is set when there will be no more."""

    ended: threading.Event

    def start(self) -> None:
        """Start the thread."""

    def stop(self) -> None:
        """End soon."""

    def check(self) -> None:
        """Raise the error with which it ended, if it ended with one."""


class _Thread:
    """Source whose work is `_work`; ``stop`` makes ``self._stopped`` true."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End, and wait `END_S` at most for the network daemon, which ends with this process in any case."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(END_S)

    def check(self) -> None:
        """Raise the error with which it ended, if it ended with one."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            self.ended.set()

    def _work(self) -> None:
        raise NotImplementedError


class Replay(_Thread):
    """Replay of the recording in ``path``, ``speed`` times as fast (0: at once)."""

    def __init__(self, path: Path, speed: float, send: Send) -> None:
        super().__init__()
        self._path, self._speed, self._send = path, speed, send

    def _work(self) -> None:
        replay(self._path, self._send, self._stopped.wait, self._speed)


class Live(_Thread):
    """Live events of the swarm of ``link``. Slow imports happen in its thread."""

    def __init__(self, link: Link, send: Send) -> None:
        super().__init__()
        self._link, self._send = link, send

    def _work(self) -> None:
        with uncollected():
            from shoal.node.watch.light_client import LightClient
        client = LightClient(self._link, self._send)

        async def until_stopped() -> None:
            watching = asyncio.ensure_future(client.run())
            while not self._stopped.is_set() and not watching.done():
                await asyncio.sleep(0.05)
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

        asyncio.run(until_stopped())
