"""Publish/subscribe of small signed records: each is published once on its kind's topic and reaches
all peers that joined it.

A record that arrives from a neighbour (`shoal.swarm.gossip.neighbours`) is opened in a worker
thread: its bounds and its author's signature, membership and quota are checked, and the topic's
handler takes it. Only then is it passed on. A record above 256 KiB is announced, and fetched by
stream from its announcer.

A bad record has no other effect than a count: each is counted as accepted or under the reason for
which it was rejected, which docs/internals.md lists ("Gossip and status").
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, cast

from blake3 import blake3

from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.errors import MessageError
from shoal.swarm.gossip import envelope
from shoal.swarm.gossip.bodies import FETCH_S, MAX_STORED, BodyFetcher, BodyStore
from shoal.swarm.gossip.envelope import (
    Body,
    BodyAnnouncement,
    Encoding,
    Opened,
)
from shoal.swarm.gossip.frames import topic_of
from shoal.swarm.gossip.neighbours import Members, Neighbours
from shoal.swarm.gossip.outbox import Outbox
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.counters import Counters
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.p2p.rate_limit import RateLimit, TokenBuckets
from shoal.swarm.wire.envelope import M, Message, pack

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

log = logging.getLogger(__name__)

REMEMBERED = 32_768  # messages, and records in them, that are recognised when they come again
AGAIN_S = 0.1  # between two looks whether the daemon is back, and after an error of this node
# Of authors whose membership was not read yet: messages that wait for it, and how long.
MAX_UNKNOWN = 32
UNKNOWN_S = 2.0

Handler = Callable[[str, M], None]


class Gossip:
    """The topics of ``swarm`` in which this node takes part. For any thread.

    ``members``: the members in view that may be dialled, with their addresses, of which neighbours
    are drawn. ``is_member``: whose records are taken and passed on, if ``access_policy`` admits
    them too. ``addresses``: returns the known addresses of a peer (from the directory), for records
    that have to be fetched. ``fetch_s``: seconds for one of those from one peer. ``look``: called
    when a stranger appears. ``body_store``: bytes of own records too large for gossip that are kept
    to be fetched. ``clock`` in seconds.
    """

    def __init__(
        self,
        host: Host,
        identity: Identity,
        swarm: str,
        *,
        members: Members,
        is_member: Callable[[str], bool] = lambda peer: True,
        addresses: Callable[[str], Sequence[str]] = lambda peer: (),
        fetch_s: float = FETCH_S,
        access_policy: AccessPolicy | None = None,
        look: Callable[[], None] = lambda: None,
        body_store: int = MAX_STORED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.access_policy = access_policy or AccessPolicy()
        self.look = look
        self.host = host
        self.identity = identity
        self.swarm = swarm
        self.fetch_s = fetch_s
        self.clock = clock
        self.body_store = BodyStore(host, swarm, addresses, nbytes=body_store)
        self._knows = is_member
        self._topics: dict[str, Topic[Any]] = {}
        self._unknown: set[asyncio.Task[None]] = set()
        self.neighbours = Neighbours(
            host,
            swarm,
            self._take,
            members=members,
            is_member=self.is_member,
            unknown=look,
            clock=clock,
        )

    def join(
        self, kind: type[M], handler: Handler[M] | None, quota: RateLimit | None = None
    ) -> Topic[M]:
        """Take part in the topic of ``kind`` from now on.

        ``handler(author, record)`` runs on the host's loop, once for each record of others; it must
        not wait. It refuses a record by MessageError, whose reason is counted; such a record is not
        passed on. None: this node only publishes and passes on. ``quota`` bounds each author.
        """
        topic = Topic(self, kind, handler, quota or RateLimit())
        self._topics[topic.name] = topic
        return topic

    def is_member(self, peer: str) -> bool:
        return self._knows(peer) and self.access_policy.admits(peer)

    def refused(self) -> dict[str, int]:
        """Return reason -> number of records and streams rejected so far, on all topics."""
        found = Counter(self.neighbours.counters.rejected())
        for topic in list(self._topics.values()):
            found.update(topic.counters.rejected())
        return dict(found)

    def close(self) -> None:
        self.neighbours.close()
        for topic in list(self._topics.values()):
            topic.close()

    # -- on the loop -------------------------------------------------------------------------------

    async def _take(self, name: str, neighbour: str, digest: bytes, data: bytes) -> bool:
        topic = self._topics.get(name)
        return topic is None or await topic.take(neighbour, digest, data)

    def wait_for_author(self, judge: Callable[[], None]) -> bool:
        """Read the directory, and have a record judged after that; return False if too many wait.

        A newcomer's first records may come before its membership was read.
        """
        self.look()
        if len(self._unknown) >= MAX_UNKNOWN:
            return False

        async def later() -> None:
            await asyncio.sleep(UNKNOWN_S)
            judge()

        task = asyncio.ensure_future(later())
        self._unknown.add(task)
        task.add_done_callback(self._unknown.discard)
        return True


class Topic(Generic[M]):
    """One topic; made by `Gossip.join`.

    ``counters``: ``sent`` and ``unsent`` messages of this node; of those of others ``received``,
    ``accepted`` and rejections.
    """

    def __init__(
        self, gossip: Gossip, kind: type[M], handler: Handler[M] | None, quota: RateLimit
    ) -> None:
        self.name = topic_of(kind)
        self.counters = Counters()
        self._host = gossip.host
        self._identity = gossip.identity
        self._swarm = gossip.swarm
        self._gossip = gossip
        self._kind = kind
        self._handler = handler
        self._room = envelope.room_for(kind)
        self._fetcher = BodyFetcher(
            gossip.body_store, self._fetched, self.counters.reject, gossip.fetch_s, self._host.met
        )
        self._quotas = TokenBuckets(quota, gossip.clock)
        # Digests of envelopes, and contents of records.
        self._seen = Newest[bytes, None](REMEMBERED)
        self._outbox = Outbox[M]()
        self.sealed = b""  # the record that the handler is called with, as it was signed
        self._running: Future[None] = self._host.submit(self._run())

    @property
    def counts(self) -> dict[str, Any]:
        """The numbers of records ``sent``, ``unsent``, ``received``, ``accepted``; and
        ``rejected``, by reason.
        """
        events, rejected = self.counters.events(), self.counters.rejected()
        counted = {name: events.get(name, 0) for name in ("sent", "unsent", "received", "accepted")}
        return {
            **counted,
            "rejected": {reason: count for reason, count in rejected.items() if count},
        }

    def publish(self, message: M) -> None:
        """Queue ``message`` for all peers that joined the topic; never waits for the network.

        Raises MessageError if it is too large, or if another peer is its author. While the daemon
        restarts messages wait, at most 256 of them and 32 MiB; the oldest are dropped and counted
        as ``unsent``.
        """
        if (
            message.AUTHOR is not None
            and getattr(message, message.AUTHOR) != self._identity.peer_id
        ):
            raise MessageError(
                f"This node cannot publish a {message.KIND} of another {message.AUTHOR}.", "forged"
            )
        dropped = self._outbox.put(message, len(pack(message)))
        self.counters.add("unsent", dropped)

    def flush(self, seconds: float) -> bool:
        """Wait until all messages so far were published or given up; return False if ``seconds``
        did not suffice.

        For a node that is about to leave. Not for the host's own thread.
        """
        return self._outbox.wait_until_settled(seconds)

    def listeners(self, timeout: float = 5.0) -> tuple[str, ...]:
        """Return the neighbours that take part in the topic.

        Raises NetworkError. Not for the host's own thread.
        """
        return self._host.call(self._listeners(), timeout)

    def close(self) -> None:
        self._running.cancel()

    # -- on the loop -------------------------------------------------------------------------------

    async def _listeners(self) -> tuple[str, ...]:
        return self._gossip.neighbours.listeners(self.name)

    async def _run(self) -> None:
        self._gossip.neighbours.join(self.name)
        await asyncio.gather(*map(self._steadily, (self._send, self._fetcher.run)))

    async def _steadily(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except Exception as error:  # a bug must not stop the topic
                self._host.internal_errors.caught("gossip", error)
                await asyncio.sleep(AGAIN_S)

    async def take(self, neighbour: str, digest: bytes, data: bytes) -> bool:
        """Check an envelope that came from ``neighbour``, and pass it on if it is sound; return
        False if any node would have refused it, whatever else it has seen. Nothing is taken once
        the topic is closed.
        """
        if digest in self._seen or self._running.done():
            return True
        self._seen[digest] = None
        self.counters.add("received")
        is_sound = True
        with self._guarded():
            try:
                opened = await self._open(data)
            except MessageError:
                is_sound = False
                raise
            if self._gossip.is_member(opened.author) or not self._gossip.wait_for_author(
                lambda: self._judge_later(opened, neighbour, digest, data)
            ):
                self._judge(opened, neighbour, digest, data)
        return is_sound

    async def _open(self, data: bytes) -> Opened:
        """Check what needs no knowledge: bounds, form, swarm, signature."""
        sent = envelope.open_envelope(data, self._swarm, self._room)
        kinds = self._kind, BodyAnnouncement
        opened = await self._opened(sent.encoding, sent.size, sent.body, *kinds)
        if getattr(opened.message, "swarm", self._swarm) != self._swarm:
            raise MessageError("A record of another swarm was refused.", "foreign-swarm")
        return opened

    def _judge(self, opened: Opened, neighbour: str, digest: bytes, data: bytes) -> None:
        """Check what this node can know, and pass the envelope on."""
        self._deliver(opened, len(data))
        self._gossip.neighbours.push(self.name, digest, data, source=neighbour)

    def _judge_later(self, opened: Opened, neighbour: str, digest: bytes, data: bytes) -> None:
        with self._guarded():
            self._judge(opened, neighbour, digest, data)

    async def _opened(
        self, encoding: Encoding, size: int, body: bytes, *kinds: type[Message]
    ) -> Opened:
        """Open a record in a worker thread."""
        work = functools.partial(envelope.open_body, encoding, size, body, *kinds)
        return await asyncio.get_running_loop().run_in_executor(None, work)

    async def _fetched(self, announcer: str, encoding: Encoding, size: int, body: bytes) -> None:
        """Take the record in a body that was announced and fetched."""
        with self._guarded():
            self._deliver(await self._opened(encoding, size, body, self._kind))

    def _deliver(self, opened: Opened, nbytes: int | None = None) -> None:
        """Check what only this node can know, and hand the record to the handler, or fetch it.

        ``nbytes``: of the envelope, which its author is charged for; a fetched record was charged
        to its announcer.
        """
        author = opened.author
        if author == self._identity.peer_id or opened.content in self._seen:
            raise MessageError("A record was refused: it arrived before.", "replayed")
        if not self._gossip.access_policy.admits(author):
            raise MessageError(
                "A record was refused: the access policy excludes its author.", "unwelcome"
            )
        if not self._gossip.is_member(author):
            raise MessageError("A record was refused: its author is no member.", "stranger")
        if nbytes is not None:
            self._charge(author, 1, max(nbytes, len(opened.sealed)))
        if isinstance(opened.message, BodyAnnouncement):
            self._announced(author, opened.message)
            self._seen[opened.content] = None
            return
        self._seen[opened.content] = None
        if self._handler is not None:
            self.sealed = opened.sealed
            self._handler(author, cast(M, opened.message))
        self.counters.add("accepted")

    def _announced(self, announcer: str, announcement: BodyAnnouncement) -> None:
        envelope.check_size(announcement.size, announcement.nbytes, self._room)
        self._charge(announcer, 0, max(announcement.size, announcement.nbytes))
        self._fetcher.want(announcer, announcement)

    def _charge(self, author: str, messages: int, nbytes: int) -> None:
        if not self._quotas.take(author, messages, nbytes):
            raise MessageError(
                "A record was refused: its author sent too many, or too large ones.", "quota"
            )

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Return a block in which an exception rejects this one record."""
        try:
            yield
        except MessageError as error:
            log.debug("%s: %s", self.name, error)
            self.counters.reject(error.reason)
        except Exception as error:
            self._host.internal_errors.caught("gossip", error)
            self.counters.reject("failed")

    async def _send(self) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await self._publish(message)
                self.counters.add("sent")
            except Exception as error:
                self._host.internal_errors.caught("gossip", error)
                self.counters.add("unsent")
            self._outbox.settle()

    async def _publish(self, message: M) -> None:
        loop = asyncio.get_running_loop()
        body: Body = await loop.run_in_executor(None, envelope.make_body, message, self._identity)
        data = envelope.make_envelope(self._swarm, body)
        if data is None:
            self._gossip.body_store.put(body.data)
            data = envelope.make_announcement(self._swarm, body, self._identity)
        while not self._host.alive:
            await asyncio.sleep(AGAIN_S)
        digest = blake3(data).digest()
        self._seen[digest] = None
        self._gossip.neighbours.push(self.name, digest, data)
