"""Activation proofs and the hook that takes them: published bytes, closed forms, round trips, and
any bytes in their place.
"""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bench import _verification_tiny as tiny
from shoal.verification.fingerprints.activations import ActivationProof, decode, encode, largest
from shoal.verification.fingerprints.last_hidden import LastHidden, output_head
from shoal.verification.fingerprints.polynomial import evaluate

PROOF = ActivationProof()
# From the README of toploc 0.1.6: windows of 3 x 16 values, top 4, and the last of 1 x 16.
PUBLISHED = [
    b"\xff\xd9\xcb\xb8\x9a\xf1\x86%T\xa0",
    b"\xff\xd9\xb4h\xda\xe6\xe4\xabA\xb6",
    b"\xff\xd9\x80d\xd6X0\xe2\xafs",
    b"\xff\xd9\xd2\x04d\xea\x91\x91\xf6\xd7",
]


def normal(tokens, width, seed=0, dtype=torch.float32):
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(1, -1)


@pytest.mark.parametrize(("proof", "size"), list(zip(PUBLISHED, (48, 48, 48, 16), strict=True)))
def test_the_bytes_are_toplocs(proof, size):
    """The values that a published proof holds look like the largest of so many normal ones, and
    make the same bytes again.
    """
    _, coefficients = decode(rows(proof))
    bits = evaluate(coefficients, torch.arange(size).unsqueeze(0))
    values = bits[0].int().to(torch.int16).view(torch.bfloat16).float()
    places = torch.nonzero((values.abs() > 1) & (values.abs() < 4)).T
    assert places.shape == (1, 4)
    assert bytes(encode(places, bits.gather(1, places))[0].tolist()) == proof


@pytest.mark.parametrize(
    ("tokens", "width", "size"),
    [
        (32, 64, 258),
        (128, 64, 4 * 258),
        (33, 64, 258 + 10),
        (1, 64, 10),
        (31, 4096, 2 + 8 * 31),
        (64, 2, 2 * (2 + 2 * 64)),
    ],
)
def test_length(tokens, width, size):
    assert len(PROOF.make(normal(tokens, width))) == size == PROOF.proof_bytes(tokens, width)


@settings(deadline=None, max_examples=30)
@given(
    tokens=st.integers(1, 100), width=st.integers(1, 80), seed=st.integers(0, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    scale=st.sampled_from([1e-30, 1e-4, 1.0, 1e4]),
)  # fmt: skip
def test_own_states_are_found_again(tokens, width, seed, dtype, scale):
    states = (normal(tokens, width, seed) * scale).to(dtype)
    evidence = PROOF.compare(PROOF.make(states), states)
    assert not evidence.fault
    assert set(evidence.values) == {(0.0, 0.0, 0.0)}
    assert math.isclose(evidence.size, tokens / 32)


def test_wide_states_need_another_modulus():
    states = normal(32, 8192, seed=3)
    states.view(-1)[5], states.view(-1)[5 + 65497] = (
        50.0,
        60.0,
    )  # two places that are equal modulo the largest modulus
    proof = PROOF.make(states)
    assert int.from_bytes(proof[:2], "big") < 65497
    assert PROOF.compare(proof, states).values == ((0.0, 0.0, 0.0),)


def test_of_equal_magnitudes_the_first_count():
    row = torch.tensor([[1.0, -2.0, 2.0, 1.0, -1.0, 2.0, 0.0]], dtype=torch.bfloat16)
    assert largest(row, 4)[0].tolist() == [[1, 2, 5, 0]]


def measured(own, theirs):
    """The features when all of ``theirs`` are at the places of ``own``: one token's worth of
    channels.
    """
    proof = ActivationProof(window=1, top=len(own[0]))
    own, theirs = (torch.tensor(side, dtype=torch.float32) for side in (own, theirs))
    return proof.compare(proof.make(theirs), own).values


def test_one_unit_of_the_last_place():
    below = 2 - 2**-7  # the neighbour of 2 below, whose exponent is another
    assert measured([[2.0, 4.0]], [[below, 4.0]]) == ((0.0, 0.5, 0.0),)


def test_another_sign_is_a_miss():
    assert measured([[2.0, 4.0]], [[2.0, -4.0]]) == ((0.5, 0.0, 0.0),)


def test_twice_is_the_largest_error_that_is_no_miss():
    assert measured([[1.0]], [[2.0]]) == ((0.0, 128.0, 0.0),)
    assert measured([[1.0]], [[2.0 + 2**-6]]) == ((1.0, 0.0, 0.0),)


def test_errors_of_a_channel_count_if_they_agree():
    def channel(errors):
        own = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
        theirs = own * (1 + torch.tensor(errors).unsqueeze(1) * 2**-7)
        proof = ActivationProof(window=4, top=4)
        return proof.compare(proof.make(theirs), own).values[0]

    assert channel([2, 2, 2, 2]) == pytest.approx((0, 2, 2))  # always away from zero
    assert channel([2, 0, 2, 0]) == pytest.approx((0, 1, math.sqrt((16 - 8) / 3 / 4)))
    assert channel([3, 1, 0, 0])[2] == pytest.approx(math.sqrt((16 - 10) / 3 / 4))


def test_a_missing_place_reads_noise():
    own, other = normal(320, 64), normal(320, 64, seed=1)
    evidence = PROOF.compare(PROOF.make(other), own)
    assert evidence.means()[0] > 0.95


@pytest.mark.parametrize(
    ("proof", "says"),
    [
        (b"", "0 bytes, but one of 32 tokens has 258"),
        (bytes(257), "257 bytes"),
        (bytes(1 << 20), "1048576 bytes"),
        (
            bytes(258),
            "modulus is out of range",
        ),  # the null proof that TOPLOC's library makes of an error
        (b"\xff\xda" + bytes(256), "modulus is out of range"),
        (b"\x80\x00" + bytes(256), "modulus is out of range"),
        (b"\xff\xd9" + b"\xff\xff" * 128, "coefficient that is out of range"),
    ],
)
def test_faults(proof, says):
    assert says in PROOF.compare(proof, normal(32, 64)).fault


def test_a_constant_polynomial_is_far_away():
    """A proof that says 2.0 everywhere guesses most exponents, but no sign and no mantissa."""
    states = normal(32, 64)
    proof = b"\xff\xd9" + (0x4000).to_bytes(2, "big") + bytes(254)
    missing, error, _ = PROOF.compare(proof, states).means()
    assert missing > 0.3
    assert error > 10


def test_proof_of_other_order_or_length_is_far():
    """A proof of other order or length is refused or far away."""
    states = normal(64, 64)
    proof = PROOF.make(states)
    assert PROOF.compare(proof[258:] + proof[:258], states).means()[0] > 0.9
    assert "bytes" in PROOF.compare(proof[:258], states).fault
    assert "bytes" in PROOF.compare(proof, states[:63]).fault


@pytest.mark.parametrize(
    ("states", "says"),
    [
        (torch.full((4, 8), float("nan")), "not all finite"),
        (torch.full((4, 8), 3.4e38), "not all finite"),  # finite, but not as bfloat16
        (torch.zeros(0, 8), "1 to 131072 tokens"),
        (torch.zeros(8), "shape"),
        (torch.zeros(4, 8, dtype=torch.int64), "floating"),
    ],
)
def test_states_without_a_proof(states, says):
    with pytest.raises(ValueError, match=says):
        PROOF.make(states)


@pytest.mark.parametrize(("window", "top"), [(0, 128), (32, 16), (32, 100), (32, 2048)])
def test_settings_are_checked(window, top):
    with pytest.raises(ValueError, match="multiple of the window"):
        ActivationProof(window, top)


def prefilled(model, asked, tokens):
    states, logits = tiny.prefill_rows(model, asked[None], tokens[None])
    return states[0], logits[0]


@pytest.mark.parametrize("cached", [True, False])
def test_generation_and_prefill_have_the_same_states(cached):
    model, asked = tiny.TinyGPT(), tiny.prompt(1)
    tokens, states = tiny.generate(model, asked, 20, cached=cached)
    again, logits = prefilled(model, asked, tokens)
    torch.testing.assert_close(states, again, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.head(again), logits, atol=1e-5, rtol=1e-5)
    assert states.shape == (20, tiny.WIDTH)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_near(dtype):
    exact, model, asked = tiny.TinyGPT(), tiny.TinyGPT().to(dtype), tiny.prompt(2)
    tokens, states = tiny.generate(model, asked, 20)
    assert states.dtype == dtype
    again, _ = prefilled(exact, asked, tokens)
    assert float((states.float() - again).norm() / again.norm()) < 0.02


def test_the_hook_is_gone_afterwards():
    model = tiny.TinyGPT()
    with LastHidden(model) as hidden, torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.int64))
    model(torch.zeros(1, 3, dtype=torch.int64))
    assert hidden.states().shape == (1, 1, tiny.WIDTH)
    with pytest.raises(RuntimeError), LastHidden(model):
        raise RuntimeError
    assert not model.head._forward_pre_hooks


def test_the_model_goes_on_with_the_same_numbers():
    model, tokens = tiny.TinyGPT(), torch.arange(6).unsqueeze(0)
    plain = model(tokens)
    with LastHidden(model, every=True) as hidden:
        assert torch.equal(model(tokens), plain)
    assert not hidden.states().requires_grad


def test_which_layer_is_the_head():
    model = tiny.TinyGPT()
    assert output_head(model) is model.head
    other = copy.copy(model)
    other.get_output_embeddings = lambda: model.blocks[1].up
    assert output_head(other) is model.blocks[1].up
    with pytest.raises(ValueError, match="no linear layer"):
        output_head(nn.Embedding(2, 2))


def test_states_of_a_model_that_was_not_called_are_refused():
    with pytest.raises(ValueError, match="was not called"):
        LastHidden(tiny.TinyGPT()).states()
