"""What a saved state holds, also by torch.distributed.checkpoint, and that one which does not fit
changes nothing.
"""

import copy
import math
import warnings
from functools import partial

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

from shoal.optim import (
    CO2,
    METHODS,
    Alone,
    DiLoCo,
    Eager,
    Mean,
    NoLoCo,
    SparseLoCo,
    Tokens,
    codec_named,
    method_named,
)
from shoal.optim.exchange.base import Handle
from shoal.optim.outer.rule import AHEAD
from tests.support.outer_state import equal, everything
from tests.support.outer_training import Recording, model, same, split, train

EVERY, STEPS = 3, 9


class Run:
    """One peer's training: a bfloat16 and a float32 part, AdamW, a scheduler, NoLoCo."""

    def __init__(self, exchange, width=4):
        torch.manual_seed(0)
        self.net = nn.ModuleList([nn.Linear(3, width, dtype=torch.bfloat16), nn.Linear(width, 2)])
        self.opt = NoLoCo(
            torch.optim.AdamW(self.net.parameters(), lr=0.05), exchange, every=EVERY, lag=0
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, STEPS)

    def train(self, first, last):
        for step in range(first, last):
            inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
            self.opt.zero_grad()
            self.net[1](self.net[0](inputs.bfloat16()).float().tanh()).square().mean().backward()
            self.opt.step()
            self.scheduler.step()


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
    with pytest.raises(
        ValueError,
        match=r"^the saved outer state 'slow' has shape \(5, 3\) at tensor 0, this model has \(4, "
        r"3\)$",
    ):
        run.opt.load_state_dict(other.opt.state_dict())
    assert equal(everything(run), before)

    state = copy.deepcopy(trained(steps=7).opt.whole_state())
    state["rule"]["momentum"][1] = torch.zeros(9)
    with pytest.raises(
        ValueError, match=r"'momentum' has shape \(9,\) at tensor 1, this model has \(4,\)"
    ):
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
    """Exchange whose mean is the own contribution as the codec sends it, so that the codec keeps a
    residual.
    """

    def start(self, mine):
        shapes = [tuple(tensor.shape) for tensor in mine.tensors]
        mean = Mean(mine.codec.decode(mine.codec.encode(mine.tensors), shapes), 1.0, ("a",))
        return type(
            "Ready",
            (Handle,),
            {"done": lambda self: True, "result": lambda self, deadline=None: mean},
        )()


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
    codecs = [opt._fragments[fragment].codec.state_dict() for fragment in range(opt.fragments)]
    return copy.deepcopy([opt.state_dict(), opt.length.state_dict(), codecs])


SPOILT = {
    **{
        f"no {name}": (
            lambda state, name=name: state.pop(name),
            f"no '{name}', so it is not an outer optimizer's",
        )
        for name in ("inner", "slow", "rule", "steps", "round")
    },
    "another codec": (
        lambda state: state["codecs"][0].update(codec="e3m0+ef"),
        "of the codec e3m0",
    ),
    "a memory less": (
        lambda state: state.update(codecs=[{}, {}]),
        "has 2 fragments, this optimizer 1",
    ),
    "a residual of another shape": (
        lambda state: state["codecs"][0].update(error=[torch.zeros(3)]),
        "of other tensors than",
    ),
    "a residual that is not finite": (
        lambda state: state["codecs"][0]["error"][0].fill_(math.nan),
        "NaN or infinity",
    ),
    "two sent": (lambda state: state.update(sent_at=[[0, 0], [0, 0]]), "has 2 fragments"),
    "two applied": (lambda state: state.update(applied=[0, 0]), "has 2 fragments"),
    "rounding of nothing": (
        lambda state: state.update(rounding={9: torch.zeros(2)}),
        "'rounding' has 1 tensors, this model has 0",
    ),
    "rounding of another shape": (
        lambda state: state.update(rounding={0: torch.zeros(9)}),
        r"'rounding' has shape \(9,\)",
    ),
    "steps that are none": (lambda state: state.update(steps="many"), "invalid literal"),
    "tokens that are none": (lambda state: state.update(tokens="many"), "invalid literal"),
    "a length that is none": (
        lambda state: state.update(length={"began": "then"}),
        "invalid literal",
    ),
    "another method": (
        lambda state: state.update(rule={"offset": []}),
        "has 'offset', which this method does not use",
    ),
    "groups": (
        lambda state: state["inner"]["param_groups"].append({"params": []}),
        "parameter group",
    ),
}


@pytest.mark.parametrize(("spoil", "sentence"), SPOILT.values(), ids=SPOILT)
def test_misfit_state_changes_nothing(spoil, sentence):
    """A state that does not fit in any of its parts changes nothing."""
    opt, state = sparse(4), sparse(9).whole_state()
    before = all_of(opt)
    spoil(state)
    with pytest.raises(ValueError, match=sentence):
        opt.load_state_dict(state)
    assert equal(all_of(opt), before)


def test_codec_memory_mismatch_changes_nothing():
    """The state of a codec with memory changes nothing in one without and the other way round."""
    for own, other in (("topk2+ef:0.95", "float32"), ("float32", "topk2+ef:0.95")):
        opt, state = sparse(4, own), sparse(9, other).state_dict()
        before = all_of(opt)
        with pytest.raises(ValueError, match="codec"):
            opt.load_state_dict(state)
        assert equal(all_of(opt), before)


def test_other_settings_load_with_a_warning():
    """A state of other settings is loaded with a warning that names those not restored."""
    saved = sparse(9, "float32", make=partial(DiLoCo, lr=0.3, nesterov=False)).state_dict()
    opt = sparse(0, "float32", make=DiLoCo, lr=0.9)
    sentence = (
        r"had nesterov False, this optimizer has nesterov True: these outer settings stay "
        r"those of the constructor"
    )
    with pytest.warns(UserWarning, match=sentence):
        opt.load_state_dict(saved)
    assert (opt.steps, opt.rule.nesterov, opt.outer.param_groups[0]["lr"]) == (9, True, 0.3)
    short = NoLoCo(
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), Alone(), every=5, lr=0.3, lag=0
    )
    other = NoLoCo(
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), Alone(), every=50, lr=0.9, lag=0
    )
    with pytest.warns(
        UserWarning, match=r"had Every\(every=5\), this optimizer has Every\(every=50\)"
    ):
        other.load_state_dict(short.state_dict())


def test_a_joiner_adopts_slow_weights_and_round_or_nothing():
    run, swarm = trained(), trained(steps=7)
    before = everything(run)
    with pytest.raises(
        ValueError, match=r"has shape \(5, 3\) at tensor 0, this model has \(4, 3\)"
    ):
        run.opt.adopt(trained(width=5).opt.slow, round=5, into_model=True)
    assert equal(everything(run), before)
    run.opt.adopt(swarm.opt.slow, round=5)
    assert equal(run.opt.slow, swarm.opt.slow)
    assert run.opt.round == 5
    assert equal(run.net.state_dict(), before[0])
    run.opt.adopt(swarm.opt.slow, round=5, into_model=True)
    assert all(
        torch.equal(p, slow.to(p.dtype))
        for p, slow in zip(run.net.parameters(), swarm.opt.slow, strict=True)
    )
    swarm.opt.slow[0].zero_()
    assert run.opt.slow[0].any()


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")


def made(name="diloco", seed=0, dtype=torch.float32, inner=torch.optim.AdamW, **options):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)).to(dtype)
    net[2].weight.requires_grad_(False)
    if "fragments" in METHODS[name].knobs:
        options.setdefault("fragments", 2)
        options.setdefault("lag", {"streaming": 1, "decoupled": 2}.get(name, 0))
    every = 4 if METHODS[name].knobs["every"] > 4 else 1
    opt = method_named(name).make(
        inner(net.parameters(), lr=0.05),
        Alone(),
        every=every,
        model=net,
        exclude=["3.bias"],
        **options,
    )
    return net, opt


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_run_is_bit_equal(name, dtype, tmp_path):
    """Saved and loaded into a new optimizer it goes on to the same bits."""
    net, opt = made(name, dtype=dtype)
    train(net, opt, 9)
    opt.finish()
    weights, state = get_state_dict(net, opt)
    assert set(state["state"]) == {"0.weight", "0.bias", "2.bias", "3.weight", "3.bias"}
    assert ["outer" in state["state"][name] for name in ("0.weight", "3.weight", "3.bias")] == [
        True,
        True,
        False,
    ]
    dcp.save({"net": weights, "opt": state}, checkpoint_id=tmp_path, no_dist=True)

    other, fresh = made(name, seed=5, dtype=dtype)
    weights, state = get_state_dict(other, fresh)
    assert (fresh.steps, fresh.round) == (0, 0)
    dcp.load({"net": weights, "opt": state}, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state)
    assert equal(fresh.whole_state(), opt.whole_state())
    train(net, opt, 7, first=9)
    train(other, fresh, 7, first=9)
    assert equal(fresh.whole_state(), opt.whole_state())
    assert same(net.parameters(), other.parameters())


@pytest.mark.parametrize("codec", ["topk2+ef:0.95", "auto:3+ef"])
@pytest.mark.parametrize("steps", [0, 9])
def test_a_codec_s_residual_is_in_it_from_the_start(codec, steps, tmp_path):
    net, opt = made("sparseloco", codec=codec_named(codec))
    opt.exchange = Echo()
    train(net, opt, steps)
    state = get_optimizer_state_dict(net, opt)
    dcp.save({"opt": state}, checkpoint_id=tmp_path, no_dist=True)
    other, fresh = made("sparseloco", codec=codec_named(codec))
    template = get_optimizer_state_dict(other, fresh)
    dcp.load({"opt": template}, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(other, fresh, template)
    assert equal(fresh.whole_state()["codecs"], opt.whole_state()["codecs"])
    assert (fresh.codec.error is None) is (steps == 0)


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.AdamW])
def test_creating_torch_state_is_no_step(inner):
    """The step by which torch makes a new state is no step."""
    net, opt = made(inner=inner)
    opt.exchange = Recording()
    before = [p.detach().clone() for p in net.parameters()]
    for _ in range(9):
        get_optimizer_state_dict(net, opt)
    assert (opt.steps, opt.round, opt.param_groups[0]["lr"], opt.exchange.sent) == (0, 0, 0.05, [])
    assert same(before, net.parameters())
    assert bool(opt.state) is (inner is torch.optim.AdamW)
    opt.exchange = Alone()
    train(net, opt, 4)
    assert (opt.steps, opt.round) == (4, 1)


def test_a_step_at_rate_0_with_gradients_counts():
    net, opt = made()
    opt.param_groups[0]["lr"] = 0.0
    train(net, opt, 4)
    assert (opt.steps, opt.round) == (4, 1)


@pytest.mark.parametrize("options", [{"full_state_dict": True}, {"cpu_offload": True}])
def test_the_options_of_torch_give_a_state_that_loads(options):
    net, opt = made()
    train(net, opt, 9)
    options = StateDictOptions(**options)
    state = get_optimizer_state_dict(net, opt, options=options)
    other, fresh = made()
    set_optimizer_state_dict(other, fresh, state, options=options)
    assert equal(fresh.whole_state(), opt.whole_state())


@pytest.mark.parametrize("read", [get_optimizer_state_dict, get_state_dict])
def test_flattened_state_is_refused_on_save(read):
    """A state to be flattened is refused when it is saved."""
    net, opt = made()
    train(net, opt, 9)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    with pytest.raises(ValueError, match=r"^a state of flatten") as raised:
        read(net, opt, options=options)
    assert str(raised.value) == (
        "a state of flatten_optimizer_state_dict=True loses the slow weights, outer momentum and "
        "round when it is loaded: leave that option out, here and where it is loaded"
    )


def test_what_cannot_be_restored_is_refused_and_changes_nothing():
    net, opt = made()
    train(net, opt, 9)
    other, fresh = made()
    before = fresh.whole_state()
    plain = torch.optim.AdamW(net.parameters(), lr=0.05).state_dict()
    flattened = StateDictOptions(flatten_optimizer_state_dict=True)
    with pytest.raises(ValueError, match="has no outer part, so it is not an outer optimizer's"):
        fresh.load_state_dict(plain)
    get_optimizer_state_dict(other, fresh)  # makes the inner state
    with pytest.raises(
        ValueError, match="which does not keep it"
    ):  # flattened by an earlier version
        set_optimizer_state_dict(
            other,
            fresh,
            get_optimizer_state_dict(net, opt.inner, options=flattened),
            options=flattened,
        )
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
        net = model()
        return net, NoLoCo(split(net), Alone(), every=4, lag=0)

    net, opt = several()
    train(net, opt, 9)
    dcp.save({"opt": get_optimizer_state_dict(net, opt)}, checkpoint_id=tmp_path, no_dist=True)
    other, fresh = several()
    state = get_optimizer_state_dict(other, fresh)
    dcp.load({"opt": state}, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(other, fresh, state)
    assert equal(fresh.whole_state(), opt.whole_state())


def test_another_method_or_schedule_is_named():
    net, opt = made()
    train(net, opt, 9)
    state = get_optimizer_state_dict(net, opt)
    other, fresh = made("noloco")
    with pytest.raises(ValueError, match="is of DiLoCo, not of NoLoCo"):
        set_optimizer_state_dict(other, fresh, state)
    inner = torch.optim.AdamW(net.parameters())
    with pytest.warns(
        UserWarning, match=r"had Every\(every=4\), this optimizer has Every\(every=7\)"
    ):
        DiLoCo(inner, Alone(), every=7, model=net, exclude=["3.bias"]).load_state_dict(
            opt.state_dict()
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DiLoCo(inner, Alone(), every=4, lr=0.1, model=net, exclude=["3.bias"]).load_state_dict(
            opt.state_dict()
        )
    assert (
        SparseLoCo(inner, Alone(), model=net, exclude=["3.bias"]).outer.param_groups[0]["lr"] == 1.0
    )


@pytest.mark.parametrize("make", [CO2, Eager])
def test_resumed_flight_may_have_a_shorter_round(make):
    """A run with a round in flight goes on with a shorter one and a warning."""
    net, other = nn.Linear(3, 2), nn.Linear(3, 2)
    one, shorter = (
        make(torch.optim.SGD(n.parameters(), lr=0.1), Alone(), every=every)
        for n, every in ((net, 4), (other, 2))
    )
    for opt, each, count in ((one, net, 6), (shorter, other, 0)):
        for _ in range(count):
            opt.zero_grad()
            each(torch.ones(1, 3)).sum().backward()
            opt.step()
    assert list(one._in_flight)
    with pytest.warns(UserWarning, match="every=4.*every=2"):
        shorter.load_state_dict(one.state_dict())
    assert equal(shorter.slow, one.slow)


def test_weights_never_held_are_not_taken_back():
    """Eager applies its own pseudo-gradient at once, and takes it back when the mean is there."""
    net = nn.Linear(3, 2, bias=False)
    opt = Eager(torch.optim.SGD(net.parameters(), lr=0.1), Alone(), every=2, lr=1.0, momentum=0.0)

    def step(rate):
        opt.zero_grad()
        (rate * net(torch.ones(1, 3)).sum()).backward()
        opt.step()

    for _ in range(4):
        step(1.0)
    assert opt.rule_state[AHEAD][0].abs().max() > 0
    theirs = [torch.full_like(tensor, 7.0) for tensor in opt.slow]
    opt.adopt(theirs, round=9, into_model=True)
    for _ in range(4):
        step(0.0)  # it learns nothing, so it stays there
    assert equal(opt.slow, theirs)


def test_tokens_may_be_counted_as_a_tensor():
    """Added to in place, the same tensor stood for what was counted before: no token seemed to be
    new.
    """
    net = nn.Linear(3, 2)
    opt = NoLoCo(torch.optim.SGD(net.parameters(), lr=0.1), Alone(), every=2, lag=0)
    counted = []
    for _ in range(4):
        opt.count(torch.ones(5, dtype=torch.bool).sum())
        counted.append(opt.tokens)
        net(torch.ones(1, 3)).sum().backward()
        opt.step()
    assert counted == [5, 10, 15, 20]
    assert {type(number) for number in counted} == {int}
    opt.state_dict()


def test_stateless_optimizer_loads_without_warning(recwarn):
    """The state of a stateless optimizer is taken without a warning."""
    net = nn.Linear(3, 2)
    opt = NoLoCo(torch.optim.SGD(net.parameters(), lr=0.1), Alone(), every=4, lag=0)

    def step():
        net(torch.ones(1, 3)).sum().backward()
        opt.step()
        opt.zero_grad()

    step()
    get_optimizer_state_dict(net, opt)
    step()
    assert not [str(each.message) for each in recwarn if "changed outside" in str(each.message)]
