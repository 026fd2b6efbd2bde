"""The swarm's rollouts as the training thread sees them: it publishes its own and drains those of others, without ever waiting.

The pool judges the swarm, environment and age of a record, not its quality: rewards are the receiver's to compute. Records of a
barred author are refused as ``banned``, or dropped if they were held already.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.swarm.errors import MessageError
from shoal.swarm.gossip.bounded import LRUSet
from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.p2p.rate_limit import RateLimit
from shoal.swarm.topics.rollout import Finish, Rollout

log = logging.getLogger(__name__)

CLOCK = 60.0  # seconds a record may be dated ahead of our clock
REMEMBERED = 16_384  # nonces

Knows = Callable[[str, str, bytes], bool]

REASONS = (
    "truncated", "oversized", "nested", "malformed", "version", "kind", "bomb", "forged", "replayed", "quota", "overflow",
    "digest", "unavailable", "foreign-swarm", "foreign-env", "stale", "future", "banned", "unwelcome",
)  # fmt: skip


@dataclass(frozen=True)
class PoolLimits:
    """The limits on what a pool accepts and keeps."""

    max_age: int = 8
    """Rounds: a record is stale when this node's round is ahead of the record's, or of its arrival's, by more."""
    max_ahead: int | None = None
    """Rounds: a record is from the future if its round is ahead of this node's by more. None: no limit, for slow nodes."""
    ttl: float = 600.0
    """Seconds since the record was issued."""
    per_sender: int = 64
    """Records of one author held at a time; a newer one displaces the oldest."""
    records: int = 1024
    """Records held at a time, of all authors."""
    nbytes: int = 128 << 20
    """Bytes held at a time."""
    quota: RateLimit = field(default_factory=RateLimit)
    """The limit of one publisher in a minute."""


@dataclass(frozen=True)
class _Held:
    rollout: Rollout
    arrived: int  # this node's round
    nbytes: int


class RolloutPool:
    """The rollouts of ``gossip``'s swarm. For any thread but the host's own.

    ``knows(env, env_version, env_config)``: returns whether this node can make the questions of that environment; quick, on the
    host's loop; an exception counts as no. ``barred``: tells peers whose records are refused; quick, for any thread; it may be set
    later.
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
        self._swarm, self._peer = gossip.swarm, gossip.identity.peer_id
        self._knows, self._clock = knows, clock
        self._limits = limits or PoolLimits()
        self.barred = barred
        self._lock = threading.Lock()  # guards the next five
        self._held: list[_Held] = []  # in the order of arrival
        self._round = 0
        self._expired = 0
        self._displaced = 0
        self._banned = 0
        self._nonces = LRUSet(REMEMBERED)  # (author, nonce); on the loop only
        self.topic = gossip.join(Rollout, self._take, self._limits.quota)

    def advance(self, round: int) -> None:
        """Count the age of records from ``round``, the round in which this node is now."""
        with self._lock:
            self._round = round

    def make(
        self,
        *,
        env: str,
        env_version: str,
        env_config: bytes,
        seed: int,
        index: int,
        completions: Sequence[str],
        finish: Sequence[Finish],
        policy_version: int,
        temperature: float,
        tokens: Sequence[bytes] | None = None,
        logps: Sequence[bytes] | None = None,
        tokenizer: str | None = None,
    ) -> Rollout:
        """Return a record of this node in its present round (`Rollout` explains the fields). Raises pydantic's ValidationError."""
        return Rollout(
            swarm=self._swarm,
            peer=self._peer,
            env=env,
            env_version=env_version,
            env_config=env_config,
            seed=seed,
            index=index,
            completions=tuple(completions),
            finish=tuple(finish),
            tokens=None if tokens is None else tuple(tokens),
            logps=None if logps is None else tuple(logps),
            tokenizer=tokenizer,
            policy_version=policy_version,
            temperature=temperature,
            round=self._round,
            nonce=secrets.token_bytes(16),
            issued=self._clock(),
        )

    def publish(self, rollout: Rollout) -> None:
        """Share ``rollout`` with the swarm, soon; never waits. Raises MessageError if it is larger than 4 MiB, or another's."""
        self.topic.publish(rollout)

    def drain(self) -> list[Rollout]:
        """Return all records since the last call that are neither too old by now nor of a barred peer, in the order of arrival."""
        with self._lock:
            self._expire()
            held, self._held = self._held, []
        barred = {peer for peer in {item.rollout.peer for item in held} if self.barred(peer)}
        drained = [item.rollout for item in held if item.rollout.peer not in barred]
        with self._lock:
            self._banned += len(held) - len(drained)
        return drained

    @property
    def counts(self) -> dict[str, Any]:
        """The numbers of records ``sent``, ``unsent``, ``received``, ``accepted``; ``held``; accepted but then ``expired`` or
        ``displaced`` before they were drained, or ``banned`` with their author; and ``rejected``, by reason.
        """
        events, rejected = self.topic.counters.events(), self.topic.counters.rejected()
        with self._lock:
            here = {"held": len(self._held), "expired": self._expired, "displaced": self._displaced, "banned": self._banned}
        counted = {name: events.get(name, 0) for name in ("sent", "unsent", "received", "accepted")}
        return {**counted, **here, "rejected": {**dict.fromkeys(REASONS, 0), **rejected}}

    def flush(self, seconds: float) -> bool:
        """Wait until all own records were published or given up; return False if ``seconds`` did not suffice."""
        return self.topic.flush(seconds)

    def close(self) -> None:
        self.topic.close()

    # -- on the loop -----------------------------------------------------------------------------------------------------

    def _take(self, author: str, rollout: Rollout) -> None:
        """Judge a record whose signature is right. Raises MessageError with the reason to count."""
        if rollout.swarm != self._swarm:
            raise MessageError("A rollout of another swarm was refused.", "foreign-swarm")
        if self.barred(author):
            raise MessageError("A rollout was refused: its author is banned for a while.", "banned")
        if (author, rollout.nonce) in self._nonces:
            raise MessageError("A rollout was refused: its nonce was used before.", "replayed")
        now = self._clock()
        if rollout.issued > now + CLOCK:
            raise MessageError("A rollout was refused: it is dated in the future.", "future")
        if rollout.issued < now - self._limits.ttl:
            raise MessageError("A rollout was refused: it is too old.", "stale")
        with self._lock:
            round = self._round
        ahead = rollout.round - round
        if self._limits.max_ahead is not None and ahead > self._limits.max_ahead:
            raise MessageError(f"A rollout was refused: its round is {ahead} ahead.", "future")
        if -ahead > self._limits.max_age:
            raise MessageError(f"A rollout was refused: it is {-ahead} rounds old.", "stale")
        if not self._is_known(rollout):
            raise MessageError("A rollout of an unknown environment was refused.", "foreign-env")
        self._nonces.add((author, rollout.nonce))
        with self._lock:
            self._held.append(_Held(rollout, round, rollout.nbytes()))
            self._make_room(author)

    def _is_known(self, rollout: Rollout) -> bool:
        try:
            return self._knows(rollout.env, rollout.env_version, rollout.env_config)
        except Exception:  # a peer's configuration may make it fail
            log.debug("environment %r was not recognised", rollout.env, exc_info=True)
            return False

    def _make_room(self, author: str) -> None:
        self._expire()
        before = len(self._held)
        theirs = [at for at, item in enumerate(self._held) if item.rollout.peer == author]
        if len(theirs) > self._limits.per_sender:
            del self._held[theirs[0]]
        nbytes = sum(item.nbytes for item in self._held)
        while self._held and (len(self._held) > self._limits.records or nbytes > self._limits.nbytes):
            nbytes -= self._held.pop(0).nbytes
        self._displaced += before - len(self._held)

    def _expire(self) -> None:
        """Drop records that became stale while they were held."""
        oldest, issued = self._round - self._limits.max_age, self._clock() - self._limits.ttl
        fresh = [item for item in self._held if min(item.rollout.round, item.arrived) >= oldest and item.rollout.issued >= issued]
        self._expired += len(self._held) - len(fresh)
        self._held = fresh
