"""Tensors computed when they are taken: the same values and the same means, and what was lent is only read."""

import pytest
import torch

from shoal.optim.codecs.base import BFLOAT16, FLOAT16, FLOAT32
from shoal.optim.exchange.base import SLAB, OnDemand, combined, differences, slabs, weighted_mean

SHAPES = [(3, 5), (), (SLAB + 7,), (0,), (2, 2)]


def made(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_difference_has_the_same_values_whole_and_in_pieces(dtype):
    slow, fast = made(0, dtype), made(1, dtype)
    lazy, whole = differences(slow, fast), [s - f for s, f in zip(slow, fast, strict=True)]
    assert lazy.shapes == SHAPES
    assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(lazy, whole, strict=True))
    pieces = [[] for _ in whole]
    for place, start, stop in slabs(lazy):
        assert stop - start <= SLAB
        pieces[place].append(lazy.values(place, start, stop))
    for found, tensor in zip(pieces, whole, strict=True):
        assert torch.equal(torch.cat(found) if found else torch.zeros(0), tensor.reshape(-1).float())


def test_what_is_taken_follows_its_parts_and_a_slice_is_computed_later_too():
    slow, fast = made(0), made(1)
    part = OnDemand([*slow, *zip(slow, fast, strict=True)])[len(slow) :]
    fast[0].add_(1)
    assert torch.equal(part[0], slow[0] - fast[0])
    assert len(part.joined([torch.ones(1)])) == len(SHAPES) + 1


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (3.0, 1.0, 0.5), (1.0, 0.0, 2.0), (0.0, 0.0, 0.0)])
@pytest.mark.parametrize("lender", ["a", "b", "c"])
@pytest.mark.parametrize("even", [0, 2])
def test_a_mean_of_lent_tensors_has_the_bits_of_a_plain_one_and_changes_none_of_them(weights, lender, even):
    names = "abc"
    plain = weighted_mean(
        [(name, weight, made(number)) for number, (name, weight) in enumerate(zip(names, weights, strict=True))], even
    )
    own = made(names.index(lender))
    given = [
        (name, weight, OnDemand(own) if name == lender else made(number))
        for number, (name, weight) in enumerate(zip(names, weights, strict=True))
    ]
    mean = weighted_mean(given, even)
    assert (mean.members, mean.weight, mean.counted, mean.limit) == (plain.members, plain.weight, plain.counted, plain.limit)
    assert all(torch.equal(a, b) for a, b in zip(mean.tensors, plain.tensors, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(own, made(names.index(lender)), strict=True))


@pytest.mark.parametrize("partner", [1.0, 0.0])
def test_a_pairs_mean_is_computed_in_what_came_from_the_partner(partner):
    own, theirs = made(0), made(1)
    places = [tensor.data_ptr() for tensor in theirs]
    mean = weighted_mean([("a", 1.0, OnDemand(own)), ("b", partner, theirs)])
    assert [tensor.data_ptr() for tensor in mean.tensors] == places


def test_a_mean_of_lent_tensors_alone_is_a_copy():
    own = made(0)
    (alone,) = [combined([("a", 2.0, OnDemand(own))])]
    assert all(torch.equal(a, b) for a, b in zip(alone, own, strict=True))
    alone[0].add_(1)
    assert torch.equal(own[0], made(0)[0])


@pytest.mark.parametrize("codec", [FLOAT32, BFLOAT16, FLOAT16], ids=lambda codec: codec.name)
def test_values_are_rounded_as_if_they_had_travelled(codec):
    tensors = made(0)
    rounded = OnDemand(tensors).rounded(codec.dtype)
    decoded = codec.decode(codec.encode(tensors), SHAPES)
    assert all(torch.equal(a, b) for a, b in zip(rounded, decoded, strict=True))
    assert all(torch.equal(rounded.values(at, i, j), decoded[at].reshape(-1)[i:j]) for at, i, j in slabs(rounded))
