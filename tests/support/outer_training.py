"""A small model, its training by inner and outer optimizers, and the comparison of what they send
and end with, bit by bit.
"""

from dataclasses import replace

import torch
from torch import nn

from shoal.optim import Alone, OuterOptimizer


class Recording(Alone):
    """Exchange without partners that notes each contribution, with its tensors as they are."""

    def __init__(self):
        self.sent = []

    def start(self, contribution):
        self.sent.append(
            replace(contribution, tensors=[tensor.clone() for tensor in contribution.tensors])
        )
        return super().start(contribution)


class GoesBack(torch.optim.SGD):
    """Every fifth step ends halfway back at where the fifth one before ended, as Lookahead's
    does.
    """

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["calls"] = state.get("calls", 0) + 1
                if state["calls"] % 5 == 0:
                    parameter.lerp_(state.get("earlier", parameter), 0.5)
                    state["earlier"] = parameter.clone()


def model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def split(net, lr=0.05):
    """Return Muon for the matrices and AdamW for the biases."""
    matrices, rest = (
        [p for p in net.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False)
    )
    return [torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(rest, lr=lr)]


def train(net, opt, steps, *, first=0, target=0.0, after=lambda: None):
    """Take steps, each on the six rows that follow from its number."""
    for step in range(first, first + steps):
        rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(step)).to(
            next(net.parameters()).dtype
        )
        opt.zero_grad()
        (net(rows) - target).square().mean().backward()
        if isinstance(opt, OuterOptimizer):
            opt.count(6)
        opt.step()
        after()


def weights(net):
    return [p.detach().clone() for p in net.parameters()]


def same(first, second):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(first, second, strict=True))
