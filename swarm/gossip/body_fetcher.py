"""The records of one topic that are too large to be gossiped, and are fetched from whoever announced them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.gossip.body_store import BodyStore
from shoal.swarm.gossip.bounded_queue import BoundedQueue
from shoal.swarm.gossip.envelope import BodyAnnouncement, Encoding
from shoal.swarm.p2p.stream import short

log = logging.getLogger(__name__)

FETCHERS = 4  # bodies fetched at once
MAX_WAITING = 64  # bodies waiting for that
MAX_PER_PUBLISHER = 8  # of one publisher, waiting or being fetched: a slow one holds up no more
MAX_HOLDERS = 4  # peers asked for one body
FETCH_S = 15.0  # seconds for one body from one peer
PAUSES = (0.5, 2.0)  # seconds before those who could not be reached are asked again: they serve so many at a time and no more

Fetched = Callable[[str, Encoding, int, bytes], Awaitable[None]]


@dataclass
class _Wanted:
    notice: BodyAnnouncement
    publisher: str
    holders: list[str]


class BodyFetcher:
    """``fetched`` gets each whole body, with its publisher; ``failed`` the reason why one was not had."""

    def __init__(self, body_store: BodyStore, fetched: Fetched, failed: Callable[[str], None], fetch_s: float = FETCH_S) -> None:
        self._shelf, self._fetched, self._failed, self._fetch_s = body_store, fetched, failed, fetch_s
        self._waiting: BoundedQueue[tuple[bytes, int, int, str]] = BoundedQueue(MAX_WAITING, MAX_WAITING)
        self._wanted: dict[tuple[bytes, int, int, str], _Wanted] = {}
        self._of: Counter[str] = Counter()  # publisher -> its bodies in _wanted

    def want(self, publisher: str, notice: BodyAnnouncement) -> None:
        """Fetch what ``notice`` announces, one after the other in the order of arrival. Never waits.

        Raises MessageError if that is under way already (reason ``replayed``: the announcer becomes one more peer to ask) or if
        too many of this publisher's are (``quota``).
        """
        # All that the notice says: a wrong size from a stranger must not spoil the author's own notice.
        key = (notice.sha256, notice.nbytes, notice.size, notice.encoding)
        known = self._wanted.get(key)
        if known is not None:
            if notice.peer not in known.holders and len(known.holders) < MAX_HOLDERS:
                known.holders.append(notice.peer)
            raise MessageError("A notice was refused: what it announces is being fetched.", "replayed")
        if self._of[publisher] >= MAX_PER_PUBLISHER:
            raise MessageError(f"A notice was refused: {MAX_PER_PUBLISHER} others of its publisher wait.", "quota")
        self._of[publisher] += 1
        self._wanted[key] = _Wanted(notice, publisher, list(dict.fromkeys((notice.peer, publisher))))
        for old in self._waiting.put(key, 1):
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
                await self._fetched(wanted.publisher, wanted.notice.encoding, wanted.notice.size, body)

    async def _from_any(self, wanted: _Wanted) -> tuple[bytes | None, str]:
        reason, notice = "unavailable", wanted.notice
        answered: set[str] = set()  # holders that need not be asked again
        for pause in (0.0, *PAUSES):
            if answered.issuperset(wanted.holders):
                break
            await asyncio.sleep(pause)
            for holder in wanted.holders:  # may grow meanwhile
                if holder in answered:
                    continue
                try:
                    return await self._shelf.fetch(holder, notice.sha256, notice.nbytes, self._fetch_s), ""
                except NetworkError as error:
                    log.debug("a body was not had from peer %s: %s", short(holder), error)
                except MessageError as error:
                    log.debug("peer %s did not hand out a body: %s", short(holder), error)
                    answered.add(holder)
                    reason = error.reason
                except Exception:  # a bug must cost one record, not all that follow
                    log.warning("fetching a body from peer %s failed", short(holder), exc_info=True)
                    answered.add(holder)
                    reason = "failed"
        return None, reason

    def _done(self, key: tuple[bytes, int, int, str]) -> None:
        wanted = self._wanted.pop(key)
        self._of[wanted.publisher] -= 1
        if not self._of[wanted.publisher]:
            del self._of[wanted.publisher]
