"""The pooled test: its variances in closed form, its false alarms on fresh honest claims, and its
file.
"""

import json
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from bench._interval import rate_interval
from shoal.verification import calibration_file
from shoal.verification.calibration import (
    LEAST_SLOPE,
    Calibration,
    CalibrationError,
    Honest,
    Pair,
    _spread_factor,
)
from shoal.verification.calibration_file import load_calibration, save_calibration
from shoal.verification.fingerprints.fingerprint import Evidence, Feature

ONE = (Feature("error", 0.0),)
TWO = (Feature("error", 0.0), Feature("misses", 0.0))
PAIR = Pair("activations", "model", "bfloat16", "float32")


def claim(*values, sizes=None, features=ONE):
    rows = tuple(value if isinstance(value, tuple) else (value,) for value in values)
    return Evidence(features, rows, sizes or (1.0,) * len(rows))


def honest_claims(many, seed=0, windows=(4,), between=0.1, draw=None):
    """Gamma windows around a mean of the claim's own; two features, the second of them counts."""
    source = random.Random(seed)
    draw = draw or (lambda level: (source.gammavariate(4, level / 4), float(source.random() < 0.1)))
    claims = []
    for _ in range(many):
        level = 1 + between * source.gauss(0, 1)
        claims.append(claim(*(draw(level) for _ in range(source.choice(windows))), features=TWO))
    return claims


class TestVariances:
    def test_equal_sizes_by_hand(self):
        """Two windows a claim, 0.5 to either side of its mean; the means are 1 and 3, each of ten
        claims.
        """
        honest = Honest.of([claim(level - 0.5, level + 0.5) for level in (1.0, 3.0) * 10])
        assert honest.mean == (2.0,)
        within = 20 * 0.5 / 20  # squares over degrees of freedom
        assert honest.within == pytest.approx((within,))
        assert honest.between == pytest.approx(((20 * 2 / 19 - within) / 2,))

    def test_one_window_a_claim_cannot_tell_them_apart(self):
        honest = Honest.of([claim(float(level)) for level in range(20)])
        assert honest.within == (0.0,)
        assert honest.between == pytest.approx((35.0,))

    def test_they_are_estimated_without_bias(self):
        claims = honest_claims(4000, windows=(1, 2, 7), between=0.2)
        honest = Honest.of(claims)
        assert honest.mean[0] == pytest.approx(1, abs=0.03)
        assert honest.between[0] == pytest.approx(0.04, rel=0.15)
        assert honest.within[0] == pytest.approx((1 + 0.04) / 4, rel=0.1)

    def test_a_short_window_counts_by_its_size(self):
        found = claim(1.0, 4.0, sizes=(1.0, 0.5))
        assert found.size == 1.5
        assert found.means() == (2.0,)

    def test_z_by_hand(self):
        honest = Honest(ONE, (), (2.0,), (0.25,), (3.0,), (), (), ())
        assert honest.scores(claim(*[3.0] * 4)) == (1.0,)
        assert honest.scores(claim(*[3.0] * 12)) == pytest.approx((math.sqrt(2),))

    def test_where_nothing_varied_the_grain_is_the_measure(self):
        exact = (Feature("error", 0.02),)
        honest = Honest.of([claim(0.0, features=exact)] * 50)
        assert honest.scores(claim(0.04, features=exact)) == (2.0,)
        assert honest.statistic(claim(0.04, features=exact)) == (2 / LEAST_SLOPE, 0)
        assert 3.7 < LEAST_SLOPE * honest.threshold(1e-4) < 10


class TestFalseAlarms:
    def alarms(self, honest, rate, many=20_000, **kind):
        threshold = honest.threshold(rate)
        return sum(
            honest.statistic(fresh)[0] > threshold for fresh in honest_claims(many, seed=99, **kind)
        )

    @pytest.mark.parametrize("windows", [(4,), (1, 4, 16)])
    def test_with_enough_claims_the_rate_is_the_stated_one(self, windows):
        honest = Honest.of(honest_claims(4999, windows=windows))
        assert honest.warning(0.01) == ""
        low, high = rate_interval(self.alarms(honest, 0.01, windows=windows), 20_000, 0.999)
        assert low < 0.0125  # what is stated and what a sample of 4,999 leaves open
        assert high > 0.0075

    @pytest.mark.parametrize("windows", [(4,), (1, 4, 16)])
    @pytest.mark.parametrize("many", [20, 50, 200])
    def test_with_too_few_it_is_not_above(self, many, windows):
        """At 1 in 1,000, over ten calibrations: on average at most the stated rate, although
        windows are skewed and discrete.
        """
        fresh = honest_claims(3000, seed=99, windows=windows)
        alarms = 0
        for seed in range(10):
            honest = Honest.of(honest_claims(many, seed, windows))
            threshold = honest.threshold(1e-3)
            alarms += sum(honest.statistic(found)[0] > threshold for found in fresh)
        assert alarms / 30_000 <= 1e-3

    def test_many_windows_are_tested_more_sharply(self):
        honest = Honest.of(honest_claims(500, between=0.02))
        worse = (2.0, 0.1)
        short, long = (
            honest.statistic(claim(*[worse] * many, features=TWO))[0] for many in (1, 32)
        )
        assert short < honest.threshold() < long


class TestThreshold:
    def test_conformal_rank_by_hand(self):
        honest = Honest(
            ONE,
            (),
            (0.0,),
            (1.0,),
            (0.0,),
            (0.0,),
            (1.0,),
            tuple(float(value) for value in range(10, 109)),
        )
        assert (
            honest.threshold(0.01) == 108
        )  # the largest of 99: a hundredth claim is above it with one chance in 100
        assert honest.threshold(0.05) == 104

    @settings(max_examples=30, deadline=None)
    @given(st.integers(20, 120), st.integers(0, 20))
    def test_a_smaller_rate_never_has_a_smaller_threshold(self, many, seed):
        honest = Honest.of(honest_claims(many, seed))
        found = [honest.threshold(rate) for rate in (0.5, 0.2, 0.1, 0.05, 0.01, 1e-3, 1e-4, 1e-6)]
        assert found == sorted(found)

    @pytest.mark.parametrize(("freedom", "quantile"), [(19, 10.117), (49, 33.930), (199, 167.361)])
    def test_the_spread_may_be_larger_than_it_seems(self, freedom, quantile):
        assert _spread_factor(freedom) == pytest.approx(math.sqrt(freedom / quantile), rel=2e-3)

    def test_small_sample_refuses_no_honest_claim(self):
        """No honest claim is refused where the sample is too small."""
        claims = honest_claims(200)
        calibration = Calibration()
        calibration.add(PAIR, claims)
        assert all(calibration.judge(PAIR, found).accepted for found in claims)

    def test_the_warning_says_how_many_are_needed(self):
        honest = Honest.of(honest_claims(200))
        assert "calibrate with 9999 claims, or state a rate of 0.005 or more" in honest.warning()
        assert honest.warning(1 / 201) == ""
        for bad in (0.0, -1.0, 0.6, math.nan):
            with pytest.raises(ValueError, match="false-positive rate"):
                honest.threshold(bad)


class TestJudge:
    calibration = Calibration()
    calibration.add(PAIR, honest_claims(100))

    def test_a_claim_that_is_far_away(self):
        found = self.calibration.judge(PAIR, claim(*[(9.0, 0.0)] * 4, features=TWO))
        assert not found.accepted
        assert found.statistic > found.threshold
        assert found.reason.startswith("error: 9, where an honest claim of this length has ")

    def test_a_fault_needs_no_calibration(self):
        found = Calibration().judge(PAIR, Evidence(TWO, fault="it has no bytes"))
        assert (found.accepted, found.reason) == (False, "it has no bytes")

    def test_equality_needs_no_calibration(self):
        assert Calibration().judge(PAIR, claim(0.0, 0.0)).accepted
        assert self.calibration.judge(PAIR, claim((0.0, 0.0), features=TWO)).accepted

    def test_what_cannot_be_judged(self):
        with pytest.raises(
            CalibrationError, match="there is no calibration of activations for a float16 prover"
        ):
            self.calibration.judge(
                Pair("activations", "model", "float16", "float32"), claim((1.0, 0.0), features=TWO)
            )
        with pytest.raises(CalibrationError, match="another version"):
            self.calibration.judge(PAIR, claim(1.0))


@pytest.mark.parametrize(
    ("claims", "says"),
    [
        ([claim(1.0)] * 19, "20 to"),
        ([claim(1.0)] * 30 + [Evidence(ONE, fault="broken")], "has a fault: broken"),
        ([claim(1.0)] * 30 + [claim((1.0, 0.0), features=TWO)], "one fingerprint"),
    ],
)
def test_claims_that_do_not_calibrate(claims, says):
    with pytest.raises(CalibrationError, match=says):
        Honest.of(claims)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Evidence(ONE),
        lambda: Evidence(ONE, ((1.0,),), (1.0,), "and a fault"),
        lambda: claim(math.nan),
        lambda: claim((1.0, 2.0)),
        lambda: claim(1.0, sizes=(0.0,)),
        lambda: claim(1.0, sizes=(1.0, 1.0)),
        lambda: Pair("", "m", "a", "b"),
        lambda: Pair("f", "m\n", "a", "b"),
    ],
)
def test_records_are_checked(bad):
    with pytest.raises(ValueError, match=r"evidence|window|printable"):
        bad()


class TestFile:
    def file(self, path):
        calibration = Calibration()
        calibration.add(PAIR, honest_claims(30, windows=(1, 5)))
        calibration.add(
            Pair("sampling", "model", "float32", "float32"),
            [claim(0.5, 0.25, sizes=(1.0, 0.125))] * 20,
        )
        save_calibration(calibration, path)
        return calibration

    def test_it_comes_back_bit_by_bit(self, tmp_path):
        calibration = self.file(tmp_path / "c")
        assert load_calibration(tmp_path / "c").pairs == calibration.pairs
        assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
        save_calibration(Calibration(), tmp_path / "c")
        assert load_calibration(tmp_path / "c").pairs == {}

    @pytest.mark.parametrize(
        "change",
        [
            {"windows": torch.tensor([25, -5], dtype=torch.int64)},
            {"windows": torch.tensor([2**62, 2**62, 2**62, 2**62 + 20], dtype=torch.int64)},
            {"windows": torch.tensor([19], dtype=torch.int64)},
            {"windows": torch.ones(20, dtype=torch.float64)},
            {"values": torch.full((20, 1), math.nan, dtype=torch.float64)},
            {"values": torch.ones(20, 2, dtype=torch.float64)},
            {"sizes": torch.zeros(20, dtype=torch.float64)},
            {"pair": ["f", "m", "a"]},
            {"pair": ["f", "m", "a", 5]},
            {"features": []},
            {"features": [["error", -1.0]]},
            {"features": [["error", "nan"]]},
            {"pairs": "[" * 100_000},
            {"pairs": "5"},
            {"pairs": json.dumps([0] * 257)},
        ],
        ids=str,
    )
    def test_lies_are_refused(self, tmp_path, change):
        parts = {
            "values": torch.ones(20, 1, dtype=torch.float64),
            "sizes": torch.ones(20, dtype=torch.float64),
            "windows": torch.ones(20, dtype=torch.int64),
            "pair": ["f", "m", "a", "b"],
            "features": [["error", 0.0]],
        }
        parts |= change
        described = parts.pop("pairs", None) or json.dumps(
            [{"pair": parts.pop("pair"), "features": parts.pop("features")}]
        )
        tensors = {f"0.{name}": parts[name] for name in ("values", "sizes", "windows")}
        (tmp_path / "c").write_bytes(
            save(tensors, metadata={"shoal.calibration": "1", "pairs": described})
        )
        with pytest.raises(CalibrationError, match="calibrat"):
            load_calibration(tmp_path / "c")

    def test_missing_and_huge(self, tmp_path, monkeypatch):
        with pytest.raises(CalibrationError, match="cannot be read: No such file"):
            load_calibration(tmp_path / "none")
        calibration = self.file(tmp_path / "c")
        monkeypatch.setattr(calibration_file, "MOST_BYTES", 1000)
        with pytest.raises(CalibrationError, match="larger than 1000 bytes"):
            load_calibration(tmp_path / "c")
        with pytest.raises(CalibrationError, match="too large for a file"):
            save_calibration(calibration, tmp_path / "d")
        assert not (tmp_path / "d").exists()
