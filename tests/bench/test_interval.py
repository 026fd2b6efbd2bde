"""The benchmarks' interval of Clopper and Pearson: closed forms at the ends, tables, and its coverage."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench._interval import rate_interval


@pytest.mark.parametrize("total", [1, 10, 1000, 10_000])
def test_ends(total):
    low, high = rate_interval(0, total)
    assert low == 0
    assert high == pytest.approx(1 - 0.025 ** (1 / total), rel=1e-9)
    assert rate_interval(total, total) == pytest.approx((1 - high, 1.0), rel=1e-9)


@pytest.mark.parametrize(
    ("found", "total", "confidence", "expected"),
    [(3, 10, 0.95, (0.06674, 0.65245)), (1, 100, 0.95, (0.000253, 0.054459)), (50, 100, 0.99, (0.36886, 0.63114))],
)
def test_tables(found, total, confidence, expected):
    assert rate_interval(found, total, confidence) == pytest.approx(expected, abs=5e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.floats(0.01, 0.99), st.sampled_from([0.5, 0.9, 0.95]))
def test_it_covers_the_rate_as_often_as_its_confidence(total, rate, confidence):
    covered = 0.0
    for found in range(total + 1):
        low, high = rate_interval(found, total, confidence)
        if low <= rate <= high:
            covered += math.comb(total, found) * rate**found * (1 - rate) ** (total - found)
    assert covered >= confidence - 1e-9


@pytest.mark.parametrize("bad", [(-1, 10, 0.95), (11, 10, 0.95), (0, 0, 0.95), (1, 10, 0.0), (1, 10, 1.0)])
def test_refused(bad):
    with pytest.raises(ValueError, match="is not a count"):
        rate_interval(*bad)
