"""Rollouts as the training thread sees them: it publishes its own and drains those of others, and
never waits.

    pool = RolloutPool(gossip, knows)
    pool.publish(pool.make(env="add", ...))
    for rollout in pool.drain(): ...

The pool judges the swarm, environment and age of a record. Those of a barred author are refused as
``banned``, or dropped if they were held already.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from shoal.swarm.errors import MessageError
from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.topics.held_rollouts import HeldRollouts, PoolLimits
from shoal.swarm.topics.rollout import Rollout
from shoal.swarm.wire.envelope import pack

log = logging.getLogger(__name__)

MAX_CLOCK_AHEAD_S = 60.0
"""That a record may be dated ahead of our clock."""
MAX_NONCES = 16_384
"""That are remembered."""

Knows = Callable[[str, str, bytes], bool]

REASONS = (
    "truncated",
    "oversized",
    "nested",
    "malformed",
    "version",
    "kind",
    "bomb",
    "forged",
    "replayed",
    "quota",
    "overflow",
    "digest",
    "unavailable",
    "foreign-swarm",
    "foreign-env",
    "stale",
    "future",
    "banned",
    "unwelcome",
)


class RolloutPool:
    """The rollouts of ``gossip``'s swarm. For any thread but the host's own.

    ``knows(env, env_version, env_config)``: returns whether this node can make the questions of
    that environment; quick, on the host's loop; an exception counts as no. ``barred``: tells peers
    whose records are refused; quick, for any thread; it may be set later.
    """

    def __init__(
        self,
        gossip: Gossip,
        knows: Knows,
        *,
        limits: PoolLimits | None = None,
        clock: Callable[[], float] = time.time,
        barred: Callable[[str], bool] = lambda peer: False,
    ) -> None:
        limits = limits or PoolLimits()
        self.barred = barred
        self.bytes_sent = 0
        """Of records published, each once: they go to several neighbours, framed."""
        self.bytes_received = 0
        """Of records drained, each once."""
        self._swarm = gossip.swarm
        self._peer = gossip.identity.peer_id
        self._knows = knows
        self._clock = clock
        self._lock = threading.Lock()  # guards the next three
        self._held = HeldRollouts(limits, clock)
        self._round = 0
        self._banned = 0  # of those that were accepted
        # Of (author, nonce); on the loop only.
        self._nonces = Newest[tuple[str, bytes], None](MAX_NONCES)
        self.topic = gossip.join(Rollout, self._take, limits.quota)

    def advance(self, round: int) -> None:
        """Note that this node begins ``round``."""
        with self._lock:
            self._round = round
            self._held.advance()

    def make(self, **fields: Any) -> Rollout:
        """Return a record of this node in its present round, with the other ``fields``.

        Raises pydantic's ValidationError.
        """
        nonce = secrets.token_bytes(16)
        issued = self._clock()
        return Rollout(
            swarm=self._swarm,
            peer=self._peer,
            round=self._round,
            nonce=nonce,
            issued=issued,
            **fields,
        )

    def publish(self, rollout: Rollout) -> None:
        """Share ``rollout`` with the swarm, soon; never waits.

        Raises MessageError if it is larger than 4 MiB, or another's.
        """
        self.bytes_sent += len(pack(rollout))
        self.topic.publish(rollout)

    def drain(self) -> list[Rollout]:
        """Return all records since the last call that are neither too old by now nor of a barred
        peer, in the order of arrival.
        """
        with self._lock:
            held = self._held.take()
        authors = {rollout.peer for rollout in held}
        barred = {peer for peer in authors if self.barred(peer)}
        drained = [rollout for rollout in held if rollout.peer not in barred]
        with self._lock:
            self._banned += len(held) - len(drained)
        self.bytes_received += sum(len(pack(rollout)) for rollout in drained)
        return drained

    @property
    def counts(self) -> dict[str, Any]:
        """The numbers of records ``sent``, ``unsent``, ``received``, ``accepted``; ``held``;
        accepted but then ``expired`` or ``displaced`` before they were drained, or ``banned`` with
        their author; and ``rejected``, by reason.
        """
        counted = self.topic.counts
        with self._lock:
            here = {
                "held": len(self._held),
                "expired": self._held.expired,
                "displaced": self._held.displaced,
                "banned": self._banned,
            }
        return {**counted, **here, "rejected": {**dict.fromkeys(REASONS, 0), **counted["rejected"]}}

    # -- on the loop -------------------------------------------------------------------------------

    def _take(self, author: str, rollout: Rollout) -> None:
        if rollout.swarm != self._swarm:
            raise MessageError("A rollout of another swarm was refused.", "foreign-swarm")
        if self.barred(author):
            raise MessageError("A rollout was refused: its author is banned for a while.", "banned")
        if (author, rollout.nonce) in self._nonces:
            raise MessageError("A rollout was refused: its nonce was used before.", "replayed")
        if rollout.issued > self._clock() + MAX_CLOCK_AHEAD_S:
            raise MessageError("A rollout was refused: it is dated in the future.", "future")
        with self._lock:
            oldest = self._held.oldest()
        if rollout.issued < oldest:
            raise MessageError("A rollout was refused: it is too old.", "stale")
        if not self._is_known(rollout):
            raise MessageError("A rollout of an unknown environment was refused.", "foreign-env")
        self._nonces[author, rollout.nonce] = None
        with self._lock:
            self._held.add(rollout)

    def _is_known(self, rollout: Rollout) -> bool:
        try:
            return self._knows(rollout.env, rollout.env_version, rollout.env_config)
        except Exception:  # a peer's configuration may make it fail
            log.debug("environment %r was not recognised", rollout.env, exc_info=True)
            return False
