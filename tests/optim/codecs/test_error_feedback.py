import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.optim import E3M0, FLOAT16, FLOAT32, INT8, SIGN, TOPK2, AutoCodec, ErrorFeedback, codec_named

LOSSY = [INT8, E3M0, SIGN, TOPK2, FLOAT16, codec_named("auto:2")]
SHAPES = [(64, 64), (300,), ()]
by_name = {"ids": lambda codec: codec.name}


def gradients(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(count)]


def send(codec, tensors):
    return codec.decode(codec.encode(tensors), SHAPES)


def assert_close(actual, expected, atol=1e-5):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=atol)


@pytest.mark.parametrize("inner", LOSSY, **by_name)
@settings(max_examples=10, deadline=None)
@given(beta=st.sampled_from([1.0, 0.95, 0.5, 0.0]), seed=st.integers(0, 999), rounds=st.integers(1, 8))
def test_sent_values_and_residual_add_up_to_the_input(inner, beta, seed, rounds):
    codec = ErrorFeedback(inner.fresh(), beta)
    expected = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for tensors in gradients(seed, rounds):
        sent = send(codec, tensors)
        # e_T = sum over s of beta^(T-1-s) (g_s - sent_s)
        expected = [beta * e + g.double() - q.double() for e, g, q in zip(expected, tensors, sent, strict=True)]
    assert_close(codec.error, expected)


@pytest.mark.parametrize("inner", LOSSY, **by_name)
def test_with_feedback_the_mean_of_what_is_sent_becomes_what_was_meant(inner):
    codec, rounds = ErrorFeedback(inner.fresh()), 200
    (g,) = gradients(1, 1)
    total = [torch.zeros(shape) for shape in SHAPES]
    for _ in range(rounds):
        total = [t + q for t, q in zip(total, send(codec, g), strict=True)]
    for t, e, x in zip(total, codec.error, g, strict=True):
        torch.testing.assert_close((t + e) / rounds, x, rtol=1e-4, atol=1e-5)
        assert e.norm() < 70 * x.norm()  # a 64th goes each round, so the residual holds no more than about 64 rounds


def test_a_lossless_codec_has_no_residual():
    codec = codec_named("float32+ef:0.5")
    for tensors in gradients(2, 3):
        assert torch.equal(codec.encode(tensors), FLOAT32.encode(tensors))
        assert all(e.count_nonzero() == 0 for e in codec.error)


def test_the_first_round_is_the_plain_codec_and_sizes_are_its_own():
    (g,) = gradients(3, 1)
    for inner in LOSSY:
        codec = ErrorFeedback(inner.fresh())
        payload = codec.encode(g)
        assert torch.equal(payload, inner.fresh().encode(g))
        assert payload.numel() == codec.nbytes(SHAPES) == inner.nbytes(SHAPES)


@pytest.mark.parametrize("inner", LOSSY, **by_name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_poison_never_enters_the_error(inner, bad):
    codec = ErrorFeedback(inner.fresh())
    first, second, third = gradients(4, 3)
    codec.encode(first)
    second[1][7] = bad
    if bad == 3e38:  # finite, but not once the error of before is added
        codec.error[1][7] = 3e38
    before = codec.state_dict()
    with pytest.raises(ValueError, match="holds NaN"):
        codec.encode(second)
    after = codec.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(before.pop("error"), after.pop("error"), strict=True))
    assert before == after
    codec.error[1][7] = 0
    codec.encode(third)


@pytest.mark.parametrize("inner", LOSSY, **by_name)
def test_a_rejected_round_is_wholly_in_the_residual(inner):
    codec = ErrorFeedback(inner.fresh(), beta=0.95)
    first, second = gradients(5, 2)
    codec.encode(first)
    e = [t.clone() for t in codec.error]
    got = send(codec, second)
    assert_close(codec.sent(), got, atol=0)
    codec.rejected()
    assert_close(codec.error, [0.95 * old + g for old, g in zip(e, second, strict=True)])
    for call in (codec.rejected, codec.sent):
        with pytest.raises(ValueError, match="nothing has been sent"):
            call()


def test_nothing_handed_in_or_out_is_shared():
    codec = codec_named("fp32+ef")
    (g,) = gradients(6, 1)
    kept = [t.clone() for t in g]
    payload = codec.encode(g)
    for t in codec.decode(payload, SHAPES):  # views into the payload
        t.fill_(77)
    assert_close(codec.sent(), kept, atol=0)
    codec.rejected()
    assert_close(g, kept, atol=0)
    assert_close(codec.error, kept, atol=0)


def test_the_callers_tensors_stay_as_they_are():
    codec = codec_named("e3m0+ef")
    for tensors in gradients(7, 3):
        kept = [t.clone() for t in tensors]
        codec.encode(tensors)
        assert_close(tensors, kept, atol=0)


@pytest.mark.parametrize("name", ["topk2+ef:0.95", "auto:2+ef", "sign+ef"])
def test_a_restart_goes_on_bit_identically(name, tmp_path):
    codec, again = codec_named(name), codec_named(name)
    *before, last = gradients(8, 4)
    for tensors in before:
        codec.encode(tensors)
    torch.save(codec.state_dict(), tmp_path / "state")
    again.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert torch.equal(codec.encode(last), again.encode(last))
    empty = codec_named(name)
    again.load_state_dict(empty.state_dict())
    assert torch.equal(empty.encode(last), again.encode(last))


def test_a_state_that_does_not_fit_changes_nothing():
    codec = codec_named("int8+ef")
    (g,) = gradients(9, 1)
    codec.encode(g)
    kept = [t.clone() for t in codec.error]
    poisoned = codec.state_dict()
    poisoned["error"][0][0, 0] = float("nan")
    with pytest.raises(ValueError, match="the saved error feedback holds NaN"):
        codec.load_state_dict(poisoned)
    with pytest.raises(ValueError, match=r"is of the codec sign\+ef, not of int8\+ef"):
        codec.load_state_dict(codec_named("sign+ef").state_dict())
    with pytest.raises(ValueError, match="a codec without state was given the state of"):
        INT8.load_state_dict(codec.state_dict())
    assert_close(codec.error, kept, atol=0)


def test_each_fragment_has_its_own():
    codec = codec_named("auto:2+ef")
    (g,) = gradients(10, 1)
    codec.encode(g)
    other = codec.fresh()
    assert other.name == codec.name
    assert other.error is None
    other.encode([torch.ones(5)])
    assert [tuple(e.shape) for e in codec.error] == SHAPES
    assert isinstance(codec.codec, AutoCodec)
    assert other.codec is not codec.codec
    with pytest.raises(ValueError, match=r"kept for 3 tensors of 4397 values, got 1 of 5: use fresh\(\)"):
        codec.encode([torch.ones(5)])
    assert INT8.fresh() is INT8


def test_two_sided_feedback_loses_nothing_on_either_side():
    """The pattern of 1-bit Adam: peers send to a reducer, the reducer sends the mean back, each with its own residual."""
    peers, reducer, rounds = [codec_named("sign+ef") for _ in range(3)], codec_named("sign+ef"), 30
    meant = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    moved = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for step in range(rounds):
        own = [gradients(100 * step + k, 1)[0] for k in range(3)]
        sent = [send(codec, g) for codec, g in zip(peers, own, strict=True)]
        mean = [torch.stack(parts).mean(0) for parts in zip(*sent, strict=True)]
        moved = [m + q for m, q in zip(moved, send(reducer, mean), strict=True)]
        meant = [m + torch.stack(parts).mean(0) for m, parts in zip(meant, zip(*own, strict=True), strict=True)]
    residual = [torch.stack(parts).mean(0) for parts in zip(*(codec.error for codec in peers), strict=True)]
    assert_close([m + e + o for m, e, o in zip(moved, reducer.error, residual, strict=True)], meant, atol=1e-4)


def test_wrong_use_is_explained():
    for beta in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"factor of error feedback must lie in \[0, 1\]"):
            ErrorFeedback(INT8, beta)
    with pytest.raises(ValueError, match="has error feedback already"):
        ErrorFeedback(codec_named("int8+ef"))
