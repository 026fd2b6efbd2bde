"""A float64 model keeps float64 weights: float32 is what travels, and what no partner sent is not rounded to it."""

import pytest
import torch
from torch import nn

from shoal.optim import METHODS, Alone, DiLoCo, Simulation

KEEPS = {  # knobs with which a round without a partner changes no weight, or keeps exactly what was learnt
    "noloco": {"lr": 1.0, "momentum": 0.0, "lag": 0},
    "local": {"lag": 0},
    "gasloc": {"lr": 1.0, "momentum": 0.0, "lag": 0},
    "diloco": {"lr": 1.0, "momentum": 0.0},
    "streaming": {"lr": 1.0, "momentum": 0.0, "fragments": 2, "lag": 0, "mix": 0.0},
    "decoupled": {"lr": 1.0, "momentum": 0.0, "fragments": 2, "lag": 0},
    "eager": {"lr": 1.0, "momentum": 0.0},
    "co2": {"lr": 1.0, "momentum": 0.0, "penalty": 1.0, "clip": None, "keep": True},
    "sparta": {"part": 0.5},
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def train(net, opt, steps, seed=0):
    for step in range(steps):
        opt.zero_grad()
        inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(100 * seed + step), dtype=torch.float64)
        net(inputs).square().mean().backward()
        if hasattr(opt, "count"):
            opt.count(6)
        opt.step()


@pytest.mark.parametrize("method", KEEPS)
def test_without_a_partner_training_ends_where_the_inner_optimizer_alone_ends(method):
    plain, wrapped = model(), model()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 8)
    opt = METHODS[method].make(torch.optim.SGD(wrapped.parameters(), lr=0.1), Alone(), every=2, model=wrapped, **KEEPS[method])
    train(wrapped, opt, 8)
    opt.finish()
    assert {tensor.dtype for tensor in (*opt.slow, *wrapped.parameters())} == {torch.float64}
    for found, expected in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)  # float32 rounds by 1e-8


def test_with_lr_0_a_weight_keeps_all_its_bits():
    net = model()
    before = [p.detach().clone() for p in net.parameters()]
    opt = DiLoCo(torch.optim.SGD(net.parameters(), lr=0.1), Alone(), every=2, lr=0.0)
    train(net, opt, 4)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("method", KEEPS)
def test_partners_are_sent_float32(method):
    sent = set()

    def peer(exchange):
        start = exchange.start

        def noting(contribution):
            sent.update(tensor.dtype for tensor in contribution.tensors)
            return start(contribution)

        exchange.start = noting
        net = model()
        opt = METHODS[method].make(torch.optim.SGD(net.parameters(), lr=0.1), exchange, every=2, model=net, **KEEPS[method])
        train(net, opt, 6, seed=ord(exchange.peer))
        opt.finish(average=True)
        return [p.detach() for p in net.parameters()]

    ends = Simulation(["a", "b"]).run(peer)
    assert sent == {torch.float32}
    for a, b in zip(ends["a"], ends["b"], strict=True):
        assert a.dtype == torch.float64
        assert torch.equal(a, b)


def test_a_float32_parameter_beside_a_float64_one_is_not_rounded_either():
    parts = [nn.Parameter(torch.rand(3, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    before = [p.detach().clone() for p in parts]
    opt = METHODS["sparta"].make(torch.optim.SGD(parts, lr=0.1), Alone(), every=1, part=1.0)
    opt.step()
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(parts, before, strict=True))
