"""Codecs that compress matrices alone: what is whole, what it costs, and where it is refused."""

import re
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.node.tasks.text import GPT
from shoal.optim import (
    SPARTA,
    Alone,
    Contribution,
    DiLoCo,
    NoLoCo,
    RoundKey,
    Simulation,
    codec_named,
    method_named,
)
from shoal.optim.codecs.buffer_tail import BufferTailCodec
from shoal.optim.codecs.floats import FLOAT32
from shoal.optim.codecs.partial import MARK_BYTES, PartialCodec, bound
from shoal.optim.layers import embeddings_and_outputs
from shoal.swarm.settings.outer import OuterSettings

INNER = ["bfloat16", "int8", "e3m0", "sign", "topk2", "topk2-senders", "topk2:0.1", "auto:4"]
SMALL = st.lists(st.integers(0, 9), max_size=3).map(tuple)
SHAPES = st.lists(SMALL | st.sampled_from([(64, 128), (5000,)]), min_size=1, max_size=5)


def drawn(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def padded(size):
    return -(-size // 4) * 4


@pytest.mark.parametrize("name", INNER)
@settings(max_examples=25)
@given(shapes=SHAPES, seed=st.integers(0, 2**16))
def test_vectors_are_exact_in_a_matrix_codec(name, shapes, seed):
    """Vectors are exact and matrices are as the codec gives them."""
    tensors = drawn(shapes, seed)
    codec, alone = codec_named(f"{name}+matrices"), codec_named(name)
    payload = codec.encode(tensors)
    decoded = codec.decode(payload, shapes)
    matrices = [tensor for tensor in tensors if tensor.ndim >= 2]
    cut = [tuple(matrix.shape) for matrix in matrices]
    expected = iter(alone.decode(alone.encode(matrices), cut))
    for tensor, found in zip(tensors, decoded, strict=True):
        assert torch.equal(found, tensor if tensor.ndim < 2 else next(expected))
    whole = sum(tensor.numel() for tensor in tensors if tensor.ndim < 2)
    assert payload.numel() == codec.nbytes(shapes)
    assert payload.numel() == padded(alone.nbytes(cut)) + 4 * whole + MARK_BYTES


def test_given_flags_count_and_not_shapes():
    """As of parameters of which a process has a flat part; two tensors a parameter repeat them."""
    tensors = drawn([(300,), (20, 20), (300,), (20, 20)])
    shapes = [tuple(tensor.shape) for tensor in tensors]
    codec = bound(codec_named("sign+hidden"), [False, True])
    decoded = codec.decode(codec.encode(tensors), shapes)
    assert [torch.equal(a, b) for a, b in zip(decoded, tensors, strict=True)] == [
        False,
        True,
        False,
        True,
    ]
    with pytest.raises(ValueError):
        codec.encode(tensors[:3])


def test_a_residual_of_what_is_whole_is_zero():
    codec = codec_named("sign+matrices+ef:0.5")
    tensors = drawn([(30, 30), (30,)])
    for _ in range(3):
        codec.encode(tensors)
        codec.accepted()
    matrix, vector = codec.state_dict()["error"]
    assert not vector.any()
    assert matrix.any()
    codec.encode(tensors)
    codec.rejected(tensors)  # applied in place of a mean: nothing of it is due
    matrix, vector = codec.state_dict()["error"]
    assert not vector.any()
    assert matrix.any()


def test_a_payload_of_other_flags_is_refused():
    tensors = drawn([(20, 20), (20, 20)])
    one, other = (bound(codec_named("int8+hidden"), flags) for flags in ([1, 0], [0, 1]))
    payload, shapes = one.encode(tensors), [(20, 20), (20, 20)]
    assert payload.numel() == other.nbytes(shapes)
    with pytest.raises(ValueError, match="sends other tensors whole"):
        other.decode(payload, shapes)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_in_vectors_too(value):
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        codec_named("int8+matrices").encode([torch.ones(3, 3), torch.tensor([1.0, value])])


@pytest.mark.parametrize("seed", range(3))
def test_a_fragment_of_vectors_alone_is_whole(seed):
    tensors = drawn([(7,), ()], seed)
    codec = codec_named("auto:2+matrices+ef")
    decoded = codec.decode(codec.encode(tensors), [(7,), ()])
    assert all(torch.equal(a, b) for a, b in zip(decoded, tensors, strict=True))


def test_names_are_canonical_and_parsed_again():
    for name in ("sign+matrices", "topk2:0.1+hidden+ef:0.95", "auto:2+matrices+ef"):
        assert codec_named(name).name == name
        assert codec_named(name).fresh().name == name
    for name in ("sign+ef+matrices", "sign+matrices+hidden", "sign+vectors", "+matrices"):
        with pytest.raises(ValueError, match="unknown codec"):
            codec_named(name)


@pytest.mark.parametrize("scope", ["matrices", "hidden"])
@pytest.mark.parametrize("name", ["mod4", "float32"])
def test_it_is_refused_where_it_cannot_work(name, scope):
    with pytest.raises(ValueError, match=re.escape(f": leave out +{scope}")) as caught:
        codec_named(f"{name}+{scope}")
    assert str(caught.value) in {
        f"mod4 is read by the partner's own weights, all tensors alike: leave out +{scope}",
        f"float32 sends all tensors whole already: leave out +{scope}",
    }


def test_a_method_that_mixes_all_parameters_takes_none():
    weight = nn.Parameter(torch.ones(2, 2))
    codec = codec_named("int8+matrices")
    with pytest.raises(ValueError, match=r"without \+matrices"):
        SPARTA(torch.optim.SGD([weight]), Alone(), codec=codec)
    with pytest.raises(ValueError, match=r"without \+matrices"):
        OuterSettings(method="sparta", codec="int8+matrices")
    method_named("noloco").check_codec(codec)


def test_a_state_goes_on_where_it_was_saved():
    tensors = drawn([(40, 40), (40,)])
    codec, again = codec_named("auto:2+matrices+ef"), codec_named("auto:2+matrices+ef")
    codec.encode(tensors)
    codec.accepted()
    again.load_state_dict(codec.state_dict())
    assert torch.equal(codec.encode(tensors), again.encode(tensors))
    with pytest.raises(ValueError, match="is of the codec"):
        codec_named("auto:2+ef").load_state_dict(codec.state_dict())


class Recorded(Alone):
    """Exchange without partners that notes which tensors arrive bit by bit as they were sent."""

    def __init__(self):
        super().__init__()
        self.whole = []

    def start(self, contribution):
        tensors = list(contribution.tensors)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        decoded = contribution.codec.decode(contribution.codec.encode(tensors), shapes)
        self.whole.append([torch.equal(a, b) for a, b in zip(decoded, tensors, strict=True)])
        return super().start(contribution)


def sent_whole(model, optimizer, codec):
    exchange = Recorded()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = optimizer(inner, exchange, every=1, model=model, codec=codec_named(codec))
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(number)
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    opt.step()
    return exchange.whole


class Flat(nn.Module):
    """An embedding of which the parameters are handed in by no module."""

    def __init__(self):
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9)


def test_an_optimizer_knows_embeddings_and_outputs_of_its_model():
    """The parameters are table, body and head with a vector each."""
    assert sent_whole(Flat(), DiLoCo, "e3m0+matrices") == [[False, False, True, False, True]]
    assert sent_whole(Flat(), DiLoCo, "e3m0+hidden") == [[True, False, True, True, True]]
    twice = sent_whole(Flat(), partial(NoLoCo, lag=0, weight=2.0, pull=0.5), "int8+hidden")
    assert twice == [[True, False, True, True, True] * 2]


def test_each_fragment_has_flags_of_its_own():
    model = Flat()
    fragments = [
        [model.body.weight, model.head.bias],
        [model.table, model.body.bias, model.head.weight],
    ]
    opt = DiLoCo(
        torch.optim.SGD(model.parameters(), lr=0.1),
        Alone(),
        model=model,
        codec=codec_named("e3m0+hidden+ef"),
    )
    assert opt.codec.codec.whole == (True, False, True, True, True)
    streaming = method_named("streaming").make(
        torch.optim.SGD(model.parameters(), lr=0.1),
        Alone(),
        model=model,
        codec=codec_named("e3m0+hidden+ef"),
        fragments=fragments,
    )
    whole = [streaming._fragments[fragment].codec.codec.whole for fragment in range(2)]
    assert whole == [(False, True), (True, True, True)]
    assert streaming._fragments[0].codec is not streaming._fragments[1].codec


def test_without_a_model_nobody_knows_which_are_embeddings():
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"hand in model=, or choose \+matrices"):
        DiLoCo(torch.optim.SGD([weight]), Alone(), codec=codec_named("sign+hidden+ef"))
    DiLoCo(torch.optim.SGD([weight]), Alone(), codec=codec_named("sign+matrices+ef"))


def test_embeddings_and_outputs_of_a_transformer():
    model = GPT(layers=2, width=16, heads=2, context=8)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {names[id(parameter)] for parameter in embeddings_and_outputs(model)}
    assert found
    assert not [name for name in found if name.startswith("blocks.")]
    convolutions = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 4), nn.Linear(4, 2))
    assert embeddings_and_outputs(convolutions) == set(convolutions[3].parameters())


def test_vectors_beside_the_mean_by_senders_have_the_plain_one():
    def peer(exchange):
        value = {"a": 2.0, "b": 8.0}[exchange.peer]
        matrix, vector = torch.tensor([[value, 0.0]]), torch.tensor([value, 0.0])
        codec = BufferTailCodec(codec_named("topk2-senders+matrices+ef"), 1)
        contribution = Contribution(RoundKey("run", 0), [vector, matrix, vector], 1.0, codec)
        mean = exchange.start(contribution).result()
        return [tensor.tolist() for tensor in mean.tensors]

    found = Simulation(["a", "b"]).run(peer).values()
    assert list(found) == [[[5.0, 0.0], [[2.0, 0.0]], [5.0, 0.0]]] * 2


def test_the_payload_of_a_tail_follows_it():
    codec = BufferTailCodec(PartialCodec(codec_named("sign"), "matrices"), 1)
    tensors = drawn([(5, 5), (3,), (4,)])
    shapes = [(5, 5), (3,), (4,)]
    payload = codec.encode(tensors)
    assert payload.numel() == codec.nbytes(shapes) == padded(4 + 4) + 12 + MARK_BYTES + 16
    assert torch.equal(payload[-16:], FLOAT32.encode(tensors[2:]))
    assert torch.equal(codec.decode(payload, shapes)[1], tensors[1])
