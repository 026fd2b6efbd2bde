"""Auditor of another peer's claims: fetch the material of a claim, repeat the work, vote; within a budget of time."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.node.verify.audit.finding import Finding, NotCheckable
from shoal.swarm.errors import MessageError, NetworkError
from shoal.verification.consensus.participant import Slot
from shoal.verification.consensus.protocol import Checked
from shoal.verification.consensus.records import Claim, Vote

# Budget of checking: some seconds of a node's time in each minute, saved up for one minute at most.

MINUTE = 60.0


class Budget:
    """Time budget of ``seconds`` in each minute; ``clock``: seconds. A check that was begun is finished, so it may be overdrawn."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._rate, self._most, self._clock = seconds / MINUTE, seconds, clock
        self._left, self._since = seconds, clock()
        self.spent = 0.0

    @property
    def is_open(self) -> bool:
        """True if a check may begin now."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._since) * self._rate)
        self._since = now
        return self._left > 0

    def spend(self, seconds: float) -> None:
        self.spent += seconds
        self._left -= seconds


log = logging.getLogger(__name__)

MOST_ASKED = 3  # peers besides the author who are asked for what it does not hand out


class Bodies(Protocol):
    """Part of `shoal.swarm.topics.attestation.EvidenceStore` that checking needs."""

    def put(self, body: bytes) -> bytes:
        """Serve ``body`` to other peers; return its SHA-256."""
        ...

    def get(self, peer: str, sha256: bytes, most: int, timeout: float) -> bytes:
        """Fetch the body with that hash. Raises NetworkError or MessageError."""
        ...


@dataclass(frozen=True)
class Made:
    """Claim for ``slot``, with the bytes that its author serves to verifiers."""

    slot: Slot
    claim: Claim
    material: bytes
    snapshot: bytes


class Checking(Protocol):
    """Checker of claims, one at a time, whose material and snapshot have been fetched already."""

    @property
    def most_material_bytes(self) -> int:
        """Size of the largest material that it can use."""
        ...

    @property
    def most_snapshot_bytes(self) -> int:
        """Size of the largest snapshot that it can use."""
        ...

    def knows(self, model: bytes) -> bool:
        """Return whether it still has the snapshot of that digest, so that it need not be fetched."""
        ...

    def check(self, claim: Claim, material: bytes, snapshot: bytes | None) -> Finding:
        """Check ``claim``; ``snapshot`` is None only if it ``knows(claim.model)``. Raises NotCheckable if this node cannot tell."""
        ...


@dataclass(frozen=True)
class Audit:
    """Result of a check on this node, for people."""

    claim: Claim
    accepted: bool
    reason: str
    material: bytes | None
    snapshot: bytes | None


class Auditor:
    """Checks claims. ``others``: peers that may have fetched the same already; ``on_audit`` is given each audit. ``fetch_s``:
    seconds to fetch a body from its author, and as many from others instead; three times that for a whole claim. ``weigh``: what
    the author's earlier claims make of a finding.
    """

    def __init__(
        self,
        checker: Checking,
        bodies: Bodies,
        budget: Budget,
        others: Callable[[], Sequence[str]],
        on_audit: Callable[[Audit], None],
        fetch_s: float,
        timer: Callable[[], float] = time.monotonic,
        weigh: Callable[[Claim, Finding], Finding] = lambda claim, finding: finding,
    ) -> None:
        self._checker, self._bodies, self._budget, self._others, self._on_audit = checker, bodies, budget, others, on_audit
        self._fetch_s, self._timer, self._until = fetch_s, timer, 0.0
        self._weigh = weigh
        self.counts: Counter[str] = Counter()

    def check(self, claim: Claim) -> Checked | None:
        """Vote on ``claim``; None if the budget is spent, or this node cannot judge it (the reason is logged)."""
        if not self._budget.is_open:
            self.counts["skipped"] += 1
            return None
        began = time.thread_time()
        try:
            found, material, snapshot = self._examine(claim)
        except NotCheckable as error:
            log.warning("a claim was not checked: %s", error)
            self.counts["uncheckable"] += 1
            return None
        finally:
            self._budget.spend(time.thread_time() - began)
        found = self._weigh(claim, found)
        vote: Vote = "valid" if found.accepted else "invalid"
        self.counts["checked"] += 1
        self.counts[vote] += 1
        self._on_audit(Audit(claim, found.accepted, found.reason, material, snapshot))
        return Checked(vote, found.evidence)

    def _examine(self, claim: Claim) -> tuple[Finding, bytes | None, bytes | None]:
        self._until = self._timer() + 3 * self._fetch_s
        material = self._fetch(claim, claim.fingerprint, self._checker.most_material_bytes)
        if material is None:
            return _withheld("what it was made of"), None, None
        snapshot = None
        if not self._checker.knows(claim.model):
            snapshot = self._fetch(claim, claim.model, self._checker.most_snapshot_bytes)
            if snapshot is None:
                return _withheld("the weights that made it"), material, None
        return self._checker.check(claim, material, snapshot), material, snapshot

    def _fetch(self, claim: Claim, sha256: bytes, most: int) -> bytes | None:
        """Fetch a body from the author or, if it answers only some peers, from another peer that has it."""
        body = self._ask(claim.peer, sha256, most, self._fetch_s)
        until = min(self._timer() + self._fetch_s, self._until)
        for peer in [peer for peer in self._others() if peer != claim.peer][:MOST_ASKED]:
            if body is not None or (left := until - self._timer()) <= 0:
                break
            body = self._ask(peer, sha256, most, left)
        if body is not None:
            self._bodies.put(body)
        return body

    def _ask(self, peer: str, sha256: bytes, most: int, timeout: float) -> bytes | None:
        try:
            return self._bodies.get(peer, sha256, most, timeout)
        except (NetworkError, MessageError) as error:
            log.debug("no evidence from %s: %s", peer, error)
            return None


def _withheld(what: str) -> Finding:
    return Finding(False, f"The author of the claim does not serve {what}.")
