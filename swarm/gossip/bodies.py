"""Bodies too large to be gossiped: those of this node are served by stream, those of others
fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.gossip.envelope import (
    BodyAnnouncement,
    BodyReply,
    BodyRequest,
    BoundedQueue,
    Encoding,
)
from shoal.swarm.p2p.addresses import by_turns, range_of
from shoal.swarm.p2p.messages import receive_bytes, receive_message, send_bytes, send_message
from shoal.swarm.p2p.rate_limit import RateLimit, TokenBuckets
from shoal.swarm.p2p.stream import Stream, short

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

BODY_PROTOCOL = "/shoal/body/1"
MAX_BODIES = 64
MAX_STORED = 64 << 20  # bytes of all bodies together
CHUNK_S = 5.0  # seconds for one small message, or without a byte
SERVE_S = 60.0  # seconds in which a body must be taken


def deadline(seconds: float) -> tuple[float, Callable[[float], float]]:
    """Return the loop's time in ``seconds``, and what is left until then of at most so many
    seconds.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    return end, lambda at_most: max(0.01, min(at_most, end - loop.time()))


class BodyStore:
    """The bodies that this node serves: the newest ``bodies``, at most ``nbytes`` bytes.

    Coroutines are for the host's loop.

    ``addresses``: returns the known addresses of a peer. ``protocol``: each store of a host has its
    own. ``quota``: the limit of what one peer gets in a minute; further requests are answered as if
    nothing were held. None: no limit. ``more``: looks up bodies that are held elsewhere, and served
    too.
    """

    def __init__(
        self,
        host: Host,
        swarm: str,
        addresses: Callable[[str], Sequence[str]] = lambda peer: (),
        *,
        protocol: str = BODY_PROTOCOL,
        bodies: int = MAX_BODIES,
        nbytes: int = MAX_STORED,
        quota: RateLimit | None = None,
        more: Callable[[bytes], bytes | None] = lambda sha256: None,
    ) -> None:
        self.host = self._host = host
        self._swarm = swarm
        self._addresses = addresses
        self._protocol = protocol
        self._max_bodies = bodies
        self._max_bytes = nbytes
        self._more = more
        self._quotas = None if quota is None else TokenBuckets(quota)
        self._lock = threading.Lock()
        self._bodies: OrderedDict[bytes, bytes] = OrderedDict()
        host.serve(protocol, self._answer)

    def put(self, body: bytes) -> bytes:
        """Serve ``body`` from now on, dropping the oldest if need be; return its SHA-256.

        For any thread.
        """
        digest = hashlib.sha256(body).digest()
        with self._lock:
            self._bodies[digest] = body
            self._bodies.move_to_end(digest)
            while self._bodies and (
                len(self._bodies) > self._max_bodies or self._held() > self._max_bytes
            ):
                self._bodies.popitem(last=False)
        return digest

    def get(self, sha256: bytes) -> bytes | None:
        """Return the body with this digest, if it is held. For any thread."""
        with self._lock:
            held = self._bodies.get(sha256)
        return held or self._more(sha256)

    def _held(self) -> int:
        return sum(map(len, self._bodies.values()))

    async def fetch(
        self, peer: str, sha256: bytes, nbytes: int, timeout: float, *, up_to: bool = False
    ) -> bytes:
        """Fetch the body with this digest and size from ``peer``, whole and checked, within
        ``timeout`` seconds.

        ``up_to``: it may be smaller. Raises NetworkError if the peer cannot be reached or is too
        slow; MessageError if it holds no such body (reason ``unavailable``), or one of another size
        (``digest``, or with ``up_to`` ``oversized``), which is refused unread, or sends another one
        (``digest``).
        """
        end, left = deadline(timeout)
        opening = self._host.open(
            peer, self._protocol, addresses=self._addresses(peer), timeout=left(timeout)
        )
        with contextlib.closing(await opening) as stream:
            request = BodyRequest(swarm=self._swarm, sha256=sha256)
            await send_message(stream, request, left(CHUNK_S))
            reply = await receive_message(stream, BodyReply, left(CHUNK_S))
            if not reply.nbytes:
                raise MessageError("The peer does not hold the body any more.", "unavailable")
            if up_to and reply.nbytes > nbytes:
                raise MessageError(
                    f"A body of {reply.nbytes} bytes was refused: at most {nbytes} are allowed.",
                    "oversized",
                )
            if not up_to and reply.nbytes != nbytes:
                raise MessageError(
                    f"A body of {reply.nbytes} bytes was refused: {nbytes} were announced.",
                    "digest",
                )
            body = bytearray(reply.nbytes)
            await receive_bytes(stream, memoryview(body), chunk_timeout=CHUNK_S, deadline=end)
        whole = bytes(body)
        # Hashing some hundred megabytes here would block the loop, and so every exchange, for as
        # many milliseconds.
        if (
            await asyncio.get_running_loop().run_in_executor(
                None, lambda: hashlib.sha256(whole).digest()
            )
            != sha256
        ):
            raise MessageError(
                "A body was refused: it is not the one that was announced.", "digest"
            )
        return whole

    async def _answer(self, stream: Stream) -> None:
        request = await receive_message(stream, BodyRequest, CHUNK_S)
        body = (self.get(request.sha256) if request.swarm == self._swarm else None) or b""
        if self._quotas is not None and not self._quotas.take(stream.peer_id, 1, len(body)):
            body = b""
        await send_message(stream, BodyReply(nbytes=len(body)), CHUNK_S)
        if body:
            end, _ = deadline(SERVE_S)
            await send_bytes(stream, memoryview(body), chunk_timeout=CHUNK_S, deadline=end)


log = logging.getLogger(__name__)

FETCHERS = 4  # bodies fetched at once
MAX_WAITING = 64  # bodies that wait to be fetched
MAX_PER_PUBLISHER = (
    8  # bodies of one publisher, waiting or being fetched: a slow one delays no more
)
MAX_SOURCES = 4  # peers asked for one body
FETCH_S = 15.0  # seconds for one body from one peer
PAUSES = (
    0.5,
    2.0,
)  # seconds before unreachable peers are asked again: each serves a limited number at a time

Fetched = Callable[[str, Encoding, int, bytes], Awaitable[None]]
Key = tuple[bytes, int, int, str]


@dataclass
class _Wanted:
    announcement: BodyAnnouncement
    publisher: str
    sources: list[str]


class BodyFetcher:
    """Fetch announced bodies.

    ``fetched`` gets each whole body, with its publisher; ``failed`` the reason for each other one.

    ``met``: where peers were met. Sources are one of each address range in turn, and of too many
    bodies the oldest one of the range whose publishers have most is given up; peers that were not
    met count as one range, for keys cost nothing.
    """

    def __init__(
        self,
        body_store: BodyStore,
        fetched: Fetched,
        failed: Callable[[str], None],
        fetch_s: float = FETCH_S,
        met: Mapping[str, str] | None = None,
    ) -> None:
        self._body_store = body_store
        self._fetched = fetched
        self._failed = failed
        self._fetch_s = fetch_s
        self._met = {} if met is None else met
        self._waiting: BoundedQueue[Key] = BoundedQueue(MAX_WAITING, MAX_WAITING)
        self._wanted: dict[Key, _Wanted] = {}  # waiting, or being fetched

    def want(self, publisher: str, announcement: BodyAnnouncement) -> None:
        """Queue the body that ``announcement`` names, to be fetched in the order of arrival.

        Never waits.

        Raises MessageError if it is in progress already (reason ``replayed``: the announcer becomes
        one more peer to ask) or if too many of this publisher's are (``quota``).
        """
        # All of its fields: a wrong size from a stranger must not spoil the author's own
        # announcement.
        key = (announcement.sha256, announcement.nbytes, announcement.size, announcement.encoding)
        known = self._wanted.get(key)
        if known is not None:
            every = dict.fromkeys((*known.sources, announcement.peer))
            known.sources[:] = by_turns((peer, self._met.get(peer, "")) for peer in every)[
                :MAX_SOURCES
            ]
            raise MessageError(
                "An announcement was refused: its body is being fetched.", "replayed"
            )
        if (
            sum(wanted.publisher == publisher for wanted in self._wanted.values())
            >= MAX_PER_PUBLISHER
        ):
            raise MessageError(
                f"An announcement was refused: {MAX_PER_PUBLISHER} others of its publisher wait.",
                "quota",
            )
        self._wanted[key] = _Wanted(
            announcement, publisher, list(dict.fromkeys((announcement.peer, publisher)))
        )
        for old in self._waiting.put(key, 1, self._crowded):
            del self._wanted[old]
            self._failed("overflow")

    async def run(self) -> None:
        await asyncio.gather(*(self._fetch() for _ in range(FETCHERS)))

    async def _fetch(self) -> None:
        while True:
            key = await self._waiting.get()
            wanted = self._wanted[key]
            try:
                found = await self._from_any(wanted)
            finally:
                del self._wanted[key]
            if isinstance(found, str):
                self._failed(found)
            else:
                await self._fetched(
                    wanted.publisher, wanted.announcement.encoding, wanted.announcement.size, found
                )

    async def _from_any(self, wanted: _Wanted) -> bytes | str:
        """Return the body, or the reason why no source served it."""
        reason = "unavailable"
        announcement = wanted.announcement
        answered: set[str] = set()  # sources that need not be asked again
        for pause in (0.0, *PAUSES):
            if answered.issuperset(wanted.sources):
                break
            await asyncio.sleep(pause)
            for source in wanted.sources:  # may grow meanwhile
                if source in answered:
                    continue
                try:
                    return await self._body_store.fetch(
                        source, announcement.sha256, announcement.nbytes, self._fetch_s
                    )
                except NetworkError as error:
                    log.debug("a body was not fetched from peer %s: %s", short(source), error)
                except MessageError as error:
                    log.debug("peer %s did not serve a body: %s", short(source), error)
                    answered.add(source)
                    reason = error.reason
                except Exception as error:  # a bug must cost one record, not all that follow
                    self._body_store.host.internal_errors.caught("gossip", error)
                    answered.add(source)
                    reason = "failed"
        return reason

    def _crowded(self, keys: Sequence[Key]) -> int:
        ranges = [range_of(self._met.get(self._wanted[key].publisher, "")) for key in keys]
        return ranges.index(Counter(ranges).most_common(1)[0][0])
