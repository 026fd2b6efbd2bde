"""The capital of the bets: its mean for uniform p-values, its growth for small ones, and after a peer that was honest for long."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.verification.sequential import JUMP, KAPPAS, Martingale

P = st.floats(1e-6, 1.0)


def after(values):
    martingale = Martingale()
    for value in values:
        martingale.bet(value)
    return martingale.log_capital


def by_hand(values):
    """The Simple Jumper as its paper states it, in plain numbers."""
    shares = [1 / len(KAPPAS)] * len(KAPPAS)
    for p in values:
        total = sum(shares)
        shares = [(1 - JUMP) * share + JUMP * total / len(KAPPAS) for share in shares]
        shares = [share * kappa * p ** (kappa - 1) for share, kappa in zip(shares, KAPPAS, strict=True)]
    return sum(shares)


@given(st.lists(P, min_size=1, max_size=12))
@settings(deadline=None)
def test_it_is_the_simple_jumper(values):
    assert after(values) == pytest.approx(math.log(by_hand(values)), abs=1e-9)


def test_the_first_bet_is_fair():
    """The capital's mean over a uniform p is 1: between the sums of steps below and above it, on p = exp(-n / 50)."""
    edges = [math.exp(-n / 50) for n in range(10_001)]  # the least bet has its mean above e^-200, but for e^-20
    capital = [math.exp(after([p])) for p in edges]
    widths = [high - low for high, low in itertools.pairwise(edges)]
    below = sum(width * value for width, value in zip(widths, capital, strict=False))
    above = sum(width * value for width, value in zip(widths, capital[1:], strict=True))
    assert 0.98 < below < 1 < above < 1.02


@given(st.lists(st.tuples(P, P), min_size=1, max_size=20))
@settings(deadline=None)
def test_a_p_value_rounded_up_never_raises_the_capital(pairs):
    assert after(max(pair) for pair in pairs) <= after(min(pair) for pair in pairs) + 1e-9


def test_uniform_p_values_seldom_make_rich():
    """Ville: P(ever >= c) <= 1 / c; of 200 gamblers over 200 bets at most 20 may reach 10, and 3 standard errors more."""
    source = random.Random(1)
    reached = 0
    for _ in range(200):
        martingale = Martingale()
        reached += any(martingale.bet(1 - source.random()) >= math.log(10) for _ in range(200))
    assert reached <= 20 + 3 * math.sqrt(200 * 0.1 * 0.9)


def test_all_small_grows_by_the_best_bet():
    assert after([0.01] * 30) == pytest.approx(30 * math.log(0.2 * 0.01**-0.8), abs=math.log(len(KAPPAS)) + 1)


def test_a_peer_that_begins_to_cheat_late_is_found_nearly_as_soon():
    source = random.Random(2)
    honest = [1 - source.random() for _ in range(1000)]
    assert after([*honest, *[0.01] * 12]) > math.log(1e4)
    assert after(honest) < math.log(100)


@pytest.mark.parametrize("p", [0.0, -0.1, 1.1, math.nan])
def test_a_number_that_is_no_p_value_is_refused(p):
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        Martingale().bet(p)
