"""The pings to one peer that are under way, between pieces of bulk."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

PING_BYTES = 32
"""Which the peer's daemon sends back."""


class Echo(NamedTuple):
    """The ends of a stream to a peer that sends back what it gets, `PING_BYTES` at a time."""

    write: Callable[[bytes], None]
    read: Callable[[], Awaitable[bytes]]
    """Returns the next answer; one that is cancelled loses nothing.

    Raises OSError or EOFError at the end.
    """


@dataclass
class Ping:
    """A ping of these bytes that was sent at the instant ``began``."""

    data: bytes
    began: float
    ahead: int
    """Bytes of bulk that were sent before it."""


class Pings:
    """Pings by one ``echo`` at a time, in the order in which they were sent. On one loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.echo: Echo | None = None
        self.last_ahead = 0
        """Bytes of bulk that were sent before the last ping."""
        self._clock = clock
        self._under_way: deque[Ping] = deque()
        self._changed = asyncio.Event()

    def __bool__(self) -> bool:
        """Whether any is under way."""
        return bool(self._under_way)

    def begin(self, echo: Echo) -> None:
        """Send pings by ``echo`` from now on."""
        self.echo = echo
        self._under_way.clear()

    def send(self, ahead: int) -> None:
        """Send one, if there is an echo; ``ahead``: bytes of bulk that were sent before."""
        if self.echo is None:
            return
        ping = Ping(os.urandom(PING_BYTES), self._clock(), ahead)
        self._under_way.append(ping)
        self.last_ahead = ahead
        self.echo.write(ping.data)
        self.wake()

    def wake(self) -> None:
        """End a `wait`."""
        self._changed.set()

    async def wait(self) -> None:
        """Wait until another is sent, or `wake`."""
        self._changed.clear()
        await self._changed.wait()

    async def answer(self, echo: Echo, timeout: float) -> bytes:
        """Return the next answer; nothing if none comes in time."""
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(echo.read(), timeout)
        return b""

    def answered(self, data: bytes) -> Ping:
        """Return the ping that ``data`` answers. EOFError if it is no answer."""
        ping = self._under_way.popleft()
        if data != ping.data:
            raise EOFError("the peer answers pings wrongly")
        return ping
