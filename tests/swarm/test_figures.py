"""Figures for people have a unit and three digits, from the smallest to the largest."""

import math

import pytest

from shoal.swarm.figures import amount, duration


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0 B"), (5_000, "5 kB"), (999_600, "1 MB"), (1.3e9, "1.3 GB"), (1.3e16, "13,000 TB")],
)
def test_bytes(value, said):
    assert amount(value) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0 s"),
        (1.97e-05, "under 1 ms"),
        (0.25, "250 ms"),
        (0.9999, "1 s"),
        (1.254, "1.25 s"),
        (119, "119 s"),
        (120, "2 min"),
        (9000, "2.5 h"),
        (3.6e7, "10,000 h"),
        (None, "-"),
        (math.nan, "-"),
    ],
)
def test_seconds(value, said):
    assert duration(value) == said
