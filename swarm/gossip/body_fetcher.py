"""Fetching of the records of one topic that are too large to be gossiped, from the peers that announced them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.gossip.body_store import BodyStore
from shoal.swarm.gossip.bounded_queue import BoundedQueue
from shoal.swarm.gossip.envelope import BodyAnnouncement, Encoding
from shoal.swarm.p2p.multiaddr import by_turns, range_of
from shoal.swarm.p2p.stream import short

log = logging.getLogger(__name__)

FETCHERS = 4  # bodies fetched at once
MAX_WAITING = 64  # bodies that wait to be fetched
MAX_PER_PUBLISHER = 8  # bodies of one publisher, waiting or being fetched: a slow one delays no more
MAX_SOURCES = 4  # peers asked for one body
FETCH_S = 15.0  # seconds for one body from one peer
PAUSES = (0.5, 2.0)  # seconds before unreachable peers are asked again: each serves a limited number at a time

Fetched = Callable[[str, Encoding, int, bytes], Awaitable[None]]


@dataclass
class _Wanted:
    announcement: BodyAnnouncement
    publisher: str
    sources: list[str]


class BodyFetcher:
    """Fetch announced bodies. ``fetched`` gets each whole body, with its publisher; ``failed`` the reason for each other one.

    ``met``: where peers were met. Sources are one of each address range in turn, and of too many bodies the oldest one of the range
    whose publishers have most is given up; peers that were not met count as one range, for keys cost nothing.
    """

    def __init__(
        self,
        body_store: BodyStore,
        fetched: Fetched,
        failed: Callable[[str], None],
        fetch_s: float = FETCH_S,
        met: Mapping[str, str] | None = None,
    ) -> None:
        self._body_store, self._fetched, self._failed, self._fetch_s = body_store, fetched, failed, fetch_s
        self._met = {} if met is None else met
        self._waiting: BoundedQueue[tuple[bytes, int, int, str]] = BoundedQueue(MAX_WAITING, MAX_WAITING)
        self._wanted: dict[tuple[bytes, int, int, str], _Wanted] = {}
        self._of: Counter[str] = Counter()  # publisher -> its bodies in _wanted

    def want(self, publisher: str, announcement: BodyAnnouncement) -> None:
        """Queue the body that ``announcement`` names, to be fetched in the order of arrival. Never waits.

        Raises MessageError if it is in progress already (reason ``replayed``: the announcer becomes one more peer to ask) or if
        too many of this publisher's are (``quota``).
        """
        # All of its fields: a wrong size from a stranger must not spoil the author's own announcement.
        key = (announcement.sha256, announcement.nbytes, announcement.size, announcement.encoding)
        known = self._wanted.get(key)
        if known is not None:
            every = dict.fromkeys((*known.sources, announcement.peer))
            known.sources[:] = by_turns((peer, self._met.get(peer, "")) for peer in every)[:MAX_SOURCES]
            raise MessageError("An announcement was refused: its body is being fetched.", "replayed")
        if self._of[publisher] >= MAX_PER_PUBLISHER:
            raise MessageError(f"An announcement was refused: {MAX_PER_PUBLISHER} others of its publisher wait.", "quota")
        self._of[publisher] += 1
        self._wanted[key] = _Wanted(announcement, publisher, list(dict.fromkeys((announcement.peer, publisher))))
        for old in self._waiting.put(key, 1, self._crowded):
            self._done(old)
            self._failed("overflow")

    async def run(self) -> None:
        """Fetch until cancelled."""
        await asyncio.gather(*(self._fetch() for _ in range(FETCHERS)))

    async def _fetch(self) -> None:
        while True:
            key = await self._waiting.get()
            wanted = self._wanted[key]
            try:
                body, reason = await self._from_any(wanted)
            finally:
                self._done(key)
            if body is None:
                self._failed(reason)
            else:
                await self._fetched(wanted.publisher, wanted.announcement.encoding, wanted.announcement.size, body)

    async def _from_any(self, wanted: _Wanted) -> tuple[bytes | None, str]:
        reason, announcement = "unavailable", wanted.announcement
        answered: set[str] = set()  # sources that need not be asked again
        for pause in (0.0, *PAUSES):
            if answered.issuperset(wanted.sources):
                break
            await asyncio.sleep(pause)
            for source in wanted.sources:  # may grow meanwhile
                if source in answered:
                    continue
                try:
                    return await self._body_store.fetch(source, announcement.sha256, announcement.nbytes, self._fetch_s), ""
                except NetworkError as error:
                    log.debug("a body was not fetched from peer %s: %s", short(source), error)
                except MessageError as error:
                    log.debug("peer %s did not serve a body: %s", short(source), error)
                    answered.add(source)
                    reason = error.reason
                except Exception:  # a bug must cost one record, not all that follow
                    log.warning("fetching a body from peer %s failed", short(source), exc_info=True)
                    answered.add(source)
                    reason = "failed"
        return None, reason

    def _crowded(self, keys: Sequence[tuple[bytes, int, int, str]]) -> int:
        ranges = [range_of(self._met.get(self._wanted[key].publisher, "")) for key in keys]
        return ranges.index(Counter(ranges).most_common(1)[0][0])

    def _done(self, key: tuple[bytes, int, int, str]) -> None:
        wanted = self._wanted.pop(key)
        self._of[wanted.publisher] -= 1
        if not self._of[wanted.publisher]:
            del self._of[wanted.publisher]
