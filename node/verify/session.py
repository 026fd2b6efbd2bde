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
from node.rl.policy import Policy
from node.rl.task import RLTask
from node.verify import store
from node.verify.auditing import Audit, Auditor
from node.verify.budget import Budget
from node.verify.calibrate import read_calibration, self_calibrate
from node.verify.checker import Checker
from node.verify.claiming import Claimer, Written
from node.verify.errors import VerifyError
from node.verify.material import Agreed
from node.verify.network import Network
from node.verify.news import News, standings
from node.verify.peers import rules_of
from node.verify.prover import make_claim
from node.verify.snapshot import digest
from swarm.errors import MessageError, NetworkError
from swarm.verify_setting import Terms
from verification.calibration import Calibration
from verification.claims import Claim, Signed, decode
from verification.consensus import Refused
from verification.log import decode_log
from verification.log import encode as encode_log
from verification.member import Checked
from verification.participant import Participant
from verification.reputation import Prices, Table

log = logging.getLogger(__name__)

CLAIMS = "claims"  # the folder of them, in the node's
PROVERS = ("float32",)  # what nodes write in; one that claims a coarser dtype would be judged more leniently
TICK_S = 0.1
INBOX = 8192  # records that wait to be taken; the oldest go
SELF_CLAIMS = 64  # honest claims of its own that a node without a calibration measures
KEPT = 256  # claims in the node's folder
MOST_PULLED = 3  # peers who are asked for a log of records at a time
JOIN_S = 10.0  # seconds in which the thread must have ended


class Verification:
    """Claims what ``task`` writes and checks what others claim, from `start` until `close`.

    ``clock``: Unix seconds; ``timer``: seconds that never go back; ``salt``: 32 fresh secret bytes with each call.

    Raises VerifyError if the settings name a calibration that cannot be used.
    """

    def __init__(
        self, settings: Settings, terms: Terms, task: RLTask, network: Network, *, clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic, salt: Callable[[], bytes] = lambda: secrets.token_bytes(32),
    ) -> None:  # fmt: skip
        self._network, self._clock, self._timer, self._rate = network, clock, timer, settings.verify.rate
        self._folder, self._round_s = settings.node.run_folder / CLAIMS, settings.verify.round_s
        self._agreed = Agreed(terms.temperature, terms.max_tokens, terms.group)
        self._policy_name, self._env = terms.policy, task.env
        self._policy: Policy = copy.deepcopy(task.policy)  # training goes on changing its own
        path = settings.node.calibration
        self._calibration = None if path is None else read_calibration(Path(path).expanduser(), self._policy_name, PROVERS)
        self._budget = Budget(settings.node.verify_seconds, timer)
        self._news = News(network.me, network.name, self._round_s)
        self._participant = Participant(
            network.me, network.swarm, operator=settings.node.operator or network.me, sign=network.sign, verify=network.verify,
            publish=lambda signed: network.publish(signed.record.encoded, signed.signature), check=self._check, clock=clock,
            salt=salt, rules=rules_of(settings.verify), prices=Prices(), round_s=self._round_s,
        )  # fmt: skip
        self._auditor: Auditor | None = None
        self.claimer = Claimer(
            self._env, self._agreed, network.swarm, network.me, policy_name=self._policy_name, round=self._now
        )
        self._lock = threading.Lock()  # guards the participant, but while a claim is checked: nothing else changes it then
        self._inbox: deque[tuple[Signed, float]] = deque(maxlen=INBOX)
        self._pull_at = 0.0
        self._began, self._counts, self._told = timer(), Counter[str](), self._participant.table
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="verification", daemon=True)
        network.open(self._take, self._log, self.is_banned)
        task.claim(self.claimer)

    # -- for other threads -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Have a thread of its own `prepare`, and `step` again and again."""
        self._thread.start()

    @property
    def table(self) -> Table:
        """Everybody's standing, as of the newest round that is settled."""
        return self._participant.table

    def is_banned(self, peer: str) -> bool:
        """Whether ``peer`` is banned now. Quick, for any thread."""
        return self.table.is_banned(peer, self._now())

    def _now(self) -> int:
        """The round of verification."""
        return int(self._clock() // self._round_s)

    def tell(self, say: Callable[[str], None], write: Callable[..., None]) -> None:
        """Hand on what happened since the last call, sentences for people and events for the metrics."""
        self._news.tell(say, write)

    def report(self) -> dict[str, Any]:
        """What came of it: numbers of claims, of checks, and the standings of all peers."""
        counts = Counter(self._auditor.counts) if self._auditor is not None else Counter[str]()
        seconds = self._timer() - self._began
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
            "network": self._network.counts,
            "standings": standings(self.table),
        }

    def close(self) -> None:
        """Neither claim nor check any more."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
        self._network.close()

    # -- its own thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(1)
        try:
            self.prepare()
            while not self._stop.wait(TICK_S):
                self.step()
        except Exception as error:  # training must go on whatever happens here
            log.warning("verification ended", exc_info=True)
            self._news.say(f"verification has ended ({type(error).__name__}: {error}): start the node again to take part in it")

    def prepare(self) -> None:
        """What takes long, once before the first `step`: learn what honest claims look like."""
        checker = Checker(
            lambda: self._policy, self._env, self._agreed, self._calibration or self._calibrate(), self._policy_name,
            rate=self._rate, allowed=PROVERS,
        )  # fmt: skip
        self._auditor = Auditor(
            checker, self._network, self._budget, self._network.others, self._audited, self._round_s / 20,
            self._timer,
        )  # fmt: skip

    def _calibrate(self) -> Calibration:
        found = self_calibrate(self._policy, self._env, self._agreed, policy_name=self._policy_name, claims=SELF_CLAIMS)
        self._news.say(f"measured {SELF_CLAIMS} honest claims of its own, to check others by")
        return found

    def step(self) -> None:
        """Whatever is due; takes as long as one check, or as fetching a log."""
        with self._lock:
            self._step()
        self._pull()

    def _step(self) -> None:
        # At first: what came may be of a round that has begun since, and what was written of one that is over: others refuse that.
        self._participant.tick(most=0)
        for written in self.claimer.take():
            self._claim(written)
        while self._inbox:
            with contextlib.suppress(Refused):  # counted by the consensus
                self._participant.take(*self._inbox.popleft())
        self._participant.tick(most=1)
        self.claimer.offer(self._participant.slots())
        if self._participant.table is not self._told:
            self._told = self._participant.table
            self._news.settled(self._told, self._budget.spent)

    def _claim(self, written: Written) -> None:
        proven, slot = written.proven, written.slot
        claim = make_claim(
            proven, run=self._network.swarm, round=slot.round, peer=self._network.me, slot=slot.slot, model=digest(written.snapshot)
        )
        self._network.put(proven.material)
        self._network.put(written.snapshot)
        try:
            self._participant.claim(claim)
        except Refused as refused:
            self._counts["lost"] += 1
            log.info("a claim was not published: %s", refused)
            return
        self._counts["claimed"] += 1
        self._counts["planted"] += slot.planted
        self._keep(claim, proven.material, written.snapshot)

    def _check(self, claim: Claim) -> Checked | None:
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

    def _take(self, author: str, data: bytes, signature: bytes) -> None:
        """On the host's loop: decode only; the rest is this object's thread's."""
        try:
            record = decode(data)
        except ValueError as error:
            raise MessageError(f"A record of verification was refused: {error}.") from None
        if record.peer != author:
            raise MessageError("A record of verification was refused: its author did not send it.", "forged")
        self._inbox.append((Signed(record, signature), self._clock()))

    def _log(self, since: int) -> bytes:
        with self._lock:
            return encode_log(self._participant.log(since))

    def _pull(self) -> None:
        """Fetch the records that this node seems to lack, from one who has them."""
        wanted = self._participant.wanted
        if wanted is None or not self._may_pull():
            return
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

    def _may_pull(self) -> bool:
        """Not again at once, whatever came of it."""
        now = self._timer()
        if now < self._pull_at:
            return False
        self._pull_at = now + self._round_s / 20
        return True

    # -- for people ------------------------------------------------------------------------------------------------------

    def _audited(self, audit: Audit) -> None:
        self._news.audited(audit)
        if audit.material is not None:
            self._keep(audit.claim, audit.material, audit.snapshot)

    def _keep(self, claim: Claim, material: bytes, snapshot: bytes | None) -> None:
        """For `shoal verify`."""
        try:
            store.save(self._folder, self._participant.consensus.signed(claim), material, self._agreed, snapshot, KEPT)
        except VerifyError as error:
            log.warning("%s", error)
