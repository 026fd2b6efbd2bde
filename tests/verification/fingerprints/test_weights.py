"""Projections of changes of weights: the same bits as value by value, near for what is near, and what a known seed allows."""

import hashlib
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.verification.fingerprints import WeightProjection, weights
from shoal.verification.fingerprints.mixing import numbers, words


def vector(seed, count=5000, scale=1.0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


def slowly(projection, values):
    """One value after the other, in Python's floats."""
    sums, squares = [0.0] * projection.dims, [0.0] * projection.dims
    for value, word in zip(values.tolist(), words(projection._key, numbers(0, len(values))).tolist(), strict=True):
        place = word & projection.dims - 1
        sums[place] += -value if word < 0 else value
        squares[place] += value * value
    return struct.pack(f"<{1 + projection.dims}f", math.sqrt(math.fsum(squares)), *sums)


@pytest.mark.parametrize("dims", [16, 256])
def test_the_bits_are_those_of_one_value_after_the_other(dims, monkeypatch):
    values, projection = vector(0), WeightProjection(7, dims)
    assert projection.make([values]) == slowly(projection, values)
    monkeypatch.setattr(weights, "PART", 700)
    parts = [values[:1234].reshape(2, 617), values[1234:1234], values[1234:]]
    assert WeightProjection(7, dims).make(parts) == slowly(projection, values)
    assert len(projection.make(parts)) == projection.proof_bytes == 4 * (1 + dims)


def mixed_slowly(key, number):
    """SplitMix64's finaliser in Python's integers, as published (Steele, Lea, Flood 2014)."""

    def finalise(word):
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word ^ word >> 31

    first, second = struct.unpack(">QQ", hashlib.sha256(key).digest()[:16])
    word = finalise(finalise((number * 0x9E3779B97F4A7C15 + first) % 2**64) ^ second)
    return word - 2**64 if word >= 2**63 else word


@given(st.binary(max_size=40), st.integers(0, 2**40))
def test_words_are_mixed_alike_everywhere(key, number):
    assert words(key, numbers(number, 3)).tolist() == [mixed_slowly(key, number + at) for at in range(3)]


def test_threads_do_not_change_the_bits():
    values, known = vector(3, 300_000), torch.get_num_threads()
    one = WeightProjection(1).make([values])
    try:
        torch.set_num_threads(2)
        assert WeightProjection(1).make([values]) == one
    finally:
        torch.set_num_threads(known)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 100), st.floats(0.0, 3.0))
def test_distances_are_kept(seed, other, share):
    """The cosine of two sketches is that of the vectors up to five standard errors, of 1 / sqrt(dims) each."""
    one = vector(101)
    two = one + share * vector(other)
    exact = float(torch.nn.functional.cosine_similarity(one.double(), two.double(), dim=0))
    projection = WeightProjection(seed)
    turned, longer = projection.compare(projection.make([one]), [two]).values[0]
    assert abs((1 - turned) - exact) <= 5 * (1 - exact**2 + 1e-9) / math.sqrt(256) + 1e-6
    assert longer >= abs(math.log(float(one.norm() / two.norm()))) - 1e-6


def test_equal_changes_are_at_distance_zero_and_small_noise_is_seen():
    one, projection = vector(1), WeightProjection(2)
    proof = projection.make([one])
    assert projection.compare(proof, [one]).values == ((0.0, 0.0),)
    turned = projection.compare(proof, [one + 1e-3 * vector(2)]).values[0][0]
    assert turned == pytest.approx(0.5e-6, rel=0.3)  # half of the squared angle
    turned, longer = projection.compare(proof, [1.25 * one]).values[0]
    assert turned < 1e-12
    assert longer == pytest.approx(math.log(1.25), abs=1e-6)


def test_a_fake_can_be_fitted_to_a_known_seed_and_only_to_that():
    """The reason why the seed must follow from the weights that were fixed."""
    honest, known = vector(1), WeightProjection(5, 64)
    mixed = words(known._key, numbers(0, len(honest)))
    places, signs = mixed & 63, torch.where(mixed < 0, -1.0, 1.0).double()
    hidden = honest.double()
    for place, at in {int(place): at for at, place in enumerate(places)}.items():  # one value of each sum makes the sum vanish
        hidden[at] -= signs[at] * float((hidden * signs)[places == place].sum())
    fake = honest.double() - 2 * float(honest.double() @ hidden) / float(hidden @ hidden) * hidden  # mirrored: the norm stays
    fake = fake.float()
    assert float((fake - honest).norm() / honest.norm()) > 1  # nothing of the change is left in it
    fitted = known.compare(known.make([fake]), [honest]).values[0]
    assert max(fitted) < 1e-5
    fresh = WeightProjection(6, 64)
    assert fresh.compare(fresh.make([fake]), [honest]).values[0][0] > 0.3


class TestFaults:
    projection = WeightProjection(3, 16)
    own = (torch.ones(40),)

    def fault(self, *values, raw=None):
        proof = struct.pack(f"<{len(values)}f", *values) if raw is None else raw
        return self.projection.compare(proof, self.own).fault

    def test_each_is_named(self):
        good = struct.unpack("<17f", self.projection.make(self.own))
        assert self.fault(*good) == ""
        assert self.fault(raw=b"") == "the proof has 0 bytes, but a projection to 16 numbers has 68"
        assert "has 72 bytes" in self.fault(*good, 1.0)
        for bad in (math.nan, math.inf, -math.inf):
            assert "not finite" in self.fault(bad, *good[1:])
            assert "not finite" in self.fault(*good[:5], bad, *good[6:])
        assert "no change of weights at all" in self.fault(*[0.0] * 17)
        assert "no change of weights at all" in self.fault(0.0, *good[1:])
        assert "no change of weights at all" in self.fault(-1.0, *good[1:])
        assert "no change of weights at all" in self.fault(good[0], *[0.0] * 16)

    def test_a_norm_that_is_not_the_sketchs_is_seen(self):
        norm, *sums = struct.unpack("<17f", self.projection.make(self.own))
        longer = self.projection.compare(struct.pack("<17f", norm, *(2 * value for value in sums)), self.own).values[0][1]
        assert longer == pytest.approx(math.log(2))

    @pytest.mark.parametrize(
        ("own", "why"),
        [
            ([torch.zeros(4)], "too small or too large"),
            ([torch.tensor([math.nan])], "finite"),
            ([torch.tensor([math.inf])], "finite"),
            ([torch.full((100,), 3e38)], "too small or too large"),
            ([torch.ones(3, dtype=torch.int64)], "floating"),
            ([], "too small or too large"),
        ],
    )
    def test_an_own_change_without_a_fingerprint(self, own, why):
        with pytest.raises(ValueError, match=why):
            self.projection.make(own)

    @pytest.mark.parametrize("wrong", [(-1, 256), (2**63, 256), (0, 15), (0, 100), (0, 2**15)])
    def test_settings_out_of_range(self, wrong):
        with pytest.raises(ValueError, match="power of two"):
            WeightProjection(*wrong)
