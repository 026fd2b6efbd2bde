"""Claims where `verify.kind` is training: stretches of inner steps, which verifiers repeat."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, islice

import torch

from shoal.node.config.settings import Settings
from shoal.node.task import Shard, Task
from shoal.node.training.trainer import Trainer
from shoal.node.verify.audit.claim_kind import Made
from shoal.node.verify.audit.errors import NotCheckable, VerifyError
from shoal.node.verify.audit.finding import Finding
from shoal.node.verify.audit.network import AuditNetwork
from shoal.node.verify.audit.snapshot import MOST_BYTES
from shoal.node.verify.training.audit import Kept, TrainingAudit, prove
from shoal.node.verify.training.calibrate import OTHERS, honest_evidence, stretches
from shoal.node.verify.training.checker import MOST_HEARD, TrainingChecker
from shoal.node.verify.training.material import TrainingMaterial, TrainingTerms
from shoal.node.verify.training.replica import Replica
from shoal.verification.calibration.calibration import Calibration, CalibrationError, Pair
from shoal.verification.consensus.participant import Slot
from shoal.verification.consensus.records import Claim, Signed
from shoal.verification.fingerprints.weights import WeightProjection

log = logging.getLogger(__name__)

LABEL, DTYPE = "task", "float32"  # names in the calibration
SELF_CLAIMS = 30  # honest stretches that a node measures, fewer where a run has fewer


class StepClaims:
    """`ClaimKind` of the steps of ``trainer``. Make it before training begins: it draws random numbers, and restores the state of
    torch's generator. While it measures honest stretches, at the start, training may round differently (oneDNN is off for
    moments), as on another machine.

    Args:
        task: an instance of its own, with the options and data of the trainer's.
        shard: the trainer's.
        shard_of: returns the shard that a peer announces; None if that is not known.
        clock: Unix seconds.

    Raises VerifyError if the steps of this task, or this swarm's settings, cannot be verified.
    """

    def __init__(
        self, settings: Settings, terms: TrainingTerms, trainer: Trainer, task: Task, shard: Shard, network: AuditNetwork,
        shard_of: Callable[[str], Shard | None], clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        if settings.node.calibration is not None:
            raise VerifyError("A calibration is of completions: leave node.calibration out in a swarm that verifies training.")
        self._terms, self._network, self._shard_of = terms, network, shard_of
        self._clock, self._round_s, self._rate = clock, settings.verify.round_s, settings.verify.rate
        self._audit = TrainingAudit(trainer, terms)
        self._replica = Replica(task, terms.train)
        check_replica(self._replica)
        with torch.random.fork_rng(devices=[]):  # a trainer seeds the generator when it is made, which is with the first stretch
            honest = stretches(task, terms, shard)
            self._honest: Iterator[Kept] = chain([next(honest)], honest)
        self._checker: StepChecker | None = None
        self._slots: deque[Slot] = deque()
        self._filled: set[tuple[int, int]] = set()
        self.seconds = 0.0

    def after_step(self) -> None:
        """Implement `ClaimKind.after_step`."""
        began = time.perf_counter()
        self._audit.after_step()
        self.seconds += time.perf_counter() - began

    def prepare(self, notify: Callable[[str], None]) -> StepChecker:
        """Measure how far honest stretches differ. Raises VerifyError if the run is too short for that."""
        calibration, many = Calibration(), claims_of(self._terms)
        evidence = honest_evidence(islice(self._honest, many), self._replica, self._terms, OTHERS, nullcontext)
        try:
            calibration.add(Pair(WeightProjection.name, LABEL, DTYPE, DTYPE), evidence)
        except CalibrationError as error:
            raise VerifyError(f"Training cannot be verified ({error}): make the run longer, or leave --verify out.") from error
        self._honest = iter(())  # frees a model
        notify(f"measured {many} honest stretches of steps of its own, to check others by")
        checker = TrainingChecker(self._replica, self._terms, calibration, label=LABEL, dtype=DTYPE, rate=self._rate)
        self._checker = StepChecker(checker, self._replica.most_bytes(), self._shard_of)
        return self._checker

    def offer(self, slots: Sequence[Slot]) -> None:
        """Implement `ClaimKind.offer`; the next stretch is for the first of them."""
        self._filled &= {(slot.round, slot.slot) for slot in slots}
        self._slots = deque(slot for slot in slots if (slot.round, slot.slot) not in self._filled)
        if self._slots:
            self._audit.request()

    def take(self) -> list[Made]:
        """Implement `ClaimKind.take`."""
        kept = self._audit.take()
        if kept is None or not self._slots or self._slots[0].round != int(self._clock() // self._round_s):
            return []
        slot = self._slots.popleft()
        proven = prove(
            kept, self._terms, run=self._network.swarm, round=slot.round, peer=self._network.me, slot=slot.slot, dtype=DTYPE,
            planted=slot.planted,
        )  # fmt: skip
        if self._checker is None or self._checker.is_again(proven.claim):
            log.info("steps from %d on were claimed before this node was started again", kept.stretch.first)
            return []
        self._filled.add((slot.round, slot.slot))
        return [Made(slot, proven.claim, proven.material, proven.snapshot)]

    def heard(self, claim: Claim) -> None:
        """Implement `ClaimKind.heard`: nobody may claim a stretch twice."""
        if self._checker is not None:
            self._checker.heard(claim)

    def keep(self, signed: Signed, material: bytes, snapshot: bytes | None) -> None:
        """Do nothing: outside the swarm the task, its options and its data are not known, so nobody could check the claim."""


class StepChecker:
    """`Checking` by ``checker``, for snapshots of at most ``most_snapshot_bytes``."""

    most_material_bytes = TrainingMaterial.LIMIT

    def __init__(self, checker: TrainingChecker, most_snapshot_bytes: int, shard_of: Callable[[str], Shard | None]) -> None:
        self._checker, self.most_snapshot_bytes, self._shard_of = checker, most_snapshot_bytes, shard_of
        self._shards: OrderedDict[bytes, Shard | None] = OrderedDict()  # that authors named when their claims came

    def knows(self, model: bytes) -> bool:
        """Return False: each stretch has a state of its own."""
        return False

    def heard(self, claim: Claim) -> None:
        """Note a claim, and its author's shard: after a restart the author may have another."""
        self._checker.heard(claim)
        self._shards.setdefault(claim.id, self._shard_of(claim.peer))
        while len(self._shards) > MOST_HEARD:
            self._shards.popitem(last=False)

    def is_again(self, claim: Claim) -> bool:
        """Return whether its author has claimed these steps before."""
        return self._checker.is_again(claim)

    def check(self, claim: Claim, material: bytes, snapshot: bytes | None) -> Finding:
        """Implement `Checking.check`."""
        if snapshot is None:
            raise NotCheckable("The state before the claimed steps is not here: fetch it from the claim's author.")
        shard = self._shards.get(claim.id) or self._shard_of(claim.peer)
        return self._checker.check(claim, material, snapshot, shard)


def claims_of(terms: TrainingTerms) -> int:
    """Return how many stretches a node measures."""
    return min(SELF_CLAIMS, terms.train.steps // terms.steps) if terms.train.steps else SELF_CLAIMS


def check_replica(replica: Replica) -> None:
    """Raise VerifyError if the steps of ``replica`` cannot be repeated beside training, or its state is too large to serve."""
    if replica.random:
        raise VerifyError(
            "The task's steps draw random numbers (dropout, for example), so they cannot be done again beside training: "
            "turn that off in the task, or leave --verify out."
        )
    if replica.most_bytes() > MOST_BYTES:
        raise VerifyError(
            f"The task's model and optimizer have {replica.most_bytes():,} bytes, and a claim may have {MOST_BYTES:,}: "
            "train fewer parameters (an adapter), or leave --verify out."
        )
