"""How far a fetch of weights has come, and for how long it may go on: as long as it moves.

    progress = FetchProgress(grace_s=3600.0)
    state = await while_it_moves(work(progress), progress)
    str(progress)  # "118 MB of 500 MB, about 51 min to go"

A bound on the whole time would end the download of any model over a slow enough link. So beyond
``grace_s`` it has the time in which a link of `SLOWEST_BYTES_PER_S` brings what has come by now.
Whoever sends less than that on average is given up.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shoal.swarm.errors import NetworkError
from shoal.swarm.figures import amount, duration
from shoal.swarm.p2p.tasks import first_of, running
from shoal.swarm.pacing.progress import SLOWEST_BYTES_PER_S

FETCH_S = 3600.0  # that a fetch may take in any case
UNSEEN_S = 5.0  # of a download before there is an estimate

T = TypeVar("T")


class FetchProgress:
    """Progress of one fetch. It is written on the host's loop, and may be read by any thread.

    ``grace_s``: seconds that it may take whatever comes.
    """

    def __init__(
        self, grace_s: float = FETCH_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._began = clock()
        self._downloading: float | None = None
        self.wanted = self.there = 0
        """Bytes of the snapshot that is being fetched, and those of it that are here."""
        self.moved = 0
        """Bytes that came and were right, of whatever snapshot."""

    def begin(self, wanted: int, there: int) -> None:
        """Note that the download of a snapshot begins, or goes on."""
        self.wanted = wanted
        self.there = there
        if self._downloading is None:
            self._downloading = self._clock()

    def arrived(self, nbytes: int) -> None:
        self.there += nbytes
        self.moved += nbytes

    @property
    def left_s(self) -> float:
        """Seconds until the fetch is given up, unless more comes."""
        return self._began + self._grace_s + self.moved / SLOWEST_BYTES_PER_S - self._clock()

    @property
    def estimate_s(self) -> float | None:
        """Seconds to go at the mean rate by now; None if that is not known yet."""
        spent = 0.0 if self._downloading is None else self._clock() - self._downloading
        if spent < UNSEEN_S or not self.moved:
            return None
        return (self.wanted - self.there) * spent / self.moved

    def __str__(self) -> str:
        """For people; empty before a download begins."""
        if not self.wanted:
            return ""
        said = f"{amount(self.there)} of {amount(self.wanted)}"
        left = self.estimate_s
        return said if left is None else f"{said}, about {duration(left)} to go"


async def while_it_moves(work: Awaitable[T], progress: FetchProgress) -> T:
    """Return the result of ``work``; NetworkError once ``progress`` is over its time."""
    async with running(work) as (task,):
        while not task.done():
            if (left := progress.left_s) <= 0:
                raise NetworkError(
                    f"the swarm's weights came too slowly, and were given up at {progress}."
                    if progress.wanted
                    else "the swarm's weights were given up, because none came."
                )
            await first_of(task, timeout=left)
        result: T = task.result()
        return result
