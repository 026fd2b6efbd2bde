"""The averaged parameters by name, in the one order that all who count positions have."""

import copy

import pytest
import torch
from torch import nn

from shoal.optim import Alone, NoLoCo, StreamingDiLoCo, muon
from shoal.optim.codecs.registry import codec_named
from shoal.optim.parameters import AveragedParameters
from tests.support.outer_training import train


class Net(nn.Module):
    """A model whose matrices all have one shape, as its vectors do."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(3, 3)
        self.key = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, rows):
        return self.head(torch.tanh(self.query(rows)) + self.key(rows))


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


class Lightning(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net


NAMES = ("query.weight", "query.bias", "key.weight", "key.bias", "head.weight", "head.bias")


def net():
    torch.manual_seed(0)
    return Net()


def grouped(model):
    """Return an optimizer with decay and no-decay groups, the no-decay one first."""
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return torch.optim.AdamW(
        [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}], lr=0.1
    )


def compiled_inside(model):
    model.key = torch.compile(model.key)
    return model


@pytest.mark.parametrize("wrap", [lambda m: m, Wrapped, torch.compile, Lightning, compiled_inside])
def test_names_ignore_wrappers(wrap):
    """Names are those of the plain model however it is wrapped."""
    assert AveragedParameters.of(wrap(net())).names == NAMES


def test_tied_parameter_keeps_its_first_name():
    """A tied parameter has its first name and a frozen one none."""
    model = net()
    model.head.weight = model.key.weight
    model.query.bias.requires_grad_(False)
    found = AveragedParameters.of(model)
    assert found.names == ("query.weight", "key.weight", "key.bias", "head.bias")
    assert [id(p) for p in found] == [
        id(p) for p in (model.query.weight, model.key.weight, model.key.bias, model.head.bias)
    ]


@pytest.mark.parametrize("make", [grouped, muon], ids=["groups", "muon"])
def test_model_order_beats_group_order(make):
    """An optimizer that knows the model averages in its order whatever the groups."""
    model = net()
    opt = NoLoCo(make(model), Alone(), every=2, lag=0, model=model)
    assert opt.parameters.names == NAMES
    assert [id(p) for p in opt.parameters] == [id(p) for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(opt.slow, model.parameters(), strict=True))


def saved_in_the_order_of_groups(model, **options):
    opt = StreamingDiLoCo(
        grouped(model), Alone(), every=2, codec=codec_named("e3m0+ef"), lag=0, **options
    )
    train(model, opt, 5)
    return opt


@pytest.mark.parametrize("fragments", [1, 2])
def test_group_order_state_resumes_in_model_order(fragments):
    """Checkpoints of nodes were saved so: read by place, a weight would go on with another one's
    slow weights and residuals.
    """
    first = net()
    layers = [first.query, [first.key, first.head]] if fragments == 2 else 1
    before = saved_in_the_order_of_groups(first, fragments=layers)
    saved = copy.deepcopy(before.whole_state())
    second = net()
    second.load_state_dict(first.state_dict())
    layers = [second.query, [second.key, second.head]] if fragments == 2 else 1
    after = StreamingDiLoCo(
        grouped(second),
        Alone(),
        every=2,
        codec=codec_named("e3m0+ef"),
        lag=0,
        fragments=layers,
        model=second,
    )
    after.load_state_dict(saved)
    assert after.parameters.names == NAMES
    for model, opt in ((first, before), (second, after)):
        train(model, opt, 6, first=5)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    own = {
        id(parameter): slow for parameter, slow in zip(before.parameters, before.slow, strict=True)
    }
    for parameter, slow in zip(first.parameters(), after.slow, strict=True):
        assert torch.equal(own[id(parameter)], slow)


def test_moved_parameters_are_refused():
    """Torch's optimizers would load another weight's moments in silence."""
    one, two = net(), net()
    opt = NoLoCo(torch.optim.SGD(one.parameters(), lr=0.1), Alone(), lag=0, model=one)
    swapped = [two.key, two.query, two.head]
    inner = torch.optim.SGD([p for layer in swapped for p in layer.parameters()], lr=0.1)
    other = NoLoCo(inner, Alone(), lag=0, model=two)
    for state in (opt.whole_state(), opt.state_dict()):
        with pytest.raises(
            ValueError,
            match=r"number 2 of the inner optimizer's parameters was 'key.weight' when the state "
            r"was saved, and is 'query.weight'",
        ):
            other.load_state_dict(state)


def test_late_part_is_refused_and_named():
    """A second adapter stayed at 0, or was trained and averaged with nobody: the inner optimizer
    does not hold it.
    """
    model = net()
    opt = NoLoCo(torch.optim.SGD(model.parameters(), lr=0.1), Alone(), every=2, lag=0, model=model)
    train(model, opt, 3)
    model.adapter = nn.Linear(3, 3, bias=False)
    steps = opt.steps
    with pytest.raises(
        ValueError,
        match=r"the parameter 'adapter.weight', frozen or not there at first, is trained",
    ):
        train(model, opt, 4, first=3)
    assert opt.steps <= steps + 2
    model.adapter.requires_grad_(False)
    train(model, opt, 4, first=3)


def test_unfrozen_layer_outside_the_optimizer_is_seen():
    """A frozen layer of the model that the inner optimizer lacks is seen when it is unfrozen."""
    model = net()
    model.query.requires_grad_(False)
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    opt = NoLoCo(inner, Alone(), every=50, lag=0, model=model)
    train(model, opt, 2)
    model.query.requires_grad_(True)
    with pytest.raises(ValueError, match="frozen at first") as error:
        train(model, opt, 1, first=2)
    assert str(error.value) == (
        "the parameter 'query.weight', frozen at first, is trained now, and would never be "
        "averaged: on all peers, finish() and make a new outer optimizer after unfreezing or "
        "adding it, or freeze it again"
    )


def test_what_is_excluded_may_be_unfrozen():
    model = net()
    model.query.requires_grad_(False)
    opt = NoLoCo(
        torch.optim.SGD(model.parameters(), lr=0.1),
        Alone(),
        every=2,
        lag=0,
        model=model,
        exclude=["query"],
    )
    model.query.requires_grad_(True)
    train(model, opt, 4)
