"""What all codecs share: names, dense payloads, bits, and memory that is nobody else's."""

import math
import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal.optim import BFLOAT16, E3M0, FLOAT16, FLOAT32, INT8, SIGN, TOPK2, codec_named
from shoal.optim.codecs.base import check_sends_weights
from shoal.optim.codecs.bits import (
    byte_table,
    look_up,
    pack,
    pack12,
    packed_bytes,
    unpack,
    unpack12,
)
from shoal.optim.codecs.floats import FLOAT_CODECS
from shoal.optim.codecs.memory import SMALL, buffer

CODECS = list(FLOAT_CODECS)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)


def lists(**floats) -> st.SearchStrategy[list[torch.Tensor]]:
    values = st.floats(width=32, **floats)
    return st.lists(
        hnp.arrays(np.float32, SHAPES, elements=values).map(torch.from_numpy), max_size=4
    )


def shapes_of(tensors):
    return [tuple(tensor.shape) for tensor in tensors]


def bits(tensor):
    return tensor.reshape(-1).view(torch.int32).tolist()


@given(lists())
def test_float32_round_trip_is_exact_to_the_bit(tensors):
    payload = FLOAT32.encode(tensors)
    assert payload.dtype == torch.uint8
    assert payload.device.type == "cpu"
    assert (
        payload.numel() == FLOAT32.nbytes(shapes_of(tensors)) == 4 * sum(t.numel() for t in tensors)
    )
    back = FLOAT32.decode(payload, shapes_of(tensors))
    assert shapes_of(back) == shapes_of(tensors)
    assert [bits(t) for t in back] == [bits(t) for t in tensors]


@pytest.mark.parametrize("codec", [FLOAT16, BFLOAT16], ids=lambda codec: codec.name)
@given(tensors=lists())
def test_half_precision_is_idempotent(codec, tensors):
    largest = torch.finfo(codec.dtype).max
    tensors = [torch.where(t.isfinite(), t.clamp(-largest, largest), t) for t in tensors]
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


LARGEST = {
    "float16": 65504.0,
    "bfloat16": float.fromhex("0x1.fep127"),
    "float32": float.fromhex("0x1.fffffep127"),
}
WIDER = {"float16": torch.float32, "bfloat16": torch.float32, "float32": torch.float64}


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_a_finite_value_never_becomes_infinite(codec):
    """The range ends half a unit above the largest number, as in IEEE 754.

    NaN and infinity pass, as ever.
    """
    largest, wider = LARGEST[codec.name], WIDER[codec.name]
    rounded, over = {
        "float16": (65519.0, 65520.0),
        "bfloat16": (float.fromhex("0x1.fefffep127"), float.fromhex("0x1.ffp127")),
        "float32": (float.fromhex("0x1.fffffe8p127"), 1e39),
    }[codec.name]
    for value in (largest, rounded):
        assert codec.decode(codec.encode([torch.tensor([-value, 1.0], dtype=wider)]), [(2,)])[
            0
        ].tolist() == [-largest, 1.0]
    for bad in (over, -over):
        with pytest.raises(
            ValueError, match=f"is too large for {codec.name}, which ends at .*: choose float32"
        ):
            codec.encode([torch.ones(3), torch.tensor([math.nan, math.inf, bad], dtype=wider)])
    passed = codec.decode(
        codec.encode([torch.tensor([math.inf, math.nan, 2.0], dtype=wider)]), [(3,)]
    )[0].tolist()
    assert passed[0] == math.inf
    assert math.isnan(passed[1])


@pytest.mark.parametrize("value", [1e5, 1e30, 3.4e38])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "int8", "e3m0", "topk2", "sign", "auto:3"])
def test_no_codec_decodes_an_infinity_that_was_not_given(name, value):
    refuses = {"float16": 0.0, "int8": 3.5e38, "sign": 3.4e38 / 2}.get(name, 3.395e38)
    if value > max(refuses, 65504.0):
        with pytest.raises(ValueError, match="too large"):
            codec_named(name).encode([torch.full((70,), value)])
    else:
        (back,) = codec_named(name).decode(
            codec_named(name).encode([torch.full((70,), value)]), [(70,)]
        )
        assert back.isfinite().all()


def test_error_feedback_is_as_before_when_its_codec_refuses():
    codec = codec_named("float16+ef")
    codec.encode([torch.tensor([0.1, 1.0])])
    codec.accepted()
    before = codec.state_dict()["error"][0].clone()
    with pytest.raises(ValueError, match="too large for float16"):
        codec.encode([torch.tensor([1e6, 1.0])])
    assert torch.equal(codec.state_dict()["error"][0], before)
    assert not codec.pending


@pytest.mark.parametrize(
    ("codec", "digits"), [(FLOAT16, 11), (BFLOAT16, 8)], ids=["float16", "bfloat16"]
)
@given(tensors=lists(min_value=2.0**-14, max_value=60000.0))
def test_half_precision_rounds_to_nearest(codec, digits, tensors):
    for sign in (1.0, -1.0):
        signed = [sign * t for t in tensors]
        for before, after in zip(
            signed, codec.decode(codec.encode(signed), shapes_of(signed)), strict=True
        ):
            assert ((after - before).abs() <= before.abs() * 2.0**-digits).all()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_ties_round_to_even(codec):
    """Halfway between two neighbours the one of an even last bit is taken: above 1 the lower one,
    above 1 + eps the upper one.
    """
    eps = torch.finfo(codec.dtype).eps
    ties = torch.tensor([1 + 0.5 * eps, 1 + 1.5 * eps], dtype=WIDER[codec.name])
    (found,) = codec.decode(codec.encode([torch.cat([ties, -ties])]), [(4,)])
    assert found.tolist() == [1.0, 1 + 2 * eps, -1.0, -1 - 2 * eps]


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


def test_bytes_are_little_endian_in_row_major_order():
    payload = FLOAT32.encode([torch.tensor([[1.0, -2.5]]), torch.tensor(math.inf)])
    assert bytes(payload.tolist()) == np.array([1.0, -2.5, math.inf], dtype="<f4").tobytes()


def test_codecs_are_found_by_name():
    assert [codec_named(codec.name) for codec in CODECS] == CODECS
    assert [codec_named(name) for name in ("fp32", "fp16", "bf16")] == CODECS
    assert [codec_named(codec.name) for codec in (INT8, E3M0, SIGN, TOPK2)] == [
        INT8,
        E3M0,
        SIGN,
        TOPK2,
    ]
    for name in (
        "auto:2",
        "auto:0.5",
        "int8+ef",
        "topk2+ef:0.95",
        "auto:3.5+ef:0.9",
        "bfloat16+ef",
        "topk2-senders+ef:0.95",
        "topk2:0.1+ef:0.9",
        "topk2-senders:0.05+ef",
    ):
        assert codec_named(name).name == name
        assert codec_named(name) is not codec_named(name)  # each has a state of its own
        assert re.fullmatch(r"[a-z0-9_.:,=+-]{1,64}", name)  # what a message between peers admits
    spellings = {
        "topk2+ef:0.950": "topk2+ef:0.95",
        "sign+ef:1": "sign+ef",
        "auto:02.0": "auto:2",
        "bf16+ef": "bfloat16+ef",
    }
    spellings |= {
        "topk2:0.10+ef": "topk2:0.1+ef",
        "topk2:0.015625": "topk2",
        "topk2-senders:0.01562500": "topk2-senders",
    }
    spellings |= {"topk2:0.12345678": "topk2:0.123457"}
    for short, name in spellings.items():
        assert codec_named(short).name == name
    exact, named = (
        codec_named("topk2:0.12345649"),
        codec_named("topk2:0.123456"),
    )  # a peer is told the name alone
    assert [exact.nbytes([(n,)]) for n in range(1, 4000)] == [
        named.nbytes([(n,)]) for n in range(1, 4000)
    ]


UNKNOWN = [
    "int3",
    "",
    "int8+",
    "int8+ef+ef",
    "int8:4",
    "auto",
    "auto:",
    "topk2+ef:",
    "INT8",
    " int8",
    "int8\n",
]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_name_gets_the_known_ones(name):
    with pytest.raises(
        ValueError,
        match=rf"unknown codec {re.escape(repr(name))}: choose one of float32, float16, bfloat16, "
        r"int8",
    ):
        codec_named(name)


def test_numbers_out_of_range_are_explained():
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\], got 1.5"):
        codec_named("int8+ef:1.5")
    with pytest.raises(ValueError, match="above 0 and up to 32, got 40"):
        codec_named("auto:40")
    for part in ("0", "0.0002", "0.26", "10"):
        with pytest.raises(
            ValueError, match=rf"topk2 keeps a part of the values from 1/4096 to 0.25, got {part}: "
        ):
            codec_named(f"topk2:{part}+ef")


def test_whole_weights_are_not_sent_through_what_is_for_displacements():
    for name in ("float32", "float16", "bfloat16", "int8"):
        check_sends_weights(codec_named(name), "LocalSGD")
    for name in ("e3m0", "topk2", "sign", "auto:4", "int8+ef"):
        with pytest.raises(
            ValueError,
            match=f"LocalSGD sends whole weights, of which the codec {re.escape(name)} loses too "
            "much",
        ):
            check_sends_weights(codec_named(name), "LocalSGD")


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


SIZE = 4 * SMALL
STATM = Path("/proc/self/statm")


@pytest.mark.skipif(
    not STATM.exists(), reason="the system does not tell how much memory the process has"
)
def test_memory_goes_back_to_the_system_with_the_last_view() -> None:
    def resident() -> int:
        return int(STATM.read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    first = buffer(16 * SIZE).fill_(1)
    exported = first.view(torch.float32)[3:9].numpy().data
    del first
    assert resident() - before > 12 * SIZE
    del exported
    assert resident() - before < 4 * SIZE


def test_an_encoded_payload_survives_the_next_encodings() -> None:
    weights = torch.arange(SIZE // 4, dtype=torch.float32)
    payload = FLOAT32.encode([weights])
    decoded = FLOAT32.decode(payload, [tuple(weights.shape)])
    del payload
    for _ in range(4):
        FLOAT32.encode([torch.zeros_like(weights)])
    assert torch.equal(decoded[0], weights)
