"""The latency model of bench/latency.py against its closed forms, and a small version against earlier figures."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.latency import (
    SPREADS,
    STEPS,
    barrier_ratios,
    estimate,
    mean_of_max,
    sigma_of,
    tree_ratios,
    tree_times,
    variance_of_max,
)

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "latency.py"
# NoLoCo's figures 5A and 5B in numbers, by an earlier simulation that shares no code with this one.
FIGURE_5A = {  # peers -> all-reduce over pair, for each of SPREADS
    4: (2.0, 2.10, 2.22, 2.33, 2.42, 2.43),
    16: (4.0, 4.50, 5.19, 5.85, 6.47, 6.79),
    64: (6.0, 7.05, 8.66, 10.5, 12.3, 13.8),
    256: (8.0, 9.70, 12.6, 16.4, 20.4, 24.0),
}
FIGURE_5B = {16: (1.23, 1.13, 1.11, 1.06), 64: (1.38, 1.24, 1.16, 1.11), 256: (1.54, 1.32, 1.23, 1.16)}
ERRORS = 4  # standard errors that a simulation may be off


def seeded():
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("cv", [0.1, 0.5, 1.0])
def test_mean_and_variance_of_the_slower_of_two_are_the_closed_forms(cv):
    sigma = sigma_of(cv)
    slower = torch.randn(400_000, 2, generator=seeded(), dtype=torch.float64).mul(sigma).add(0.3).exp().amax(1)
    found = estimate(slower)
    assert abs(found.value - mean_of_max(sigma, 0.3)) < ERRORS * found.error
    squares = estimate((slower - mean_of_max(sigma, 0.3)) ** 2)
    assert abs(squares.value - variance_of_max(sigma, 0.3)) < ERRORS * squares.error


def test_closed_forms_at_known_points():
    assert mean_of_max(0.0) == pytest.approx(1.0)
    assert variance_of_max(0.0) == pytest.approx(0.0)
    for cv in SPREADS:  # coefficient of variation of one message, from its logarithm's deviation
        assert math.sqrt(math.expm1(sigma_of(cv) ** 2)) == pytest.approx(cv)


def test_without_spread_a_tree_is_as_many_hops_as_levels():
    for peers, levels in ((2, 1), (3, 2), (4, 2), (1024, 10), (10_000, 14)):
        assert tree_times(peers, 2, seeded(), (0.0,)).tolist() == [[levels, levels]]


def test_a_tree_of_two_is_the_pair():
    for found in tree_ratios(2, 50_000, seeded()):
        assert abs(found.value - 1) <= ERRORS * found.error


@pytest.mark.parametrize("peers", FIGURE_5A)
def test_tree_against_the_figure(peers):
    for found, expected in zip(tree_ratios(peers, 4000, seeded()), FIGURE_5A[peers], strict=True):
        assert abs(found.value - expected) <= max(ERRORS * found.error, 0.005 * expected)  # the table has three digits


@pytest.mark.parametrize("peers", FIGURE_5B)
def test_barriers_against_the_figure(peers):
    found = barrier_ratios(peers, 4, seeded())
    assert [cell.value for cell in found] == pytest.approx(FIGURE_5B[peers], rel=0.03)
    assert len(found) == len(STEPS)


def test_a_barrier_of_two_is_the_pair():
    assert [cell.value for cell in barrier_ratios(2, 2, seeded(), rounds=20)] == pytest.approx([1.0] * len(STEPS))


def test_one_line_of_json(tmp_path):
    command = [sys.executable, str(SCRIPT), "--peers", "4,10", "--samples", "2", "--runs", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["peers"] for row in result["tree"]] == [4, 10]
    assert [cell["cv"] for cell in result["tree"][0]["cells"]] == list(SPREADS)
    assert [cell["steps"] for cell in result["barrier"][0]["cells"]] == list(STEPS)
    assert "pair exchange" in done.stderr
