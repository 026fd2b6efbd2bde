"""Seeded sampling, and interpolation modulo 65,497: closed forms, slow references, and what is
refused.
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.verification.fingerprints.polynomial import (
    PRIME,
    evaluate,
    injective_modulus,
    interpolate,
)
from shoal.verification.fingerprints.sampling import (
    FARTHEST,
    Drawn,
    SeededSampling,
    draw_each,
    margins,
)
from shoal.verification.fingerprints.sampling import gumbel as noise_at

CHECK = SeededSampling()


def logits(rows, words=50, seed=0):
    return 2 * torch.randn(rows, words, generator=torch.Generator().manual_seed(seed))


def gumbel(seed, position, vocabulary):
    return noise_at(seed, range(position, position + 1), vocabulary)[0]


def draw(row, seed, position, temperature):
    return int(draw_each(row.unsqueeze(0), seed, range(position, position + 1), temperature))


def measured(output):
    return CHECK.measured(margins(output))


def drawn(seed=b"s", temperature=1.0, rows=40, source=0, first=0, judged=0):
    """Tokens drawn from the logits ``source``, judged with the logits ``judged``."""
    tokens = [
        draw(row, seed, first + at, temperature) for at, row in enumerate(logits(rows, seed=source))
    ]
    return Drawn(torch.tensor(tokens), logits(rows, seed=judged), seed, temperature, first)


def test_the_noise_is_this_function_for_ever():
    expected = [
        "0x1.be92a2513d850p+0",
        "0x1.4c1184d9eb85dp+0",
        "-0x1.7a912649190f0p-2",
        "0x1.a3c7f5d6da8e6p-1",
    ]
    assert gumbel(b"abc", 5, 4).tolist() == pytest.approx(
        [float.fromhex(text) for text in expected], abs=1e-12
    )
    assert torch.equal(gumbel(b"abc", 5, 400)[:4], gumbel(b"abc", 5, 4))


def test_the_noise_is_gumbel_distributed():
    noise = torch.cat([gumbel(b"x", position, 1000) for position in range(200)])
    count = len(noise)
    assert abs(float(noise.mean()) - 0.5772156649) < 4 * math.pi / math.sqrt(6 * count)
    uniform = torch.exp(-torch.exp(-noise)).sort().values
    steps = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    assert float((uniform - steps).abs().max()) < 1.95 / math.sqrt(
        count
    )  # Kolmogorov and Smirnov, p = 1e-3


def test_neighbouring_positions_and_seeds_are_unlike():
    def correlation(a, b):
        return float(torch.corrcoef(torch.stack((a, b)))[0, 1])

    base = gumbel(b"x", 7, 20_000)
    for other in (gumbel(b"x", 8, 20_000), gumbel(b"y", 7, 20_000), base.roll(1)):
        assert abs(correlation(base, other)) < 4 / math.sqrt(20_000)


def test_draws_are_of_the_softmax():
    row = torch.tensor([0.0, 1.0, 2.0, -math.inf])
    many = 4000
    seen = (
        torch.bincount(torch.tensor([draw(row, b"s", at, 2.0) for at in range(many)]), minlength=4)
        / many
    )
    expected = torch.softmax(row / 2, 0)
    assert float((seen - expected).abs().max()) < 4 * 0.5 / math.sqrt(many)
    assert seen[3] == 0


@settings(deadline=None, max_examples=25)
@given(
    seed=st.binary(max_size=64),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    first=st.integers(0, 1 << 40),
)
def test_honest_drawing_has_no_distance(seed, temperature, first):
    output = drawn(seed, temperature, rows=5, first=first)
    assert measured(output).values == ((0.0, 0.0, 0.0),)


def test_margin_closed_form():
    row = torch.tensor([[3.0, 1.0]])
    greedy = Drawn(torch.tensor([1]), row, b"", 0.0)
    assert margins(greedy).tolist() == [2.0]
    noise = gumbel(b"k", 4, 2)
    scores = (row[0].double() / 0.5 + noise).tolist()
    loser = scores.index(min(scores))
    assert margins(Drawn(torch.tensor([loser]), row, b"k", 0.5, 4)).tolist() == pytest.approx(
        [max(scores) - min(scores)]
    )
    banned = Drawn(torch.tensor([1]), torch.tensor([[3.0, -math.inf]]), b"", 0.0)
    assert margins(banned).tolist() == [FARTHEST]


def test_other_logits_other_seed_and_no_seed_show():
    cheap = drawn(source=1)
    shares, distance, _ = measured(cheap).means()
    assert shares > 0.5
    assert distance > 1
    free = torch.multinomial(
        torch.softmax(logits(40), 1), 1, generator=torch.Generator().manual_seed(0)
    ).flatten()
    own_choice = Drawn(free, logits(40), b"s")
    assert measured(own_choice).means()[1] > 1


def test_one_token_moves_the_largest_distance():
    """One token of many moves the largest distance and hardly the others."""
    output = drawn(rows=320)
    other = output.tokens.clone()
    other[200] = (other[200] + 1) % output.logits.shape[1]
    changed = dataclasses.replace(output, tokens=other)
    most = float(margins(changed).max())
    shares, distance, largest = measured(changed).means()
    assert largest == most > 0
    assert (shares, distance) == pytest.approx((1 / 320, most / 320))


def test_windows_and_their_sizes():
    output = drawn(rows=40)
    evidence = measured(output)
    assert evidence.sizes == (1.0, 0.25)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (Drawn(torch.tensor([0]), torch.tensor([[math.nan, 0.0]]), b""), "not numbers"),
        (Drawn(torch.tensor([0]), torch.tensor([[-math.inf, -math.inf]]), b""), "allow no token"),
        (Drawn(torch.tensor([2]), torch.zeros(1, 2), b""), "in the vocabulary"),
        (Drawn(torch.tensor([-1]), torch.zeros(1, 2), b""), "in the vocabulary"),
        (Drawn(torch.tensor([0, 1]), torch.zeros(1, 2), b""), "one row for each"),
        (Drawn(torch.tensor([0.0]), torch.zeros(1, 2), b""), "one row for each"),
        (Drawn(torch.tensor([0]), torch.zeros(1, 2), b"", -1.0), "temperature"),
        (Drawn(torch.tensor([0]), torch.zeros(1, 2), b"", math.nan), "temperature"),
        (Drawn(torch.tensor([0]), torch.zeros(1, 2), bytes(65)), "seed of at most"),
    ],
)
def test_outputs_that_do_not_fit_together(output, says):
    with pytest.raises(ValueError, match=says):
        margins(output)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_rows_are_drawn_as_each_alone(temperature):
    rows, positions = logits(5), range(3, 18, 3)
    alone = [draw(row, b"s", at, temperature) for row, at in zip(rows, positions, strict=True)]
    assert draw_each(rows, b"s", positions, temperature).tolist() == alone


def test_rows_without_a_position_of_their_own_are_refused():
    with pytest.raises(ValueError, match="a position for each of 2 rows"):
        draw_each(logits(2), b"s", range(1))


def slow(xs, ys):
    """Lagrange's formula, polynomial by polynomial, in Python's integers."""
    found = [0] * len(xs)
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        basis, below = [1], 1
        for j, other in enumerate(xs):
            if j != i:
                basis = [
                    (a - other * b) % PRIME for a, b in zip([0, *basis], [*basis, 0], strict=True)
                ]
                below = below * (x - other) % PRIME
        scale = y * pow(below, -1, PRIME)
        found = [(a + scale * b) % PRIME for a, b in zip(found, basis, strict=True)]
    return found


@pytest.mark.parametrize(
    ("xs", "ys", "coefficients"),
    [
        ([7], [42], [42]),
        ([1, 2, 3], [4, 5, 6], [3, 1, 0]),
        ([0, 1, 2, 3], [0, 1, 4, 9], [0, 0, 1, 0]),
        ([0, 1], [1, 0], [1, PRIME - 1]),
        ([PRIME - 1, 0, 1], [1, 0, 1], [0, 0, 1]),
    ],
)
def test_closed_forms(xs, ys, coefficients):
    assert interpolate(torch.tensor([xs]), torch.tensor([ys])).tolist() == [coefficients]


def points(most):
    return st.lists(
        st.tuples(st.integers(0, PRIME - 1), st.integers(0, PRIME - 1)),
        min_size=1,
        max_size=most,
        unique_by=lambda p: p[0],
    )


@settings(deadline=None, max_examples=60)
@given(points(12))
def test_equals_the_slow_reference(pairs):
    xs, ys = zip(*pairs, strict=True)
    assert interpolate(torch.tensor([xs]), torch.tensor([ys]))[0].tolist() == slow(xs, ys)


@settings(deadline=None, max_examples=40)
@given(points(200))
def test_each_point_is_found_again(pairs):
    xs, ys = (torch.tensor([column]) for column in zip(*pairs, strict=True))
    assert torch.equal(evaluate(interpolate(xs, ys), xs), ys)


def test_batched_windows_equal_single_ones():
    """Many windows at once are the same as one by one."""
    generator = torch.Generator().manual_seed(0)
    xs = torch.stack([torch.randperm(PRIME, generator=generator)[:128] for _ in range(5)])
    ys = torch.randint(PRIME, (5, 128), generator=generator)
    ys[0], ys[1] = 0, PRIME - 1
    together = interpolate(xs, ys)
    assert torch.equal(
        together,
        torch.cat([interpolate(x, y) for x, y in zip(xs.split(1), ys.split(1), strict=True)]),
    )
    assert torch.equal(evaluate(together, xs), ys)


@pytest.mark.parametrize("count", [1, 2, 127, 129, 1000, 1024])
def test_the_largest_values_are_exact(count):
    xs = torch.stack((torch.arange(PRIME - count, PRIME), torch.arange(count)))
    ys = torch.full((2, count), PRIME - 1)
    ys[1, ::2] = 0
    found = interpolate(xs, ys)
    assert torch.equal(evaluate(found, xs), ys)
    assert found[0].tolist() == [PRIME - 1] + [0] * (count - 1)  # a constant


def test_modulus():
    assert injective_modulus(torch.tensor([0, 1, 2])) == PRIME
    assert injective_modulus(torch.tensor([0, PRIME])) == PRIME - 1
    assert injective_modulus(torch.tensor([5, 5 + PRIME * (PRIME - 1)])) == PRIME - 2
    with pytest.raises(ValueError, match="no modulus"):
        injective_modulus(torch.tensor([3, 3]))


@pytest.mark.parametrize(
    ("xs", "ys", "says"),
    [
        ([[1, 1]], [[2, 3]], "same x"),
        ([[1, PRIME]], [[2, 3]], "whole numbers"),
        ([[1, -1]], [[2, 3]], "whole numbers"),
        ([[1.0, 2.0]], [[2, 3]], "whole numbers"),
        ([[1, 2]], [[2, PRIME]], "whole numbers"),
        ([[1, 2]], [[2]], "rows of"),
        ([[]], [[]], "rows of"),
    ],
)
def test_refused(xs, ys, says):
    with pytest.raises(ValueError, match=says):
        interpolate(torch.tensor(xs), torch.tensor(ys))
