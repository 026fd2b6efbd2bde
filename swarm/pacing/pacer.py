"""The paces of all peers to which one host sends bulk."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager

from shoal.swarm.pacing.pace import Echo, Pace

MAX_PACES = 256  # peers whose pace is remembered

log = logging.getLogger(__name__)


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
        self._paces: OrderedDict[str, Pace] = OrderedDict()
        self._busy = 0  # paces in use

    @contextlib.contextmanager
    def to(self, peer: str) -> Iterator[Pace]:
        """Yield the pace of bulk to ``peer``, which is measured until the end of the block.

        On the loop.
        """
        pace = self._paces.get(peer)
        if pace is None:
            pace = Pace(self._clock, lambda: max(self._busy, 1))
            self._paces[peer] = pace
        self._paces.move_to_end(peer)
        pace.users += 1
        if pace.users == 1:
            self._busy += 1
            pace.begin()
        if pace.task is None:
            pace.task = asyncio.ensure_future(self._measure(peer, pace))
        try:
            yield pace
        finally:
            pace.users -= 1
            if not pace.users:
                self._busy -= 1
                pace.end()
                self._forget_oldest()

    def round_trip(self, peer: str) -> float | None:
        """Return the seconds that the empty link to ``peer`` and back takes; None while that was
        not measured.
        """
        pace = self._paces.get(peer)
        if pace is None or not pace.link.measured:
            return None
        return pace.link.empty_delay()

    def forget(self, peer: str) -> None:
        if (pace := self._paces.get(peer)) is not None:
            pace.forget()

    def _forget_oldest(self) -> None:
        idle = [peer for peer, pace in self._paces.items() if not pace.users]
        for peer in idle[: max(len(self._paces) - MAX_PACES, 0)]:
            del self._paces[peer]

    async def _measure(self, peer: str, pace: Pace) -> None:
        try:
            while True:
                async with self._echo(peer) as echo:
                    if echo is None:
                        break
                    await pace.measure(echo)
                # Another transfer may have begun while the pings of the last one ended.
                if not pace.users:
                    pace.stop()
                    return
        except Exception as error:  # bulk that waits for its pace must go on
            log.debug("bulk to a peer is not paced: %r", error)
        finally:
            pace.task = None
        pace.free()
