"""Verification service of a running node: a thread between the network, the claims that it makes
and those that it checks.

Training hands over what is claimed (`CompletionClaims`) and reads who is banned; it never waits for
anything here.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch

from shoal.node.config.settings import Settings
from shoal.node.verify.audit import MINUTE, Budget, Finding, Made, SwarmNetwork
from shoal.node.verify.checker import Checker
from shoal.node.verify.completions import CompletionClaims
from shoal.node.verify.history import NAME, History
from shoal.node.verify.peers import reasons, rules_of
from shoal.optim.device import current_device
from shoal.swarm.errors import MessageError, NetworkError, ShoalError
from shoal.verification.consensus.log import decode_log
from shoal.verification.consensus.log import encode as encode_log
from shoal.verification.consensus.participant import Participant
from shoal.verification.consensus.records import Claim, Refused, Signed, Vote, decode
from shoal.verification.consensus.reputation import (
    ScoreRules,
    Table,
)
from shoal.verification.consensus.voter import Checked

# Output of verification: sentences for people, events for the metrics, standings for the report.

# of a node's time, at least, that checking others' claims may take; half of the swarm's audit rate
# if that is more
CHECKING = 0.1
MOST_WAITING = 256  # sentences, and events, that wait to be passed on
ABSENT = (
    "this node is not drawn as a verifier for a while, because {} of its votes did not come; it "
    "stays a member, and its claims are checked as before. If this comes back, run less on this "
    "machine"
)
BACK = "this node is drawn as a verifier again"


class Feed:
    """Queue filled by the thread of verification and drained by another.

    ``name`` returns a peer's display name.
    """

    def __init__(self, me: str, name: Callable[[str], str], round_s: float) -> None:
        self._me = me
        self._name = name
        self._round_s = round_s
        self._sentences: deque[str] = deque(maxlen=MOST_WAITING)
        self._events: deque[dict[str, Any]] = deque(maxlen=MOST_WAITING)
        self._banned = dict[str, int]()
        self._voted = set[bytes]()  # own claims whose votes were counted
        self._absent = False

    def drain(self, notify: Callable[[str], None], write: Callable[..., None]) -> None:
        """Pass on what was queued since the last call: sentences to ``notify``, events to
        ``write``.
        """
        while self._sentences:
            notify(self._sentences.popleft())
        while self._events:
            write("verify", **self._events.popleft())

    def notify(self, sentence: str) -> None:
        self._sentences.append(sentence)

    def settled(self, table: Table, check_s: float) -> None:
        """Report new bans by ``table``, and whether this node is drawn.

        ``check_s``: seconds that checking took so far.
        """
        banned = {
            peer: until
            for peer in table.standings
            if (until := table.banned_until(peer)) is not None
        }
        for peer, until in banned.items():
            if self._banned.get(peer) != until:
                ends = time.strftime("%H:%M:%S", time.localtime((until + 1) * self._round_s))
                who = "this node" if peer == self._me else self._name(peer)
                self.notify(f"{who} is banned until {ends}: {reasons(table.standings[peer])}")
        self._banned = banned
        if table.is_absent(self._me) != self._absent:
            self._absent = not self._absent
            self.notify(
                ABSENT.format(table.standings[self._me].votes["absent"]) if self._absent else BACK
            )
        votes = self._votes(table)
        self._events.append(
            {"round": table.round, "banned": sorted(banned), "check_s": check_s, **votes}
        )

    def _votes(self, table: Table) -> dict[str, Any]:
        """Return the votes of others on claims of this node that were not returned yet, and how
        many it has cast itself.
        """
        mine = {
            claim: ruling
            for claim, ruling in table.rulings.items()
            if ruling.claim.peer == self._me
        }
        new, self._voted = mine.keys() - self._voted, set(mine)
        trials = (trial for claim in new for trial in mine[claim].trials)
        votes = Counter(
            peer
            for trial in trials
            for peer, mark in zip(trial.verifiers, trial.marks, strict=True)
            if mark in ("valid", "invalid")
        )
        cast = table.standings[self._me].votes if self._me in table.standings else {}
        return {
            "votes": dict(votes),
            "voted": sum(cast.get(kind, 0) for kind in ("agreed", "against", "missed")),
        }


log = logging.getLogger(__name__)

TICK_S = 0.1
INBOX = 8192  # records that wait to be taken; the oldest go
MOST_PULLED = 3  # peers to ask for a log of records at a time
JOIN_S = 10.0  # seconds to wait for the thread's end
UPLINK = 10  # Mbit/s that most peers have; a node says so if claims need more
MOST_ASKED = 3  # peers besides the author who are asked for what it does not hand out


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
        # its author chose the question: a check that fails costs this seat, not all later ones
        except Exception as error:
            log.warning("a claim was not checked: %s", error)
            if not isinstance(error, ShoalError):  # those say why this node cannot tell
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
        for peer in [peer for peer in self._network.others() if peer != claim.peer][:MOST_ASKED]:
            if body is not None or (left := until - self._timer()) <= 0:
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
        self._clock = clock
        self._timer = timer
        self._round_s = settings.verify.round_s
        self._budget = Budget(MINUTE * max(CHECKING, settings.verify.audit_rate / 2), timer)
        self._feed = Feed(network.me, network.name, self._round_s)
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
            round_s=self._round_s,
        )
        self._auditor: Auditor | None = None
        self._lock = (
            threading.Lock()
        )  # guards the participant, but while a claim is checked: nothing else changes it then
        self._inbox: deque[tuple[Signed, float]] = deque(maxlen=INBOX)
        self._pull_at = 0.0
        self._left = False
        self._began = timer()
        self._counts = Counter[str]()
        self._reported = self._participant.table
        self._stop = threading.Event()
        self._use_device = current_device()
        self._thread = threading.Thread(target=self._run, name="verification", daemon=True)
        network.open(self._take, self._log, self.is_banned)

    # -- for other threads -------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    @property
    def table(self) -> Table:
        return self._participant.table

    def is_banned(self, peer: str) -> bool:
        """Return whether ``peer`` is banned now. Quick, for any thread."""
        return self.table.is_banned(peer, self._now())

    def _now(self) -> int:
        return int(self._clock() // self._round_s)

    def tell(self, notify: Callable[[str], None], write: Callable[..., None]) -> None:
        """Pass on what was queued since the last call: sentences for people, events for the
        metrics.
        """
        self._feed.drain(notify, write)

    def counted(self) -> dict[str, int]:
        """Return the numbers of claims made here, of checks, and of claims found invalid. Quick."""
        return {name: self._counts[name] for name in ("claimed", "checked", "invalid")}

    def report(self) -> dict[str, Any]:
        """Return the numbers of claims and checks, and the standings of all peers."""
        seconds = self._timer() - self._began
        table = self.table
        counted = ("claimed", "planted", "checked", "valid", "invalid", "skipped", "uncheckable")
        return {
            **{name: self._counts[name] for name in counted},
            "check_s": self._budget.spent,
            "claim_s": self._kind.claimer.seconds,
            "share": self._budget.spent / seconds if seconds > 0 else 0.0,
            "pulled": self._counts["pulled"],
            "lost": self._counts["lost"],
            "records": dict(self._participant.consensus.counts),
            "network": self._network.counts,
            "standings": {
                peer: {
                    "score": standing.score / 1000,
                    "claims": standing.claims,
                    "seats": standing.votes,
                    "appeals": standing.appeals,
                    "banned_until": table.banned_until(peer),
                }
                for peer, standing in table.standings.items()
            },
        }

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
        if self._lock.acquire(timeout=JOIN_S):
            self._participant.member.reveal()
            self._left = True
            self._lock.release()
        self._network.close()

    # -- its own thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(1)
        self._use_device()
        try:
            self.prepare()
            while not self._stop.wait(TICK_S):
                self.step()
        except Exception as error:  # training must go on whatever happens here
            first = self._network.internal_errors.caught("verification", error)
            self._feed.notify(
                f"verification has ended ({first}): start the node again to take part in it"
            )

    def prepare(self) -> None:
        """Do the slow preparation, once before the first `step`: calibrate on honest claims."""
        checker = self._kind.prepare(self._feed.notify)
        fetch_s = self._round_s / 20
        seats = self._participant.rules.verifiers
        needed = seats * checker.most_snapshot_bytes * 8e-6 / fetch_s
        if needed > UPLINK:
            self._feed.notify(
                f"{seats} verifiers must get the weights behind each claim "
                f"({checker.most_snapshot_bytes / 1e6:.1f} MB) within {fetch_s:g} s: where an "
                f"uplink has less than {needed:.0f} Mbit/s, honest claims may seem withheld. In a "
                "swarm created with --set "
                f"verify.round_s={math.ceil(self._round_s * needed / UPLINK)} they need {UPLINK}"
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
            while self._inbox:
                signed, at = self._inbox.popleft()
                with contextlib.suppress(Refused):  # counted by the consensus
                    participant.take(signed, at)
            participant.tick(most=1)
            self._kind.claimer.offer(participant.slots())
            if participant.table is not self._reported:
                self._reported = participant.table
                self._feed.settled(self._reported, self._budget.spent)
                consensus = participant.consensus
                for peer in self._history.settle(
                    self._reported, consensus.ledger, consensus.electorates
                ):
                    self._feed.notify(
                        f"the claims of {self._network.name(peer)}, taken together, are not honest "
                        f"ones: `shoal verify explain {peer}` says why"
                    )
        self._pull()

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
        if self._auditor is None or self._stop.is_set():
            return None
        self._lock.release()
        try:
            checked = self._auditor.check(claim)
        finally:
            self._lock.acquire()
        return (
            None if self._left else checked
        )  # of a vote that nobody would reveal nothing is to be seen

    # -- the network -------------------------------------------------------------------------------

    def _take(self, author: str, data: bytes, signature: bytes) -> None:
        """Decode and queue a record; runs on the host's loop, so the rest is left to this object's
        thread.
        """
        try:
            record = decode(data)
        except ValueError as error:
            raise MessageError(f"A record of verification was refused: {error}.") from None
        if record.peer != author:
            raise MessageError(
                "A record of verification was refused: its author did not send it.", "forged"
            )
        self._inbox.append((Signed(record, signature), self._clock()))

    def _log(self, since: int) -> bytes:
        with self._lock:
            return encode_log(self._participant.log(since))

    def _pull(self) -> None:
        """Fetch the records that this node seems to lack, from a peer that has them."""
        wanted, now = self._participant.wanted, self._timer()
        if wanted is None or now < self._pull_at:
            return
        self._pull_at = now + self._round_s / 20  # whatever comes of it
        for peer in wanted.peers[:MOST_PULLED]:
            if self._stop.is_set():
                return
            try:
                found = decode_log(self._network.fetch_log(peer, wanted.since))
            except (NetworkError, MessageError, ValueError) as error:
                log.info("no records from %s: %s", peer, error)
                continue
            with self._lock:
                self._counts["pulled"] += self._participant.learn(found)
            return

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
