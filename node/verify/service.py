"""Verification service of a running node: a thread between the network, the claims that it makes
and those that it checks.

Training hands over what is claimed (`CompletionClaims`) and reads who is banned; it never waits for
anything here.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from shoal.node.config.settings import Settings
from shoal.node.verify.auditor import MINUTE_S, Auditor, Budget
from shoal.node.verify.claimer import Made
from shoal.node.verify.completion_claims import CompletionClaims
from shoal.node.verify.evidence_file import NAME
from shoal.node.verify.feed import Feed
from shoal.node.verify.finding import Finding
from shoal.node.verify.history import History
from shoal.node.verify.peers import rules_of
from shoal.node.verify.record_exchange import RecordExchange
from shoal.node.verify.service_thread import JOIN_S, ServiceThread
from shoal.node.verify.swarm_network import SwarmNetwork
from shoal.verification.consensus.participant import Participant
from shoal.verification.consensus.records import Claim, Refused
from shoal.verification.consensus.reputation import ScoreRules, Table
from shoal.verification.consensus.voter import Checked

log = logging.getLogger(__name__)

CHECKING_SHARE = 0.1
"""Of a node's time, at least, that checking others' claims may take; half of the swarm's audit rate
if that is more.
"""
FETCHES_PER_ROUND = 20
"""Of a round's time, what fetching the body of a claim may take is one part in so many."""
UPLINK_MBIT = 10
"""A second, that most peers have; a node says so if claims need more."""


class Verification:
    """Service that makes claims of ``kind`` and checks those of others, from `start` until `close`.

    ``clock``: Unix seconds; ``timer``: seconds that never go back; ``salt``: 32 fresh secret bytes
    with each call.
    """

    def __init__(
        self,
        settings: Settings,
        kind: CompletionClaims,
        network: SwarmNetwork,
        *,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
        salt: Callable[[], bytes] = lambda: secrets.token_bytes(32),
    ) -> None:
        self._kind = kind
        self._network = network
        self._timer = timer
        round_s = settings.verify.round_s
        self._round_now: Callable[[], int] = lambda: int(clock() // round_s)
        share = max(CHECKING_SHARE, settings.verify.audit_rate / 2)
        self._budget = Budget(MINUTE_S * share, timer)
        self._feed = Feed(network.me, network.name, round_s)
        operator = settings.node.operator or network.me
        self._history = History(settings.node.run_folder / NAME, operator)
        self._participant = Participant(
            network.me,
            network.swarm,
            operator=operator,
            sign=network.sign,
            verify=network.verify,
            publish=lambda signed: network.publish(signed.record.encoded, signed.signature),
            check=self._check,
            clock=clock,
            salt=salt,
            rules=rules_of(settings.verify),
            prices=ScoreRules(),
            round_s=round_s,
        )
        self._auditor: Auditor | None = None
        # Guards the participant, but while a claim is checked: nothing else changes it then.
        self._lock = threading.Lock()
        self._left = False
        self._counts = Counter[str]()
        self._records = RecordExchange(
            self._participant, network, self._lock, self._counts, clock=clock, timer=timer
        )
        self._reported = self._participant.table
        self._thread = ServiceThread()
        network.open(self._records.receive, self._records.log_since, self.is_banned)

    # -- for other threads -------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start(self.prepare, self.step, self._failed)

    @property
    def table(self) -> Table:
        return self._participant.table

    def is_banned(self, peer: str) -> bool:
        """Return whether ``peer`` is banned now. Quick, for any thread."""
        return self.table.is_banned(peer, self._round_now())

    def tell(self, notify: Callable[[str], None], write: Callable[..., None]) -> None:
        """Pass on what was queued since the last call: sentences for people, events for the
        metrics.
        """
        self._feed.drain(notify, write)

    def counted(self) -> dict[str, int]:
        """Return the numbers of claims made here, of checks, and of claims found invalid. Quick."""
        return {
            "claims": self._counts["claimed"],
            "checked": self._counts["checked"],
            "invalid": self._counts["invalid"],
        }

    def report(self) -> dict[str, Any]:
        """Return the numbers of claims and checks, and the standings of all peers."""
        table = self.table
        counted = ("claimed", "planted", "checked", "valid", "invalid", "skipped", "uncheckable")
        return {
            **{name: self._counts[name] for name in counted},
            "check_s": self._budget.spent,
            "claim_s": self._kind.claimer.seconds,
            "share": self._budget.share,
            "pulled": self._counts["pulled"],
            "lost": self._counts["lost"],
            "records": dict(self._participant.consensus.counts),
            "network": self._network.counts,
            "standings": {peer: _standing(table, peer) for peer in table.standings},
        }

    def close(self) -> None:
        self._thread.stop()
        if self._lock.acquire(timeout=JOIN_S):
            self._participant.member.reveal()
            self._left = True
            self._lock.release()
        self._network.close()

    # -- its own thread ----------------------------------------------------------------------------

    def _failed(self, error: Exception) -> None:
        first = self._network.internal_errors.caught("verification", error)
        self._feed.notify(
            f"verification has ended ({first}): start the node again to take part in it"
        )

    def prepare(self) -> None:
        """Do the slow preparation, once before the first `step`: calibrate on honest claims."""
        checker = self._kind.prepare(self._feed.notify)
        round_s = self._participant.clock.round_s
        fetch_s = round_s / FETCHES_PER_ROUND
        seats = self._participant.rules.verifiers
        needed = seats * checker.most_snapshot_bytes * 8e-6 / fetch_s
        if needed > UPLINK_MBIT:
            enough_s = math.ceil(round_s * needed / UPLINK_MBIT)
            self._feed.notify(
                f"{seats} verifiers must get the weights behind each claim "
                f"({checker.most_snapshot_bytes / 1e6:.1f} MB) within {fetch_s:g} s: where an "
                f"uplink has less than {needed:.0f} Mbit/s, honest claims may seem withheld. In a "
                f"swarm created with --set verify.round_s={enough_s} they need {UPLINK_MBIT}"
            )
        self._auditor = Auditor(
            checker,
            self._network,
            self._budget,
            self._audited,
            fetch_s,
            self._timer,
            self._history.weigh,
            self._counts,
        )

    def step(self) -> None:
        """Do what is due; takes as long as one check, or as fetching a log."""
        made = self._kind.claimer.take()
        participant = self._participant
        with self._lock:
            # First: what waits may be records of a round that has begun since, or claims of one
            # that is over, which others refuse.
            participant.tick(most=0)
            for one in made:
                self._claim(one)
            self._records.take()
            participant.tick(most=1)
            self._kind.claimer.offer(participant.slots())
            if participant.table is not self._reported:
                self._settle(participant.table)
        self._records.pull(self._thread.stopping)

    def _settle(self, table: Table) -> None:
        """Report what a new ``table`` settles."""
        self._reported = table
        self._feed.settled(table, self._budget.spent)
        consensus = self._participant.consensus
        for peer in self._history.settle(table, consensus.ledger, consensus.electorates):
            self._feed.notify(
                f"the claims of {self._network.name(peer)}, taken together, are not honest ones: "
                f"`shoal verify explain {peer}` says why"
            )

    def _claim(self, made: Made) -> None:
        self._network.put(made.material)
        self._network.put(made.snapshot)
        try:
            self._participant.claim(made.claim)
        except Refused as refused:
            self._counts["lost"] += 1
            log.info("a claim was not published: %s", refused)
            return
        self._counts["claimed"] += 1
        self._counts["planted"] += made.slot.planted
        self._keep(made.claim, made.material, made.snapshot)

    def _check(self, claim: Claim) -> Checked | None:
        if self._auditor is None or self._thread.stopping.is_set():
            return None
        self._lock.release()
        try:
            checked = self._auditor.check(claim)
        finally:
            self._lock.acquire()
        # Of a vote that nobody would reveal nothing is to be seen.
        return None if self._left else checked

    # -- for people --------------------------------------------------------------------------------

    def _audited(
        self, claim: Claim, finding: Finding, material: bytes | None, snapshot: bytes | None
    ) -> None:
        if not finding.accepted:
            who = self._network.name(claim.peer)
            self._feed.notify(f"claim {claim.id.hex()[:12]} of {who} is invalid: {finding.reason}")
        if material is not None:
            self._keep(claim, material, snapshot)

    def _keep(self, claim: Claim, material: bytes, snapshot: bytes | None) -> None:
        self._kind.keep(self._participant.consensus.signed(claim), material, snapshot)


def _standing(table: Table, peer: str) -> dict[str, Any]:
    standing = table.standings[peer]
    return {
        "score": standing.score / 1000,
        "claims": standing.claims,
        "seats": standing.votes,
        "appeals": standing.appeals,
        "banned_until": table.banned_until(peer),
    }
