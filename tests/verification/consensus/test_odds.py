"""What a vote is worth: the closed form against the design's figures, enumeration, and a million simulated claims."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.verification.consensus.rulings import drawn, least_audit, vote

CLAIMS = 10**6
SHARES = st.floats(0, 1)


@pytest.mark.parametrize(("n", "collude", "expected"), [(3, 0.0, 2.98e-4), (3, 0.1, 0.0330), (7, 0.1, 0.00376)])
def test_the_figures_of_the_design(n, collude, expected):
    assert vote(n, collude).wrong_accepted == pytest.approx(expected, rel=0.02)
    assert vote(n, collude).honest_rejected == pytest.approx(expected, rel=0.02)


@settings(deadline=None)
@given(st.sampled_from([1, 3, 5]), SHARES, SHARES, SHARES, SHARES)
def test_against_enumeration_of_all_seats(n, collude, lazy, miss, alarm):
    lazy *= 1 - collude
    works = 1 - collude - lazy
    accept = {"colluding": 1.0, "lazy": 1.0, "works": miss}
    reject = {"colluding": 1.0, "lazy": 0.0, "works": alarm}
    share = {"colluding": collude, "lazy": lazy, "works": works}

    def majority(chance):
        total = 0.0
        for kinds in itertools.product(share, repeat=n):
            for votes in itertools.product((0, 1), repeat=n):
                if sum(votes) > n // 2:
                    total += math.prod(
                        share[kind] * (chance[kind] if voted else 1 - chance[kind])
                        for kind, voted in zip(kinds, votes, strict=True)
                    )
        return total

    odds = vote(n, collude, lazy=lazy, miss=miss, alarm=alarm)
    assert odds.wrong_accepted == pytest.approx(majority(accept), abs=1e-9)
    assert odds.honest_rejected == pytest.approx(majority(reject), abs=1e-9)


@settings(deadline=None)
@given(st.integers(1, 9), SHARES, st.integers(9, 60))
def test_a_draw_is_a_distribution_with_the_right_mean(n, share, population):
    for chances, mean in ((drawn(n, share), n * share), (drawn(n, share, population), n * round(share * population) / population)):
        assert sum(chances) == pytest.approx(1)
        assert sum(c * chance for c, chance in enumerate(chances)) == pytest.approx(mean, abs=1e-9)


def within_three_errors(count, chance):
    return abs(count / CLAIMS - chance) <= 3 * math.sqrt(chance * (1 - chance) / CLAIMS) + 1e-12


@pytest.mark.parametrize("n", [3, 5, 7])
@pytest.mark.parametrize("collude", [0.0, 0.1, 0.2, 0.3, 0.4])
def test_a_million_claims(n, collude):
    random = torch.Generator().manual_seed(int(100 * n + 10 * collude))
    colluders = torch.rand(CLAIMS, n, generator=random) < collude
    slips = torch.rand(CLAIMS, n, generator=random) < 0.01
    lost = int(((colluders | slips).sum(1) > n // 2).sum())
    odds = vote(n, collude)
    assert within_three_errors(lost, odds.wrong_accepted)
    assert within_three_errors(lost, odds.honest_rejected)


@pytest.mark.parametrize("n", [3, 7])
def test_a_million_claims_in_a_small_population_with_lazy_peers(n):
    population, colluding, lazy = 20, 4, 5
    random = torch.Generator().manual_seed(n)
    # The n smallest of as many random numbers as there are peers are a draw without replacement.
    accepted = rejected = 0
    for _ in range(10):
        seats = torch.rand(CLAIMS // 10, population, generator=random).topk(n, largest=False).indices
        slips = torch.rand(CLAIMS // 10, n, generator=random) < 0.01
        hostile, idle = seats < colluding, (seats >= colluding) & (seats < colluding + lazy)
        accepted += int(((hostile | idle | slips).sum(1) > n // 2).sum())
        rejected += int(((hostile | (slips & ~idle)).sum(1) > n // 2).sum())
    odds = vote(n, colluding / population, lazy=lazy / population, population=population)
    assert within_three_errors(accepted, odds.wrong_accepted)
    assert within_three_errors(rejected, odds.honest_rejected)


def test_when_cheating_does_not_pay():
    rate = least_audit(gain=1.0, penalty=60.0, detected=0.99)
    assert rate * 60.0 * 0.99 == pytest.approx(1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: vote(4),
        lambda: vote(3, 1.1),
        lambda: vote(3, 0.6, lazy=0.6),
        lambda: vote(3, miss=-0.1),
        lambda: vote(5, population=4),
        lambda: drawn(0, 0.5),
        lambda: least_audit(1, 0, 1),
    ],
)
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=r"\w"):
        wrong()
