"""A patch of weights in bfloat16 makes the newer version to the last bit, or is refused."""

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.optim.weight_patch import (
    VALUE_BYTES,
    PatchError,
    PatchHeader,
    apply,
    bits_of,
    digest_of,
    encode,
    set_bits,
)

VALUES = 3000
HEADER = PatchHeader.FORMAT


def weights(seed=0, count=VALUES):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def changed(bits, places, by=1):
    after = bits.clone()
    after[places] += by
    return after


@st.composite
def versions(draw):
    """Draw any bits, NaN's among them, and a later version that differs in some or all."""
    count = draw(st.integers(0, 1200))
    pattern = draw(st.binary(min_size=1, max_size=64))
    raw = bytearray((pattern * (VALUE_BYTES * count))[: VALUE_BYTES * count])
    before = torch.empty(0, dtype=torch.int16)
    if count:
        before = torch.frombuffer(raw, dtype=torch.int16)
    after = before.clone()
    places = st.tuples(st.integers(0, max(count - 1, 0)), st.integers(-(2**15), 2**15 - 1))
    for place, value in draw(st.lists(places, max_size=40)) if count else ():
        after[place] = value
    return before, after


@settings(max_examples=60)
@given(versions())
def test_patch_makes_the_newer_bits(two):
    before, after = two
    assert torch.equal(apply(encode(before, after), before), after)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 2 * 255 + 254])
def test_gaps_of_every_length_are_kept(gap):
    before = bits_of([weights()])
    after = changed(before, [gap, 2 * gap + 1, VALUES - 1])
    assert torch.equal(apply(encode(before, after), before), after)


def test_small_updates_take_a_hundredth_of_the_whole():
    """As in reinforcement learning: one value in fifty moves by one bit or two."""
    bits = bits_of([weights(count=500_000)])
    generator = torch.Generator().manual_seed(1)
    places = torch.randperm(len(bits), generator=generator)[: len(bits) // 50]
    steps = torch.randint(-2, 2, places.shape, generator=generator, dtype=torch.int16)
    patch = encode(bits, changed(bits, places, steps))
    assert len(patch) < VALUE_BYTES * len(bits) / 80


def test_weights_of_any_dtype_and_shape_take_the_bits():
    torch.manual_seed(0)
    sources = [torch.randn(3, 5), torch.randn(()), torch.zeros(0), torch.randn(7)]
    bits = bits_of(sources)
    for dtype in (torch.float32, torch.bfloat16):
        copies = [torch.zeros(one.shape, dtype=dtype) for one in sources]
        set_bits(copies, bits)
        assert torch.equal(bits_of(copies), bits)


def forged(patch, **fields):
    """Return ``patch`` with other numbers in its header."""
    header = PatchHeader.read(patch)
    return PatchHeader(**{**vars(header), **fields}).pack() + patch[HEADER.size :]


BEFORE = bits_of([weights()])
AFTER = changed(BEFORE, [0, 7, 2000])
PATCH = encode(BEFORE, AFTER)
LONGEST = 3 + VALUES // 255


def of_gaps(gaps):
    """Return a patch of three changes by the bytes ``gaps``."""
    content = zlib.compress(bytes(gaps) + bytes(3 * VALUE_BYTES))
    return forged(PATCH, gap_bytes=len(gaps))[: HEADER.size] + content


BEYOND = of_gaps([*[255] * (LONGEST - 3), 254, 254, 254])
FEWER = of_gaps([1, 1, 255])
OF_ZEROS = zlib.compress(bytes(2**20))


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        (PATCH[:50], "is cut off"),
        (encode(AFTER, BEFORE), "is for other weights than these"),
        (forged(PATCH, values=VALUES - 1), "is for other weights than these"),
        (forged(PATCH, after=digest_of(BEFORE)), "makes other weights than it says"),
        (forged(PATCH, changed=2**60), r"states \d+ changes of 3000 values"),
        (forged(PATCH, gap_bytes=2**60), "states 3 changes of 3000 values"),
        (forged(PATCH, changed=2), "holds other than the"),
        (PATCH[:-1], "holds other than the"),
        (PATCH + b"\0", "holds other than the"),
        (PATCH[: HEADER.size] + b"nonsense", "cannot be opened"),
        (PATCH[: HEADER.size] + OF_ZEROS, "holds other than the"),
        (BEYOND, "changes values that are not there"),
        (FEWER, "changes values that are not there"),
    ],
)
def test_wrong_patch_is_refused_with_a_sentence(patch, said):
    with pytest.raises(PatchError, match=said) as raised:
        apply(patch, BEFORE)
    assert str(raised.value).endswith(".")


def test_versions_of_other_sizes_have_no_patch():
    with pytest.raises(ValueError, match="3000 values cannot become 2999"):
        encode(BEFORE, BEFORE[1:])
