"""Saved and loaded at any inner step, training goes on bit-identically; what does not fit changes nothing."""

import copy
import io

import pytest
import torch
from torch import nn

from shoal.optim import Alone, NoLoCo, Simulation

PEERS, EVERY, STEPS = ["a", "b", "c"], 3, 9


class Run:
    """One peer's training: a bfloat16 and a float32 part, AdamW, a scheduler, NoLoCo."""

    def __init__(self, exchange, width=4):
        torch.manual_seed(0)
        self.net = nn.ModuleList([nn.Linear(3, width, dtype=torch.bfloat16), nn.Linear(width, 2)])
        self.opt = NoLoCo(torch.optim.AdamW(self.net.parameters(), lr=0.05), exchange, every=EVERY)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, STEPS)
        self.exchange = exchange

    def train(self, first, last):
        for step in range(first, last):
            generator = torch.Generator().manual_seed(1000 * PEERS.index(self.exchange.peer) + step)
            inputs = torch.randn(6, 3, generator=generator)
            self.opt.zero_grad()
            self.net[1](self.net[0](inputs.bfloat16()).float().tanh()).square().mean().backward()
            self.opt.step()
            self.scheduler.step()

    def save(self):
        file = io.BytesIO()
        torch.save([self.net.state_dict(), self.opt.state_dict(), self.scheduler.state_dict()], file)
        return file.getvalue()

    def load(self, saved):
        net, opt, scheduler = torch.load(io.BytesIO(saved), weights_only=True)
        self.net.load_state_dict(net)
        self.opt.load_state_dict(opt)
        self.scheduler.load_state_dict(scheduler)
        return self


def flat(value):
    """Return every tensor and number in a nested state, in order."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in flat(value[key])]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in flat(item)]
    return [value]


def equal(first, second):
    first, second = flat(first), flat(second)
    return len(first) == len(second) and all(
        a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(first, second, strict=True)
    )


def everything(run):
    return copy.deepcopy([run.net.state_dict(), run.opt.state_dict(), run.opt.param_groups, run.opt.state])


@pytest.mark.parametrize("at", range(STEPS + 1))
def test_resumes_bit_identically_at_any_inner_step(at):
    def straight(exchange):
        run = Run(exchange)
        run.train(0, STEPS)
        return everything(run)

    def until(exchange):
        run = Run(exchange)
        run.train(0, at)
        return run.save()

    saved = Simulation(PEERS, seed=1).run(until)

    def onwards(exchange):
        run = Run(exchange).load(saved[exchange.peer])
        assert run.opt.param_groups is run.opt.inner.param_groups
        assert run.opt.state is run.opt.inner.state
        run.train(at, STEPS)
        return everything(run)

    assert equal(Simulation(PEERS, seed=1).run(onwards), Simulation(PEERS, seed=1).run(straight))


def trained(width=4, steps=4):
    exchange = Alone()
    exchange.peer = "a"
    run = Run(exchange, width)
    run.train(0, steps)
    return run


def test_the_state_is_a_copy_of_the_outer_state():
    run = trained()
    state = run.opt.state_dict()
    kept = copy.deepcopy([state["slow"], state["rule"]])
    run.train(4, 9)
    assert equal(kept, [state["slow"], state["rule"]])
    run.opt.load_state_dict(state)
    run.train(4, 9)
    assert equal(kept, [state["slow"], state["rule"]])


def test_other_shapes_change_nothing_and_the_difference_is_named():
    run, other = trained(), trained(width=5, steps=7)
    before = everything(run)
    with pytest.raises(ValueError, match=r"^the saved outer state 'slow' has shape \(5, 3\) at tensor 0, this model has \(4, 3\)$"):
        run.opt.load_state_dict(other.opt.state_dict())
    assert equal(everything(run), before)

    state = copy.deepcopy(trained(steps=7).opt.state_dict())
    state["rule"]["momentum"][1] = torch.zeros(9)
    with pytest.raises(ValueError, match=r"'momentum' has shape \(9,\) at tensor 1, this model has \(4,\)"):
        run.opt.load_state_dict(state)
    state["rule"]["momentum"].pop()
    with pytest.raises(ValueError, match="'momentum' has 3 tensors, this model has 4"):
        run.opt.load_state_dict(state)
    assert equal(everything(run), before)

    state = copy.deepcopy(trained(steps=7).opt.state_dict())
    state["inner"]["param_groups"] *= 2
    with pytest.raises(ValueError, match="parameter group"):
        run.opt.load_state_dict(state)
    assert equal(everything(run), before)


def test_a_joiner_adopts_slow_weights_and_round_or_nothing():
    run, swarm = trained(), trained(steps=7)
    before = everything(run)
    with pytest.raises(ValueError, match=r"has shape \(5, 3\) at tensor 0, this model has \(4, 3\)"):
        run.opt.adopt(trained(width=5).opt.slow, round=5, into_model=True)
    assert equal(everything(run), before)
    run.opt.adopt(swarm.opt.slow, round=5)
    assert equal(run.opt.slow, swarm.opt.slow)
    assert run.opt.round == 5
    assert equal(run.net.state_dict(), before[0])
    run.opt.adopt(swarm.opt.slow, round=5, into_model=True)
    assert all(torch.equal(p, slow.to(p.dtype)) for p, slow in zip(run.net.parameters(), swarm.opt.slow, strict=True))
    swarm.opt.slow[0].zero_()
    assert run.opt.slow[0].any()
