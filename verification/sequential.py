"""Series of a peer's claims against one calibration: p-values that are uniform for an honest peer,
and the odds against it.

    series = Series(Reference(pair, honest), number=1)
    series.add(reference.scores(evidence), reference.tolerances(evidence))
    series.log_odds >= ALARM

Claim n gets, for each feature, the share of the calibrated claims, the peer's earlier ones and
itself that are at least as far away (a conformal p-value; Vovk, Gammerman and Shafer 2022, chapter
8). Series k of a peer's life has the part 1 / (k (k + 1)) of the rate of false alarms, together 1;
its features share that. When this holds: docs/internals.md, "Odds against a peer".
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from bisect import bisect_left, insort

from shoal.verification.calibration import Honest, Pair
from shoal.verification.fingerprints.fingerprint import Evidence
from shoal.verification.martingale import Martingale

LENGTH = 512
"""Claims of a series, which bounds what is kept of a peer."""
TOLERANCE = 0.2
"""Share of an honest claim's mean that a claim may be further away, in one dtype."""
ACROSS = 0.05
"""The same across dtypes."""


LIFE_RATE = 5e-5
"""Probability of an alarm about an honest peer in its life, at one verifier; at more than half of
them at most twice that.
"""
ALARM = math.log(1 / LIFE_RATE)
"""Logarithm of the odds at which a verifier raises an alarm."""


class Reference:
    """Calibrated claims of ``pair``, prepared for series. ``digest`` names them."""

    def __init__(self, pair: Pair, honest: Honest) -> None:
        self.pair = pair
        self.honest = honest
        self._share = TOLERANCE if pair.prover == pair.verifier else ACROSS
        columns = zip(*map(honest.scores, honest.claims), strict=True)
        self.columns = tuple(sorted(column) for column in columns)
        flat = list(itertools.chain.from_iterable(self.columns))
        self.digest = hashlib.sha256(struct.pack(f">{len(flat)}d", *flat)).hexdigest()

    def scores(self, evidence: Evidence) -> tuple[float, ...]:
        if evidence.features != self.honest.features:
            raise ValueError("the evidence is of another fingerprint than the calibration")
        return self.honest.scores(evidence)

    def tolerances(self, evidence: Evidence) -> tuple[float, ...]:
        """Return how much further away than calibrated a claim of each feature may be, as a
        difference of scores.
        """
        rows = zip(
            self.honest.features, self.honest.mean, self.honest.spreads(evidence.size), strict=True
        )
        return tuple(
            max(feature.grain, self._share * mean) / spread for feature, mean, spread in rows
        )


class Series:
    """Series number ``number``, from 1, of one peer."""

    def __init__(self, reference: Reference, number: int) -> None:
        if number < 1:
            raise ValueError("the series of a peer count from 1")
        self.reference = reference
        many = len(reference.columns)
        self._shared = math.log(many) + math.log(number) + math.log(number + 1)
        self._own: tuple[list[float], ...] = tuple([] for _ in range(many))
        self._capitals = tuple(Martingale() for _ in range(many))
        self.count = 0
        self.log_odds = -self._shared
        """Odds against the peer after the last claim: the largest capital of a feature, times the
        series' and feature's part.
        """

    def add(self, scores: tuple[float, ...], tolerances: tuple[float, ...]) -> tuple[float, ...]:
        """Add a claim, as `Reference` measures it, and return the p-value of each feature.

        Raises ValueError if the series is full or the numbers are not one finite score for each
        feature.
        """
        fits = len(scores) == len(tolerances) == len(self._own)
        finite = all(map(math.isfinite, (*scores, *tolerances)))
        if self.count >= LENGTH or not fits or not finite or min(tolerances) < 0:
            raise ValueError(
                f"a series takes {LENGTH} claims, each with a finite score for every feature"
            )
        ranks = []
        for score, tolerance, known, own in zip(
            scores, tolerances, self.reference.columns, self._own, strict=True
        ):
            least = score - tolerance
            further = len(known) - bisect_left(known, least) + len(own) - bisect_left(own, least)
            ranks.append((1 + further) / (1 + len(known) + len(own)))
            insort(own, score)
        self.count += 1
        capitals = [capital.bet(p) for capital, p in zip(self._capitals, ranks, strict=True)]
        self.log_odds = max(capitals) - self._shared
        return tuple(ranks)
