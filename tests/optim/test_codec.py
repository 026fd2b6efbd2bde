import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from optim import BFLOAT16, FLOAT16, FLOAT32, codec_named

CODECS = [FLOAT32, FLOAT16, BFLOAT16]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)


def lists(**floats) -> st.SearchStrategy[list[torch.Tensor]]:
    values = st.floats(width=32, **floats)
    return st.lists(hnp.arrays(np.float32, SHAPES, elements=values).map(torch.from_numpy), max_size=4)


def shapes_of(tensors):
    return [tuple(tensor.shape) for tensor in tensors]


def bits(tensor):
    return tensor.reshape(-1).view(torch.int32).tolist()


@given(lists())
def test_float32_round_trip_is_exact_to_the_bit(tensors):
    payload = FLOAT32.encode(tensors)
    assert payload.dtype == torch.uint8
    assert payload.device.type == "cpu"
    assert payload.numel() == FLOAT32.nbytes(shapes_of(tensors)) == 4 * sum(t.numel() for t in tensors)
    back = FLOAT32.decode(payload, shapes_of(tensors))
    assert shapes_of(back) == shapes_of(tensors)
    assert [bits(t) for t in back] == [bits(t) for t in tensors]


@pytest.mark.parametrize("codec", [FLOAT16, BFLOAT16], ids=lambda codec: codec.name)
@given(tensors=lists())
def test_half_precision_is_idempotent(codec, tensors):
    once = codec.encode(tensors)
    assert once.numel() == codec.nbytes(shapes_of(tensors)) == 2 * sum(t.numel() for t in tensors)
    back = codec.decode(once, shapes_of(tensors))
    assert all(t.dtype == torch.float32 for t in back)
    assert shapes_of(back) == shapes_of(tensors)
    twice = codec.encode(back)
    for a, b in zip(back, codec.decode(twice, shapes_of(tensors)), strict=True):
        assert torch.equal(torch.nan_to_num(a, nan=77), torch.nan_to_num(b, nan=77))
    if not any(t.isnan().any() for t in tensors):  # there are many codes for "not a number"
        assert twice.tolist() == once.tolist()


@pytest.mark.parametrize(("codec", "digits"), [(FLOAT16, 11), (BFLOAT16, 8)], ids=["float16", "bfloat16"])
@given(tensors=lists(min_value=2.0**-14, max_value=60000.0))
def test_half_precision_rounds_to_nearest(codec, digits, tensors):
    for sign in (1.0, -1.0):
        signed = [sign * t for t in tensors]
        for before, after in zip(signed, codec.decode(codec.encode(signed), shapes_of(signed)), strict=True):
            assert ((after - before).abs() <= before.abs() * 2.0**-digits).all()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@given(tensors=lists(), change=st.integers(-9, 9).filter(bool))
def test_a_payload_of_the_wrong_size_is_refused(codec, tensors, change):
    payload = codec.encode(tensors)
    size = max(0, payload.numel() + change)
    if size == payload.numel():
        return
    with pytest.raises(ValueError, match=rf"payload has {size} bytes, these shapes need {payload.numel()} in {codec.name}"):
        codec.decode(torch.zeros(size, dtype=torch.uint8), shapes_of(tensors))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_encode_never_aliases(codec, dtype):
    tensors = [torch.arange(6, dtype=dtype).reshape(2, 3), torch.ones(4, dtype=dtype)]
    payload = codec.encode(tensors)
    kept = payload.clone()
    for tensor in tensors:
        tensor.fill_(77)
    assert torch.equal(payload, kept)
    payload.zero_()
    assert all((tensor == 77).all() for tensor in tensors)


def test_any_layout_and_a_parameter_can_be_encoded():
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    (back,) = FLOAT32.decode(FLOAT32.encode([weight.T]), [(3, 2)])
    assert back.tolist() == weight.T.tolist()
    assert not back.requires_grad


def test_bytes_are_little_endian_in_row_major_order():
    payload = FLOAT32.encode([torch.tensor([[1.0, -2.5]]), torch.tensor(math.inf)])
    assert bytes(payload.tolist()) == np.array([1.0, -2.5, math.inf], dtype="<f4").tobytes()


def test_codecs_are_found_by_name():
    assert [codec_named(codec.name) for codec in CODECS] == CODECS
    with pytest.raises(ValueError, match=r"unknown codec 'int3': choose one of float32, float16, bfloat16"):
        codec_named("int3")
