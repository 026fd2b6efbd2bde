"""Robust means as shares: equal to the formulas, to the plain mean where nothing is clipped, and bounded for any input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.optim.exchange.averaging import CUTOFF, GRID, centered_clip, clipped_gossip, norms, squared_distances

SEEDS = st.integers(0, 2**32 - 1)
SHAPES = [(3, 4), (50,), (), (0,)]


def peer(random, scale=1.0):
    return [(scale * torch.randn(shape, generator=random)).float() for shape in SHAPES]


def flat(tensors):
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def clip(vector, radius):
    """clip(z, radius) of ClippedGossip (He, Karimireddy, Jaggi, 2022) and of CenteredClip (Karimireddy, He, Jaggi, 2021)."""
    return vector * min(1.0, radius / float(vector.norm())) if vector.any() else vector


def mixed(contributions, shares):
    return sum(share * flat(tensors) for share, tensors in zip(shares, contributions, strict=True)) / sum(shares)


@settings(deadline=None)
@given(SEEDS, st.integers(1, 7))
def test_distances_are_those_of_the_tensors(seed, count):
    random = torch.Generator().manual_seed(seed)
    offset = peer(random, 1e4)  # weights: large against what they differ by
    contributions = [[a + b for a, b in zip(offset, peer(random), strict=True)] for _ in range(count)]
    squares = squared_distances(contributions)
    for i in range(count):
        for j in range(count):
            far, norm = norms(contributions[i], contributions[j])
            assert math.isclose(far, float((flat(contributions[i]) - flat(contributions[j])).norm()), rel_tol=1e-9)
            assert math.isclose(norm, float(flat(contributions[i]).norm()), rel_tol=1e-9)
            assert math.isclose(math.sqrt(squares[i][j]), far, rel_tol=1e-6, abs_tol=1e-6)
    assert norms(contributions[0], contributions[0])[0] == 0


def test_the_largest_numbers_do_not_overflow():
    huge = [torch.full((1000,), 3e38)]
    far, norm = norms(huge, [-huge[0]])
    assert math.isfinite(far)
    assert math.isfinite(norm)
    quiet = [[torch.full((1000,), 1.0 + 0.1 * number)] for number in range(4)]
    assert centered_clip(squared_distances([*quiet, huge]), 1.0)[4] == 0


@settings(deadline=None)
@given(SEEDS, st.floats(0, 30))
def test_clipped_gossip_is_the_formula_and_its_step_is_bounded(seed, radius):
    random = torch.Generator().manual_seed(seed)
    own, other = peer(random), peer(random)
    theirs = clipped_gossip(norms(own, other)[0], radius)
    result = mixed([own, other], [GRID - theirs, theirs])
    expected = flat(own) + clip(flat(other) - flat(own), radius) / 2
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
    assert (result - flat(own)).norm() <= radius / 2 + 1e-9
    assert theirs <= GRID // 2


@settings(deadline=None)
@given(SEEDS, st.integers(1, 9))
def test_without_attackers_and_with_a_large_radius_all_count_the_same(seed, count):
    random = torch.Generator().manual_seed(seed)
    squares = squared_distances([peer(random) for _ in range(count)])
    assert centered_clip(squares, math.inf) == [1] * count
    assert centered_clip(squares, 100.0) == [1] * count
    assert clipped_gossip(7.0, math.inf) == clipped_gossip(7.0, 7.0) == GRID // 2


@settings(deadline=None, max_examples=30)
@given(SEEDS, st.integers(3, 9), st.floats(0.3, 3))
def test_centered_clip_comes_to_rest_where_the_formula_does(seed, count, times):
    random = torch.Generator().manual_seed(seed)
    contributions = [peer(random) for _ in range(count)]
    result = mixed(contributions, centered_clip(squared_distances(contributions), times))
    whole = [flat(tensors) for tensors in contributions]
    from_here = sorted(float((each - result).norm()) for each in whole)
    radius = times * (from_here[(count - 1) // 2] + from_here[count // 2]) / 2
    again = result + sum(clip(each - result, radius) for each in whole) / count
    assert (again - result).norm() <= 0.03 * from_here[-1]  # 30 iterations come near, not quite there


@settings(deadline=None, max_examples=50)
@given(SEEDS, st.sampled_from([(4, 1), (8, 2), (9, 2), (12, 3)]), st.floats(-4, 12), st.sampled_from(["apart", "together", "flip"]))
def test_a_quarter_of_attackers_cannot_move_centered_clip_far(seed, sizes, magnitude, form):
    """It stays within twice the largest honest distance from the honest mean, whatever the attackers send."""
    count, bad = sizes
    random = torch.Generator().manual_seed(seed)
    middle = flat(peer(random, 3))
    honest = [[middle + flat(peer(random))] for _ in range(count - bad)]
    mean = sum(tensors[0] for tensors in honest) / len(honest)
    together = flat(peer(random))
    bases = {"apart": lambda: flat(peer(random)), "together": lambda: together, "flip": lambda: -mean}
    hostile = [[mean + 10**magnitude * bases[form]()] for _ in range(bad)]
    contributions = [*honest, *hostile]
    moved = mixed([[t.float() for t in c] for c in contributions], centered_clip(squared_distances(contributions), 1.0))
    widest = max(float((tensors[0] - mean).norm()) for tensors in honest)
    assert (moved - mean).norm() <= 2 * widest


@given(st.integers(2, 9), SEEDS)
def test_shares_go_with_the_contributions_and_not_with_their_places(count, seed):
    random = torch.Generator().manual_seed(seed)
    contributions = [peer(random, 1 + number) for number in range(count)]
    there = torch.randperm(count, generator=random).tolist()
    shares = centered_clip(squared_distances(contributions), 1.0)
    moved = centered_clip(squared_distances([contributions[place] for place in there]), 1.0)
    if count > 2:  # of two none is nearer to the others, and the first begins; it ends in the middle all the same
        assert all(abs(moved[at] - shares[place]) <= 2 for at, place in enumerate(there))
    else:
        assert shares == moved == [1, 1] or abs(shares[0] - shares[1]) <= 2


def test_equal_contributions_and_a_stranger():
    same = [[torch.ones(5)] for _ in range(3)]
    assert centered_clip(squared_distances(same), 1.0) == [1, 1, 1]
    assert centered_clip(squared_distances([*same, [torch.zeros(5)]]), 1.0) == [1, 1, 1, 0]
    far = [[torch.full((5,), float(value))] for value in (1, 2, 3, 4 * CUTOFF)]
    assert centered_clip(squared_distances(far), 1.0)[3] == 0


def test_what_makes_no_sense_is_refused():
    for refuse in (
        lambda: clipped_gossip(1.0, -1.0),
        lambda: clipped_gossip(1.0, math.nan),
        lambda: centered_clip([], 1.0),
        lambda: centered_clip([[0.0]], 0.0),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            refuse()
