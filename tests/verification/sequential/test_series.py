"""Series of claims and the capital of bets on them: p-values that no honest peer can make too
small, and their odds.
"""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.verification.calibration import Honest, Pair
from shoal.verification.fingerprints.fingerprint import Evidence, Feature
from shoal.verification.martingale import JUMP, KAPPAS, Martingale
from shoal.verification.sequential import (
    ACROSS,
    ALARM,
    LENGTH,
    LIFE_RATE,
    TOLERANCE,
    Reference,
    Series,
)

ONE = (Feature("error", 0.0),)
TWO = (Feature("error", 0.0), Feature("misses", 0.0))
SAME, OTHER = (
    Pair("activations", "model", "float32", "float32"),
    Pair("activations", "model", "bfloat16", "float32"),
)
NONE = (0.0,)


def claim(*values, features=ONE):
    return Evidence(features, (values,), (1.0,))


def reference(values, pair=SAME, features=ONE):
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return Reference(pair, Honest.of([claim(*row, features=features) for row in rows]))


def steps(series, known, values):
    return [series.add(known.scores(claim(value)), NONE)[0] for value in values]


def test_p_values_by_hand():
    """Twenty calibrated claims 0 to 19: 18.5 has one beyond it, and itself, of 21; then that one
    counts with the others.
    """
    known = reference([float(n) for n in range(20)])
    assert steps(Series(known, 1), known, [18.5, 18.7, -1.0, 30.0]) == [
        2 / 21,
        2 / 22,
        23 / 23,
        1 / 24,
    ]


def test_ties_count_as_further():
    known = reference([0.0] * 10 + [1.0] * 10)
    assert steps(Series(known, 1), known, [1.0, 1.0, 0.0]) == [11 / 21, 12 / 22, 1.0]


@given(st.lists(st.integers(0, 4), min_size=22, max_size=22), st.integers(1, 21))
@settings(deadline=None, max_examples=60)
def test_p_values_are_uniform_with_ties(values, rank):
    """Of all 22 rotations of one multiset each is as likely; the last claim's p-value is <= rank /
    22 in at most that share.
    """
    least = []
    for turn in range(22):
        order = [float(value) for value in values[turn:] + values[:turn]]
        known = reference(order[:21])
        least.append(steps(Series(known, 1), known, order[21:])[0])
    assert sum(p <= rank / 22 + 1e-12 for p in least) <= rank


def test_later_p_values_inherit_no_luck():
    """Against 20 fixed claims an honest peer would look guilty sooner or later, as these 20 are too
    near by chance. Of all capitals after 200 claims at most a twentieth may be 20, and 3 standard
    errors more.
    """
    source = random.Random(3)
    capitals = []
    for _ in range(100):
        known = reference([source.gauss(0, 1) for _ in range(20)])
        martingale, series = Martingale(), Series(known, 1)
        for p in steps(series, known, [source.gauss(0, 1) for _ in range(200)]):
            martingale.bet(p)
        capitals.append(min(martingale.log_capital, 20.0))
    assert sum(capital >= math.log(20) for capital in capitals) <= 100 / 20 + 3 * math.sqrt(
        100 / 20
    )


def ever(known, draws, claims, source):
    series = Series(known, 1)
    for at in range(1, claims + 1):
        series.add(known.scores(draws(source)), known.tolerances(claim(0.0)))
        if series.log_odds >= ALARM:
            return at
    return None


def test_slight_cheat_is_found_and_nobody_else():
    """No honest peer is accused and one that cheats a little is found."""
    source = random.Random(4)
    honest, cheat = (
        (lambda s: claim(1 + 0.1 * s.gauss(0, 1))),
        (lambda s: claim(1.45 + 0.1 * s.gauss(0, 1))),
    )
    accused, found = [], []
    for _ in range(12):
        known = reference([honest(source).values[0] for _ in range(400)])
        accused.append(ever(known, honest, 200, source))
        found.append(ever(known, cheat, 100, source))
    assert accused == [None] * 12
    assert None not in found
    assert sorted(found)[6] <= 40


@pytest.mark.parametrize(("pair", "share"), [(SAME, TOLERANCE), (OTHER, ACROSS)])
def test_a_shift_within_the_tolerance_is_no_evidence(pair, share):
    """Claims at 1 + 0.99 share against honest ones at 1 exactly: p is 1.

    Just beyond, it is the least.
    """
    known = reference([1.0] * 20, pair)
    for shift, p in ((0.99 * share, 1.0), (1.01 * share, 1 / 21)):
        shown = claim(1 + shift)
        assert Series(known, 1).add(known.scores(shown), known.tolerances(shown)) == (p,)


def test_the_tolerance_is_at_least_the_grain():
    grained = (Feature("error", 0.5),)
    known = reference([0.0] * 20, features=grained)
    for value, p in ((0.49, 1.0), (0.51, 1 / 21)):
        shown = claim(value, features=grained)
        assert Series(known, 1).add(known.scores(shown), known.tolerances(shown)) == (p,)


def test_odds_are_discounted_for_series_and_features():
    """Odds are the largest capital less the parts of series and feature."""
    known = reference([(float(n), float(-n)) for n in range(20)], features=TWO)
    for number in (1, 2, 5):
        series = Series(known, number)
        p = series.add(known.scores(claim(25.0, -3.5, features=TWO)), (0.0, 0.0))
        martingales = [Martingale(), Martingale()]
        capitals = [martingale.bet(one) for martingale, one in zip(martingales, p, strict=True)]
        assert series.log_odds == pytest.approx(max(capitals) - math.log(2 * number * (number + 1)))


def test_the_parts_of_all_series_are_one_rate():
    """Union bound over features and series: sum of 1 / (k (k + 1)) telescopes to 1 - 1 / (n +
    1).
    """
    known = reference([float(n) for n in range(20)])
    parts = [math.exp(Series(known, number).log_odds) for number in range(1, 1000)]
    assert sum(parts) == pytest.approx(1 - 1 / 1000)
    assert math.exp(ALARM) == pytest.approx(1 / LIFE_RATE)


@given(st.permutations(range(6)))
@settings(deadline=None, max_examples=30)
def test_last_p_value_ignores_the_order_before(order):
    """The last p value does not depend on the order before."""
    known = reference([float(n) for n in range(20)])
    values = [3.0, 7.5, 30.0, 19.0, -2.0, 12.0]
    first = steps(Series(known, 1), known, [*values, 15.5])[-1]
    assert steps(Series(known, 1), known, [*(values[at] for at in order), 15.5])[-1] == first


def test_the_digest_names_the_calibration():
    digests = [
        reference(values).digest
        for values in ([float(n) for n in range(20)], [float(n) for n in range(21)])
    ]
    assert len({*digests, reference([float(n) for n in reversed(range(20))]).digest}) == 2


def test_what_does_not_fit_is_refused():
    known = reference([float(n) for n in range(20)])
    with pytest.raises(ValueError, match="another fingerprint"):
        known.scores(claim(1.0, 2.0, features=TWO))
    with pytest.raises(ValueError, match="count from 1"):
        Series(known, 0)
    series = Series(known, 1)
    for scores, tolerances in itertools.product([(math.nan,), (1.0, 2.0), ()], [NONE]):
        with pytest.raises(ValueError, match="each with a finite score"):
            series.add(scores, tolerances)
    with pytest.raises(ValueError, match="each with a finite score"):
        series.add((1.0,), (-1.0,))
    for _ in range(LENGTH):
        series.add((0.0,), NONE)
    with pytest.raises(ValueError, match="512 claims"):
        series.add((0.0,), NONE)


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
        shares = [
            share * kappa * p ** (kappa - 1) for share, kappa in zip(shares, KAPPAS, strict=True)
        ]
    return sum(shares)


@given(st.lists(P, min_size=1, max_size=12))
@settings(deadline=None)
def test_it_is_the_simple_jumper(values):
    assert after(values) == pytest.approx(math.log(by_hand(values)), abs=1e-9)


@given(st.lists(st.tuples(P, P), min_size=1, max_size=20))
@settings(deadline=None)
def test_a_p_value_rounded_up_never_raises_the_capital(pairs):
    assert after(max(pair) for pair in pairs) <= after(min(pair) for pair in pairs) + 1e-9


def test_all_small_grows_by_the_best_bet():
    assert after([0.01] * 30) == pytest.approx(
        30 * math.log(0.2 * 0.01**-0.8), abs=math.log(len(KAPPAS)) + 1
    )


def test_late_cheat_is_found_nearly_as_soon():
    """A peer that begins to cheat late is found nearly as soon."""
    source = random.Random(2)
    honest = [1 - source.random() for _ in range(1000)]
    assert after([*honest, *[0.01] * 12]) > math.log(1e4)
    assert after(honest) < math.log(100)


@pytest.mark.parametrize("p", [0.0, -0.1, 1.1, math.nan])
def test_a_number_that_is_no_p_value_is_refused(p):
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        Martingale().bet(p)
