"""The paces of all peers to which one host sends bulk."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from shoal.swarm.pacing.pace import Pace
from shoal.swarm.pacing.pings import Echo

MAX_PACES = 256
"""Peers whose pace is remembered."""

log = logging.getLogger(__name__)


@dataclass
class _PaceInUse:
    """A pace, how many transfers use it, and what measures it meanwhile."""

    pace: Pace
    users: int = 0
    task: asyncio.Future[None] | None = None


class Pacer:
    """The paces of the peers to which one host sends bulk.

    ``echo`` pings a peer; it yields None for one that is not paced.
    """

    def __init__(
        self,
        echo: Callable[[str], AbstractAsyncContextManager[Echo | None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._echo = echo
        self._clock = clock
        self._paces: OrderedDict[str, _PaceInUse] = OrderedDict()
        self._busy = 0  # paces in use

    @contextlib.contextmanager
    def to(self, peer: str) -> Iterator[Pace]:
        """Yield the pace of bulk to ``peer``, which is measured until the end of the block.

        On the loop.
        """
        used = self._paces.get(peer)
        if used is None:
            used = _PaceInUse(Pace(self._clock, lambda: max(self._busy, 1)))
            self._paces[peer] = used
        self._paces.move_to_end(peer)
        used.users += 1
        if used.users == 1:
            self._busy += 1
            used.pace.begin()
        if used.task is None:
            used.task = asyncio.ensure_future(self._measure(peer, used))
        try:
            yield used.pace
        finally:
            used.users -= 1
            if not used.users:
                self._busy -= 1
                used.pace.end()
                self._forget_oldest()

    def round_trip(self, peer: str) -> float | None:
        """Return the seconds that the empty link to ``peer`` and back takes; None while that was
        not measured.
        """
        used = self._paces.get(peer)
        if used is None or not used.pace.link.measured:
            return None
        return used.pace.link.empty_delay()

    def forget(self, peer: str) -> None:
        used = self._paces.get(peer)
        if used is not None:
            used.pace.forget()

    def _forget_oldest(self) -> None:
        idle = [peer for peer, used in self._paces.items() if not used.users]
        for peer in idle[: max(len(self._paces) - MAX_PACES, 0)]:
            del self._paces[peer]

    async def _measure(self, peer: str, used: _PaceInUse) -> None:
        pace = used.pace
        try:
            while True:
                async with self._echo(peer) as echo:
                    if echo is None:
                        break
                    await pace.measure(echo)
                # Another transfer may have begun while the pings of the last one ended.
                if not used.users:
                    pace.stop()
                    return
        except Exception as error:  # bulk that waits for its pace must go on
            log.debug("bulk to a peer is not paced: %r", error)
        finally:
            used.task = None
        pace.free()
