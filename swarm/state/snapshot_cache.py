"""The snapshots that this node serves: at most two, each dropped when nobody asks for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.swarm.exchange.timeouts import LEAST_RATE
from shoal.swarm.pacing.progress import SLOWEST_BYTES_PER_S
from shoal.swarm.state.snapshot import Snapshot

# snapshots that a node holds at most, each as large as its slow weights and shared state in float32
MAX_SNAPSHOTS = 2
UNUSED_S = 120.0  # after which a snapshot that nobody asks for is dropped
BUSY_S = 15.0  # since a snapshot was offered in which its first download may begin


def download_s(nbytes: int) -> float:
    """Return the seconds in which whoever is offered a snapshot of ``nbytes`` should have it
    whole.
    """
    return BUSY_S + nbytes / LEAST_RATE


@dataclass
class _Held:
    """A snapshot in the cache.

    ``made``: when it came; ``readers``: streams on which it is being downloaded; ``read``: a
    download of it has ended.
    """

    snapshot: Snapshot
    made: float
    asked: float  # time of the last request for it, or of the end of the last download
    readers: int = 0
    read: bool = False

    def is_wanted(self, now: float) -> bool:
        """Return whether it was asked for lately, or is being read and was asked for within the
        time that the slowest link that counts takes for all of it: for one chunk that takes longer
        than `UNUSED_S`.
        """
        if now - self.asked <= UNUSED_S:
            return True
        slowest_s = self.snapshot.header.nbytes / SLOWEST_BYTES_PER_S
        return self.readers > 0 and now - self.asked <= UNUSED_S + slowest_s

    def busy(self, now: float) -> bool:
        return self.readers > 0 or (not self.read and now - self.asked <= BUSY_S)


class SnapshotCache:
    """Cache of snapshots that this node hands out: at most two, each dropped two minutes after its
    last request or download, or once a slow one must be over that asks for no more. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[bytes, _Held] = {}

    def put(self, snapshot: Snapshot) -> None:
        """Hand out a snapshot from now on; beyond two, drop the older, if possible of those that
        nobody downloads.
        """
        with self._lock:
            now = self._clock()
            if snapshot.id not in self._held and len(self._held) >= MAX_SNAPSHOTS:
                held = self._held
                del held[min(held, key=lambda id: (held[id].busy(now), held[id].made))]
            self._held.setdefault(snapshot.id, _Held(snapshot, now, now)).asked = now

    def get(self, id: bytes) -> Snapshot | None:
        """Return the snapshot with this id, and mark it as requested."""
        with self._lock:
            found = self._held.get(id)
            if found is None:
                return None
            found.asked = self._clock()
            return found.snapshot

    @contextmanager
    def read(self, id: bytes) -> Iterator[None]:
        """Return a block in which the snapshot, if it is here, counts as being downloaded."""
        with self._lock:
            found = self._held.get(id)
            if found is not None:
                found.readers += 1
        try:
            yield
        finally:
            with self._lock:
                if found is not None:
                    found.readers = found.readers - 1
                    found.read = True
                    found.asked = self._clock()  # after a break it goes on

    def expire(self) -> None:
        with self._lock:
            now = self._clock()
            self._held = {id: held for id, held in self._held.items() if held.is_wanted(now)}

    def full(self) -> bool:
        """Return whether one more would drop a snapshot that is being downloaded, or is about to
        be.

        The older was offered until the newer was made. Whoever is no quicker than `download_s`
        since then does not keep others from newer weights.
        """
        with self._lock:
            now = self._clock()
            busy = [held for held in self._held.values() if held.busy(now)]
            if len(busy) < MAX_SNAPSHOTS:
                return False
            newer = max(busy, key=lambda held: held.made)
            return now - newer.made <= download_s(newer.snapshot.header.nbytes)

    def newest(self, since: int) -> Snapshot | None:
        with self._lock:
            found = [
                held.snapshot for held in self._held.values() if held.snapshot.header.round >= since
            ]
        return max(found, key=lambda snapshot: snapshot.header.round, default=None)
