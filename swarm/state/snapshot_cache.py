"""The snapshots that this node serves: at most two, each dropped when nobody asks for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.swarm.state.snapshot import Snapshot

# snapshots that a node holds at most, each as large as its slow weights and shared state in float32
MAX_SNAPSHOTS = 2
UNUSED_S = 120.0  # after which a snapshot that nobody asks for is dropped
BUSY_S = 15.0  # since a snapshot was offered in which its first download may begin


@dataclass
class _Held:
    """A snapshot in the cache.

    ``readers``: streams on which it is being downloaded; ``read``: a download of it has ended.
    """

    snapshot: Snapshot
    asked: float  # time of the last request for it
    readers: int = 0
    read: bool = False

    def busy(self, now: float) -> bool:
        return self.readers > 0 or (not self.read and now - self.asked <= BUSY_S)


class SnapshotCache:
    """Cache of snapshots that this node hands out: at most two, each dropped two minutes after its
    last request. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[bytes, _Held] = {}

    def put(self, snapshot: Snapshot) -> None:
        """Hand out a snapshot from now on; beyond two, drop the least recently requested, if
        possible one that nobody downloads.
        """
        with self._lock:
            now = self._clock()
            others = [id for id in self._held if id != snapshot.id]
            for id in sorted(
                others, key=lambda id: (self._held[id].busy(now), self._held[id].asked)
            )[: len(others) + 1 - MAX_SNAPSHOTS]:
                del self._held[id]
            self._held.setdefault(snapshot.id, _Held(snapshot, now)).asked = now

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

    def expire(self) -> None:
        with self._lock:
            now = self._clock()
            self._held = {
                id: held for id, held in self._held.items() if now - held.asked <= UNUSED_S
            }

    def full(self) -> bool:
        """Return whether one more would drop a snapshot that is being downloaded, or is about to
        be.
        """
        with self._lock:
            now = self._clock()
            return sum(held.busy(now) for held in self._held.values()) >= MAX_SNAPSHOTS

    def newest(self, since: int) -> Snapshot | None:
        with self._lock:
            found = [
                held.snapshot for held in self._held.values() if held.snapshot.header.round >= since
            ]
        return max(found, key=lambda snapshot: snapshot.header.round, default=None)
