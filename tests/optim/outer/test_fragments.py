"""The cut into fragments is a property of the model: not of what wraps it, and none is far larger than the others."""

import pytest
import torch
from torch import nn

from shoal.optim import Alone, DecoupledDiLoCo, Simulation, StreamingDiLoCo, strided


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(5)])


class Holds(nn.Module):
    """As DistributedDataParallel, peft and many a training script hold a model; ``held`` may itself be wrapped."""

    def __init__(self, held):
        super().__init__()
        self.module = held


def cut(model, fragments):
    return [[id(p) for p in part] for part in strided(model, fragments)]


def sizes(parts):
    return [sum(p.numel() for p in part) for part in parts]


@pytest.mark.parametrize("fragments", [1, 2, 3, 4])
def test_a_wrapped_model_is_cut_as_the_plain_one(fragments):
    net = Net()
    plain = cut(net, fragments)
    compiled = torch.compile(net)
    assert next(compiled.named_parameters())[0].startswith("_orig_mod.")
    for wrapped in (compiled, Holds(net), Holds(Holds(compiled)), nn.Sequential(net), torch.nn.DataParallel(net)):
        assert cut(wrapped, fragments) == plain
    net.blocks[2] = torch.compile(net.blocks[2])
    assert cut(net, fragments) == plain


def test_a_list_of_layers_within_a_list_is_cut_too_and_a_block_of_several_modules_is_not():
    nested = nn.Sequential(nn.Embedding(20, 4), nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), nn.Linear(4, 7, bias=False))
    assert sizes(strided(nested, 4)) == [80 + 72, 2 * 72, 2 * 72, 72 + 28]
    assert [len(part) for part in strided(nn.Sequential(nn.Sequential(nested)), 4)] == [3, 4, 4, 3]
    net = Net()
    blocks = {id(p): name.split(".")[1] for name, p in net.named_parameters() if "blocks" in name}
    assert [{blocks[i] for i in part if i in blocks} for part in cut(net, 2)] == [{"0", "2", "4"}, {"1", "3"}]


@pytest.mark.parametrize("method", [StreamingDiLoCo, DecoupledDiLoCo])
def test_the_defaults_need_no_model_and_cut_evenly(method):
    net = Net()
    opt = method(torch.optim.SGD(net.parameters(), lr=0.1), Alone())
    count = len(list(net.parameters()))
    assert opt.fragments == (4 if method is StreamingDiLoCo else min(count, 24))
    own = sizes([opt.slow_of(fragment) for fragment in range(opt.fragments)])
    assert sum(own) == sum(p.numel() for p in net.parameters())
    if method is StreamingDiLoCo:
        assert max(own) - min(own) <= 16
        again = StreamingDiLoCo(torch.optim.SGD(Net().parameters(), lr=0.1), Alone(), lag=1)
        assert again._parts == opt._parts


def test_peers_that_cut_their_models_in_other_ways_get_one_sentence():
    def peer(exchange):
        net = Net()
        parts = strided(net, 2) if exchange.peer == "a" else list(reversed(strided(net, 2)))
        opt = StreamingDiLoCo(torch.optim.SGD(net.parameters(), lr=0.1), exchange, every=2, lag=0, fragments=parts)
        for _ in range(2):
            opt.step()

    sentence = r"peer b sends \d+ tensors in fragment 0 where peer a sends \d+ or other shapes: all must have the same model"
    with pytest.raises(ValueError, match=sentence):
        Simulation(["a", "b"]).run(peer)
