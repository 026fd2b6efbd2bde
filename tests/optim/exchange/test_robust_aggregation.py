"""What each of several members counts for: stated weights in means and in simulations, and robust
means as shares of them.
"""

import math
from statistics import median_low

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.optim import DiLoCo, Eager, GASLoC, LocalSGD, NoLoCo, Simulation, weighted_mean
from shoal.optim.exchange.robust_shares import (
    GRID,
    MAX_DISTANCE_IN_MEDIANS,
    centered_clip,
    clipped_gossip,
    norms,
    squared_distances,
)
from shoal.optim.exchange.weighted_mean import MAX_MEDIANS, counted_weights

SEEDS = st.integers(0, 2**32 - 1)
SHAPES = [(3, 4), (50,), (), (0,)]


def peer(random, scale=1.0):
    return [(scale * torch.randn(shape, generator=random)).float() for shape in SHAPES]


def flat(tensors):
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def clip(vector, radius):
    """clip(z, radius) of ClippedGossip (He, Karimireddy, Jaggi, 2022) and of CenteredClip
    (Karimireddy, He, Jaggi, 2021).
    """
    return vector * min(1.0, radius / float(vector.norm())) if vector.any() else vector


def mixed(contributions, shares):
    return sum(
        share * flat(tensors) for share, tensors in zip(shares, contributions, strict=True)
    ) / sum(shares)


@given(SEEDS, st.integers(1, 7))
def test_distances_are_those_of_the_tensors(seed, count):
    random = torch.Generator().manual_seed(seed)
    offset = peer(random, 1e4)  # weights: large against what they differ by
    contributions = [
        [a + b for a, b in zip(offset, peer(random), strict=True)] for _ in range(count)
    ]
    squares = squared_distances(contributions)
    for i in range(count):
        for j in range(count):
            far, norm = norms(contributions[i], contributions[j])
            assert math.isclose(
                far, float((flat(contributions[i]) - flat(contributions[j])).norm()), rel_tol=1e-9
            )
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


@given(SEEDS, st.integers(1, 9))
def test_large_radius_counts_all_the_same(seed, count):
    """Without attackers and with a large radius all count the same."""
    random = torch.Generator().manual_seed(seed)
    squares = squared_distances([peer(random) for _ in range(count)])
    assert centered_clip(squares, math.inf) == [1] * count
    assert centered_clip(squares, 100.0) == [1] * count
    assert clipped_gossip(7.0, math.inf) == clipped_gossip(7.0, 7.0) == GRID // 2


@settings(max_examples=30)
@given(SEEDS, st.integers(3, 9), st.floats(0.3, 3))
def test_centered_clip_comes_to_rest_where_the_formula_does(seed, count, times):
    random = torch.Generator().manual_seed(seed)
    contributions = [peer(random) for _ in range(count)]
    result = mixed(contributions, centered_clip(squared_distances(contributions), times))
    whole = [flat(tensors) for tensors in contributions]
    from_here = sorted(float((each - result).norm()) for each in whole)
    radius = times * (from_here[(count - 1) // 2] + from_here[count // 2]) / 2
    again = result + sum(clip(each - result, radius) for each in whole) / count
    assert (again - result).norm() <= 0.03 * from_here[
        -1
    ]  # 30 iterations come near, not quite there


@settings(max_examples=50)
@given(
    SEEDS,
    st.sampled_from([(4, 1), (8, 2), (9, 2), (12, 3)]),
    st.floats(-4, 12),
    st.sampled_from(["apart", "together", "flip"]),
)
def test_a_quarter_of_attackers_cannot_move_centered_clip_far(seed, sizes, magnitude, form):
    """It stays within twice the largest honest distance from the honest mean, whatever the
    attackers send.
    """
    count, bad = sizes
    random = torch.Generator().manual_seed(seed)
    middle = flat(peer(random, 3))
    honest = [[middle + flat(peer(random))] for _ in range(count - bad)]
    mean = sum(tensors[0] for tensors in honest) / len(honest)
    together = flat(peer(random))
    bases = {
        "apart": lambda: flat(peer(random)),
        "together": lambda: together,
        "flip": lambda: -mean,
    }
    hostile = [[mean + 10**magnitude * bases[form]()] for _ in range(bad)]
    contributions = [*honest, *hostile]
    moved = mixed(
        [[t.float() for t in c] for c in contributions],
        centered_clip(squared_distances(contributions), 1.0),
    )
    widest = max(float((tensors[0] - mean).norm()) for tensors in honest)
    assert (moved - mean).norm() <= 2 * widest


@given(st.integers(2, 9), SEEDS)
def test_shares_go_with_the_contributions_and_not_with_their_places(count, seed):
    random = torch.Generator().manual_seed(seed)
    contributions = [peer(random, 1 + number) for number in range(count)]
    there = torch.randperm(count, generator=random).tolist()
    shares = centered_clip(squared_distances(contributions), 1.0)
    moved = centered_clip(squared_distances([contributions[place] for place in there]), 1.0)
    if (
        count > 2
        # of two none is nearer to the others, and the first begins; it ends in the middle all the
        # same
    ):
        assert all(abs(moved[at] - shares[place]) <= 2 for at, place in enumerate(there))
    else:
        assert shares == moved == [1, 1] or abs(shares[0] - shares[1]) <= 2


def test_equal_contributions_and_a_stranger():
    same = [[torch.ones(5)] for _ in range(3)]
    assert centered_clip(squared_distances(same), 1.0) == [1, 1, 1]
    assert centered_clip(squared_distances([*same, [torch.zeros(5)]]), 1.0) == [1, 1, 1, 0]
    far = [[torch.full((5,), float(value))] for value in (1, 2, 3, 4 * MAX_DISTANCE_IN_MEDIANS)]
    assert centered_clip(squared_distances(far), 1.0)[3] == 0


def test_what_makes_no_sense_is_refused():
    for refuse in (
        lambda: clipped_gossip(1.0, -1.0),
        lambda: clipped_gossip(1.0, math.nan),
        lambda: centered_clip([], 1.0),
        lambda: centered_clip([[0.0]], 0.0),
    ):
        with pytest.raises(ValueError):
            refuse()


LIES = (1e30, 1e-30, 1e300)


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=9))
def test_no_weight_is_more_than_four_times_the_median(stated):
    counted, limit = counted_weights(stated)
    positive = [weight for weight in stated if weight]
    assert limit == MAX_MEDIANS * (median_low(positive) if positive else 1.0)
    assert counted == (
        [min(weight, limit) for weight in stated] if positive else [1.0] * len(stated)
    )


@given(st.lists(st.floats(1.0, 10.0), min_size=2, max_size=6), st.data())
def test_a_minority_cannot_own_a_mean(honest, data):
    lies = data.draw(st.lists(st.sampled_from(LIES), min_size=1, max_size=(len(honest) - 1) or 1))
    counted, _ = counted_weights([*honest, *lies])
    share = sum(counted[len(honest) :]) / sum(counted)
    assert share <= MAX_MEDIANS * len(lies) / (MAX_MEDIANS * len(lies) + len(honest) / 10)
    if len(honest) == len(lies) == 1:
        assert share <= MAX_MEDIANS / (MAX_MEDIANS + 1)


@pytest.mark.parametrize("lie", LIES)
def test_in_a_pair_both_sides_count_the_same(lie):
    def parts(order):
        made = {"a": (lie, torch.tensor([10.0])), "b": (2.0, torch.tensor([0.0]))}
        return [(peer, made[peer][0], [made[peer][1].clone()]) for peer in order]

    here, there = weighted_mean(parts("ab")), weighted_mean(parts("ba"))
    assert (
        here.tensors[0].item() == there.tensors[0].item() == pytest.approx(8.0 if lie > 2 else 2.0)
    )
    assert (here.weight, here.limit) == (there.weight, there.limit)


def test_the_first_tensors_get_a_plain_mean():
    parts = [
        ("a", 3.0, [torch.tensor(1.0), torch.tensor(1.0)]),
        ("b", 1.0, [torch.tensor(5.0), torch.tensor(5.0)]),
    ]
    assert [tensor.item() for tensor in weighted_mean(parts, unweighted_count=1).tensors] == [
        3.0,
        2.0,
    ]


def moved(method, lie, *, size, steps=40, peers=6, **options):
    """How far the honest peers are from their optimum, 0, where one peer pulls towards 1 and states
    the weight ``lie``.
    """

    def peer(exchange):
        hostile = exchange.peer == "peer0"
        weight = torch.nn.Parameter(torch.zeros(1))
        inner = torch.optim.SGD([weight], lr=0.1)
        opt = method(
            inner,
            exchange,
            every=5,
            weight=(lambda tokens, steps: lie) if hostile else 1.0,
            **options,
        )
        for _ in range(steps):
            exchange.sleep(1.0)
            weight.grad = weight.detach() - float(hostile)
            opt.step()
        opt.finish()
        return opt.slow[0].item()

    found = Simulation([f"peer{number}" for number in range(peers)], seed=1, size=size).run(peer)
    return max(abs(value) for name, value in found.items() if name != "peer0")


@pytest.mark.thinned(4)
@pytest.mark.parametrize("lie", [1e30, 1e-30])
@pytest.mark.parametrize(
    ("method", "size", "most"),
    [(NoLoCo, 2, 0.45), (LocalSGD, 2, 0.45), (GASLoC, 2, 0.3), (DiLoCo, 6, 0.5), (Eager, 6, 0.5)],
)
def test_stated_weight_has_bounded_influence(method, size, most, lie):
    """A stated weight moves the others no further than four honest peers would."""
    assert moved(method, lie, size=size) <= most
    assert moved(method, MAX_MEDIANS, size=size) == pytest.approx(
        moved(method, 1e30, size=size), abs=1e-6
    )


def test_rule_is_told_the_counted_share():
    """Eager updates put the own share in at once: one above 1 would take the others' away."""
    shares = []

    def peer(exchange):
        weight = torch.nn.Parameter(torch.zeros(1))
        opt = Eager(
            torch.optim.SGD([weight], lr=0.1),
            exchange,
            every=1,
            weight=100.0 if exchange.peer == "a" else 1.0,
        )
        apply = opt.rule.apply

        def noted(slow, fast, mean, state, context):
            if context.members > 1:
                shares.append((exchange.peer, context.share))
            apply(slow, fast, mean, state, context)

        object.__setattr__(opt.rule, "apply", noted)
        for _ in range(4):
            exchange.sleep(1.0)
            weight.grad = torch.ones(1)
            opt.step()

    Simulation(["a", "b"]).run(peer)
    assert dict(shares) == {"a": pytest.approx(0.8), "b": pytest.approx(0.2)}
