"""Claims about completions: how a node makes them, checks them, and keeps them in its folder."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable
from typing import cast

from shoal.node.config.settings import Settings
from shoal.node.rl.policy import Policy
from shoal.node.rl.task import RLTask
from shoal.node.verify.calibrate import own_dtypes, read_calibration, self_calibrate
from shoal.node.verify.checker import Checker
from shoal.node.verify.claim_file import CLAIM, load_claim, save_claim
from shoal.node.verify.claimer import Claimer
from shoal.node.verify.claims_folder import CLAIMS
from shoal.node.verify.errors import VerifyError
from shoal.node.verify.material import Agreed, Dtype
from shoal.node.verify.swarm_network import SwarmNetwork
from shoal.swarm.settings.verification import Terms
from shoal.verification.calibration import Calibration
from shoal.verification.consensus.records import Signed

log = logging.getLogger(__name__)

CALIBRATION = "calibration"
"""File of `shoal verify calibrate` in a node's folder, where there is one."""
SELF_CLAIMS = 128
"""Honest claims of its own that a node without a calibration measures."""
KEPT_CLAIMS = 256
"""In the node's folder."""
PENDING_ROUNDS = 20
"""In which a claim can still be checked, disputes included."""


class CompletionClaims:
    """Claims about the completions of ``task``: how they are made, and how they are checked.

    ``clock``: Unix seconds.

    All methods are for the thread of verification; each own claim is made once.

    Raises VerifyError if the node's folder holds a calibration that cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        terms: Terms,
        task: RLTask,
        network: SwarmNetwork,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._network = network
        self._folder = settings.node.run_folder / CLAIMS
        self._agreed = Agreed(terms.temperature, terms.max_tokens, terms.group)
        self._policy_name = terms.policy
        self._env = task.env
        # Training goes on changing its own.
        self._policy: Policy = copy.deepcopy(task.policy)
        self._dtypes = cast("tuple[Dtype, ...]", tuple(dict.fromkeys(("float32", terms.dtype))))
        path = settings.node.run_folder / CALIBRATION
        self._calibration: Calibration | None = None
        if path.exists():
            self._calibration = read_calibration(path, self._policy_name, self._dtypes)
        self._round: Callable[[], int] = lambda: int(clock() // settings.verify.round_s)
        self.claimer = Claimer(
            self._env,
            self._agreed,
            network.swarm,
            network.me,
            policy_name=self._policy_name,
            round=self._round,
            allowed=self._dtypes,
        )
        task.claim(self.claimer.write)

    def prepare(self, notify: Callable[[str], None]) -> Checker:
        """Calibrate on honest claims, once before all that follows; ``notify`` is given sentences
        for people.
        """
        self._hand_out_again()
        known = self._calibration
        if known is None:
            known = self_calibrate(
                self._policy,
                self._env,
                self._agreed,
                policy_name=self._policy_name,
                claims=SELF_CLAIMS,
                dtypes=self._dtypes,
                across=False,
            )
            notify(f"measured {SELF_CLAIMS} honest claims of its own, to check others by")
        return Checker(
            lambda: self._policy,
            self._env,
            self._agreed,
            known,
            self._policy_name,
            allowed=self._dtypes,
            own=own_dtypes(known, self._policy_name, self._dtypes),
        )

    def _hand_out_again(self) -> None:
        """Serve the claims of before a restart again, or they would count as withheld; the newest
        last, which is kept longest.
        """
        oldest = self._round() - PENDING_ROUNDS
        files = sorted(self._folder.glob(f"*{CLAIM}"), key=lambda path: path.stat().st_mtime_ns)
        for path in files[-KEPT_CLAIMS:]:
            with contextlib.suppress(VerifyError):
                stored = load_claim(path)
                claim = stored.claim
                is_own = claim.peer == self._network.me and claim.run == self._network.swarm
                if not is_own or claim.round < oldest:
                    continue
                # A crash may leave an empty file.
                if stored.material:
                    self._network.put(stored.material)
                if stored.snapshot:
                    self._network.put(stored.snapshot)

    def keep(self, signed: Signed, material: bytes, snapshot: bytes | None) -> None:
        """Store a claim of this node, or one that it checked, for `shoal verify`."""
        try:
            save_claim(self._folder, signed, material, self._agreed, snapshot, KEPT_CLAIMS)
        except VerifyError as error:
            log.warning("%s", error)
