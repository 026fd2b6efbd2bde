"""Test of a claim against the distribution of honest claims, at a stated rate of false alarms.

    calibration = Calibration()
    calibration.add(Pair("activations", model, "float32", "float32"), honest_claims)
    calibration.judge(pair, evidence, rate=1e-4).accepted

A claim is tested once, as a whole: each feature is pooled over all windows,

    z_f = (mean_f - honest mean_f) / sqrt(between_f + within_f / size)
    statistic = max over the features f of (z_f - start_f) / slope_f

where ``size`` is the claim's length in windows, the variances are those between and within honest
claims, and beyond start_f their tail has mean excess slope_f. Why the rate holds:
docs/internals.md, "The threshold of a calibration".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from statistics import NormalDist

from shoal.verification.fingerprints.fingerprint import Evidence, Feature

RATE = 1e-4
"""Probability that an honest claim is refused, by default."""
FEWEST = 20
"""Honest claims of a calibration, at least."""
TAIL = 0.1
"""Part of the honest claims beyond which the tail is taken for exponential."""
SURENESS = NormalDist().inv_cdf(0.95)
"""Standard deviations, one-sided, for what is estimated from a small sample."""
LEAST_SLOPE = 0.6
"""Slope of the tail, at least, in standard deviations: a normal one has 0.47, an exponential one 1.
"""
SMALLEST_VARIANCE = 1e-24
"""Of a feature, at least, so that one without variance can be divided by."""
MOST_CLAIMS = 1 << 20
"""Honest claims of a calibration, at most."""


class CalibrationError(ValueError):
    """Missing calibration of a claim, or too few claims to make one. One sentence says what to
    do.
    """


@dataclass(frozen=True, order=True)
class Pair:
    """Key of a calibration: a fingerprint by name, a model by id, and the dtypes of both sides,
    such as "float32".
    """

    fingerprint: str
    model: str
    prover: str
    verifier: str

    def __post_init__(self) -> None:
        if not all(0 < len(part) <= 256 and part.isprintable() for part in astuple(self)):
            raise ValueError(
                "each part of a calibration's name must be 1 to 256 printable characters"
            )


@dataclass(frozen=True)
class Honest:
    """The windows of ``claims`` honest claims and what follows from them. Made by ``Honest.of``."""

    features: tuple[Feature, ...]
    claims: tuple[Evidence, ...]
    mean: tuple[float, ...]
    between: tuple[float, ...]
    within: tuple[float, ...]
    starts: tuple[float, ...]
    slopes: tuple[float, ...]
    """Slope of z's upper tail, for each feature."""
    statistics: tuple[float, ...]
    """Statistic of each claim, ascending."""

    @staticmethod
    def of(claims: Sequence[Evidence]) -> Honest:
        """Calibrate.

        Raises ``CalibrationError`` for fewer than 20 claims, one with a fault, or claims of unlike
        fingerprints.
        """
        if not FEWEST <= len(claims) <= MOST_CLAIMS:
            raise CalibrationError(
                f"a calibration needs {FEWEST} to {MOST_CLAIMS} honest claims, not {len(claims)}"
            )
        features = claims[0].features
        for claim in claims:
            if claim.fault:
                raise CalibrationError(f"a claim that should be honest has a fault: {claim.fault}")
            if claim.features != features:
                raise CalibrationError("the claims of one calibration must be of one fingerprint")
        components = [_components(claims, at) for at in range(len(features))]
        mean, between, within = zip(*components, strict=True)
        honest = Honest(features, tuple(claims), mean, between, within, (), (), ())
        columns = zip(*map(honest.scores, claims), strict=True)
        starts, slopes = zip(*(_tail(sorted(column)) for column in columns), strict=True)
        honest = replace(honest, starts=starts, slopes=slopes)
        statistics = sorted(honest.statistic(claim)[0] for claim in claims)
        return replace(honest, statistics=tuple(statistics))

    def scores(self, evidence: Evidence) -> tuple[float, ...]:
        rows = zip(evidence.means(), self.mean, self.spreads(evidence.size), strict=True)
        return tuple((found - mean) / spread for found, mean, spread in rows)

    def spreads(self, size: float) -> tuple[float, ...]:
        """Return the standard deviation of each feature's mean over an honest claim of ``size``
        windows, at least its grain.
        """
        spreads = []
        for between, within, feature in zip(self.between, self.within, self.features, strict=True):
            variance = max(between + within / size, feature.grain**2, SMALLEST_VARIANCE)
            spreads.append(math.sqrt(variance))
        return tuple(spreads)

    def statistic(self, evidence: Evidence) -> tuple[float, int]:
        """Return the most extreme feature, in units of its honest tail, and its index."""
        tails = zip(self.scores(evidence), self.starts, self.slopes, strict=True)
        scores = [(z - start) / slope for z, start, slope in tails]
        worst = max(range(len(scores)), key=scores.__getitem__)
        return scores[worst], worst

    def threshold(self, rate: float = RATE) -> float:
        """Return the value that an honest claim's statistic exceeds with probability ``rate``, in
        (0, 0.5].
        """
        _check_rate(rate)
        ranked = self.statistics
        many = len(ranked)
        # What a normal distribution would have: one sample that happens to be narrow does not make
        # the test sharper.
        least = (NormalDist().inv_cdf(1 - rate) - NormalDist().inv_cdf(1 - TAIL)) / LEAST_SLOPE
        # This many ranks from the top, the claim's own among them, may be refused.
        over = math.floor(rate * (many + 1))
        if over >= 1:
            return max(least, ranked[many - over])
        # Of F features each may be beyond t with probability TAIL exp(-t). Then what the sample
        # leaves open of the spread.
        far = math.log(len(self.features) * TAIL / rate)
        wider = _spread_factor(many - 1)
        begin = max(start / slope for start, slope in zip(self.starts, self.slopes, strict=True))
        return max(least, ranked[-1], far * wider + max(0.0, begin) * (wider - 1))

    def warning(self, rate: float = RATE) -> str:
        """Return one sentence if there are too few claims for ``rate``, else an empty string."""
        _check_rate(rate)
        many = len(self.claims)
        wanted = math.ceil(1 / rate - 1 - 1e-9)
        if many >= wanted:
            return ""
        return (
            f"{many} honest claims cannot show a false-positive rate of {rate:g}: the threshold is "
            f"extrapolated; calibrate with {wanted} claims, or state a rate of "
            f"{1 / (many + 1):.2g} or more."
        )


@dataclass(frozen=True)
class Judgement:
    """Outcome of a test; ``reason`` is one sentence, also for an accepted claim.

    A fault has an infinite ``statistic``.
    """

    accepted: bool
    statistic: float
    threshold: float
    reason: str


class Calibration:
    """Honest distributions of several pairs."""

    def __init__(self, pairs: dict[Pair, Honest] | None = None) -> None:
        self.pairs = dict(pairs or {})

    def add(self, pair: Pair, claims: Sequence[Evidence]) -> Honest:
        """Calibrate ``pair`` with honest ``claims`` in place of any earlier calibration.

        Raises as ``Honest.of``.
        """
        self.pairs[pair] = Honest.of(claims)
        return self.pairs[pair]

    def judge(self, pair: Pair, evidence: Evidence, rate: float = RATE) -> Judgement:
        """Test a claim.

        A fault is refused and equality accepted without a calibration; otherwise raises
        ``CalibrationError`` if ``pair`` was not calibrated, or was with another fingerprint's
        features.

        ``rate`` holds for claims like the honest ones in all but length. If many claims of one peer
        are tested, some are refused at this rate; it is for the vote and the reputation to forgive
        that.
        """
        if evidence.fault:
            _check_rate(rate)
            return Judgement(False, math.inf, math.inf, evidence.fault)
        # As exact tokens are: the test is one-sided, so no calibration refuses it.
        if not any(map(any, evidence.values)):
            _check_rate(rate)
            return Judgement(True, 0.0, 0.0, "nothing differs")
        honest = self.pairs.get(pair)
        if honest is None:
            raise CalibrationError(
                f"there is no calibration of {pair.fingerprint} for a {pair.prover} prover and a "
                f"{pair.verifier} verifier of '{pair.model}': calibrate with honest claims first"
            )
        if evidence.features != honest.features:
            raise CalibrationError(
                "the calibration was made with another version of this fingerprint: calibrate again"
            )
        statistic, worst = honest.statistic(evidence)
        threshold = honest.threshold(rate)
        accepted = statistic <= threshold
        found = evidence.means()[worst]
        mean = honest.mean[worst]
        z = honest.scores(evidence)[worst]
        limit = honest.starts[worst] + honest.slopes[worst] * threshold
        most = mean
        if z:
            most += limit * ((found - mean) / z)
        reason = (
            f"{honest.features[worst].name}: {found:.4g}, where an honest claim of this length has "
            f"{mean:.4g} on average and at most {most:.4g}"
        )
        return Judgement(accepted, statistic, threshold, reason)


def _check_rate(rate: float) -> None:
    if not 0 < rate <= 0.5:
        raise ValueError(f"a false-positive rate must be above 0 and at most 0.5, not {rate}")


def _tail(ranked: Sequence[float]) -> tuple[float, float]:
    """Return where the upper tenth of ascending ``ranked`` begins, and an upper bound of its mean
    excess, >= ``LEAST_SLOPE``.
    """
    many = len(ranked)
    tail = max(2, int(many * TAIL))
    start = ranked[many - tail - 1]
    slope = sum(value - start for value in ranked[many - tail :]) / tail
    return start, max(LEAST_SLOPE, slope * (1 + SURENESS / math.sqrt(tail)))


def _spread_factor(freedom: int) -> float:
    """Return how much larger a standard deviation may be than one estimated with ``freedom``
    degrees of freedom, at 95 %.

    The quantile of chi-square is that of Wilson and Hilferty (1931), right to 1 % for 19 or more.
    """
    part = 2 / (9 * freedom)
    return math.pow(1 - part - SURENESS * math.sqrt(part), -1.5)


def _components(claims: Sequence[Evidence], at: int) -> tuple[float, float, float]:
    """Return the mean of feature ``at``, its variance between claims, and that of one whole window
    within a claim.

    The analysis of variance of a random-effects model with unequal group sizes (Searle, Casella,
    McCulloch 1992, 3.6): window w of claim i is mean + b_i + e_iw, the variance of e being
    ``within`` over the window's size.
    """
    sizes = [claim.size for claim in claims]
    means = [claim.means()[at] for claim in claims]
    total = math.fsum(sizes)
    mean = math.fsum(size * value for size, value in zip(sizes, means, strict=True)) / total
    inside: list[float] = []
    for claim, value in zip(claims, means, strict=True):
        for size, row in zip(claim.sizes, claim.values, strict=True):
            inside.append(size * (row[at] - value) ** 2)
    inner = math.fsum(inside)
    outer = math.fsum(size * (value - mean) ** 2 for size, value in zip(sizes, means, strict=True))
    windows = sum(len(claim.sizes) for claim in claims)
    freedom = windows - len(claims)
    within = inner / freedom if freedom else 0.0
    effective = (total - math.fsum(size**2 for size in sizes) / total) / (len(claims) - 1)
    between = max(0.0, (outer / (len(claims) - 1) - within) / effective)
    return mean, between, within
