import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.optim import BFLOAT16, E3M0, FLOAT32, INT8, SIGN, TOPK2, AutoCodec, codec_named
from shoal.optim.codecs.adaptive import allocate, greedy, total

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
    return min((total(errors, picks) for picks in every if total(sizes, picks) <= budget), default=None)


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=60, deadline=None)
@given(tables(largest=10**6))
def test_with_coarse_steps_it_fits_and_is_not_worse_than_greedy_or_uniform(case):
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


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=6), st.integers(0, 60))
def test_one_layer_gets_the_best_that_fits(options, budget):
    fitting = [error for error, size in options if size <= budget]
    assume(fitting)
    (pick,) = allocate([[e for e, _ in options]], [[s for _, s in options]], budget)
    assert options[pick][0] == min(fitting)


def test_greedy_is_optimal_for_the_size_it_uses():
    generator = torch.Generator().manual_seed(0)
    errors = torch.randint(0, 100, (5, 4), generator=generator).tolist()
    sizes = torch.randint(0, 100, (5, 4), generator=generator).tolist()
    for budget in range(int(sum(map(min, sizes))), 500, 7):
        picks = greedy(errors, sizes, budget)
        assert total(errors, picks) == best_by_trying_all(errors, sizes, total(sizes, picks))


def test_errors_that_are_no_numbers_are_refused():
    for bad in (float("nan"), -1.0):
        with pytest.raises(ValueError, match="errors must be numbers"):
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
    assert sent[0] == sent[3] == sent[4][::-1] != sent[4]  # what was measured is the next round's choice
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
    with pytest.raises(ValueError, match="names codec 6, there are 6"):
        codec.decode(payload, SHAPES)
    payload[:5] = 0
    with pytest.raises(ValueError, match="more bytes than it has"):
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
