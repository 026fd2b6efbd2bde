"""``after_inner`` is the rest of ``step``: the same weights, and it yields each exchange before it waits for it."""

import pytest
import torch

from shoal.optim import method_named
from shoal.optim.exchange.base import Exchange, Handle, Mean


class Halves(Exchange):
    """Exchange with a peer whose tensors are all 0; records starts and waits."""

    def __init__(self):
        self.events = []

    def start(self, contribution):
        self.events.append(("start", contribution.key.round))
        return _Half(self, contribution.key, [tensor.clone() for tensor in contribution.tensors])


class _Half(Handle):
    def __init__(self, exchange, key, tensors):
        self.exchange, self.key, self.tensors = exchange, key, tensors

    def done(self):
        return True

    def result(self, deadline=None):
        self.exchange.events.append(("result", self.key.round))
        return Mean([tensor / 2 for tensor in self.tensors], 2.0, ("a", "b"))


@pytest.mark.parametrize("method", ["noloco", "streaming", "co2"])
def test_it_is_the_rest_of_a_step(method):
    weights, events, wanted = [], [], []
    for whole in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
        inner, exchange = torch.optim.SGD(model.parameters(), lr=0.1), Halves()
        opt = method_named(method).make(inner, exchange, model=model, every=4)
        for _ in range(13):
            opt.zero_grad()
            model(torch.randn(5, 3)).square().mean().backward()
            if whole:
                opt.step()
                continue
            inner.step()
            for handle in opt.after_inner():
                assert ("result", handle.key.round) not in exchange.events
                wanted.append(handle.key.round)
        weights.append([param.detach().clone() for param in model.parameters()])
        events.append(exchange.events)
    assert events[0] == events[1]
    assert wanted == [round for what, round in events[1] if what == "result"]
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
