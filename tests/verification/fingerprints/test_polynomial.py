"""Interpolation modulo 65,497: closed forms, a slow reference in whole numbers, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.verification.fingerprints.activations import PRIME, evaluate, injective_modulus, interpolate


def slow(xs, ys):
    """Lagrange's formula, polynomial by polynomial, in Python's integers."""
    found = [0] * len(xs)
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        basis, below = [1], 1
        for j, other in enumerate(xs):
            if j != i:
                basis = [(a - other * b) % PRIME for a, b in zip([0, *basis], [*basis, 0], strict=True)]
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
        st.tuples(st.integers(0, PRIME - 1), st.integers(0, PRIME - 1)), min_size=1, max_size=most, unique_by=lambda p: p[0]
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


def test_many_windows_at_once_are_the_same_as_one_by_one():
    generator = torch.Generator().manual_seed(0)
    xs = torch.stack([torch.randperm(PRIME, generator=generator)[:128] for _ in range(5)])
    ys = torch.randint(PRIME, (5, 128), generator=generator)
    ys[0], ys[1] = 0, PRIME - 1
    together = interpolate(xs, ys)
    assert torch.equal(together, torch.cat([interpolate(x, y) for x, y in zip(xs.split(1), ys.split(1), strict=True)]))
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
