"""Codecs that remember: the error that is fed back, and widths that follow what was sent."""

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.optim import (
    BFLOAT16,
    E3M0,
    FLOAT16,
    FLOAT32,
    INT8,
    SIGN,
    TOPK2,
    AutoCodec,
    ErrorFeedback,
    codec_named,
)
from shoal.optim.codecs.allocation import allocate, greedy, total

MENU = (FLOAT32, BFLOAT16, INT8, E3M0, SIGN, TOPK2)


@st.composite
def tables(draw, largest=60):
    layers, choices = draw(st.integers(0, 5)), draw(st.integers(1, 4))
    row = st.lists(st.integers(0, largest), min_size=choices, max_size=choices)
    errors = draw(st.lists(row, min_size=layers, max_size=layers))
    sizes = draw(st.lists(row, min_size=layers, max_size=layers))
    return errors, sizes, draw(st.integers(0, layers * largest))


def best_by_trying_all(errors, sizes, budget):
    every = itertools.product(*(range(len(row)) for row in errors))
    return min(
        (total(errors, picks) for picks in every if total(sizes, picks) <= budget), default=None
    )


@settings(max_examples=150)
@given(tables())
def test_allocation_is_the_best_there_is(case):
    errors, sizes, budget = case
    best = best_by_trying_all(errors, sizes, budget)
    if best is None:
        with pytest.raises(ValueError, match="even the smallest sizes need more"):
            allocate(errors, sizes, budget)
        return
    picks = allocate(errors, sizes, budget)
    assert total(sizes, picks) <= budget
    assert total(errors, picks) == best


@settings(max_examples=60)
@given(tables(largest=10**6))
def test_coarse_steps_fit_and_match_the_baselines(case):
    """With coarse steps it fits and is not worse than greedy or uniform."""
    errors, sizes, budget = case
    assume(best_by_trying_all(errors, sizes, budget) is not None)
    picks = allocate(errors, sizes, budget)
    assert total(sizes, picks) <= budget
    found = total(errors, picks)
    simple = greedy(errors, sizes, budget)
    assert total(sizes, simple) <= budget
    assert found <= total(errors, simple)
    for choice in range(len(errors[0]) if errors else 0):
        if total(sizes, [choice] * len(sizes)) <= budget:
            assert found <= total(errors, [choice] * len(sizes))


def test_greedy_is_optimal_for_the_size_it_uses():
    generator = torch.Generator().manual_seed(0)
    errors = torch.randint(0, 100, (5, 4), generator=generator).tolist()
    sizes = torch.randint(0, 100, (5, 4), generator=generator).tolist()
    for budget in range(int(sum(map(min, sizes))), 500, 7):
        picks = greedy(errors, sizes, budget)
        assert total(errors, picks) == best_by_trying_all(errors, sizes, total(sizes, picks))


def test_errors_that_are_no_numbers_are_refused():
    for bad in (float("nan"), -1.0):
        with pytest.raises(ValueError):
            allocate([[1.0, bad]], [[1, 1]], 5)


def layers(seed=0):
    """Tensors of one size, whose energies differ by a factor of a hundred million."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(128, 128, generator=generator) * 10.0**-power for power in range(5)]


SHAPES = [(128, 128)] * 5


def error(tensors, got):
    return sum(float((a - b).square().sum()) for a, b in zip(tensors, got, strict=True))


@pytest.mark.parametrize("bits", [0.5, 1.2, 2, 4.2, 8.2, 16.1])
def test_better_than_one_codec_for_all_of_the_same_size(bits):
    codec = AutoCodec(bits, MENU)
    x = layers()
    payload = codec.encode(x)
    assert payload.numel() == codec.nbytes(SHAPES)
    assert payload.numel() * 8 <= bits * 5 * 128 * 128 + 64 + 32 * 5  # the header, and rounding
    found = error(x, codec.decode(payload, SHAPES))
    uniform = [c for c in MENU if sum(c.nbytes([s]) for s in SHAPES) <= payload.numel() - 8]
    assert uniform
    for other in uniform:
        assert found <= error(x, other.decode(other.encode(x), SHAPES))
    assert len(set(codec.choice)) > 1
    sizes = [c.nbytes([s]) for c in MENU for s in SHAPES[:1]]
    chosen = [sizes[[c.name for c in MENU].index(name)] for name in codec.choice]
    assert chosen == sorted(chosen, reverse=True)  # the more energy, the more bits


def test_one_tensor_gets_what_one_codec_would():
    x = [layers()[0]]
    assert AutoCodec(9, MENU).encode(x)[4 : 4 + INT8.nbytes(SHAPES[:1])].equal(INT8.encode(x))


def test_partners_may_choose_differently():
    here, there = AutoCodec(2, MENU), AutoCodec(2, MENU)
    x, y = layers(), layers()[::-1]
    mine, theirs = here.encode(x), there.encode(y)
    assert here.choice == there.choice[::-1] != there.choice
    assert mine.numel() == theirs.numel()
    for a, b in zip(here.decode(theirs, SHAPES), there.decode(theirs, SHAPES), strict=True):
        assert torch.equal(a, b)


def test_measured_again_every_few_rounds():
    codec = AutoCodec(2, MENU, every=3)
    choices, sent = [], []
    for step in range(7):
        sent.append(codec.encode(layers() if step == 0 else layers()[::-1])[:5].tolist())
        choices.append(codec.choice)
    assert choices[0] == choices[1] == choices[2]
    assert choices[3] == choices[0][::-1] == choices[6]
    assert (
        sent[0] == sent[3] == sent[4][::-1] != sent[4]
    )  # what was measured is the next round's choice
    codec.encode(layers()[:2])
    assert len(codec.choice) == 2


@pytest.mark.parametrize("shapes", [[], [()], [(0, 3)], [(1,), (), (2, 2)], [(5,)] * 9])
def test_small_budgets_grow_to_what_the_smallest_codecs_need(shapes):
    codec = AutoCodec(0.001, MENU)
    tensors = [torch.ones(shape) for shape in shapes]
    payload = codec.encode(tensors)
    least = sum(min(math.ceil(c.nbytes([shape]) / 4) * 4 for c in MENU) for shape in shapes)
    assert payload.numel() == codec.nbytes(shapes) == math.ceil(len(shapes) / 4) * 4 + least
    assert [t.shape for t in codec.decode(payload, shapes)] == [t.shape for t in tensors]


def test_hostile_choices_are_refused():
    codec = AutoCodec(2, MENU)
    payload = codec.encode(layers())
    payload[2] = len(MENU)
    with pytest.raises(ValueError):
        codec.decode(payload, SHAPES)
    payload[:5] = 0
    with pytest.raises(ValueError):
        codec.decode(payload, SHAPES)


def test_the_state_of_another_is_refused():
    codec = codec_named("auto:2")
    codec.encode(layers())
    for wrong in ({**codec.state_dict(), "choice": [99]}, codec_named("auto:3").state_dict(), {}):
        with pytest.raises(ValueError, match="the saved state is of the codec"):
            codec_named("auto:2").load_state_dict(wrong)
    for bits in (0, 33, float("nan")):
        with pytest.raises(ValueError, match="above 0 and up to 32"):
            AutoCodec(bits, MENU)


LOSSY = [INT8, E3M0, SIGN, TOPK2, FLOAT16, codec_named("auto:2")]
FED = [(64, 64), (300,), ()]
by_name = {"ids": lambda codec: codec.name}


def gradients(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator) for shape in FED] for _ in range(count)]


def send(codec, tensors):
    return codec.decode(codec.encode(tensors), FED)


def assert_close(actual, expected, atol=1e-5):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=atol)


@pytest.mark.parametrize("inner", LOSSY, **by_name)
@settings(max_examples=10)
@given(
    beta=st.sampled_from([1.0, 0.95, 0.5, 0.0]), seed=st.integers(0, 999), rounds=st.integers(1, 8)
)
def test_sent_values_and_residual_add_up_to_the_input(inner, beta, seed, rounds):
    codec = ErrorFeedback(inner.fresh(), beta)
    expected = [torch.zeros(shape, dtype=torch.float64) for shape in FED]
    for tensors in gradients(seed, rounds):
        sent = send(codec, tensors)
        # e_T = sum over s of beta^(T-1-s) (g_s - sent_s)
        expected = [
            beta * e + g.double() - q.double()
            for e, g, q in zip(expected, tensors, sent, strict=True)
        ]
    assert_close(codec.error, expected)


@pytest.mark.parametrize("inner", LOSSY, **by_name)
def test_feedback_recovers_what_was_meant(inner):
    """With feedback the mean of what is sent becomes what was meant."""
    codec, rounds = ErrorFeedback(inner.fresh()), 200
    (g,) = gradients(1, 1)
    total = [torch.zeros(shape) for shape in FED]
    for _ in range(rounds):
        total = [t + q for t, q in zip(total, send(codec, g), strict=True)]
    for t, e, x in zip(total, codec.error, g, strict=True):
        torch.testing.assert_close((t + e) / rounds, x, rtol=1e-4, atol=1e-5)
        assert (
            e.norm() < 70 * x.norm()
        )  # a 64th goes each round, so the residual holds no more than about 64 rounds


def test_first_round_is_the_plain_codec():
    """The first round is the plain codec and sizes are its own."""
    (g,) = gradients(3, 1)
    for inner in LOSSY:
        codec = ErrorFeedback(inner.fresh())
        payload = codec.encode(g)
        assert torch.equal(payload, inner.fresh().encode(g))
        assert payload.numel() == codec.nbytes(FED) == inner.nbytes(FED)


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
    assert all(
        torch.equal(a, b) for a, b in zip(before.pop("error"), after.pop("error"), strict=True)
    )
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
    for t in codec.decode(payload, FED):  # views into the payload
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
    assert [tuple(e.shape) for e in codec.error] == FED
    assert isinstance(codec.codec, AutoCodec)
    assert other.codec is not codec.codec
    with pytest.raises(
        ValueError, match=r"kept for 3 tensors of 4397 values, got 1 of 5: use fresh\(\)"
    ):
        codec.encode([torch.ones(5)])
    assert INT8.fresh() is INT8


def test_two_sided_feedback_loses_nothing_on_either_side():
    """The pattern of 1-bit Adam: peers send to a reducer, the reducer sends the mean back, each
    with its own residual.
    """
    peers, reducer, rounds = [codec_named("sign+ef") for _ in range(3)], codec_named("sign+ef"), 30
    meant = [torch.zeros(shape, dtype=torch.float64) for shape in FED]
    moved = [torch.zeros(shape, dtype=torch.float64) for shape in FED]
    for step in range(rounds):
        own = [gradients(100 * step + k, 1)[0] for k in range(3)]
        sent = [send(codec, g) for codec, g in zip(peers, own, strict=True)]
        mean = [torch.stack(parts).mean(0) for parts in zip(*sent, strict=True)]
        moved = [m + q for m, q in zip(moved, send(reducer, mean), strict=True)]
        meant = [
            m + torch.stack(parts).mean(0)
            for m, parts in zip(meant, zip(*own, strict=True), strict=True)
        ]
    residual = [
        torch.stack(parts).mean(0) for parts in zip(*(codec.error for codec in peers), strict=True)
    ]
    assert_close(
        [m + e + o for m, e, o in zip(moved, reducer.error, residual, strict=True)],
        meant,
        atol=1e-4,
    )


def test_wrong_use_is_explained():
    for beta in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"factor of error feedback must lie in \[0, 1\]"):
            ErrorFeedback(INT8, beta)
    with pytest.raises(ValueError, match="has error feedback already"):
        ErrorFeedback(codec_named("int8+ef"))
