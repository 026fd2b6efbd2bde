"""Older weights of a server, told from its rounding by what its completions show together."""

import pytest
import torch

from shoal.node.rl.newest_weights import (
    CERTAIN_ERRORS,
    EXACT_NATS,
    FEWEST_COMPLETIONS,
    STALE_SLOPE,
    OlderWeights,
)

ROWS, TOKENS = 16, 8


def answers(seed, *, stale, noise=0.05, difference=0.02):
    """Yield completions without end, of which the share ``stale`` follows the older weights.

    What a server adds to one token it adds to the whole completion too, as real kernels do.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    while True:
        apart = difference * normal(ROWS, TOKENS)
        rounding = noise * (normal(ROWS, TOKENS) + normal(ROWS, 1)) / 2**0.5
        follows = (torch.arange(ROWS) < stale * ROWS)[:, None]
        yield rounding + follows * apart, apart, torch.ones(ROWS, TOKENS, dtype=torch.bool)


def concluded(seed, most=200, **options):
    """Return the first slope that is reported, and after how many answers; None: after none."""
    check = OlderWeights()
    for number, answer in zip(range(most), answers(seed, **options), strict=False):
        if (slope := check.add(*answer)) is not None:
            return slope, number + 1
    return None


def test_small_differences_are_told_over_several_answers():
    found = [concluded(seed, stale=1.0, difference=0.005) for seed in range(20)]
    assert all(slope > 2 * STALE_SLOPE for slope, _ in found)
    assert all(number > 5 for _, number in found)


def test_half_of_the_completions_by_a_cache_are_enough():
    found = [concluded(seed, stale=0.5, noise=0.01) for seed in range(20)]
    assert all(0.4 < slope < 0.6 for slope, _ in found)


def test_rounding_alone_is_never_taken_for_older_weights():
    assert [concluded(seed, stale=0.0) for seed in range(50)] == [None] * 50


def test_concluded_evidence_of_freshness_is_forgotten():
    """Else a server that falls behind later would have to outweigh all that went before."""
    check = OlderWeights()
    for _, answer in zip(range(200), answers(0, stale=0.0, noise=0.001), strict=False):
        assert check.add(*answer) is None
    assert check.add(*next(answers(1, stale=1.0, noise=0.001))) == pytest.approx(1.0, abs=0.05)


def test_few_completions_or_differences_below_what_is_exact_say_nothing():
    (error, apart, mask) = next(answers(0, stale=1.0, noise=0.0))
    few = slice(FEWEST_COMPLETIONS - 1)
    assert OlderWeights().add(error[few], apart[few], mask[few]) is None
    hardly = CERTAIN_ERRORS * EXACT_NATS / (1 - STALE_SLOPE) / float(apart.norm())
    for factor, told in ((0.9, False), (1.1, True)):
        scale = factor * hardly
        assert (OlderWeights().add(scale * error, scale * apart, mask) is not None) == told
    assert OlderWeights().add(0 * error, 0 * apart, mask) is None


def test_tokens_that_older_weights_exclude_are_left_out():
    error, apart, mask = next(answers(0, stale=1.0, noise=0.0))
    apart[0, 0] = -torch.inf
    assert OlderWeights().add(error, apart, mask) == pytest.approx(1.0)
    masked = mask.clone()
    masked[:, 4:] = False
    error[:, 4:] = torch.nan
    assert OlderWeights().add(error, apart, masked) == pytest.approx(1.0)
