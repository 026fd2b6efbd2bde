"""The training thread's part in verification: it writes the groups that are to be claimed. All the rest is done elsewhere."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.node.rl.environment import Env, Question
from shoal.node.rl.policy import Policy
from shoal.node.rl.task import Claimed
from shoal.node.verify.audit.snapshot import snapshot
from shoal.node.verify.completions.material import Agreed, Coordinates, seed_of
from shoal.node.verify.completions.prover import Proven, prove
from shoal.verification.consensus.participant import Slot

MOST_WRITTEN = 64  # groups that wait to be claimed
ASIDE = 2**40  # from a question to those of which one is answered in its place where a claim has to be wrong
ASIDES = 64  # how many of these are looked at: where there are few questions, the same one comes up again


@dataclass(frozen=True)
class Written:
    """A group to claim for ``slot``, and the weights that it was written with."""

    slot: Slot
    proven: Proven
    snapshot: bytes


class Claimer:
    """Answers questions for the slots that it was offered. ``offer`` and ``take`` are for one other thread.

    ``round``: of verification, now: a slot of an earlier one is too late.
    """

    def __init__(self, env: Env, agreed: Agreed, run: str, peer: str, *, policy_name: str, round: Callable[[], int]) -> None:
        self._env, self._agreed, self._run, self._peer = env, agreed, run, peer
        self._policy_name, self._round = policy_name, round
        self._lock = threading.Lock()  # guards the next three
        self._slots: deque[Slot] = deque()
        self._filled: set[tuple[int, int]] = set()
        self._written: deque[Written] = deque(maxlen=MOST_WRITTEN)
        self.seconds = 0.0
        """What writing such groups took of the training thread's time, generating included."""

    def offer(self, slots: Sequence[Slot]) -> None:
        """What is to be claimed now, in place of what was."""
        with self._lock:
            self._filled &= {(slot.round, slot.slot) for slot in slots}
            self._slots = deque(slot for slot in slots if (slot.round, slot.slot) not in self._filled)

    def take(self) -> list[Written]:
        """What was written since the last call."""
        with self._lock:
            written = list(self._written)
            self._written.clear()
        return written

    def write(self, policy: Policy, seed: int, index: int, question: Question) -> Claimed | None:
        """As `shoal.node.rl.task.Claiming.write`."""
        del question  # the prover makes it anew, as those who check it do
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
        )  # fmt: skip
        with self._lock:
            self._written.append(Written(slot, proven, held))
        self.seconds += time.perf_counter() - began
        return Claimed(proven.completions, slot.planted)

    def _aside(self, seed: int, index: int) -> str | None:
        """The prompt of another question; None if there seems to be no other: an answer to the same one would be a right claim."""
        asked = self._env.made.question(seed, index).prompt
        others = (self._env.made.question(seed, index + ASIDE + number).prompt for number in range(ASIDES))
        return next((prompt for prompt in others if prompt != asked), None)
