"""Gossip between members that have only a relay in common, which a bootstrap node forwards.

GossipSub in libp2p's daemon opens no stream over a relayed connection, so of two nodes behind routers neither hears what the other
publishes. But both are connected to the bootstrap node that relays for them, and its daemon passes on what is published on a topic
to which it is subscribed. So a member that announces a relay names its topics, and the bootstrap node subscribes to them; it reads
nothing of what comes but how much that is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest

from shoal.swarm.errors import NetworkError
from shoal.swarm.p2p.daemon import ANSWER_S, DAEMON_GONE, Daemon
from shoal.swarm.p2p.multiaddr import range_of
from shoal.swarm.p2p.pubsub import Subscription
from shoal.swarm.p2p.rate_limit import RateLimit, TokenBuckets

log = logging.getLogger(__name__)

MAX_TOPICS, MAX_OF_RANGE = 256, 64  # that are forwarded at once, and asked for from one address range
TTL = 120.0  # seconds after which a topic that nobody asks for is not forwarded any more
LOOK_S = 1.0  # seconds between two looks at what is asked for
BUDGET = RateLimit(messages=3000, nbytes=16 << 20, senders=4 * MAX_TOPICS)  # of one topic, in a minute
REST_S = 60.0  # seconds for which one is not forwarded that exceeded it


class GossipForwarding:
    """The topics that a bootstrap node forwards; use it on one loop. ``clock`` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: dict[str, dict[str, float]] = {}
        """Address range of the askers -> topic -> until when. The one asked for first is first."""
        self._rests: dict[str, float] = {}
        """Topic that exceeded its budget -> until when it rests."""
        self._budgets = TokenBuckets(BUDGET, clock)

    def ask(self, swarm: str, topics: Sequence[str], host: str) -> None:
        """Forward ``topics`` of ``swarm`` from now on, for a member that called from the IP address ``host``."""
        asked = self._asked.setdefault(range_of(host), {})
        for topic in (f"shoal/{swarm}/{topic}" for topic in topics):
            if topic in asked or len(asked) < MAX_OF_RANGE:
                asked[topic] = self._clock() + TTL

    def chosen(self) -> list[str]:
        """Return the topics to forward: where too many are asked for, one of each address range in turn."""
        now = self._clock()
        live = {where: {topic: until for topic, until in asked.items() if until >= now} for where, asked in self._asked.items()}
        self._asked = {where: asked for where, asked in live.items() if asked}
        self._rests = {topic: until for topic, until in self._rests.items() if until >= now}
        turns = dict.fromkeys(topic for row in zip_longest(*self._asked.values()) for topic in row if topic is not None)
        return [topic for topic in turns if topic not in self._rests][:MAX_TOPICS]

    def takes(self, topic: str, nbytes: int) -> bool:
        """Count a message of ``topic``; return False, and let it rest, if that is more than it may have."""
        if self._budgets.take(topic, 1, nbytes):
            return True
        log.warning("%s is not forwarded for %g s: more is published than %d MiB a minute", topic, REST_S, BUDGET.nbytes >> 20)
        self._rests[topic] = self._clock() + REST_S
        return False

    async def run(self, daemon: Daemon) -> None:
        """Subscribe ``daemon`` to what is chosen, until cancelled."""
        running: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                chosen = self.chosen()
                for topic in [topic for topic, task in running.items() if task.done() or topic not in chosen]:
                    running.pop(topic).cancel()
                for topic in chosen:
                    if topic not in running:
                        running[topic] = asyncio.ensure_future(self._forward(daemon, topic))
        finally:
            for task in running.values():
                task.cancel()

    async def _forward(self, daemon: Daemon, topic: str) -> None:
        try:
            subscription = await asyncio.wait_for(Subscription.to(daemon, topic), ANSWER_S)
        except (*DAEMON_GONE, asyncio.TimeoutError) as error:
            log.debug("%s is not forwarded: %r", topic, error)
            return
        try:
            while self.takes(topic, len((await subscription.next()).data)):
                pass
        except NetworkError as error:
            log.debug("%s is forwarded no more: %s", topic, error)
        finally:
            subscription.close()
