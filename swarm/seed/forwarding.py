"""The gossip that a bootstrap node forwards, between members that have only a relay in common.

A member that announces a relay names its topics; the daemon of the bootstrap node passes on what is
published on a topic to which it is subscribed. Why: docs/internals.md, "A bootstrap node".
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest

from shoal.swarm.errors import NetworkError
from shoal.swarm.p2p.addresses import range_of
from shoal.swarm.p2p.daemon import ANSWER_S, DAEMON_GONE, Daemon
from shoal.swarm.p2p.pubsub import Subscription
from shoal.swarm.p2p.rate_limit import RateLimit, TokenBuckets
from shoal.swarm.seed.registry import TTL_S

log = logging.getLogger(__name__)

MAX_TOPICS = 256
"""That are forwarded at once."""
MAX_ASKED = 64
"""Topics that one address range may ask for."""
LOOK_S = 1.0
"""Between two looks at what is asked for."""
BUDGET = RateLimit(messages=3000, nbytes=16 << 20, senders=4 * MAX_TOPICS)
"""Of one topic in a minute."""
REST_S = 60.0
"""For which a topic is not forwarded that exceeded its budget."""


class GossipForwarding:
    """The topics that a bootstrap node forwards; use it on one loop. ``clock`` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: dict[str, dict[str, float]] = {}
        """Address range of the askers -> topic -> until when. The one asked for first is first."""
        self._rests: dict[str, float] = {}  # topic -> until when it rests
        self._budgets = TokenBuckets(BUDGET, clock)

    def ask(self, swarm: str, topics: Sequence[str], host: str) -> None:
        """Forward ``topics`` of ``swarm`` from now on, for a member that called from the IP address
        ``host``.
        """
        asked = self._asked.setdefault(range_of(host), {})
        for name in topics:
            topic = f"shoal/{swarm}/{name}"
            if topic in asked or len(asked) < MAX_ASKED:
                asked[topic] = self._clock() + TTL_S

    def chosen(self) -> list[str]:
        """Return the topics to forward: where too many are asked for, one of each address range in
        turn.
        """
        self._forget_past()
        turns: dict[str, None] = {}
        for row in zip_longest(*self._asked.values()):
            for topic in row:
                if topic is not None and topic not in self._rests:
                    turns[topic] = None
        return list(turns)[:MAX_TOPICS]

    def takes(self, topic: str, nbytes: int) -> bool:
        """Count a message of ``topic``; return False, and let it rest, if that is more than it may
        have.
        """
        if self._budgets.take(topic, 1, nbytes):
            return True
        log.warning(
            "%s is not forwarded for %g s: more is published than %d MiB a minute",
            topic,
            REST_S,
            BUDGET.nbytes >> 20,
        )
        self._rests[topic] = self._clock() + REST_S
        return False

    async def run(self, daemon: Daemon) -> None:
        """Subscribe ``daemon`` to what is chosen, until cancelled."""
        running: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                chosen = self.chosen()
                for topic, task in list(running.items()):
                    if task.done() or topic not in chosen:
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
        except (TimeoutError, *DAEMON_GONE) as error:
            log.debug("%s is not forwarded: %r", topic, error)
            return
        try:
            while self.takes(topic, len((await subscription.next()).data)):
                pass
        except NetworkError as error:
            log.debug("%s is forwarded no more: %s", topic, error)
        finally:
            subscription.close()

    def _forget_past(self) -> None:
        """Forget what is asked for no more, and which topics have rested."""
        now = self._clock()
        for where, asked in list(self._asked.items()):
            live = {topic: until for topic, until in asked.items() if until >= now}
            if live:
                self._asked[where] = live
            else:
                del self._asked[where]
        self._rests = {topic: until for topic, until in self._rests.items() if until >= now}
