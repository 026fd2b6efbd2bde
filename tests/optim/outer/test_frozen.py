"""What requires no gradient is neither kept nor sent, whatever the inner optimizer is given; the layout stays as it was made."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from shoal.optim import Alone, DecoupledDiLoCo, DiLoCo, NoLoCo, StreamingDiLoCo, strided
from shoal.swarm.training.session_setup import parameters_of


class Recording(Alone):
    def __init__(self):
        self.sent = []

    def start(self, contribution):
        self.sent.append([tensor.clone() for tensor in contribution.tensors])
        return super().start(contribution)


class Adapted(nn.Module):
    """A frozen matrix with a trained adapter of rank 2, as LoRA has it, and a frozen integer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.codes = nn.Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(2, 16)), nn.Parameter(torch.zeros(16, 2))

    def forward(self, inputs):
        return self.base(inputs) + inputs @ self.down.T @ self.up.T


def train(net, opt, steps):
    for step in range(steps):
        net(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        opt.count(4)
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("method", [partial(NoLoCo, lag=0), DiLoCo, partial(StreamingDiLoCo, lag=1, fragments=1)])
def test_only_the_adapter_is_sent_and_the_weights_are_those_of_an_optimizer_without_the_rest(method):
    every, few = Adapted(), Adapted()
    all_given = method(torch.optim.AdamW(every.parameters(), lr=0.01), recorded := Recording(), every=2)
    only = method(torch.optim.AdamW([few.down, few.up], lr=0.01), Alone(), every=2)
    train(every, all_given, 6)
    train(few, only, 6)
    assert [[tuple(tensor.shape) for tensor in sent] for sent in recorded.sent] == [[(2, 16), (16, 2)]] * 3
    assert [tensor.numel() for tensor in all_given.slow] == [32, 32]
    assert all(a is b for a, b in zip(all_given.parameters, [every.down, every.up], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(every.state_dict().values(), few.state_dict().values(), strict=True))


def test_what_is_unfrozen_later_is_refused_before_a_step_and_what_is_frozen_later_stays_in():
    net = Adapted()
    opt = NoLoCo(torch.optim.SGD(net.parameters(), lr=0.01), recorded := Recording(), every=1, lag=0)
    net.down.requires_grad_(False)
    train(net, opt, 1)
    net.base.weight.requires_grad_(True)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match="was frozen when the outer optimizer was made is trained now"):
        train(net, opt, 1)
    assert opt.steps == 1
    assert [len(sent) for sent in recorded.sent] == [2]
    assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True))


def test_a_plain_mean_is_of_the_parameter_that_was_named_behind_frozen_ones():
    net = Adapted()
    opt = DecoupledDiLoCo(torch.optim.SGD(net.parameters(), lr=0.01), Alone(), fragments=1, plain=[net.up], lag=2)
    assert opt.rule.plain == {(0, 1)}


def test_fragments_are_cut_from_what_is_trained():
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    net[:4].requires_grad_(False)
    assert [[id(p) for p in part] for part in strided(net, 2)] == [[id(p) for p in net[place].parameters()] for place in (4, 5)]


def test_a_session_averages_what_is_trained_of_a_module_and_of_a_list():
    net = Adapted()
    for state in (net, list(net.parameters())):
        assert [id(p) for p in parameters_of(state)] == [id(net.down), id(net.up)]
