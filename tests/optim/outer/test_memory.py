"""What an outer optimizer holds: nothing of the model's size but slow weights and the rule's state where it can be avoided."""

from functools import partial

import pytest
import torch

from shoal.optim import CO2, DiLoCo, NoLoCo, StreamingDiLoCo
from shoal.optim.exchange.base import Exchange, NoPartner, OnDemand


class Lender(Exchange):
    """Exchange that notes what it is lent."""

    def __init__(self):
        self.lent = []

    def start(self, contribution):
        assert isinstance(contribution.tensors, OnDemand)
        self.lent.append((contribution.tensors, [tensor.clone() for tensor in contribution.tensors]))
        return NoPartner()


def train(method, exchange, steps, dtype=torch.float32, **options):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(4, 3).to(dtype)), torch.nn.Parameter(torch.randn(5).to(dtype))]
    opt = method(torch.optim.SGD(weights, lr=0.1), exchange, every=2, **options)
    for step in range(steps):
        for weight in weights:
            weight.grad = torch.full_like(weight, 1.0 + step)
        opt.step()
    return opt, weights


def test_a_float32_parameter_is_its_own_staging():
    opt, weights = train(partial(NoLoCo, lag=0), Lender(), 2)
    assert [fast.data_ptr() for fast in opt._weights.fast] == [weight.data_ptr() for weight in weights]
    moved = [weight.data_ptr() for weight in weights]
    assert all(slow.data_ptr() not in moved for slow in opt.slow)


@pytest.mark.parametrize("change", [lambda w: w.bfloat16(), lambda w: w.t().contiguous().t()], ids=["dtype", "strides"])
def test_a_parameter_that_is_replaced_gets_staging_of_its_own(change):
    opt, weights = train(partial(NoLoCo, lag=0), Lender(), 1)
    with torch.no_grad():
        weights[0].data = change(weights[0].data)
    weights[0].grad = torch.ones_like(weights[0])
    opt.step()
    assert opt._weights.fast[0].data_ptr() != weights[0].data_ptr()
    assert opt._weights.fast[1].data_ptr() == weights[1].data_ptr()
    assert torch.equal(opt.slow[0].to(weights[0].dtype), weights[0])


@pytest.mark.parametrize("method", [partial(NoLoCo, lag=0), DiLoCo])
def test_what_waits_for_its_mean_is_lent_and_not_copied(method):
    exchange = Lender()
    opt, weights = train(method, exchange, 2)
    ours = {tensor.data_ptr() for tensor in (*opt.slow, *weights)}
    for lent, _ in exchange.lent:
        for item in lent._items:
            assert {tensor.data_ptr() for tensor in ([item] if isinstance(item, torch.Tensor) else item)} <= ours


@pytest.mark.parametrize(
    ("method", "options"),
    [(CO2, {}), (StreamingDiLoCo, {"fragments": 1, "lag": 1}), (NoLoCo, {"lag": 0}), (NoLoCo, {"lag": 1, "fragments": 1})],
)
def test_what_is_lent_stays_as_it_is_while_it_is_in_flight(method, options):
    class Slow(Lender):
        """Its rounds are checked when their outcome is asked for."""

        def start(self, contribution):
            super().start(contribution)
            lent, copies = self.lent[-1]
            handle = NoPartner()
            handle.result = lambda deadline=None: [self.same(lent, copies), None][1]
            return handle

        def same(self, lent, copies):
            assert all(torch.equal(a, b) for a, b in zip(lent, copies, strict=True))

    exchange = Slow()
    opt, _ = train(method, exchange, 8, **options)
    opt.finish()
    assert len(exchange.lent) == 4


def test_averaged_buffers_are_not_lent_while_training_changes_them():
    model, exchange = torch.nn.BatchNorm1d(3), Lender()
    opt = NoLoCo(torch.optim.SGD(model.parameters(), lr=0.1), exchange, every=2, fragments=1, lag=1, model=model, buffers="average")
    for step in range(3):
        model(torch.full((2, 3), float(step)) * torch.tensor([[1.0], [2.0]])).sum().backward()
        opt.step()
    ((lent, copies),) = exchange.lent
    assert not torch.equal(lent[-1], model.running_var)
    assert all(torch.equal(a, b) for a, b in zip(lent, copies, strict=True))
