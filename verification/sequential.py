"""Series of a peer's claims against one calibration: p-values that are uniform for an honest peer,
and the odds against it.

Claim n gets, for each feature, the share of the calibrated claims, the peer's earlier ones and
itself that are at least as far away (a conformal p-value; Vovk, Gammerman and Shafer 2022, chapter
8): at least uniform given those before if the peer's claims are exchangeable with the calibrated
ones, however few these are; exactly for claims of one length. Other honest machines shift the
distribution (bfloat16 without AVX: errors 17 % larger; across dtypes .4 %); each peer has one of
them, so calibrating on several does not help. A claim may therefore be further away by a tolerance
before it counts; a larger shift breaks the bound.

Series k of a peer's life has the part 1 / (k (k + 1)) of the rate of false alarms, together 1; its
features share that.
"""

from __future__ import annotations

import hashlib
import math
import struct
from bisect import bisect_left, insort

from shoal.verification.calibration import Honest, Pair
from shoal.verification.fingerprints.fingerprint import Evidence

# Test martingale: a gambler's capital that bets on small p-values, and grows only if they come too
# often.
#
# Each p-value multiplies a share of the capital by kappa * p^(kappa - 1), whose mean is 1 for a
# uniform p and less for a larger one (a power calibrator; Vovk and Wang 2021). The shares have
# kappas from 1, which keeps its money, to 0.1, which bets on very small p; before each bet a part
# of all capital is dealt anew among them (the Simple Jumper of Vovk, Nouretdinov and Gammerman
# 2021), so that a peer which was honest for long and then cheats is found as well. If each p-value
# is at least uniform given those before, P(the capital ever reaches c) <= 1 / c (Ville's
# inequality), at whatever claim one stops to look.
#
# Every factor falls with p, and no bet depends on earlier p-values. So rounding a p-value up only
# lowers the capital.

KAPPAS = (1.0, 0.95, 0.85, 0.7, 0.5, 0.35, 0.2, 0.1)
JUMP = 0.001  # of the capital, dealt anew before each bet


class Martingale:
    """Capital, of 1 at the begin, after a sequence of p-values."""

    def __init__(self) -> None:
        self._logs = [-math.log(len(KAPPAS))] * len(KAPPAS)
        self.log_capital = 0.0  # its natural logarithm

    def bet(self, p: float) -> float:
        """Bet on ``p``, in (0, 1], and return the new ``log_capital``.

        Raises ValueError for another number.
        """
        if not 0 < p <= 1:
            raise ValueError(f"a p-value is above 0 and at most 1, not {p}")
        dealt = math.log(JUMP / len(KAPPAS)) + self.log_capital
        for at, kappa in enumerate(KAPPAS):
            share = _log_sum((math.log1p(-JUMP) + self._logs[at], dealt))
            self._logs[at] = share + math.log(kappa) + (kappa - 1) * math.log(p)
        self.log_capital = _log_sum(self._logs)
        return self.log_capital


def _log_sum(logs: tuple[float, ...] | list[float]) -> float:
    largest = max(logs)
    return largest + math.log(math.fsum(math.exp(one - largest) for one in logs))


LENGTH = 512  # claims of a series, which bounds what is kept of a peer
TOLERANCE, ACROSS = 0.2, 0.05  # shares of an honest claim's mean, in one dtype and across dtypes
LIFE_RATE = 5e-5
"""Probability of an alarm about an honest peer in its life, at one verifier; at more than half of
them at most twice that.
"""
ALARM = math.log(1 / LIFE_RATE)
"""Logarithm of the odds at which a verifier raises an alarm."""


class Reference:
    """Calibrated claims of ``pair``, prepared for series. ``digest`` names them."""

    def __init__(self, pair: Pair, honest: Honest) -> None:
        self.pair, self.honest = pair, honest
        self._share = TOLERANCE if pair.prover == pair.verifier else ACROSS
        self.columns = tuple(
            sorted(column) for column in zip(*map(honest.scores, honest.claims), strict=True)
        )
        flat = [score for column in self.columns for score in column]
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
        fits = len(scores) == len(tolerances) == len(self._own) and all(
            map(math.isfinite, (*scores, *tolerances))
        )
        if self.count >= LENGTH or not fits or min(tolerances) < 0:
            raise ValueError(
                "a series takes 512 claims, each with a finite score for every feature"
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
