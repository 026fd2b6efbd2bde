"""Averaged buffers are those that the model has now: conversions and modules put other tensors in the place of the first."""

import pytest
import torch
from torch import nn

from shoal.optim import Alone, LocalSGD, Simulation


class Assigns(nn.Module):
    """Module that keeps its running mean by assignment and not in place."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("running", torch.zeros(3))

    def forward(self, inputs):
        self.running = 0.5 * self.running + inputs.mean(0)
        return inputs * self.weight


def norm():
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def converted(net):
    return net.to(torch.float64).to(torch.float32)


@pytest.mark.parametrize(
    ("make", "change", "name"),
    [(norm, converted, "1.running_mean"), (Assigns, lambda net: net, "running"), (norm, lambda net: net, "1.running_mean")],
    ids=["converted", "assigned", "in place"],
)
def test_peers_have_the_same_statistics_after_a_round_whichever_tensor_holds_them(make, change, name):
    def peer(exchange):
        torch.manual_seed(0)
        net = make()
        opt = LocalSGD(torch.optim.SGD(net.parameters(), lr=0.1), exchange, every=2, buffers="average", model=net, lag=0)
        change(net)
        own = torch.Generator().manual_seed(ord(exchange.peer))
        for _ in range(4):
            net(torch.randn(8, 3, generator=own)).square().mean().backward()
            if opt.steps == 3:
                before = net.get_buffer(name).clone()
            opt.step()
            opt.zero_grad()
        return before, net.get_buffer(name).clone()

    ends = Simulation(["a", "b"]).run(peer)
    before = [ends[name][0] for name in "ab"]
    assert not torch.equal(*before)
    for _, after in ends.values():
        torch.testing.assert_close(after, sum(before) / 2, rtol=0, atol=1e-6)


def test_a_buffer_that_changed_its_shape_is_named_before_anything_is_sent():
    net = Assigns()
    opt = LocalSGD(torch.optim.SGD(net.parameters(), lr=0.1), Alone(), every=1, buffers="average", model=net, lag=0)
    net.running = torch.zeros(4)
    with pytest.raises(ValueError, match=r"the averaged buffer 'running' is not of shape \(3,\) any more"):
        opt.step()
    assert opt.round == 0
