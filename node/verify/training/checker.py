"""Checker of training: repeats a claimed stretch of inner steps and compares (verification.md, section 6)."""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from contextlib import nullcontext

from shoal.node.task import Shard
from shoal.node.verify.audit.errors import NotCalibrated
from shoal.node.verify.audit.finding import Finding
from shoal.node.verify.training.audit import change
from shoal.node.verify.training.material import TrainingMaterial, TrainingTerms, projection_seed
from shoal.node.verify.training.replica import MODEL, Condition, NotAsClaimed, Replica, weights_hash, weights_in
from shoal.swarm.errors import MessageError
from shoal.swarm.wire.envelope import unpack
from shoal.verification.calibration.calibration import RATE, Calibration, CalibrationError, Judgement, Pair
from shoal.verification.consensus.records import Claim
from shoal.verification.fingerprints.weights import WeightProjection

MOST_HEARD = 1 << 16  # claims that are remembered, the newest


class TrainingChecker:
    """Checker of claims about training. Not for several threads at once; see `Replica` for tasks that draw random numbers.

    Args:
        replica: the swarm's task, with the same options and data as the provers'.
        terms: the swarm's agreed terms.
        calibration: of pairs (weights, ``label``, dtype of the prover, ``dtype``).
        label: the calibration's name of the model.
        dtype, condition: of the computation of the steps here.
        rate: of false alarms.
    """

    def __init__(
        self,
        replica: Replica,
        terms: TrainingTerms,
        calibration: Calibration,
        *,
        label: str,
        dtype: str = "float32",
        condition: Condition = nullcontext,
        rate: float = RATE,
    ) -> None:
        self._replica, self._terms, self._calibration = replica, terms, calibration
        self._label, self._dtype, self._condition, self._rate = label, dtype, condition, rate
        self._first: OrderedDict[tuple[str, bytes], tuple[int, int, bytes]] = OrderedDict()

    def heard(self, claim: Claim) -> None:
        """Note a claim of any peer, also one that need not be checked: nobody may claim a stretch twice."""
        key, place = (claim.peer, claim.prompt), (claim.round, claim.slot, claim.id)
        self._first[key] = min(place, self._first.get(key, place))
        while len(self._first) > MOST_HEARD:
            self._first.popitem(last=False)

    def is_again(self, claim: Claim) -> bool:
        """Return whether its author has claimed the same stretch before, in a noted claim."""
        place = (claim.round, claim.slot, claim.id)
        return self._first.get((claim.peer, claim.prompt), place) < place

    def check(self, claim: Claim, material: bytes, snapshot: bytes, shard: Shard | None = None) -> Finding:
        """Check ``claim``. ``shard``: the one that the prover was given, if that is known.

        Raises NotCalibrated if this node cannot tell: there is no calibration, and the weights differ.
        """
        began = time.monotonic()
        statistics: dict[str, float] = {}
        try:
            found = self._material(claim, material, shard)
            judged = self._compare(claim, found, snapshot, statistics)
        except NotAsClaimed as error:
            return Finding(False, f"{error}.", statistics, time.monotonic() - began)
        except CalibrationError as error:
            raise NotCalibrated(f"This claim about training cannot be judged here ({error}).") from error
        figures = {"statistic": judged.statistic, "threshold": judged.threshold}
        statistics |= {name: value for name, value in figures.items() if math.isfinite(value)}
        outcome = "lead to the claimed weights" if judged.accepted else "do not lead to the claimed weights"
        reason = f"The steps, done again, {outcome} ({judged.reason})."
        return Finding(judged.accepted, reason, statistics, time.monotonic() - began)

    def _material(self, claim: Claim, material: bytes, shard: Shard | None) -> TrainingMaterial:
        """Do all checks that need no snapshot."""
        if hashlib.sha256(material).digest() != claim.fingerprint:
            raise NotAsClaimed("The material is not the one that was claimed")
        try:
            found = unpack(material, TrainingMaterial)
        except MessageError as error:
            raise NotAsClaimed(f"The material cannot be read ({str(error).rstrip('.')})") from error
        stretch, terms = found.stretch, self._terms
        if claim.sampling != terms.hash or found.steps != terms.steps or claim.tokens != terms.steps:
            raise NotAsClaimed("The steps were claimed on other terms than the swarm's")
        if claim.prompt != stretch.hash:
            raise NotAsClaimed("The material is about other steps than the claim")
        if claim.seed != projection_seed(
            (claim.run, claim.round, claim.peer, claim.slot), claim.model, claim.prompt, claim.sampling, claim.output
        ):
            raise NotAsClaimed("The projection's seed is not the one that follows from the claim")
        if found.dtype not in terms.dtypes:
            raise NotAsClaimed(f"The steps were computed in {found.dtype}, which the swarm's terms do not allow")
        if stretch.shard.index >= stretch.shard.of or (shard is not None and shard != stretch.shard):
            raise NotAsClaimed("The steps were claimed on another shard than the peer's own")
        if stretch.first % terms.steps or (terms.train.steps and stretch.first + stretch.steps > terms.train.steps):
            raise NotAsClaimed(f"Steps {stretch.first + 1} to {stretch.first + stretch.steps} are no stretch that can be claimed")
        if self.is_again(claim):
            raise NotAsClaimed("The same steps were claimed by this peer before")
        return found

    def _compare(self, claim: Claim, found: TrainingMaterial, snapshot: bytes, statistics: dict[str, float]) -> Judgement:
        if len(snapshot) != found.snapshot or hashlib.sha256(snapshot).digest() != claim.model:
            raise NotAsClaimed("The snapshot is not the one that was claimed")
        stretch, replica = found.stretch, self._replica
        names = tuple(replica.names)
        state, after = replica.open(snapshot, stretch.first)
        if weights_hash(names, weights_in(state, names, MODEL)) != found.before or weights_hash(names, after) != claim.output:
            raise NotAsClaimed("The snapshot's weights are not the ones that were claimed")
        projection = WeightProjection(claim.seed, self._terms.dims)
        try:
            shown = projection.make(change(names, state, tuple(after)))
        except ValueError as error:
            raise NotAsClaimed(f"The steps are claimed to lead nowhere ({error})") from error
        if shown != found.projection:
            raise NotAsClaimed("The projection is not that of the claimed weights")
        own = replica.replay(state, stretch.shard, stretch.first, stretch.steps, self._condition)
        try:
            evidence = projection.compare(shown, change(names, state, tuple(own)))
        except ValueError as error:
            raise NotAsClaimed(f"The steps, done again, lead nowhere ({error})") from error
        statistics |= {"turned": evidence.means()[0], "longer": evidence.means()[1]}
        pair = Pair(WeightProjection.name, self._label, found.dtype, self._dtype)
        return self._calibration.judge(pair, evidence, self._rate)
