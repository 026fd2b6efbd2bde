"""Optimizers that go back to earlier weights are told from those that go on from where a round has
moved the model.
"""

import copy
import random

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal.optim import Alone, NoLoCo
from shoal.optim.outer import probe
from shoal.optim.outer.probe import LEAST_LEFT, share_left
from tests.support.outer_state import by_path
from tests.support.outer_training import GoesBack, model, train, weights


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch):
    monkeypatch.setattr(probe, "_verdicts", probe.OrderedDict())


ORDINARY = {
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), weight_decay=0.1),
    "SGD": lambda net: torch.optim.SGD(
        net.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "fused": lambda net: torch.optim.AdamW(net.parameters(), fused=True),
    "rate in a tensor": lambda net: torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1)),
    "Muon": lambda net: torch.optim.Muon([p for p in net.parameters() if p.dim() == 2]),
    "Adafactor": lambda net: torch.optim.Adafactor(net.parameters()),
    "Rprop": lambda net: torch.optim.Rprop(net.parameters()),
    "two groups": lambda net: torch.optim.AdamW(
        [{"params": net[0].parameters(), "lr": 0.1}, {"params": net[2].parameters()}]
    ),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_optimizer_keeps_a_move(name):
    share = share_left(ORDINARY[name](model()))
    assert share is not None
    assert share > 0.99


class KeptFromTheStart(torch.optim.SGD):
    """Makes its state with itself, as pytorch_optimizer's Lookahead does, and steps from there."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = parameter.detach().clone()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]["kept"]
                kept -= group["lr"] * parameter.grad
                parameter.copy_(kept)


@pytest.mark.parametrize("kind", [GoesBack, KeptFromTheStart])
@pytest.mark.parametrize("rate", [0.0, 1e-6, 1.0])
def test_one_that_goes_back_is_told_at_any_rate(kind, rate):
    share = share_left(kind(model().parameters(), lr=rate))
    assert share is not None
    assert share < LEAST_LEFT


# Weights that come back: where they are kept, and how they do.


def _state_of_each(optimizer, parameters):
    return [optimizer.state[parameter] for parameter in parameters]


def _attribute(optimizer, parameters):
    if not hasattr(optimizer, "kept"):
        optimizer.kept = {parameter: {} for parameter in parameters}
    return [optimizer.kept[parameter] for parameter in parameters]


def _list_of_a_group(optimizer, parameters):
    group = optimizer.param_groups[0]
    group.setdefault("kept", [{} for _ in parameters])
    return group["kept"]


PLACES = [_state_of_each, _attribute, _list_of_a_group]


class Keeps(torch.optim.SGD):
    """SGD that keeps what a subclass does at ``place``, from the start or from its first step."""

    def __init__(self, parameters, place=_state_of_each, *, early=False):
        super().__init__(parameters, lr=0.1)
        self.place = place
        if early:
            self.each(self.keep)

    def each(self, do):
        parameters = self.param_groups[0]["params"]
        for parameter, kept in zip(parameters, self.place(self, parameters), strict=False):
            do(parameter, kept)

    @torch.no_grad()
    def step(self, closure=None):
        self.each(self.keep)
        super().step(closure)
        self.each(self.after)

    def keep(self, parameter, kept):
        kept.setdefault("weights", parameter.detach().clone())


class Pulled(Keeps):
    """Averages all weights so far, and goes back to the average a little in every step."""

    def after(self, parameter, kept):
        kept["weights"].lerp_(parameter, 0.1)
        parameter.lerp_(kept["weights"], 0.1)


class FromTheStart(Keeps):
    """Dual averaging: the first weights less the sum of all gradients, as MADGRAD and FTRL do."""

    def after(self, parameter, kept):
        total = kept.setdefault("total", torch.zeros_like(parameter))
        total += parameter.grad
        parameter.copy_(kept["weights"] - 0.1 * total)


class Extrapolates(Keeps):
    """Steps from weights in its state, and shows a mean of these and their average, as
    schedule-free ones do.
    """

    def after(self, parameter, kept):
        kept["weights"].sub_(parameter.grad, alpha=0.1)
        average = kept.setdefault("average", kept["weights"].clone())
        average.lerp_(kept["weights"], 0.1)
        parameter.copy_(torch.lerp(kept["weights"], average, 0.9))


@pytest.mark.parametrize("width", [4, 4 * probe.LONGEST_SIDE])
@pytest.mark.parametrize("early", [False, True], ids=["at its first step", "from the start"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [Pulled, FromTheStart, Extrapolates])
def test_weights_are_found_wherever_and_however_they_are_kept(kind, place, early, width):
    """Mutants, of which each fails some: only the state that steps made is tried (`keep_state`);
    what is kept of a large parameter beside the state is not cut, so that the copy takes no step;
    the displacement comes before the first step (`STEPS_BEFORE`), or shows after one
    (`STEPS_AFTER`).
    """
    net = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    with pytest.raises(ValueError, match=f"{kind.__name__} remembers earlier weights"):
        NoLoCo(kind(net.parameters(), place, early=early), Alone(), lag=0)


class Averages(Pulled):
    """Keeps an average for evaluation, and never goes back to it."""

    def after(self, parameter, kept):
        kept["weights"].lerp_(parameter, 0.1)


class Measures(Keeps):
    """Keeps the last weights, to say how far a step went."""

    def after(self, parameter, kept):
        self.moved = (parameter - kept["weights"]).norm()
        kept["weights"].copy_(parameter)


class InDouble(Keeps):
    """Steps in double, in weights of its own that it reads from the model before every step."""

    def keep(self, parameter, kept):
        kept["weights"] = parameter.detach().double()

    def after(self, parameter, kept):
        parameter.copy_(kept["weights"] - 0.1 * parameter.grad)


@pytest.mark.parametrize("width", [4, 4 * probe.LONGEST_SIDE])
@pytest.mark.parametrize("early", [False, True], ids=["at its first step", "from the start"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [Averages, Measures, InDouble])
def test_kept_weights_that_do_not_come_back_are_no_harm(kind, place, early, width, caplog):
    """Mutant: an optimizer is refused for weights in its state, whatever it does with them."""
    net = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    NoLoCo(kind(net.parameters(), place, early=early), Alone(), lag=0)
    assert not caplog.records


def test_one_inside_another_is_tried_too():
    """Mutant: the inside is shared with the real one, which is stepped, or has the real
    parameters.
    """

    class Around(torch.optim.Optimizer):
        def __init__(self, inside):
            self.inside = inside
            super().__init__(inside.param_groups, inside.defaults)
            self.param_groups = inside.param_groups

        def step(self, closure=None):
            return self.inside.step(closure)

    net = model()
    before = weights(net)
    assert share_left(Around(torch.optim.AdamW(net.parameters()))) > 0.99
    assert share_left(Around(GoesBack(net.parameters(), lr=0.1))) == pytest.approx(0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(net), strict=True))


def test_trying_changes_nothing_of_a_run_under_way():
    """Mutants: the schedule's `step` of the instance is called; a hook for all optimizers is;
    random numbers are drawn.
    """
    net = model()
    inner = torch.optim.AdamW(net.parameters(), lr=0.1)
    schedule = LambdaLR(inner, lambda step: 1.0)
    train(net, inner, 3)
    schedule.step()
    calls = []
    hook = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    inner.register_step_post_hook(lambda *_: calls.append(1))
    state, before = by_path(copy.deepcopy(inner.state_dict())), weights(net)
    gradients = [p.grad.clone() for p in net.parameters()]
    chance = torch.get_rng_state(), random.getstate()
    try:
        assert share_left(inner) > 0.99
    finally:
        hook.remove()
    assert not calls
    assert inner._opt_called
    assert torch.equal(chance[0], torch.get_rng_state())
    assert chance[1] == random.getstate()
    after = by_path(inner.state_dict())
    assert state.keys() == after.keys()
    assert all(
        torch.equal(a, after[key]) if isinstance(a, torch.Tensor) else a == after[key]
        for key, a in state.items()
    )
    assert all(torch.equal(a, b) for a, b in zip(before, weights(net), strict=True))
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, net.parameters(), strict=True))


class Counts(torch.optim.SGD):
    """Counts in its state, beside the parameters, as SPAM of pytorch_optimizer does."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.state["calls"] = 0

    def step(self, closure=None):
        self.state["calls"] += 1
        return super().step(closure)


def test_a_counter_in_the_state_is_no_parameter_s():
    inner = Counts(model().parameters(), lr=0.1)
    NoLoCo(inner, Alone(), lag=0)
    assert share_left(inner) > 0.99
    assert inner.state["calls"] == 0


def test_a_large_model_is_not_copied():
    layer = nn.Linear(1 << 14, 1 << 14, device="meta")
    small = probe.SmallCopy(torch.optim.AdamW(layer.parameters()), False)
    assert [tuple(p.shape) for p in small.parameters] == [(8, 8), (8,)]


class NeedsItsModel(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("no gradients but those of its own backward pass")


def test_one_that_cannot_be_tried_is_said_once_and_accepted(caplog):
    for _ in range(2):
        NoLoCo(NeedsItsModel(model().parameters(), lr=0.1), Alone(), lag=0)
    (record,) = caplog.records
    assert record.getMessage() == (
        "whether NeedsItsModel remembers earlier weights could not be tried, for a small copy of "
        "it takes no step: if its state holds weights, a round's move is lost"
    )


def test_a_verdict_is_of_the_settings():
    """Mutant: one verdict for a class."""

    class Sometimes(GoesBack):
        def __init__(self, params, lr, back):
            super().__init__(params, lr)
            self.back = back

        def step(self, closure=None):
            return super().step(closure) if self.back else torch.optim.SGD.step(self, closure)

    shares = [share_left(Sometimes(model().parameters(), 0.1, back)) for back in (False, True)]
    assert shares == pytest.approx([1, 0.5], rel=1e-3)
