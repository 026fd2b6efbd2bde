import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim.codecs.quantized import byte_table, look_up, pack, pack12, packed_bytes, unpack, unpack12


def codes_of(width, size=200):
    return st.lists(st.integers(0, 2**width - 1), max_size=size)


@pytest.mark.parametrize("width", [1, 2, 4])
@given(data=st.data())
def test_packing_loses_nothing_and_leaves_no_gap(width, data):
    codes = torch.tensor(data.draw(codes_of(width)), dtype=torch.uint8)
    packed = pack(codes, width)
    assert packed.dtype == torch.uint8
    assert packed.numel() == packed_bytes(codes.numel(), width) == -(-codes.numel() * width // 8)
    assert torch.equal(unpack(packed, width, codes.numel()), codes)


@pytest.mark.parametrize("width", [1, 2, 4])
@given(data=st.data())
def test_the_first_code_stands_in_the_lowest_bits(width, data):
    codes = data.draw(codes_of(width))
    number = sum(code << (width * place) for place, code in enumerate(codes))
    expected = number.to_bytes(packed_bytes(len(codes), width), "little")
    assert bytes(pack(torch.tensor(codes, dtype=torch.uint8), width).tolist()) == expected


@given(rows=st.integers(1, 5), count=st.integers(0, 70), seed=st.integers(0, 2**32 - 1))
def test_twelve_bits(rows, count, seed):
    codes = torch.from_numpy(np.random.default_rng(seed).integers(0, 4096, (rows, count)))
    packed = pack12(codes)
    assert packed.shape == (rows, packed_bytes(count, 12))
    assert torch.equal(unpack12(packed, count), codes)
    for row, line in zip(codes.tolist(), packed.tolist(), strict=True):
        number = sum(code << (12 * place) for place, code in enumerate(row))
        assert bytes(line) == number.to_bytes(packed_bytes(count, 12), "little")


def test_a_table_turns_bytes_into_levels():
    levels = torch.tensor([0.0, 0.5, -0.5, 3.0])
    codes = torch.tensor([3, 1, 2, 0, 1], dtype=torch.uint8)
    assert look_up(pack(codes, 2), byte_table(levels), 5).tolist() == [3.0, 0.5, -0.5, 0.0, 0.5]
