"""torch.distributed.checkpoint in one process: names for numbers, a new optimizer as a template, and all restored exactly."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from shoal.optim import METHODS, Alone, DiLoCo, Mean, NoLoCo, SparseLoCo, codec_named, method_named
from shoal.optim.exchange.base import Handle

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")


def make(name="diloco", seed=0, dtype=torch.float32, inner=torch.optim.AdamW, **options):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)).to(dtype)
    net[2].weight.requires_grad_(False)
    if "fragments" in METHODS[name].knobs:
        options.setdefault("fragments", 2)
        options.setdefault("lag", {"streaming": 1, "decoupled": 2}.get(name, 0))
    every = 4 if METHODS[name].knobs["every"] > 4 else 1
    opt = method_named(name).make(inner(net.parameters(), lr=0.05), Alone(), every=every, model=net, exclude=["3.bias"], **options)
    return net, opt


def learn(net, opt, steps, first=0):
    for step in range(first, first + steps):
        opt.zero_grad()
        rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(step)).to(next(net.parameters()).dtype)
        net(rows).square().mean().backward()
        opt.count(6)
        opt.step()


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def flat(value):
    if isinstance(value, dict):
        return {f"{key}/{path}": leaf for key, part in value.items() for path, leaf in flat(part).items()}
    if isinstance(value, list | tuple):
        return flat(dict(enumerate(value)))
    return {"": value}


def equal(first, second):
    one, two = flat(first), flat(second)
    return one.keys() == two.keys() and all(
        torch.equal(one[path], two[path]) if isinstance(one[path], torch.Tensor) else one[path] == two[path] for path in one
    )


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded_into_a_new_optimizer_it_goes_on_to_the_same_bits(name, dtype, tmp_path):
    net, opt = make(name, dtype=dtype)
    learn(net, opt, 9)
    opt.finish()
    weights, state = get_state_dict(net, opt)
    assert set(state["state"]) == {"0.weight", "0.bias", "2.bias", "3.weight", "3.bias"}
    assert ["outer" in state["state"][name] for name in ("0.weight", "3.weight", "3.bias")] == [True, True, False]
    dcp.save({"net": weights, "opt": state}, checkpoint_id=tmp_path, no_dist=True)

    other, fresh = make(name, seed=5, dtype=dtype)
    weights, state = get_state_dict(other, fresh)
    assert (fresh.steps, fresh.round) == (0, 0)
    dcp.load({"net": weights, "opt": state}, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state)
    assert equal(fresh.whole_state(), opt.whole_state())
    learn(net, opt, 7, first=9)
    learn(other, fresh, 7, first=9)
    assert equal(fresh.whole_state(), opt.whole_state())
    assert same(net.parameters(), other.parameters())


class Echo(Alone):
    """Exchange whose mean is the own contribution as the codec sends it, so that the codec keeps a residual."""

    def start(self, mine):
        shapes = [tuple(tensor.shape) for tensor in mine.tensors]
        mean = Mean(mine.codec.decode(mine.codec.encode(mine.tensors), shapes), 1.0, ("a",))
        return type("Ready", (Handle,), {"done": lambda self: True, "result": lambda self, deadline=None: mean})()


@pytest.mark.parametrize("codec", ["topk2+ef:0.95", "auto:3+ef"])
@pytest.mark.parametrize("steps", [0, 9])
def test_a_codec_s_residual_is_in_it_from_the_start(codec, steps, tmp_path):
    net, opt = make("sparseloco", codec=codec_named(codec))
    opt.exchange = Echo()
    learn(net, opt, steps)
    state = get_optimizer_state_dict(net, opt)
    dcp.save({"opt": state}, checkpoint_id=tmp_path, no_dist=True)
    other, fresh = make("sparseloco", codec=codec_named(codec))
    template = get_optimizer_state_dict(other, fresh)
    dcp.load({"opt": template}, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(other, fresh, template)
    assert equal(fresh.whole_state()["codecs"], opt.whole_state()["codecs"])
    assert (fresh.codec.error is None) is (steps == 0)


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.AdamW])
def test_the_step_by_which_torch_makes_a_new_state_is_no_step(inner):
    class None_(Alone):
        def start(self, contribution):
            raise AssertionError("an exchange was started")

    net, opt = make(inner=inner)
    opt.exchange = None_()
    before = [p.detach().clone() for p in net.parameters()]
    for _ in range(9):
        get_optimizer_state_dict(net, opt)
    assert (opt.steps, opt.round, opt.param_groups[0]["lr"]) == (0, 0, 0.05)
    assert same(before, net.parameters())
    assert bool(opt.state) is (inner is torch.optim.AdamW)
    opt.exchange = Alone()
    learn(net, opt, 4)
    assert (opt.steps, opt.round) == (4, 1)


def test_a_step_at_rate_0_with_gradients_counts():
    net, opt = make()
    opt.param_groups[0]["lr"] = 0.0
    learn(net, opt, 4)
    assert (opt.steps, opt.round) == (4, 1)


@pytest.mark.parametrize("options", [{"full_state_dict": True}, {"cpu_offload": True}])
def test_the_options_of_torch_give_a_state_that_loads(options):
    net, opt = make()
    learn(net, opt, 9)
    options = StateDictOptions(**options)
    state = get_optimizer_state_dict(net, opt, options=options)
    other, fresh = make()
    set_optimizer_state_dict(other, fresh, state, options=options)
    assert equal(fresh.whole_state(), opt.whole_state())


def test_what_cannot_be_restored_is_refused_and_changes_nothing():
    net, opt = make()
    learn(net, opt, 9)
    other, fresh = make()
    before = fresh.whole_state()
    plain = torch.optim.AdamW(net.parameters(), lr=0.05).state_dict()
    flattened = StateDictOptions(flatten_optimizer_state_dict=True)
    with pytest.raises(ValueError, match="has no outer part, so it is not an outer optimizer's"):
        fresh.load_state_dict(plain)
    get_optimizer_state_dict(other, fresh)  # makes the inner state
    with pytest.raises(ValueError, match="flatten_optimizer_state_dict"):
        set_optimizer_state_dict(other, fresh, get_optimizer_state_dict(net, opt, options=flattened), options=flattened)
    state = opt.state_dict()
    del state["state"][1]["outer"]["momentum"]
    with pytest.raises(ValueError, match="no 'momentum' of parameter 1"):
        fresh.load_state_dict(state)
    state = opt.state_dict()
    state["state"][0]["outer"]["slow"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"'slow' has shape \(2,\) at tensor 0"):
        fresh.load_state_dict(state)
    state = opt.state_dict()
    state["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="have 5 parameters, this optimizer 6"):
        fresh.load_state_dict(state)
    assert equal(before["slow"], fresh.whole_state()["slow"])
    assert fresh.steps == 0


def test_several_inner_optimizers_are_one_in_it(tmp_path):
    def several():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        parts = [[p for p in net.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False)]
        return net, NoLoCo([torch.optim.Muon(parts[0], lr=0.05), torch.optim.AdamW(parts[1], lr=0.05)], Alone(), every=4, lag=0)

    net, opt = several()
    learn(net, opt, 9)
    dcp.save({"opt": get_optimizer_state_dict(net, opt)}, checkpoint_id=tmp_path, no_dist=True)
    other, fresh = several()
    state = get_optimizer_state_dict(other, fresh)
    dcp.load({"opt": state}, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(other, fresh, state)
    assert equal(fresh.whole_state(), opt.whole_state())


def test_another_method_or_schedule_is_named():
    net, opt = make()
    learn(net, opt, 9)
    state = get_optimizer_state_dict(net, opt)
    other, fresh = make("noloco")
    with pytest.raises(ValueError, match="is of DiLoCo, not of NoLoCo"):
        set_optimizer_state_dict(other, fresh, state)
    inner = torch.optim.AdamW(net.parameters())
    with pytest.warns(UserWarning, match=r"had Every\(every=4\), this optimizer has Every\(every=7\)"):
        DiLoCo(inner, Alone(), every=7, model=net, exclude=["3.bias"]).load_state_dict(opt.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DiLoCo(inner, Alone(), every=4, lr=0.1, model=net, exclude=["3.bias"]).load_state_dict(opt.state_dict())
    assert SparseLoCo(inner, Alone(), model=net, exclude=["3.bias"]).outer.param_groups[0]["lr"] == 1.0
