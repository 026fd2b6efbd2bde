"""Which models may be averaged with each other, and what is said of two that may not."""

import zlib

import pytest
import torch
from torch import nn

from shoal.optim.parameters import AveragedParameters
from shoal.swarm.errors import MessageError
from shoal.swarm.exchange.contribution import Outline, model_digest
from shoal.swarm.state.query import ModelDiffersError, StateQuery
from shoal.swarm.state.snapshot import nothing
from shoal.swarm.training.session_setup import parameters_of
from shoal.swarm.wire.envelope import MAX_NAMES, pack, pack_names, unpack, unpack_names
from shoal.swarm.wire.messages import StateHeader, StateRequest


def attention(*names, out=4):
    return nn.ModuleDict({name: nn.Linear(4, out, bias=False) for name in names})


def outline(model):
    return Outline.of(parameters_of(model))


def test_equal_shapes_in_another_order_are_another_model():
    """q was averaged with k: the digest was of types and shapes alone."""
    assert model_digest(parameters_of(attention("q", "k"))) != model_digest(
        parameters_of(attention("k", "q"))
    )
    assert model_digest(parameters_of(attention("q", "k"))) == model_digest(
        parameters_of(torch.compile(attention("q", "k")))
    )


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        (
            attention("q", "k"),
            attention("k", "q"),
            "parameter 0 is 'q.weight' here and 'k.weight' there, the same names in another order",
        ),
        (
            attention("q", "k"),
            attention("q", "key"),
            "parameter 1 is 'k.weight' here and 'key.weight' there",
        ),
        (
            attention("q", "k"),
            attention("q", "k", "v"),
            "the model has 2 parameters here and 3 there: 'v.weight' is only there",
        ),
        (
            attention("q", "k", out=4),
            attention("q", "k", out=5),
            "'q.weight' has shape [4, 4] here and [5, 4] there",
        ),
        (
            attention("q"),
            list(attention("q").parameters()),
            "the parameters have names here and none there, where a list of them is averaged in "
            "place of a module",
        ),
        (
            list(attention("q").parameters()),
            attention("q"),
            "the parameters have names there and none here, where a list of them is averaged in "
            "place of a module",
        ),
        (
            list(attention("q").parameters()),
            list(attention("q", out=5).parameters()),
            "tensor 0 has shape [4, 4] here and [5, 4] there",
        ),
        (attention("q", "k"), attention("q", "k"), None),
    ],
)
def test_the_first_difference_is_named(mine, theirs, said):
    assert outline(mine).differs(outline(theirs)) == said


def test_without_names_only_shapes_are_compared():
    assert Outline((), ((4, 4),)).differs(outline(attention("q"))) is None


def test_a_newcomer_is_told_which_parameter_is_called_what():
    own, theirs = outline(attention("q", "k")), outline(attention("k", "q"))
    header = unpack(pack(nothing(theirs.shapes, pack_names(theirs.names))), StateHeader)
    query = StateQuery(StateRequest(swarm="a" * 52, model="0" * 64), own.shapes, names=own.names)
    with pytest.raises(ModelDiffersError) as error:
        query.check("12D3KooW", header)
    assert str(error.value) == (
        "This node's model does not fit the swarm: parameter 0 is 'q.weight' here and 'k.weight' "
        "there, the same names in another order (in the swarm); use the swarm's model, task and "
        "options."
    )


def test_names_are_packed_small_and_unpacked_within_bounds():
    many = [f"layers.{n}.experts.{m}.down.weight" for n in range(64) for m in range(512)]
    packed = pack_names(many)
    assert unpack_names(packed) == tuple(many)
    assert len(packed) < MAX_NAMES
    assert pack_names(["x" * 9_000_000]) == b""
    assert unpack_names(pack_names(["a\nb"])) == ("a?b",)


@pytest.mark.parametrize("wrong", [
    b"junk", pack_names(["a"])[:-4], zlib.compress(b"a" * 9_000_000), zlib.compress(b"\xff"),
])  # fmt: skip
def test_wrong_names_are_refused_without_unpacking_more(wrong):
    with pytest.raises(MessageError, match="names of the parameters"):
        unpack_names(wrong)


def test_dtype_and_shape_are_part_of_a_digest():
    one = attention("q")
    found = {
        model_digest(AveragedParameters.of(model))
        for model in (one, attention("q").to(torch.bfloat16), attention("q", out=5))
    }
    assert len(found) == 3
