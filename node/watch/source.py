"""Where events come from: the swarm itself, or a recording. Either runs in a thread of its own until it is stopped."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from shoal.node.watch.events import Event
from shoal.node.watch.recording import replay
from shoal.swarm.access.link import Link
from shoal.swarm.errors import ShoalError

log = logging.getLogger(__name__)

Tell = Callable[[Event], None]


class WatchError(ShoalError):
    """The swarm cannot be watched."""


class Source(Protocol):
    """Tells events to whom it was made for. ``ended`` is set when there will be no more."""

    ended: threading.Event

    def start(self) -> None:
        """Begin, in a thread of its own."""

    def stop(self) -> None:
        """End, soon."""

    def check(self) -> None:
        """Raise the error with which it ended, if it ended with one."""


class _Thread:
    """A source whose work is `_work`; ``stop`` makes ``self._stopped`` true."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """End; waits a second at most for the connections to be closed."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

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
    """The recording in ``path``, ``speed`` times as fast (0: at once)."""

    def __init__(self, path: Path, speed: float, tell: Tell) -> None:
        super().__init__()
        self._path, self._speed, self._tell = path, speed, tell

    def _work(self) -> None:
        replay(self._path, self._tell, self._stopped.wait, self._speed)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Python looks through all objects again and again while modules make them: a tenth of the time to the first peer."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class Live(_Thread):
    """The swarm of ``link``. Importing what it needs takes a second, and happens in its thread."""

    def __init__(self, link: Link, tell: Tell) -> None:
        super().__init__()
        self._link, self._tell = link, tell

    def _work(self) -> None:
        try:
            with _without_collecting():
                import trio

                from shoal.node.watch.light_client import LightClient
        except ImportError as error:
            what = str(error)[:200]
            raise WatchError(f"Cannot watch a swarm ({what}): install what it needs with pip install 'shoal[watch]'.") from error
        if not log.isEnabledFor(logging.DEBUG):  # a peer that cannot be reached is told as an event
            logging.getLogger("libp2p").setLevel(logging.CRITICAL)
        client = LightClient(self._link, self._tell)

        async def until_stopped() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.run)
                while not self._stopped.is_set():
                    await trio.sleep(0.05)
                nursery.cancel_scope.cancel()

        trio.run(until_stopped)
