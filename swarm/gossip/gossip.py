"""Publish/subscribe of small signed records: each is published once on its kind's topic and reaches
all peers that joined it.

GossipSub (in the daemon) spreads the messages and authenticates their publishers. A record also
carries the signature of its author, so that it can be passed on, kept, and judged. A message that
arrives is charged to its publisher's quota, opened in a worker thread, and handed to the topic's
handler once. A record above 256 KiB is announced, and fetched by stream.

A bad record has no other effect than a count: each is counted as accepted or under the reason for
which it was rejected, which docs/internals.md lists ("Gossip and status").
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, cast

from blake3 import blake3

from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.gossip import envelope
from shoal.swarm.gossip.bodies import FETCH_S, MAX_STORED, BodyFetcher, BodyStore
from shoal.swarm.gossip.envelope import (
    Body,
    BodyAnnouncement,
    BoundedQueue,
    Encoding,
    GossipEnvelope,
    Opened,
    topic_of,
)
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.counters import Counters
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.p2p.rate_limit import RateLimit, TokenBuckets
from shoal.swarm.wire.envelope import MAX_MESSAGE, M, Message, pack

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

log = logging.getLogger(__name__)

REMEMBERED = 32_768  # messages, and records in them, that are recognised when they come again
INBOX = (256, 32 << 20)  # messages and bytes that wait to be opened, unless a topic says otherwise
OUTBOX = (256, 32 << 20)  # messages and bytes that wait to be published
AGAIN = (
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
)  # seconds before each further attempt to subscribe; the last repeats
ATTEMPTS = 3  # to publish one message

Handler = Callable[[str, M], None]


class Gossip:
    """The topics of ``swarm`` in which this node takes part. For any thread.

    ``addresses``: returns the known addresses of a peer (from the directory), for records that have
    to be fetched. ``fetch_s``: seconds for one of those from one peer. ``access_policy``: whose
    records are taken. ``look``: called when a stranger publishes. ``body_store``: bytes of own
    records too large for gossip that are kept to be fetched.
    """

    def __init__(
        self,
        host: Host,
        identity: Identity,
        swarm: str,
        *,
        addresses: Callable[[str], Sequence[str]] = lambda peer: (),
        fetch_s: float = FETCH_S,
        access_policy: AccessPolicy | None = None,
        look: Callable[[], None] = lambda: None,
        body_store: int = MAX_STORED,
    ) -> None:
        self.access_policy = access_policy or AccessPolicy()
        self.look = look
        self.host = host
        self.identity = identity
        self.swarm = swarm
        self.fetch_s = fetch_s
        self.body_store = BodyStore(host, swarm, addresses, nbytes=body_store)
        self._topics: list[Topic[Any]] = []

    def join(
        self,
        kind: type[M],
        handler: Handler[M] | None,
        quota: RateLimit | None = None,
        inbox: tuple[int, int] = INBOX,
    ) -> Topic[M]:
        """Take part in the topic of ``kind`` from now on.

        ``handler(author, record)`` runs on the host's loop, once for each record of others; it must
        not wait. It refuses a record by MessageError, whose reason is counted. None: this node only
        publishes and its daemon passes on; arriving messages are dropped unopened. ``quota`` bounds
        each publisher; ``inbox`` the messages, and their bytes, that wait to be opened: if there
        are more, the oldest are dropped.
        """
        topic = Topic(self, kind, handler, quota or RateLimit(), inbox)
        self._topics.append(topic)
        return topic

    def refused(self) -> dict[str, int]:
        """Return reason -> number of records rejected so far, on all topics."""
        found: Counter[str] = Counter()
        for topic in list(self._topics):
            found.update(topic.counters.rejected())
        return dict(found)

    def close(self) -> None:
        """Leave all topics; records not published yet are lost."""
        for topic in self._topics:
            topic.close()


class Topic(Generic[M]):
    """One kind of record; see `Gossip.join`.

    ``counters``: ``sent``, ``unsent``, ``received``, ``accepted`` and rejections.
    """

    def __init__(
        self,
        gossip: Gossip,
        kind: type[M],
        handler: Handler[M] | None,
        quota: RateLimit,
        inbox: tuple[int, int],
    ) -> None:
        self.name = topic_of(gossip.swarm, kind)
        self.counters = Counters()
        self._host = gossip.host
        self._identity = gossip.identity
        self._swarm = gossip.swarm
        self._gossip = gossip
        self._kind = kind
        self._handler = handler
        self._room = envelope.room_for(kind)
        self._fetcher = BodyFetcher(
            gossip.body_store, self._open, self.counters.reject, gossip.fetch_s, self._host.met
        )
        self._quotas = TokenBuckets(quota)
        self._seen = Newest[tuple[str, bytes] | bytes, None](REMEMBERED)
        self._inbox: BoundedQueue[tuple[str, GossipEnvelope]] = BoundedQueue(*inbox)
        self._outbox: BoundedQueue[M] = BoundedQueue(*OUTBOX)
        self.sealed = b""  # the record that the handler is called with, as it was signed
        self._settled = threading.Condition()  # guards the next one
        self._unsettled = 0  # messages that were neither published nor given up yet
        self._up = asyncio.Event()  # while this node is subscribed
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
        with self._settled:
            dropped = len(self._outbox.put(message, len(pack(message))))
            self._unsettled += 1 - dropped
        self.counters.add("unsent", dropped)

    def flush(self, seconds: float) -> bool:
        """Wait until all messages so far were published or given up; return False if ``seconds``
        did not suffice.

        For a node that is about to leave. Not for the host's own thread.
        """
        with self._settled:
            return self._settled.wait_for(lambda: self._unsettled <= 0, seconds)

    def listeners(self, timeout: float = 5.0) -> tuple[str, ...]:
        """Return the connected peers that take part in the topic.

        Raises NetworkError. Not for the host's own thread.
        """
        return self._host.call(self._host.pubsub.listeners(self.name), timeout)

    def close(self) -> None:
        self._running.cancel()

    # -- on the loop -------------------------------------------------------------------------------

    async def _run(self) -> None:
        await asyncio.gather(
            *map(self._steadily, (self._listen, self._receive, self._send, self._fetcher.run))
        )

    async def _steadily(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except Exception as error:  # a bug must not stop the topic
                self._host.internal_errors.caught("gossip", error)
                await asyncio.sleep(AGAIN[-1])

    async def _listen(self) -> None:
        failures = 0
        while True:
            try:
                subscription = await self._host.pubsub.subscribe(self.name)
            except NetworkError as error:
                log.debug("not subscribed to %s: %s", self.name, error)
                await asyncio.sleep(AGAIN[min(failures, len(AGAIN) - 1)])
                failures += 1
                continue
            self._up.set()
            failures = 0
            try:
                while True:
                    publisher, data = await subscription.next()
                    if publisher != self._identity.peer_id:
                        self.counters.add("received")
                        if self._handler is not None:
                            with self._guarded():
                                self._take(publisher, data)
            except NetworkError as error:
                log.debug("%s: %s", self.name, error)
            finally:
                self._up.clear()
                subscription.close()

    def _take(self, publisher: str, data: bytes) -> None:
        """Make the cheap checks and queue the message for the others."""
        self._check_access(publisher)
        if len(data) > MAX_MESSAGE:
            raise MessageError(f"A message of {len(data)} bytes was refused.", "oversized")
        # GossipSub itself forgets after two minutes. A peer that then replays another's messages
        # must not use up that one's quota.
        digest = blake3(data).digest()
        if (publisher, digest) in self._seen:
            raise MessageError("A message was refused: it arrived before.", "replayed")
        self._charge(publisher, 1, len(data))
        self._seen[publisher, digest] = None
        opened = envelope.open_envelope(data, self._swarm, self._room)
        self._charge(publisher, 0, max(0, opened.size - len(data)))
        self.counters.reject("overflow", len(self._inbox.put((publisher, opened), len(data))))

    def _check_access(self, peer: str) -> None:
        if not self._gossip.access_policy.admits(peer):
            self._gossip.look()  # it may have just joined, and its record was not read yet
            raise MessageError(
                "A message was refused: the access policy excludes its publisher or author.",
                "unwelcome",
            )

    def _charge(self, publisher: str, messages: int, nbytes: int) -> None:
        if not self._quotas.take(publisher, messages, nbytes):
            raise MessageError(
                "A message was refused: its publisher sent too many, or too large ones.", "quota"
            )

    async def _receive(self) -> None:
        while True:
            publisher, sent = await self._inbox.get()
            await self._open(publisher, sent.encoding, sent.size, sent.body, BodyAnnouncement)

    async def _open(
        self, publisher: str, encoding: Encoding, size: int, body: bytes, *others: type[Message]
    ) -> None:
        """Open the record in a body, of this kind or ``others``, in a worker thread, and deliver
        it.
        """
        work = functools.partial(envelope.open_body, encoding, size, body, self._kind, *others)
        with self._guarded():
            self._deliver(publisher, await asyncio.get_running_loop().run_in_executor(None, work))

    def _deliver(self, publisher: str, opened: Opened) -> None:
        if opened.author == self._identity.peer_id or opened.content in self._seen:
            raise MessageError("A record was refused: it arrived before.", "replayed")
        if isinstance(opened.message, BodyAnnouncement):
            self._announced(publisher, opened.message)
            self._seen[opened.content] = (
                None  # only now: one publisher's quota must not keep the next one's copy out
            )
            return
        self._check_access(opened.author)
        self._seen[opened.content] = None
        if self._handler is not None:
            self.sealed = opened.sealed
            self._handler(opened.author, cast(M, opened.message))
        self.counters.add("accepted")

    def _announced(self, publisher: str, announcement: BodyAnnouncement) -> None:
        if announcement.swarm != self._swarm:
            raise MessageError("An announcement of another swarm was refused.", "foreign-swarm")
        envelope.check_size(announcement.size, announcement.nbytes, self._room)
        self._charge(publisher, 0, max(announcement.size, announcement.nbytes))
        self._fetcher.want(publisher, announcement)

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
            except NetworkError as error:
                log.info("a %s was not published: %s", self._kind.KIND, error)
                self.counters.add("unsent")
            except Exception as error:
                self._host.internal_errors.caught("gossip", error)
                self.counters.add("unsent")
            with self._settled:
                self._unsettled -= 1
                self._settled.notify_all()

    async def _publish(self, message: M) -> None:
        loop = asyncio.get_running_loop()
        body: Body = await loop.run_in_executor(None, envelope.make_body, message, self._identity)
        data = envelope.make_envelope(self._swarm, body)
        if data is None:
            self._gossip.body_store.put(body.data)
            data = envelope.make_announcement(self._swarm, body, self._identity)
        for attempt in range(ATTEMPTS):
            await self._up.wait()
            try:
                await self._host.pubsub.publish(self.name, data)
                return
            except NetworkError:
                if attempt == ATTEMPTS - 1:
                    raise
                await asyncio.sleep(AGAIN[attempt])
