"""Sessions whose optimizers group the parameters otherwise."""

from functools import partial

import pytest
import torch

import shoal
from shoal.optim import DiLoCo, NoLoCo, StreamingDiLoCo
from tests.support.session_loops import (
    EVERY,
    HERE,
    decayed,
    loop,
    several,
    sgd,
    simulated,
    square,
    together,
    trained,
)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("settings", [{"lag": 0}, {"lag": 0, "fragments": 2}, {"method": "diloco"}])
def test_grouping_does_not_change_the_average(settings, frozen):
    """It catches parameters that are sent in the order of an optimizer's groups: their shapes are
    equal here.
    """
    first = shoal.create(
        state=(begin := square(0, frozen)),
        every=EVERY,
        codec="float32",
        **settings,
        start_when=2,
        network=HERE,
    )
    link, other = first.link, square(7, frozen)
    make = DiLoCo if "method" in settings else partial(NoLoCo, **settings)
    if frozen:
        other[0].weight.data.copy_(begin[0].weight)
    found = together(
        lambda: trained(first, lambda s: make(decayed(begin), s.exchange(), every=EVERY), begin, 1),
        lambda: trained(
            shoal.join(link, state=other, network=HERE),
            lambda s: s.optimizer(several(other)),
            other,
            2,
        ),
    )
    wanted = simulated(
        lambda module, exchange: make(
            sgd(module), exchange, every=EVERY, **{} if make is DiLoCo else {"model": module}
        ),
        lambda: square(0, frozen),
    )
    for mine, theirs in zip(found, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_group_order_resumes_in_model_order():
    """It catches state that is kept by place in the session's order and read in that of another
    exchange.
    """
    net = square(0).to(torch.bfloat16)
    with shoal.create(
        state=net,
        method="streaming",
        every=4,
        fragments=2,
        codec="e3m0+ef",
        lag=1,
        network=HERE,
        wait_s=0.2,
        finish="none",
    ) as s:
        opt = s.optimizer(decayed(net))
        loop(opt, net, 1, steps=4 * EVERY - 1)
        parts = [
            [opt.parameters[at] for at in opt.positions(fragment)]
            for fragment in range(opt.fragments)
        ]
        saved, model_saved = (
            opt.state_dict(),
            {name: value.clone() for name, value in net.state_dict().items()},
        )
        other = square(3).to(torch.bfloat16)
        place = dict(zip(net.parameters(), other.parameters(), strict=True))
        other.load_state_dict(model_saved)
        alike = [[place[p] for p in part] for part in parts]
        again = StreamingDiLoCo(
            decayed(other), shoal.Alone(), every=4, fragments=alike, codec=opt.codec.fresh(), lag=1
        )
        again.load_state_dict(saved)
        order = [[id(p) for p in other.parameters()].index(id(p)) for p in again.parameters]
        assert order != sorted(order)
        for one, module in ((opt, net), (again, other)):
            loop(one, module, 2, steps=3 * EVERY)
            one.finish()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(again.slow[at], opt.slow[place]) for at, place in enumerate(order))
    again.load_state_dict(opt.whole_state())
    whole = again.whole_state()
    assert whole["order"] == [*range(len(order))] != opt.whole_state()["order"]
    assert all(torch.equal(whole["slow"][at], opt.slow[place]) for at, place in enumerate(order))
    errors = opt.whole_state()["rounding"]
    assert all(
        torch.equal(whole["rounding"][at], errors[place])
        for at, place in enumerate(order)
        if place in errors
    )
