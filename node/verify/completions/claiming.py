"""The training thread's part in verification: writing the groups of completions that are to be claimed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shoal.node.rl.environment import Env, Question
from shoal.node.rl.policy import Policy
from shoal.node.rl.task import Claimed
from shoal.node.verify.audit.snapshot import snapshot
from shoal.node.verify.completions.material import DTYPES, Agreed, Coordinates, seed_of
from shoal.node.verify.completions.prover import ProvenGroup, prove
from shoal.verification.consensus.participant import Slot

MOST_WRITTEN = 64  # groups that wait to be claimed
ASIDE = 2**40  # distance to the questions of which one is answered instead where a claim has to be wrong
ASIDES = 64  # questions to try there: where there are few, the same one comes up again


@dataclass(frozen=True)
class Written:
    """Group to claim for ``slot``, and the weights with which it was written."""

    slot: Slot
    proven: ProvenGroup
    snapshot: bytes


class Claimer:
    """Writer of groups for the slots that it was offered. ``offer`` and ``take`` are for one other thread.

    ``round`` returns the current round of verification; a slot of an earlier one is too late. ``allowed``: dtypes of claims.
    """

    def __init__(
        self, env: Env, agreed: Agreed, run: str, peer: str, *, policy_name: str, round: Callable[[], int],
        allowed: Collection[str] = tuple(DTYPES),
    ) -> None:  # fmt: skip
        self._env, self._agreed, self._run, self._peer = env, agreed, run, peer
        self._policy_name, self._round, self._allowed = policy_name, round, allowed
        self._lock = threading.Lock()  # guards the next three
        self._slots: deque[Slot] = deque()
        self._filled: set[tuple[int, int]] = set()
        self._written: deque[Written] = deque(maxlen=MOST_WRITTEN)
        self.seconds = 0.0
        """Time of the training thread spent on writing such groups, generating included."""

    def offer(self, slots: Sequence[Slot]) -> None:
        """Replace the slots for which groups are to be written."""
        with self._lock:
            self._filled &= {(slot.round, slot.slot) for slot in slots}
            self._slots = deque(slot for slot in slots if (slot.round, slot.slot) not in self._filled)

    def take(self) -> list[Written]:
        """Return the groups written since the last call."""
        with self._lock:
            written = list(self._written)
            self._written.clear()
        return written

    def write(self, policy: Policy, seed: int, index: int, question: Question) -> Claimed | None:
        del question  # the prover makes it anew, as verifiers do
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
            policy, self._env, at, self._agreed, seed_of(self._run, slot.round, self._peer, slot.slot, at.hash),
            policy_name=self._policy_name, snapshot_bytes=len(held), planted_prompt=aside,
            allowed=self._allowed,
        )  # fmt: skip
        with self._lock:
            self._written.append(Written(slot, proven, held))
        self.seconds += time.perf_counter() - began
        return Claimed(proven.completions, slot.planted)

    def _aside(self, seed: int, index: int) -> str | None:
        """Return the prompt of another question, or None if none was found: an answer to the same one would be a right claim."""
        asked = self._env.made.question(seed, index).prompt
        others = (self._env.made.question(seed, index + ASIDE + number).prompt for number in range(ASIDES))
        return next((prompt for prompt in others if prompt != asked), None)
