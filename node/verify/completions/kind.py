"""Claims where `verify.kind` is activations: groups of completions."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from typing import cast

from shoal.node.config.settings import Settings
from shoal.node.rl.policy import Policy
from shoal.node.rl.task import RLTask
from shoal.node.verify.audit.auditing import Made
from shoal.node.verify.audit.errors import VerifyError
from shoal.node.verify.audit.network import AuditNetwork
from shoal.node.verify.audit.snapshot import digest
from shoal.node.verify.completions import store
from shoal.node.verify.completions.calibrate import own_dtypes, read_calibration, self_calibrate
from shoal.node.verify.completions.checker import Checker
from shoal.node.verify.completions.claiming import Claimer
from shoal.node.verify.completions.material import Agreed, Dtype
from shoal.node.verify.completions.prover import make_claim
from shoal.swarm.manifest.verify import Terms
from shoal.verification.calibration.calibration import Calibration
from shoal.verification.consensus.participant import Slot
from shoal.verification.consensus.records import Signed

log = logging.getLogger(__name__)

CLAIMS = "claims"  # their folder, within the node's
SELF_CLAIMS = 128  # honest claims of its own that a node without a calibration measures
KEPT = 256  # claims in the node's folder
PENDING = 20  # rounds in which a claim can still be checked, disputes included


class CompletionClaims:
    """Claims about the completions of ``task``: how they are made, and how they are checked. ``clock``: Unix seconds.

    All methods are for the thread of verification; each own claim is made once.

    Raises VerifyError if the settings name a calibration that cannot be used.
    """

    def __init__(
        self, settings: Settings, terms: Terms, task: RLTask, network: AuditNetwork, clock: Callable[[], float] = time.time
    ) -> None:
        self._network, self._rate, self._folder = network, settings.verify.rate, settings.node.run_folder / CLAIMS
        self._agreed = Agreed(terms.temperature, terms.max_tokens, terms.group)
        self._policy_name, self._env = terms.policy, task.env
        self._policy: Policy = copy.deepcopy(task.policy)  # training goes on changing its own
        self._dtypes = cast("tuple[Dtype, ...]", tuple(settings.verify.dtypes.split(",")))
        path = settings.node.calibration
        self._calibration = None if path is None else read_calibration(path, self._policy_name, self._dtypes)
        self._round: Callable[[], int] = lambda: int(clock() // settings.verify.round_s)
        self.claimer = Claimer(
            self._env, self._agreed, network.swarm, network.me, policy_name=self._policy_name, round=self._round,
            allowed=self._dtypes,
        )  # fmt: skip
        task.claim(self.claimer)

    @property
    def seconds(self) -> float:
        """Time of the training thread spent on making claims."""
        return self.claimer.seconds

    def prepare(self, notify: Callable[[str], None]) -> Checker:
        """Calibrate on honest claims, once before all that follows; ``notify`` is given sentences for people."""
        self._hand_out_again()
        known = self._calibration or self._calibrate(notify)
        return Checker(
            lambda: self._policy, self._env, self._agreed, known, self._policy_name, rate=self._rate, allowed=self._dtypes,
            own=own_dtypes(known, self._policy_name, self._dtypes),
        )  # fmt: skip

    def _hand_out_again(self) -> None:
        """Serve the claims of before a restart again: a verifier may still ask for them, and they would count as withheld."""
        oldest = self._round() - PENDING
        for stored in store.newest(self._folder, KEPT):
            claim = stored.claim
            if claim.peer == self._network.me and claim.run == self._network.swarm and claim.round >= oldest:
                self._network.put(stored.material)
                if stored.snapshot is not None:
                    self._network.put(stored.snapshot)

    def _calibrate(self, notify: Callable[[str], None]) -> Calibration:
        found = self_calibrate(
            self._policy, self._env, self._agreed, policy_name=self._policy_name, claims=SELF_CLAIMS, dtypes=self._dtypes,
            across=False,
        )  # fmt: skip
        notify(f"measured {SELF_CLAIMS} honest claims of its own, to check others by")
        return found

    def offer(self, slots: Sequence[Slot]) -> None:
        """Replace the slots for which claims are to be made."""
        self.claimer.offer(slots)

    def take(self) -> list[Made]:
        """Return the claims made since the last call."""
        made = []
        for written in self.claimer.take():
            proven, slot = written.proven, written.slot
            claim = make_claim(
                proven, run=self._network.swarm, round=slot.round, peer=self._network.me, slot=slot.slot,
                model=digest(written.snapshot),
            )  # fmt: skip
            made.append(Made(slot, claim, proven.material, written.snapshot))
        return made

    def keep(self, signed: Signed, material: bytes, snapshot: bytes | None) -> None:
        """Store a claim of this node, or one that it checked, for `shoal verify`."""
        try:
            store.save(self._folder, signed, material, self._agreed, snapshot, KEPT)
        except VerifyError as error:
            log.warning("%s", error)
