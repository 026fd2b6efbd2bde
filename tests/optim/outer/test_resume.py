"""What a saved state holds, and that one which does not fit changes nothing."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from shoal.optim import Alone, DiLoCo, Mean, NoLoCo, SparseLoCo, Tokens, codec_named
from shoal.optim.exchange.base import Handle

EVERY, STEPS = 3, 9


class Run:
    """One peer's training: a bfloat16 and a float32 part, AdamW, a scheduler, NoLoCo."""

    def __init__(self, exchange, width=4):
        torch.manual_seed(0)
        self.net = nn.ModuleList([nn.Linear(3, width, dtype=torch.bfloat16), nn.Linear(width, 2)])
        self.opt = NoLoCo(torch.optim.AdamW(self.net.parameters(), lr=0.05), exchange, every=EVERY, lag=0)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, STEPS)

    def train(self, first, last):
        for step in range(first, last):
            inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
            self.opt.zero_grad()
            self.net[1](self.net[0](inputs.bfloat16()).float().tanh()).square().mean().backward()
            self.opt.step()
            self.scheduler.step()


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


def trained(width=4, steps=4):
    run = Run(Alone(), width)
    run.train(0, steps)
    return run


def test_the_state_is_a_copy_of_the_outer_state():
    run = trained()
    state = run.opt.whole_state()
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

    state = copy.deepcopy(trained(steps=7).opt.whole_state())
    state["rule"]["momentum"][1] = torch.zeros(9)
    with pytest.raises(ValueError, match=r"'momentum' has shape \(9,\) at tensor 1, this model has \(4,\)"):
        run.opt.load_state_dict(state)
    state["rule"]["momentum"].pop()
    with pytest.raises(ValueError, match="'momentum' has 3 tensors, this model has 4"):
        run.opt.load_state_dict(state)
    assert equal(everything(run), before)

    state = copy.deepcopy(trained(steps=7).opt.whole_state())
    state["inner"]["param_groups"] *= 2
    with pytest.raises(ValueError, match="parameter group"):
        run.opt.load_state_dict(state)
    assert equal(everything(run), before)


class Echo(Alone):
    """Exchange whose mean is the own contribution as the codec sends it, so that the codec keeps a residual."""

    def start(self, mine):
        shapes = [tuple(tensor.shape) for tensor in mine.tensors]
        mean = Mean(mine.codec.decode(mine.codec.encode(mine.tensors), shapes), 1.0, ("a",))
        return type("Ready", (Handle,), {"done": lambda self: True, "result": lambda self, deadline=None: mean})()


def sparse(steps, codec="topk2+ef:0.95", inputs=300, make=SparseLoCo, **options):
    torch.manual_seed(0)
    net = nn.Linear(inputs, 2)
    inner = torch.optim.AdamW(net.parameters(), lr=0.05)
    opt = make(inner, Echo(), every=2, codec=codec_named(codec), length=Tokens(6), **options)
    for _ in range(steps):
        opt.zero_grad()
        net(torch.ones(1, inputs)).square().sum().backward()
        opt.count(3)
        opt.step()
    return opt


def all_of(opt):
    """Return copies of all that loading may change, the codec's residual included."""
    return copy.deepcopy([opt.state_dict(), opt.length.state_dict(), [codec.state_dict() for codec in opt._codecs]])


def put(name, value):
    def change(state):
        state[name] = value

    return change


def without(name):
    def change(state):
        del state[name]

    return change


SPOILT = {
    **{f"no {name}": (without(name), f"no '{name}', so it is not an outer optimizer's") for name in
       ("inner", "slow", "rule", "steps", "round")},
    "another codec": (lambda state: state["codecs"][0].update(codec="e3m0+ef"), "of the codec e3m0"),
    "a memory less": (put("codecs", [{}, {}]), "has 2 fragments, this optimizer 1"),
    "a residual of another shape": (lambda state: state["codecs"][0].update(error=[torch.zeros(3)]), "of other tensors than"),
    "a residual that is not finite": (lambda state: state["codecs"][0]["error"][0].fill_(math.nan), "NaN or infinity"),
    "two sent": (put("sent_at", [[0, 0], [0, 0]]), "has 2 fragments"),
    "two applied": (put("applied", [0, 0]), "has 2 fragments"),
    "rounding of nothing": (put("rounding", {9: torch.zeros(2)}), "'rounding' has 1 tensors, this model has 0"),
    "rounding of another shape": (put("rounding", {0: torch.zeros(9)}), r"'rounding' has shape \(9,\)"),
    "steps that are none": (put("steps", "many"), "invalid literal"),
    "tokens that are none": (put("tokens", "many"), "invalid literal"),
    "a length that is none": (put("length", {"began": "then"}), "invalid literal"),
    "another method": (put("rule", {"offset": []}), "has 'offset', which this method does not use"),
    "groups": (lambda state: state["inner"]["param_groups"].append({"params": []}), "parameter group"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "sentence"), SPOILT.values(), ids=SPOILT)
def test_a_state_that_does_not_fit_in_any_of_its_parts_changes_nothing(spoil, sentence):
    opt, state = sparse(4), sparse(9).whole_state()
    before = all_of(opt)
    spoil(state)
    with pytest.raises(ValueError, match=sentence):
        opt.load_state_dict(state)
    assert equal(all_of(opt), before)


def test_the_state_of_a_codec_with_memory_changes_nothing_in_one_without_and_the_other_way_round():
    for own, other in (("topk2+ef:0.95", "float32"), ("float32", "topk2+ef:0.95")):
        opt, state = sparse(4, own), sparse(9, other).state_dict()
        before = all_of(opt)
        with pytest.raises(ValueError, match="codec"):
            opt.load_state_dict(state)
        assert equal(all_of(opt), before)


def test_the_codec_goes_on_with_the_residual_that_was_saved():
    opt = sparse(0)
    opt.load_state_dict(sparse(9).state_dict())
    saved = sparse(9)._codecs[0].error
    assert any(tensor.any() for tensor in saved)
    assert equal(opt.codec.error, saved)


def test_a_state_of_other_settings_is_loaded_with_a_warning_that_names_those_that_are_not_restored():
    saved = sparse(9, "float32", make=partial(DiLoCo, lr=0.3, nesterov=False)).state_dict()
    opt = sparse(0, "float32", make=DiLoCo, lr=0.9)
    sentence = r"had nesterov False, this optimizer has nesterov True: these outer settings stay those of the constructor"
    with pytest.warns(UserWarning, match=sentence):
        opt.load_state_dict(saved)
    assert (opt.steps, opt.rule.nesterov, opt.outer.param_groups[0]["lr"]) == (9, True, 0.3)
    short = NoLoCo(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), Alone(), every=5, lr=0.3, lag=0)
    other = NoLoCo(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), Alone(), every=50, lr=0.9, lag=0)
    with pytest.warns(UserWarning, match=r"had Every\(every=5\), this optimizer has Every\(every=50\)"):
        other.load_state_dict(short.state_dict())


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
