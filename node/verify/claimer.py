"""The training thread's part in verification: writing the groups of completions that are to be
claimed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shoal.node.rl.environment import Env
from shoal.node.rl.policy import Policy
from shoal.node.rl.task import Claimed
from shoal.node.verify.material import DTYPES, Agreed, Coordinates, seed_of
from shoal.node.verify.proven_group import ProvenGroup, make_claim, prove
from shoal.node.verify.snapshot import digest, snapshot
from shoal.verification.consensus.participant import Slot
from shoal.verification.consensus.records import Claim

MAX_WRITTEN = 64
"""Groups that wait to be claimed."""
ASIDE = 2**40
"""Distance to the questions of which one is answered instead where a claim has to be wrong."""
ASIDES_TRIED = 64
"""Where there are few questions, the same one comes up again."""


@dataclass(frozen=True)
class Made:
    """Claim for ``slot``, with the bytes that its author serves to verifiers."""

    slot: Slot
    claim: Claim
    material: bytes
    snapshot: bytes


class Claimer:
    """Writer of groups for the slots that it was offered.

    ``offer`` and ``take`` are for one other thread.

    ``round`` returns the current round of verification; a slot of an earlier one is too late.
    ``allowed``: dtypes of claims.
    """

    def __init__(
        self,
        env: Env,
        agreed: Agreed,
        run: str,
        peer: str,
        *,
        policy_name: str,
        round: Callable[[], int],
        allowed: Collection[str] = tuple(DTYPES),
    ) -> None:
        self._env = env
        self._agreed = agreed
        self._run = run
        self._peer = peer
        self._policy_name = policy_name
        self._round = round
        self._allowed = allowed
        # Guards the next three.
        self._lock = threading.Lock()
        self._slots: deque[Slot] = deque()
        self._filled: set[tuple[int, int]] = set()
        self._written: deque[tuple[Slot, ProvenGroup, bytes]] = deque(maxlen=MAX_WRITTEN)
        self.seconds = 0.0
        """Time of the training thread spent on writing such groups, generating included."""

    def offer(self, slots: Sequence[Slot]) -> None:
        """Replace the slots for which groups are to be written."""
        with self._lock:
            self._filled &= {(slot.round, slot.slot) for slot in slots}
            self._slots.clear()
            for slot in slots:
                if (slot.round, slot.slot) not in self._filled:
                    self._slots.append(slot)

    def take(self) -> list[Made]:
        """Return the claims of the groups written since the last call."""
        with self._lock:
            written = list(self._written)
            self._written.clear()
        made: list[Made] = []
        for slot, proven, held in written:
            claim = make_claim(
                proven,
                run=self._run,
                round=slot.round,
                peer=self._peer,
                slot=slot.slot,
                model=digest(held),
            )
            made.append(Made(slot, claim, proven.material, held))
        return made

    def write(self, policy: Policy, seed: int, index: int) -> Claimed | None:
        """Write a group that answers question ``index`` of ``seed``; None if no claim is due."""
        with self._lock:
            slot = self._slots.popleft() if self._slots else None
            if slot is None or slot.round != self._round():
                return None
            self._filled.add((slot.round, slot.slot))
        began = time.perf_counter()
        at = Coordinates.of(self._env, seed, index)
        aside = self._aside(seed, index) if slot.planted else None
        if slot.planted and aside is None:
            return None
        held = snapshot(policy)
        proven = prove(
            policy,
            self._env,
            at,
            self._agreed,
            seed_of(self._run, slot.round, self._peer, slot.slot, at.hash),
            policy_name=self._policy_name,
            snapshot_bytes=len(held),
            planted_prompt=aside,
            allowed=self._allowed,
        )
        with self._lock:
            self._written.append((slot, proven, held))
        self.seconds += time.perf_counter() - began
        return Claimed(proven.completions, slot.planted)

    def _aside(self, seed: int, index: int) -> str | None:
        """Return the prompt of another question, or None if none was found: an answer to the same
        one would be a right claim.
        """
        asked = self._env.made.question(seed, index).prompt
        for number in range(ASIDES_TRIED):
            other = self._env.made.question(seed, index + ASIDE + number).prompt
            if other != asked:
                return other
        return None
