"""The bytes of a round that the plan and the public listing state are those that codecs make."""

import pytest
import torch
from torch import nn

from shoal.node.plan.rows import ModelTensors, work_of
from shoal.optim import METHODS, Alone, codec_named
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.training.factories import make_outer

CODECS = {
    "pair": ["float32", "bfloat16", "int8", "mod4"],
    "everyone": [
        "float32",
        "int8",
        "int8+matrices",
        "int8+hidden+ef",
        "e3m0+hidden",
        "sign+hidden+ef",
        "topk2+matrices",
    ],
}


class Mixed(nn.Module):
    """A model of an embedding, two hidden matrices with biases, a norm and an untied output."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(301, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24)) for _ in range(2)
        )
        self.output = nn.Linear(24, 301, bias=False)


class Encoding(Alone):
    """An exchange without partners that counts the bytes of each payload."""

    def __init__(self):
        self.sent = []

    def start(self, contribution):
        self.sent.append(contribution.codec.encode(contribution.tensors).numel())
        return super().start(contribution)


def bytes_sent(outer, model):
    """Return the bytes that the codec makes of the model in one round."""
    exchange = Encoding()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = make_outer(outer, inner, exchange, model=model, slow_device="cpu")
    for _ in range(2 * (outer.every or 1)):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        opt.count(1)
        opt.step()
    return exchange.sent[0]


def as_one(name, **settings):
    """Return settings of a round of two steps in which the model is sent as one."""
    if METHODS[name].schedule == "overlaps":
        settings["fragments"] = 1
    if "every" in METHODS[name].knobs:
        settings["every"] = 2
    return OuterSettings(method=name, **settings).resolved()


def possible():
    """Yield each method with the codecs that it may have."""
    for method in METHODS.values():
        for codec in CODECS.get(method.group, []):
            try:
                method.check_codec(codec_named(codec))
            except ValueError:
                continue
            yield method.name, codec


@pytest.mark.parametrize(("name", "codec"), list(possible()))
def test_stated_bytes_are_those_encoded(name, codec):
    model = Mixed()
    outer = as_one(name, codec=codec)
    tensors = ModelTensors.of(list(model.parameters()), model)
    stated = work_of(outer, tensors, peers=2, step_s=1.0).nbytes
    assert stated == bytes_sent(outer, model)


def test_weighted_pairs_send_two_tensors_a_parameter():
    model = Mixed()
    outer = as_one("noloco", codec="float32", weights="tokens")
    tensors = ModelTensors.of(list(model.parameters()), model)
    stated = work_of(outer, tensors, peers=2, step_s=1.0).nbytes
    assert stated == bytes_sent(outer, model) == 2 * 4 * tensors.params


def test_whole_embeddings_count_in_the_bytes():
    """Of this model most values are embeddings, which +hidden sends as float32."""
    model = Mixed()
    tensors = ModelTensors.of(list(model.parameters()), model)
    outer = as_one("diloco", codec="int8+hidden")
    as_matrix = work_of(outer, ModelTensors.of_count(tensors.params), peers=2, step_s=1.0)
    stated = work_of(outer, tensors, peers=2, step_s=1.0)
    assert stated.nbytes > 3 * as_matrix.nbytes
