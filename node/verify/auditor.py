"""Checks of others' claims: evidence is fetched, checked within a budget of time, and becomes a
vote.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from shoal.node.verify.checker import Checker
from shoal.node.verify.finding import Finding
from shoal.node.verify.swarm_network import SwarmNetwork
from shoal.swarm.errors import MessageError, NetworkError, ShoalError
from shoal.verification.consensus.records import Claim, Vote
from shoal.verification.consensus.voter import Checked

log = logging.getLogger(__name__)

MINUTE_S = 60.0
OTHERS_ASKED = 3
"""Peers besides the author who are asked for what it does not hand out."""


class Budget:
    """Time budget of ``seconds`` in each minute, saved up for one minute at most; ``clock``:
    seconds.

    A check that was begun is finished, so it may be overdrawn.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._rate = seconds / MINUTE_S
        self._most = seconds
        self._clock = clock
        self._left = seconds
        self._began = clock()
        self._since = self._began
        self.spent = 0.0

    @property
    def share(self) -> float:
        """Part of the time since it began that was spent."""
        seconds = self._clock() - self._began
        return self.spent / seconds if seconds > 0 else 0.0

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


class Auditor:
    """Checks claims.

    ``on_audit`` is given each claim with its finding, and the material and snapshot that were
    fetched.

    ``fetch_s``: seconds to fetch a body from its author, and as many from others instead; three
    times that for a whole claim. ``weigh``: what the author's earlier claims make of a finding.
    ``counts``: to which those of checks are added.
    """

    def __init__(
        self,
        checker: Checker,
        network: SwarmNetwork,
        budget: Budget,
        on_audit: Callable[[Claim, Finding, bytes | None, bytes | None], None],
        fetch_s: float,
        timer: Callable[[], float],
        weigh: Callable[[Claim, Finding], Finding],
        counts: Counter[str],
    ) -> None:
        self._checker = checker
        self._network = network
        self._budget = budget
        self._on_audit = on_audit
        self._weigh = weigh
        self._fetch_s = fetch_s
        self._timer = timer
        self._until = 0.0
        self.counts = counts

    def check(self, claim: Claim) -> Checked | None:
        """Vote on ``claim``; None if the budget is spent, or this node cannot judge it (the reason
        is logged).
        """
        if not self._budget.is_open:
            self.counts["skipped"] += 1
            return None
        began = time.thread_time()
        try:
            found, material, snapshot = self._examine(claim)
        # Its author chose the question: a check that fails costs this seat, not all later ones.
        except Exception as error:
            log.warning("a claim was not checked: %s", error)
            # A ShoalError says why this node cannot tell.
            if not isinstance(error, ShoalError):
                self._network.internal_errors.caught("verification", error)
            self.counts["uncheckable"] += 1
            return None
        finally:
            self._budget.spend(time.thread_time() - began)
        found = self._weigh(claim, found)
        vote: Vote = "valid" if found.accepted else "invalid"
        self.counts["checked"] += 1
        self.counts[vote] += 1
        self._on_audit(claim, found, material, snapshot)
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
        """Fetch a body from the author or, if it answers only some peers, from another peer that
        has it.
        """
        body = self._ask(claim.peer, sha256, most, self._fetch_s)
        until = min(self._timer() + self._fetch_s, self._until)
        others = [peer for peer in self._network.others() if peer != claim.peer]
        for peer in others[:OTHERS_ASKED]:
            left = until - self._timer()
            if body is not None or left <= 0:
                break
            body = self._ask(peer, sha256, most, left)
        return body

    def _ask(self, peer: str, sha256: bytes, most: int, timeout: float) -> bytes | None:
        try:
            return self._network.get(peer, sha256, most, timeout)
        except (NetworkError, MessageError) as error:
            log.debug("no evidence from %s: %s", peer, error)
            return None


def _withheld(what: str) -> Finding:
    return Finding(False, f"The author of the claim does not serve {what}.")
