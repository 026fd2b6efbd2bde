"""Inner optimizers behind the outer one, and the outer rate and momentum in parameter groups:
driven, loaded, saved, compared.
"""

import copy
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, ExponentialLR, LambdaLR, StepLR

from shoal.optim import (
    CO2,
    METHODS,
    SPARTA,
    Alone,
    DecoupledDiLoCo,
    DiLoCo,
    Eager,
    GASLoC,
    LocalSGD,
    NoLoCo,
    Simulation,
    SparseLoCo,
    Stepped,
    StreamingDiLoCo,
    config_diff,
    method_named,
)
from tests.support.outer_training import GoesBack, model, same, split, train, weights


def test_scheduler_goes_on_after_an_inner_load():
    """A scheduler goes on after the inner optimizer loaded behind the wrapper."""
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    opt = DiLoCo(inner, Alone(), every=100)
    schedule = StepLR(opt, 1, 0.1)
    inner.load_state_dict(inner.state_dict())
    assert opt.param_groups is inner.param_groups
    train(net, opt, 1)
    schedule.step()
    assert inner.param_groups[0]["lr"] == pytest.approx(0.1)
    assert opt.state is inner.state


def test_replaced_groups_are_the_inner_optimizers():
    """Groups and state that are replaced are those of the inner optimizer."""
    net = model()
    inner = torch.optim.AdamW(net.parameters(), lr=1.0)
    opt = DiLoCo(inner, Alone(), every=100)
    opt.param_groups = [group | {"lr": 0.5} for group in opt.param_groups]
    train(net, opt, 1)
    opt.state = copy.copy(opt.state)
    assert (inner.param_groups[0]["lr"], opt.state is inner.state, len(inner.state)) == (
        0.5,
        True,
        4,
    )
    several = DiLoCo(split(net), Alone())
    for name in ("param_groups", "state"):
        with pytest.raises(AttributeError, match="of each"):
            setattr(several, name, getattr(several, name))


def test_late_group_is_refused_before_a_step():
    """A group added behind the wrapper is refused before a step."""
    net, late = model(), nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    opt = DiLoCo(inner, Alone(), every=100)
    train(net, opt, 1)
    inner.add_param_group({"params": [late]})
    before = weights(net)
    with pytest.raises(ValueError, match="would never be averaged"):
        train(net, opt, 1)
    assert (opt.steps, same(before, weights(net))) == (1, True)


@pytest.mark.parametrize("method", [NoLoCo, DiLoCo])
def test_several_inner_optimizers_train_as_each_alone_and_are_averaged(method):
    def peer(exchange):
        net = model()
        opt = method(split(net), exchange, every=4)
        train(net, opt, 8, target=int(exchange.peer))
        return [opt.slow, weights(net)]

    alone, several = model(), model()
    apart = split(alone)
    together = method(split(several), Alone(), every=100)
    for step in range(6):
        rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
        alone.zero_grad()
        alone(rows).square().mean().backward()
        for one in apart:
            one.step()
    train(several, together, 6)
    assert same(weights(alone), weights(several))
    found = Simulation(["0", "1"]).run(peer)
    assert method is NoLoCo or same(found["0"][0], found["1"][0])
    assert [slow.shape for slow in found["0"][0]] == [
        (4, 3),
        (2, 4),
        (4,),
        (2,),
    ]  # in the order of the optimizers


def test_each_of_several_has_its_scheduler_and_its_saved_state():
    def run():
        net = model()
        inners = split(net)
        opt = NoLoCo(inners, Alone(), every=4, lag=0)
        schedules = [ExponentialLR(inners[0], 0.5), ExponentialLR(inners[1], 0.9)]
        return net, inners, opt, lambda: [schedule.step() for schedule in schedules]

    net, inners, opt, after = run()
    train(net, opt, 5, after=after)
    rates = [group["lr"] for group in opt.param_groups]
    assert (
        rates
        == [inners[0].param_groups[0]["lr"], inners[1].param_groups[0]["lr"]]
        == pytest.approx([0.05 / 32, 0.05 * 0.9**5])
    )
    assert set(opt.state) == set(net.parameters())
    again, others, resumed, _ = run()
    again.load_state_dict(net.state_dict())
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert [group["lr"] for group in others[0].param_groups + others[1].param_groups] == rates
    for one, other in ((net, opt), (again, resumed)):
        train(one, other, 5, first=5)
    assert same(weights(net), weights(again))


def test_a_closure_is_called_once_for_all():
    net, calls = model(), []
    opt = NoLoCo(split(net), Alone(), every=100, lag=0)

    def closure():
        calls.append(1)
        opt.zero_grad()
        loss = net(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    before = weights(net)
    assert opt.step(closure).item() > 0
    assert len(calls) == 1
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(net), strict=True))


def test_invalid_combinations_are_refused():
    """What cannot be combined is refused and a state that does not fit changes nothing."""
    net = model()
    every = list(net.parameters())
    with pytest.raises(ValueError, match="at least one"):
        NoLoCo([], Alone(), lag=0)
    with pytest.raises(ValueError, match="more than one parameter group"):
        NoLoCo([torch.optim.SGD(every, lr=0.1), torch.optim.AdamW(every[:1])], Alone(), lag=0)
    opt = NoLoCo(split(net), Alone(), lag=0)
    with pytest.raises(ValueError, match="before wrapping it"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="before combining them"):
        opt.inner.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    ordered = torch.optim.SGD([p for group in opt.param_groups for p in group["params"]], lr=0.7)
    one = NoLoCo(ordered, Alone(), lag=0).state_dict()
    with pytest.raises(ValueError, match="has 1 parameter groups, this optimizer 2"):
        opt.load_state_dict(one)
    assert [group["lr"] for group in opt.param_groups] == [0.05, 0.05]


@pytest.mark.parametrize("form", [lambda inner: inner, lambda inner: [inner]])
def test_an_inner_optimizer_that_remembers_earlier_weights_is_refused(form):
    sentence = (
        "GoesBack remembers earlier weights, to which it would go back after a round has moved the "
        "model (of a move 50% was left after 56 steps): use an inner optimizer whose state holds "
        "gradients only, such as AdamW"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        NoLoCo(form(GoesBack(model().parameters(), lr=0.1)), Alone(), lag=0)


def test_an_inner_optimizer_that_needs_a_closure_is_refused():
    sentence = (
        "LBFGS compares gradients at weights between which a round may have moved the model, in "
        "steps that need a closure: use an inner optimizer whose state holds gradients only, such "
        "as AdamW"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        NoLoCo(torch.optim.LBFGS(model().parameters(), lr=0.1), Alone(), lag=0)


def test_what_steps_in_place_of_a_stand_in_is_tried():
    parameters = list(model().parameters())
    with pytest.raises(ValueError, match=r"^GoesBack remembers earlier weights"):
        NoLoCo(Stepped(parameters, stands_for=GoesBack(parameters, lr=0.1)), Alone(), lag=0)
    NoLoCo(Stepped(parameters, stands_for=torch.optim.AdamW(parameters)), Alone(), lag=0)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            lambda net, inner: NoLoCo(inner, Alone(), evry=5),
            "NoLoCo has no argument 'evry': did you mean 'every'?",
        ),
        (lambda net, inner: DiLoCo(inner, Alone(), colour=5), "DiLoCo has no argument 'colour'"),
        (
            lambda net, inner: NoLoCo(net, Alone()),
            "inner must be an optimizer of torch, or a list of them, got Sequential",
        ),
        (
            lambda net, inner: NoLoCo([inner, net], Alone()),
            "inner must be an optimizer of torch, or a list of them, got Sequential",
        ),
        (lambda net, inner: NoLoCo(inner, None), "exchange must be an exchange, got NoneType"),
        (
            lambda net, inner: NoLoCo(inner, Alone(), codec="int8"),
            "codec must be a codec, got str: hand in shoal.codec_named('int8')",
        ),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_made(wrong, sentence):
    net = model()
    with pytest.raises(TypeError, match=re.escape(sentence)):
        wrong(net, torch.optim.AdamW(net.parameters()))


def test_outer_state_is_refused_by_an_inner_optimizer():
    """As a script does that resumes before it wraps: the slow weights would be lost in silence."""
    net = model()
    outer = DiLoCo(torch.optim.AdamW(net.parameters()), Alone(), every=2)
    train(net, outer, 3)
    bare = torch.optim.AdamW(net.parameters())
    train(net, bare, 1)
    bare.param_groups[0].update(
        {
            key: value
            for key, value in outer.state_dict()["param_groups"][0].items()
            if key != "params"
        }
    )
    with pytest.raises(
        ValueError,
        match="the saved state of an outer one: load that into the outer optimizer, once it is "
        "made",
    ):
        DiLoCo(bare, Alone())


def test_accelerate_micro_batches_are_no_steps():
    """12 micro-batches in accumulations of 4 are 3 steps: rounds of 1 step are 3, and the weights
    those of whole batches.
    """
    accelerate = pytest.importorskip("accelerate")
    ends = []
    for order in ("whole batches", "prepared first", "prepared last"):
        net, rounds = model(), []
        accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=1 if order == "whole batches" else 4
        )
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        options = {"every": 1, "lag": 0, "on_round": rounds.append}
        if order == "prepared first":
            opt = NoLoCo(accelerator.prepare_optimizer(inner), Alone(), **options)
        else:
            opt = accelerator.prepare_optimizer(NoLoCo(inner, Alone(), **options))
        for step in range(3):
            data = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
            for part in data.chunk(1 if order == "whole batches" else 4):
                with accelerator.accumulate(net):
                    accelerator.backward(net(part).square().mean())
                    opt.step()
                    opt.zero_grad()
        assert len(rounds) == 3
        ends.append([p.detach().clone() for p in net.parameters()])
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
    for other in ends[1:]:
        for mine, whole in zip(other, ends[0], strict=True):
            torch.testing.assert_close(mine, whole, rtol=0, atol=1e-6)


def groups(net, lr=0.05):
    return torch.optim.SGD(
        [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 2 * lr}], lr=lr
    )


def test_torch_scheduler_drives_the_outer_rate():
    """A scheduler of torch drives the outer rate round by round."""
    rates, net = [], model()
    opt = DiLoCo(
        torch.optim.SGD(net.parameters(), lr=0.05),
        Alone(),
        every=2,
        lr=0.8,
        on_round=lambda info: schedule.step(),
    )
    schedule = CosineAnnealingLR(opt.outer, T_max=4)
    train(net, opt, 8, after=lambda: rates.append(opt.outer.param_groups[0]["lr"]))
    expected = [
        0.8 * (1 + torch.cos(torch.tensor(torch.pi * done / 4)).item()) / 2
        for done in (0, 1, 1, 2, 2, 3, 3, 4)
    ]
    assert rates == pytest.approx(expected, abs=1e-7)
    slow = [tensor.clone() for tensor in opt.slow]
    train(net, opt, 2, first=8)  # at rate 0 the slow weights stay
    assert same(slow, opt.slow)


@pytest.mark.filterwarnings("error")
def test_scheduler_sees_steps_and_hooks():
    """The scheduler sees that steps were taken and hooks may drive it."""
    net = model()
    opt = DiLoCo(torch.optim.SGD(net.parameters(), lr=0.05), Alone(), every=2, lr=0.5, momentum=0.5)
    schedule = CyclicLR(opt.outer, 0.1, 0.5, step_size_up=2, base_momentum=0.3, max_momentum=0.6)
    opt.outer.register_step_post_hook(lambda *_: schedule.step())
    train(net, opt, 4)
    assert opt.outer.param_groups[0]["lr"] == pytest.approx(0.5)
    assert opt.outer.param_groups[0]["momentum"] == pytest.approx(0.3)


SCHEDULED = {
    "noloco": NoLoCo,
    "gasloc": GASLoC,
    "diloco": DiLoCo,
    "eager": Eager,
    "co2": CO2,
    "sparseloco": SparseLoCo,
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_a_round_has_the_values_of_its_time(name):
    """A changed group is as an optimizer made with that value, which takes over the state."""
    values = {"lr": 0.3} if name == "sparseloco" else {"lr": 0.3, "momentum": 0.2}

    def peer(exchange, by_groups):
        net = model()
        opt = SCHEDULED[name](torch.optim.SGD(net.parameters(), lr=0.05), exchange, every=2)
        train(net, opt, 4, target=int(exchange.peer))
        opt.finish()
        if by_groups:
            opt.outer.param_groups[0].update(values)
        else:
            opt.outer = type(opt.outer)(
                replace(opt.rule, **values), opt.slow, [range(len(opt.slow))]
            )
        train(net, opt, 4, target=int(exchange.peer), first=4)
        opt.finish()
        return [
            *(tensor.clone() for tensor in opt.slow),
            *(p.detach().clone() for p in net.parameters()),
        ]

    groups, rule = (
        Simulation(["0", "1"]).run(lambda exchange, way=way: peer(exchange, way))
        for way in (True, False)
    )
    assert same(groups["0"], rule["0"])


def test_what_is_in_flight_is_applied_as_it_was_sent():
    def peer(exchange, change):
        net = model()
        opt = StreamingDiLoCo(
            torch.optim.SGD(net.parameters(), lr=0.0),
            exchange,
            every=4,
            fragments=1,
            lag=2,
            lr=1.0,
            momentum=0.0,
        )
        with torch.no_grad():
            net[0].bias.fill_(float(exchange.peer))
        for _ in range(4):
            opt.step()
        if change:
            opt.outer.param_groups[0]["lr"] = 0.0
        for _ in range(2):
            opt.step()
        return opt.slow[1].clone()

    changed, plain = (
        Simulation(["0", "1"]).run(lambda exchange, c=change: peer(exchange, c))
        for change in (True, False)
    )
    assert torch.equal(changed["0"], plain["0"])
    assert torch.allclose(plain["0"], torch.full((4,), 0.5))


@pytest.mark.parametrize(
    "name", [name for name in METHODS if name not in ("local", "none", "sparta", "co2")]
)
def test_groups_act_as_separate_optimizers(name):
    """Not CO2: its penalty is over the whole fragment, and with unequal groups over each."""
    knobs = {"fragments": 1} if "fragments" in METHODS[name].knobs else {}

    def peer(exchange, lr):
        net = model()
        opt = method_named(name).make(groups(net), exchange, every=4, lr=0.6, model=net, **knobs)
        for group, rate in zip(opt.outer.param_groups, lr, strict=True):
            group["lr"] = rate
        train(net, opt, 4, target=int(exchange.peer))
        opt.finish()
        return [tensor.clone() for tensor in opt.slow]

    mixed, first, second = (
        Simulation(["0", "1"]).run(lambda e, lr=lr: peer(e, lr))
        for lr in ((0.6, 0.2), (0.6, 0.6), (0.2, 0.2))
    )
    assert same(mixed["0"], [*first["0"][:2], *second["0"][2:]])
    assert not torch.equal(first["0"][2], second["0"][2])


def test_a_plain_mean_stays_with_its_parameter_if_groups_differ():
    def peer(exchange, lr):
        net = model()
        opt = DecoupledDiLoCo(
            groups(net), exchange, every=2, lag=0, fragments=1, plain=[net[2].weight], lr=0.6
        )
        opt.outer.param_groups[0]["lr"] = lr
        train(net, opt, 2, target=int(exchange.peer))
        return [tensor.clone() for tensor in opt.slow]

    mixed, equal = (Simulation(["0", "1"]).run(lambda e, lr=lr: peer(e, lr)) for lr in (0.1, 0.6))
    assert same(mixed["0"][2:], equal["0"][2:])


def test_a_rule_without_rate_or_momentum_has_no_such_key():
    net = model()
    inner = groups(net)
    keys = {
        make: set(make(inner, Alone()).outer.param_groups[1]) - {"params"}
        for make in (NoLoCo, LocalSGD, SPARTA, SparseLoCo, DiLoCo, CO2)
    }
    assert keys == {
        NoLoCo: {"lr", "momentum"},
        LocalSGD: set(),
        SPARTA: set(),
        SparseLoCo: {"lr"},
        DiLoCo: {"lr", "momentum"},
        CO2: {"lr", "momentum"},
    }
    opt = NoLoCo(inner, Alone(), lag=0)
    assert [[p.shape for p in group["params"]] for group in opt.outer.param_groups] == [
        [(4, 3), (4,)],
        [(2, 4), (2,)],
    ]
    assert all(
        p is slow for p, slow in zip(opt.outer.param_groups[1]["params"], opt.slow[2:], strict=True)
    )


def test_invalid_rate_stops_the_step():
    """A value that no rule takes stops the step that would use it."""
    net = model()
    opt = DiLoCo(torch.optim.SGD(net.parameters(), lr=0.05), Alone(), every=2)
    opt.outer.param_groups[0]["lr"] = -0.1
    with pytest.raises(ValueError, match=r"outer lr must not be negative, got -0\.1"):
        train(net, opt, 2)
    opt = NoLoCo(groups(net), Alone(), every=1, lr=0.5, pull=0.5, lag=0)
    opt.outer.param_groups[0]["lr"] = 0.4
    with pytest.raises(ValueError, match="send unequally many tensors"):
        train(net, opt, 1)


@pytest.mark.parametrize("form", ["state_dict", "whole_state"])
def test_present_rates_are_saved_and_restored(form):
    """The present values are saved and restored with a scheduler that goes on."""

    def run():
        net = model()
        opt = DiLoCo(groups(net), Alone(), every=2, lr=0.8)
        return net, opt, StepLR(opt.outer, 1, 0.5)

    net, opt, schedule = run()
    after = lambda schedule: lambda info: schedule.step()  # noqa: E731
    opt.on_round = after(schedule)
    train(net, opt, 4)
    again, other, resumed = run()
    other.on_round = after(resumed)
    again.load_state_dict(net.state_dict())
    other.load_state_dict(copy.deepcopy(getattr(opt, form)()))
    resumed.load_state_dict(schedule.state_dict())
    assert [group["lr"] for group in other.outer.param_groups] == [0.2, 0.2]
    assert other.outer.param_groups[0]["initial_lr"] == 0.8
    train(net, opt, 4, first=4)
    train(again, other, 4, first=4)
    assert (
        [group["lr"] for group in other.outer.param_groups]
        == [group["lr"] for group in opt.outer.param_groups]
        == [0.05, 0.05]
    )
    assert same(net.parameters(), again.parameters())


def test_peers_are_compared_by_their_present_values():
    net = model()
    one, other = (
        DiLoCo(groups(net), Alone(), lr=0.5),
        DiLoCo(torch.optim.SGD(net.parameters(), lr=0.1), Alone(), lr=0.5),
    )
    assert config_diff(one, other) is None
    assert (
        config_diff(one, DiLoCo(groups(net), Alone(), lr=0.5, momentum=0.0))
        == "momentum is 0.6 and not 0.0"
    )
    one.outer.param_groups[1]["lr"] = 0.25
    assert config_diff(one, other) == "lr is 0.25 and not 0.5"
    other.outer.param_groups[0]["lr"] = one.outer.param_groups[0]["lr"] = 0.25
    assert config_diff(one, other) is None
    other.outer.param_groups[0]["momentum"] = 0.3
    assert config_diff(one, other) == "momentum is 0.6 and not 0.3"


def test_late_peer_follows_the_round_schedule():
    """A schedule by the round number is that of the others for a late peer."""
    net = model()
    opt = DiLoCo(torch.optim.SGD(net.parameters(), lr=0.05), Alone(), every=1, lr=0.8)
    schedule = LambdaLR(opt.outer, lambda _: 0.5**opt.round)
    opt.adopt(opt.slow, round=3, into_model=True)
    schedule.step()
    assert opt.outer.param_groups[0]["lr"] == pytest.approx(0.1)
