"""ClippedGossip and CenteredClip against plain references, their bounds, and the usual attacks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verification.reference_robust import Radius, centered_clip, check, clipped_gossip, distance, factor, is_no_worse

SHAPES = [(3, 4), (5,), ()]
SEEDS = st.integers(0, 2**32 - 1)


def peer(random, scale=1.0):
    return [scale * torch.randn(shape, generator=random, dtype=torch.float64) for shape in SHAPES]


def flat(tensors):
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def clip(vector, radius):
    norm = vector.norm()
    return vector if norm <= radius else vector * (radius / norm)


def shares(random, count):
    weights = torch.rand(count, generator=random, dtype=torch.float64)
    return (weights / (weights.sum() + 0.5)).tolist()


@settings(deadline=None)
@given(SEEDS, st.integers(0, 6), st.floats(0, 20))
def test_clipped_gossip_is_the_formula_and_its_step_is_bounded(seed, count, radius):
    random = torch.Generator().manual_seed(seed)
    own, others, weights = peer(random), [peer(random, 10) for _ in range(count)], shares(random, count)
    before = flat(own).clone()
    result = flat(clipped_gossip(own, others, weights, radius))
    expected = before + sum((w * clip(flat(x) - before, radius) for w, x in zip(weights, others, strict=True)), torch.zeros(18))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-9)
    assert (result - before).norm() <= sum(weights) * radius + 1e-9
    assert torch.equal(flat(own), before)


@settings(deadline=None)
@given(SEEDS, st.integers(2, 6), st.floats(0, 20))
def test_with_equal_weights_and_radius_the_mean_over_all_peers_stays(seed, count, radius):
    random = torch.Generator().manual_seed(seed)
    peers = [peer(random, 5) for _ in range(count)]
    after = [clipped_gossip(own, [x for x in peers if x is not own], [1 / count] * (count - 1), radius) for own in peers]
    torch.testing.assert_close(sum(map(flat, after)), sum(map(flat, peers)), rtol=0, atol=1e-9)


@settings(deadline=None)
@given(SEEDS, st.integers(1, 6), st.integers(1, 4), st.floats(0, 20))
def test_centered_clip_is_the_formula(seed, count, iterations, radius):
    random = torch.Generator().manual_seed(seed)
    start, contributions = peer(random), [peer(random, 10) for _ in range(count)]
    centre = flat(start)
    for _ in range(iterations):
        centre = centre + sum(clip(flat(x) - centre, radius) for x in contributions) / count
    torch.testing.assert_close(flat(centered_clip(contributions, start, radius, iterations)), centre, rtol=0, atol=1e-9)


@settings(deadline=None)
@given(SEEDS, st.integers(1, 8))
def test_without_attackers_a_large_radius_gives_the_mean(seed, count):
    random = torch.Generator().manual_seed(seed)
    start, contributions = peer(random), [peer(random) for _ in range(count)]
    mean = sum(map(flat, contributions)) / count
    torch.testing.assert_close(flat(centered_clip(contributions, start, math.inf)), mean, rtol=0, atol=1e-9)
    pair = clipped_gossip(contributions[0], [start], [0.5], math.inf)
    torch.testing.assert_close(flat(pair), (flat(contributions[0]) + flat(start)) / 2, rtol=0, atol=1e-9)


ATTACKS = {
    "sign flip": lambda honest: -honest.mean(0),
    "scaling": lambda honest: 1e6 * honest.mean(0),
    "a little is enough": lambda honest: honest.mean(0) - 1.5 * honest.std(0),
    "inner product": lambda honest: -10 * honest.mean(0),
    "largest float": lambda honest: torch.full_like(honest[0], torch.finfo(honest.dtype).max),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_bounded_and_the_mean_is_not(attack):
    """Ten honest peers near a point far from zero, and three that attack together."""
    random = torch.Generator().manual_seed(0)
    honest = 3 + 0.1 * torch.randn(10, 50, generator=random, dtype=torch.float64)
    hostile = ATTACKS[attack](honest).expand(3, 50)
    everybody = [[row] for row in torch.cat([honest, hostile])]
    start, radius = [honest[0]], 3 * float((honest - honest.mean(0)).norm(dim=1).median())
    wanted = honest.mean(0)
    clean = centered_clip(everybody[:10], start, radius, 5)[0]
    robust = centered_clip(everybody, start, radius, 5)[0]
    assert (robust - wanted).norm() <= (clean - wanted).norm() + 5 * 3 * radius / 13 + 1e-9
    assert (robust - wanted).norm() <= radius
    if attack != "a little is enough":  # which hides within the spread of the honest ones
        plain = torch.stack([row[0] for row in everybody]).mean(0)
        assert (plain - wanted).norm() > 5 * (robust - wanted).norm()


def test_bfloat16_stays_bfloat16_and_is_summed_in_float64():
    own, other = [torch.full((4,), 1.0, dtype=torch.bfloat16)], [torch.full((4,), 3.0, dtype=torch.bfloat16)]
    (mean,) = clipped_gossip(own, [other], [0.5], 100.0)
    assert mean.dtype == torch.bfloat16
    assert mean.tolist() == [2.0] * 4


def test_the_distance_of_the_largest_floats_does_not_overflow():
    largest = torch.finfo(torch.float32).max
    assert distance([torch.full((4,), largest)], [torch.zeros(4)]) == pytest.approx(2 * largest)
    assert distance([torch.zeros(0)], [torch.zeros(0)]) == 0.0


@pytest.mark.parametrize(
    "other",
    [
        [],
        [torch.zeros(3)],
        [torch.zeros(2, dtype=torch.float16)],
        [torch.tensor([0.0, math.nan])],
        [torch.tensor([0.0, math.inf])],
    ],
)
def test_what_does_not_fit_is_refused(other):
    own = [torch.zeros(2)]
    for refuse in (
        lambda: check(own, other),
        lambda: clipped_gossip(own, [other], [0.5], 1.0),
        lambda: centered_clip([other], own, 1.0),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            refuse()


def test_integers_and_bad_parameters_are_refused():
    own = [torch.zeros(2)]
    for refuse in (
        lambda: check([torch.zeros(2, dtype=torch.int64)], [torch.zeros(2, dtype=torch.int64)]),
        lambda: clipped_gossip(own, [own], [0.5, 0.5], 1.0),
        lambda: clipped_gossip(own, [own, own], [0.6, 0.6], 1.0),
        lambda: clipped_gossip(own, [own], [-0.1], 1.0),
        lambda: clipped_gossip(own, [own], [0.5], -1.0),
        lambda: factor(1.0, math.nan),
        lambda: centered_clip([], own, 1.0),
        lambda: centered_clip([own], own, 1.0, 0),
        lambda: Radius(times=0.5),
        lambda: Radius().add(math.nan),
        lambda: Radius().load_state_dict({"seen": [-1.0]}),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            refuse()


def test_the_radius_follows_the_median_and_giants_do_not_widen_it():
    radius = Radius(times=3, window=8, least=4)
    assert radius.value == math.inf
    for _ in range(4):
        assert radius.add(1.0)
    assert radius.value == 3.0
    for _ in range(3):
        assert not radius.add(1e30)
    assert radius.value == 3.0
    again = Radius(times=3, window=8, least=4)
    again.load_state_dict(radius.state_dict())
    assert again.value == radius.value


def test_the_radius_lets_honest_distances_grow():
    radius = Radius(window=8)
    for step in range(40):
        assert radius.add(1.1**step)


def test_acceptance_by_loss():
    assert is_no_worse(1.0, 1.05, 0.1)
    assert not is_no_worse(1.0, 1.2, 0.1)
    assert not is_no_worse(1.0, math.nan, 0.1)
