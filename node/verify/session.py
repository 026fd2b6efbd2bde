"""A node's part in verification while it runs: a thread of its own, between the network, the claims it writes and those it checks.

Training hands over claims (`claiming`) and reads who is banned; it never waits for anything here.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from node.config import Settings
from node.membership import Membership
from node.rl.policy import Policy
from node.rl.task import RLTask
from node.verify import store
from node.verify.auditing import Audit, Auditor
from node.verify.budget import Budget
from node.verify.calibrate import self_calibrate
from node.verify.checker import Checker
from node.verify.claiming import Claimer, Written
from node.verify.errors import VerifyError
from node.verify.material import Agreed
from node.verify.peers import reasons, rules_of
from node.verify.prover import make_claim
from node.verify.snapshot import digest
from swarm.attestations import Attestations, sign_record, verify_record
from swarm.errors import MessageError, NetworkError
from swarm.evidence import Evidence
from swarm.gossip import Gossip
from swarm.log_sync import LogServer, fetch_log
from swarm.verify_setting import Terms
from verification.calibration import Calibration
from verification.calibration_file import load_calibration
from verification.claims import Claim, Signed, decode
from verification.consensus import Refused
from verification.log import decode_log
from verification.log import encode as encode_log
from verification.participant import Participant
from verification.reputation import Prices, Table

log = logging.getLogger(__name__)

CLAIMS = "claims"  # the folder of them, in the node's
PROVERS = ("float32",)  # what nodes write in; one that claims a coarser dtype would be judged more leniently
TICK_S = 0.1
INBOX = 8192  # records that wait to be taken; the oldest go
SELF_CLAIMS = 64  # honest claims of its own that a node without a calibration measures
MOST_NEWS = 256  # sentences, and events, that wait to be told
KEPT = 256  # claims in the node's folder
PULL_S = 5.0  # seconds for a log of records
MOST_PULLED = 3  # peers who are asked for it at a time
JOIN_S = 10.0  # seconds in which the thread must have ended


class Verification:
    """Claims what ``task`` writes and checks what others claim, from now until `close`."""

    def __init__(
        self, settings: Settings, membership: Membership, terms: Terms, task: RLTask, gossip: Gossip
    ) -> None:
        self._settings, self._membership, self._folder = settings, membership, settings.node.run_folder / CLAIMS
        self._news: deque[str] = deque(maxlen=MOST_NEWS)
        self._events: deque[dict[str, Any]] = deque(maxlen=MOST_NEWS)
        self.me, verify = membership.identity.peer_id, settings.verify
        self._agreed = Agreed(terms.temperature, terms.max_tokens, terms.group)
        self._policy_name, self._env = terms.policy, task.env
        self._policy: Policy = copy.deepcopy(task.policy)  # training goes on changing its own
        self._round_s = verify.round_s
        self._budget = Budget(settings.node.verify_seconds, time.monotonic)
        self._bodies = Evidence(membership.host, membership.swarm, self._addresses)
        identity = membership.identity
        self._participant = Participant(
            self.me, membership.swarm, operator=settings.node.operator or self.me, sign=lambda data: sign_record(identity, data),
            verify=verify_record, publish=self._publish, check=self._check, clock=time.time, salt=lambda: secrets.token_bytes(32),
            rules=rules_of(membership.manifest), prices=Prices(), round_s=verify.round_s,
        )  # fmt: skip
        self._auditor: Auditor | None = None
        self.claimer = Claimer(
            self._env, self._agreed, membership.swarm, self.me, policy_name=self._policy_name, round=self._now
        )
        self._lock = threading.Lock()  # guards the participant, but while a claim is checked: nothing else changes it then
        self._inbox: deque[tuple[Signed, float]] = deque(maxlen=INBOX)
        self._records = Attestations(gossip, self._take)
        self._logs = LogServer(membership.host, membership.swarm, self._log)
        self._pull_at = 0.0
        self._began, self._counts, self._banned = time.monotonic(), Counter[str](), dict[str, int]()
        membership.directory.barred = self.is_banned
        task.claim(self.claimer)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verification", daemon=True)
        self._thread.start()

    # -- for other threads -----------------------------------------------------------------------------------------------

    @property
    def table(self) -> Table:
        """Everybody's standing, as of the newest round that is settled."""
        return self._participant.table

    def is_banned(self, peer: str) -> bool:
        """Whether ``peer`` is banned now. Quick, for any thread."""
        return self.table.is_banned(peer, self._now())

    def _now(self) -> int:
        """The round of verification."""
        return int(time.time() // self._round_s)

    def tell(self, say: Callable[[str], None], write: Callable[..., None]) -> None:
        """Hand on what happened since the last call, sentences for people and events for the metrics."""
        while self._news:
            say(self._news.popleft())
        while self._events:
            write("verify", **self._events.popleft())

    def report(self) -> dict[str, Any]:
        """What came of it: numbers of claims, of checks, and the standings of all peers."""
        counts = Counter(self._auditor.counts) if self._auditor is not None else Counter[str]()
        seconds = time.monotonic() - self._began
        return {
            "claimed": self._counts["claimed"],
            "planted": self._counts["planted"],
            **{name: counts[name] for name in ("checked", "valid", "invalid", "skipped", "uncheckable")},
            "check_s": self._budget.spent,
            "claim_s": self.claimer.seconds,
            "share": self._budget.spent / seconds if seconds > 0 else 0.0,
            "pulled": self._counts["pulled"],
            "lost": self._counts["lost"],
            "records": dict(self._participant.consensus.counts),
            "network": self._records.counts,
            "standings": standings(self.table),
        }

    def close(self) -> None:
        """Neither claim nor check any more."""
        self._stop.set()
        self._thread.join(JOIN_S)
        self._records.close()
        self._logs.close()

    # -- its own thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(1)
        try:
            self._auditor = self._make_auditor()
            while not self._stop.wait(TICK_S):
                with self._lock:
                    self._step()
                self._pull()
        except Exception as error:  # training must go on whatever happens here
            log.warning("verification ended", exc_info=True)
            self._news.append(f"verification has ended ({type(error).__name__}: {error}): start the node again to take part in it")

    def _make_auditor(self) -> Auditor:
        path = self._settings.node.calibration
        calibration = load_calibration(Path(path).expanduser()) if path is not None else self._calibrate()
        checker = Checker(
            lambda: self._policy, self._env, self._agreed, calibration, self._policy_name, rate=self._settings.verify.rate,
            allowed=PROVERS,
        )
        return Auditor(checker, self._bodies, self._budget, self._others, self._audited, self._round_s / 20)

    def _calibrate(self) -> Calibration:
        found = self_calibrate(self._policy, self._env, self._agreed, policy_name=self._policy_name, claims=SELF_CLAIMS)
        self._news.append(f"measured {SELF_CLAIMS} honest claims of its own, to check others by")
        return found

    def _step(self) -> None:
        before = self._participant.table
        for written in self.claimer.take():
            self._claim(written)
        self._participant.tick(most=0)  # what came may be of a round that has begun since
        while self._inbox:
            with contextlib.suppress(Refused):  # counted by the consensus
                self._participant.take(*self._inbox.popleft())
        self._participant.tick(most=1)
        self.claimer.offer(self._participant.slots())
        if self._participant.table is not before:
            self._settled(self._participant.table)

    def _claim(self, written: Written) -> None:
        proven, slot = written.proven, written.slot
        claim = make_claim(
            proven, run=self._membership.swarm, round=slot.round, peer=self.me, slot=slot.slot, model=digest(written.snapshot)
        )
        self._bodies.put(proven.material)
        self._bodies.put(written.snapshot)
        try:
            self._participant.claim(claim)
        except Refused as refused:
            self._counts["lost"] += 1
            log.info("a claim was not published: %s", refused)
            return
        self._counts["claimed"] += 1
        self._counts["planted"] += slot.planted
        self._keep(claim, proven.material, written.snapshot)

    def _check(self, claim: Claim) -> Any:
        if self._auditor is None or self._stop.is_set():
            return None
        with self._unlocked():
            return self._auditor.check(claim)

    @contextlib.contextmanager
    def _unlocked(self) -> Iterator[None]:
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    # -- the network -----------------------------------------------------------------------------------------------------

    def _addresses(self, peer: str) -> tuple[str, ...]:
        member = self._membership.directory.everyone().get(peer)
        return () if member is None else tuple(member.addresses)

    def _others(self) -> list[str]:
        """Peers that may have fetched what somebody claims, in no order that anybody knows."""
        peers = [peer for peer in self._membership.directory.members() if peer != self.me]
        secrets.SystemRandom().shuffle(peers)
        return peers

    def _publish(self, signed: Signed) -> None:
        self._records.publish(signed.record.encoded, signed.signature)

    def _take(self, author: str, data: bytes, signature: bytes) -> None:
        """On the host's loop: decode only; the rest is this object's thread's."""
        try:
            record = decode(data)
        except ValueError as error:
            raise MessageError(f"A record of verification was refused: {error}.") from None
        if record.peer != author:
            raise MessageError("A record of verification was refused: its author did not send it.", "forged")
        self._inbox.append((Signed(record, signature), time.time()))

    def _log(self, since: int) -> bytes:
        with self._lock:
            return encode_log(self._participant.log(since))

    def _pull(self) -> None:
        """Fetch the records that this node seems to lack, from one who has them."""
        wanted = self._participant.wanted
        if wanted is None or not self._may_pull():
            return
        for peer in wanted.peers[:MOST_PULLED]:
            try:
                data = fetch_log(
                    self._membership.host, peer, self._addresses(peer), self._membership.swarm, wanted.since, PULL_S
                )
                found = decode_log(data)
            except (NetworkError, MessageError, ValueError) as error:
                log.info("no records from %s: %s", peer, error)
                continue
            with self._lock:
                self._counts["pulled"] += self._participant.learn(found)
            return

    def _may_pull(self) -> bool:
        """Not again at once, whatever came of it."""
        now = time.monotonic()
        if now < self._pull_at:
            return False
        self._pull_at = now + self._round_s / 20
        return True

    # -- for people ------------------------------------------------------------------------------------------------------

    def _audited(self, audit: Audit) -> None:
        if not audit.accepted:
            self._news.append(f"claim {audit.claim.id.hex()[:12]} of {self._name(audit.claim.peer)} is invalid: {audit.reason}")
        if audit.material is not None:
            self._keep(audit.claim, audit.material, audit.snapshot)

    def _name(self, peer: str) -> str:
        member = self._membership.directory.everyone().get(peer)
        return member.name if member is not None else peer

    def _settled(self, table: Table) -> None:
        """A further round is reckoned: say who is banned since, or is no longer."""
        banned = {peer: until for peer in table.standings if (until := table.banned_until(peer)) is not None}
        for peer, until in banned.items():
            if self._banned.get(peer) != until:
                ends = time.strftime("%H:%M:%S", time.localtime((until + 1) * self._round_s))
                who = "this node" if peer == self.me else self._name(peer)
                self._news.append(f"{who} is banned until {ends}: {reasons(table.standings[peer])}")
        self._banned = banned
        self._events.append({"round": table.round, "banned": sorted(banned), "check_s": self._budget.spent})

    def _keep(self, claim: Claim, material: bytes, snapshot: bytes | None) -> None:
        """For `shoal verify`."""
        try:
            store.save(self._folder, self._participant.consensus.signed(claim), material, self._agreed, snapshot, KEPT)
        except VerifyError as error:
            log.warning("%s", error)


def standings(table: Table) -> dict[str, Any]:
    """Of each peer, for JSON."""
    return {
        peer: {
            "score": standing.score / 1000,
            "claims": standing.claims,
            "seats": standing.seats,
            "appeals": standing.appeals,
            "banned_until": table.banned_until(peer),
        }
        for peer, standing in table.standings.items()
    }
