"""The outer optimizer as an ordinary optimizer: schedulers, GradScaler, closures, hooks, kinds of
models, what a round does.
"""

import copy
import pickle

import pytest
import torch
from torch import nn

from shoal.optim import (
    CO2,
    Alone,
    Apply,
    CO2Rule,
    DiLoCo,
    DiLoCoRule,
    Every,
    GASLoCRule,
    LocalSGD,
    Mean,
    NoLoCo,
    NoLoCoRule,
    OuterOptimizer,
    Send,
    Simulation,
    SpartaRule,
    method_named,
)
from shoal.optim.exchange.base import Exchange, Handle
from tests.support.outer_training import model, same, train, weights


class Partner(Exchange):
    """Exchange with one partner that always sends ``theirs``."""

    def __init__(self, theirs):
        self.theirs, self.sent, self.keys = theirs, [], []

    def start(self, contribution):
        own = [tensor.clone() for tensor in contribution.tensors]
        self.sent.append(own)
        self.keys.append(contribution.key)
        mean = (
            None
            if self.theirs is None
            else Mean([(a + b) / 2 for a, b in zip(own, self.theirs, strict=True)], 2.0, ("a", "b"))
        )
        return type(
            "Ready",
            (Handle,),
            {"done": lambda self: True, "result": lambda self, deadline=None: mean},
        )()


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10),
        lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=10),
        lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step),
    ],
)
@pytest.mark.parametrize(
    "inner", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)]
)
@pytest.mark.filterwarnings("error")
def test_a_scheduler_acts_on_it_as_on_the_inner_optimizer(inner, scheduler):
    plain, wrapped = model(), model()
    opt = inner(plain.parameters())
    outer = NoLoCo(inner(wrapped.parameters()), Alone(), every=100, lag=0)
    train(plain, opt, 10, after=scheduler(opt).step)
    train(wrapped, outer, 10, after=scheduler(outer).step)
    assert outer.param_groups is outer.inner.param_groups
    assert outer.param_groups[0]["lr"] == opt.param_groups[0]["lr"]
    assert same(weights(plain), weights(wrapped))


def adamw(net, fused):
    return torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)


INNER = {
    "foreach": lambda net: adamw(net, False),
    "fused": lambda net: adamw(net, True),
    "several": lambda net: [
        adamw(net[0], True),
        torch.optim.SGD(net[2].parameters(), lr=0.1, momentum=0.9),
    ],
}


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", INNER)
def test_skipped_float16_step_still_counts(kind, clip):
    """Mutants: the outer part is left out too (37 steps, 7 rounds), gradients unscaled twice or
    never, an infinity is stepped.
    """
    steps, every, overflows = 40, 5, (3, 14, 15)
    data = [torch.randn(4, 3, generator=torch.Generator().manual_seed(n)) for n in range(steps)]

    def backward(net, scaler, step, part=None):
        loss = net(data[step]).square().mean()
        scaler.scale(loss * float("inf") if step in overflows else loss).backward()

    def scaled(net, scaler, opts):
        for opt in opts:
            if clip is not None:
                scaler.unscale_(opt)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        for opt in opts:
            scaler.step(opt)
        scaler.update()

    net = model()
    opt = DiLoCo(INNER[kind](net), Alone(), every=every)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=6)
    for step in range(steps):
        opt.zero_grad()
        backward(net, scaler, step)
        scaled(net, scaler, [opt])
    assert (opt.steps, opt.round) == (
        steps,
        steps // every,
    )  # as many as of a peer without an overflow

    by_hand = model()
    made = INNER[kind](by_hand)
    inner = made if isinstance(made, list) else [made]
    slow, momentum = weights(by_hand), [torch.zeros_like(p) for p in by_hand.parameters()]
    hands = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=6)
    for step in range(steps):
        by_hand.zero_grad()
        backward(by_hand, hands, step)
        scaled(by_hand, hands, inner)
        if (step + 1) % every == 0:
            with torch.no_grad():
                for s, v, p in zip(slow, momentum, by_hand.parameters(), strict=True):
                    g = s - p
                    v.mul_(0.6).add_(g)
                    s.sub_(g, alpha=0.7).sub_(v, alpha=0.7 * 0.6)
                    p.copy_(s)
    assert same(weights(net), weights(by_hand))
    assert scaler.get_scale() == hands.get_scale()


def test_grad_scaler_limits_are_stated():
    """What grad scaler cannot do is said and leaves nothing to the next step."""
    net = model()
    opt = DiLoCo(torch.optim.SGD(net.parameters(), lr=0.1), Alone(), every=5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(net(torch.ones(1, 3)).sum()).backward()
    gradients = [p.grad.clone() for p in net.parameters()]
    with pytest.raises(
        RuntimeError, match="GradScaler takes no closure: compute the gradients before"
    ):
        scaler.step(opt, lambda: 0.0)
    with opt.averaged(), pytest.raises(RuntimeError, match=r"step\(\) within averaged"):
        scaler.step(opt)
    assert (opt.steps, same(gradients, [p.grad for p in net.parameters()])) == (0, True)
    before = weights(net)
    opt.step()  # not called by a scaler: the gradients are taken as they are
    assert all(
        torch.equal(p, b.add(g, alpha=-0.1))
        for p, b, g in zip(weights(net), before, gradients, strict=True)
    )
    half = torch.nn.Linear(2, 1, dtype=torch.float16)
    opt = DiLoCo(torch.optim.SGD(half.parameters(), lr=0.1), Alone(), every=5)
    scaler.scale(half(torch.ones(1, 2, dtype=torch.float16)).sum()).backward()
    with pytest.raises(
        ValueError, match="Attempting to unscale FP16 gradients: keep the parameters in float32"
    ):
        scaler.step(opt)


def test_closures_hooks_and_groups_work_as_on_any_optimizer():
    net = model()
    inner = torch.optim.SGD(
        [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[2].parameters()}], lr=0.1
    )
    opt = NoLoCo(inner, Alone(), every=2, lag=0)
    calls = []
    opt.register_step_post_hook(lambda *_: calls.append(opt.steps))
    assert isinstance(opt, torch.optim.Optimizer)
    assert [group["lr"] for group in opt.param_groups] == [0.5, 0.1]
    assert opt.state is inner.state

    def closure():
        opt.zero_grad()
        loss = net(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() > opt.step(closure).item()
    assert calls == [1, 2]
    frozen = weights(net[0])
    opt.param_groups[0]["lr"] = 0.0
    moving = weights(net[2])
    opt.step(closure)
    assert same(frozen, weights(net[0]))
    assert not same(moving, weights(net[2]))


@pytest.mark.parametrize(
    "parameters", [[], [nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)]]
)
def test_parameters_that_cannot_be_averaged_are_refused(parameters):
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    inner.param_groups[0]["params"] = parameters
    with pytest.raises(ValueError, match="averages floating-point parameters"):
        NoLoCo(inner, Alone(), lag=0)


def test_tied_parameters_are_sent_once_and_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    net = Tied()
    partner = Partner([torch.zeros(5, 3)])
    opt = LocalSGD(torch.optim.SGD(net.parameters(), lr=0.1), partner, every=1, lag=0)
    before = net.embed.weight.detach().clone()
    opt.step()
    assert [len(sent) for sent in partner.sent] == [1]
    assert net.head.weight is net.embed.weight
    assert torch.equal(net.head.weight, before / 2)


def test_bfloat16_model_keeps_small_changes():
    """A bfloat16 model has float32 slow weights that do not lose small changes."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    inner = torch.optim.SGD([weight], lr=1.0)
    opt = NoLoCo(inner, Partner([torch.full((4,), 1.001)]), every=1, lr=0.5, momentum=0.0, lag=0)
    for pulls in range(1, 5):  # each a quarter of the way to 1.001, which bfloat16 rounds to 1
        opt.step()
        assert weight.dtype == torch.bfloat16
        assert opt.slow[0].dtype == torch.float32
        torch.testing.assert_close(
            opt.slow[0], torch.full((4,), 1.001 - 0.001 * 0.75**pulls), rtol=0, atol=2e-7
        )
    kept = opt.slow[0].clone()
    opt.exchange = Alone()  # nothing is learnt from now on, so nothing may move
    for _ in range(5):
        opt.step()
    torch.testing.assert_close(opt.slow[0], kept, rtol=0, atol=2e-7)
    weight.grad = torch.full((4,), -0.25, dtype=torch.bfloat16)
    opt.step()
    torch.testing.assert_close(opt.slow[0], kept + 0.125, rtol=0, atol=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_averaged_restores_the_fast_weights(dtype):
    """Averaged shows the slow weights and restores the fast ones bit by bit."""
    net = model(dtype=dtype)
    opt = NoLoCo(torch.optim.SGD(net.parameters(), lr=0.1), Alone(), every=4, lag=0)
    train(net, opt, 6)
    net[0].bias.data[0] = float("nan")
    fast = [p.detach().clone().view(torch.uint8) for p in net.parameters()]

    def look():
        with opt.averaged():
            assert same(weights(net), [slow.to(dtype) for slow in opt.slow])
            raise KeyError("in the body")

    with pytest.raises(KeyError, match="in the body"):
        look()
    assert same(fast, [p.detach().view(torch.uint8) for p in net.parameters()])
    with opt.averaged():
        pass
    assert same(fast, [p.detach().view(torch.uint8) for p in net.parameters()])


def test_slow_weights_that_cannot_be_shown_leave_the_fast_ones(monkeypatch):
    """The fault: no memory half way, and the model kept a mixture of both."""
    net = model()
    opt = NoLoCo(torch.optim.SGD(net.parameters(), lr=0.1), Alone(), every=4, lag=0)
    train(net, opt, 6)
    fast = [p.detach().clone() for p in net.parameters()]

    def in_part(part, tensors):
        net[0].weight.data.copy_(tensors[0])
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(opt._weights, "write", in_part)
    with pytest.raises(torch.OutOfMemoryError), opt.averaged():
        pass
    assert same(fast, [p.detach() for p in net.parameters()])


@pytest.mark.parametrize("pull", [None, 0.3])
def test_own_step_is_taken_without_an_answer(pull):
    """Without an answer the own step is taken and never rolled back."""
    net, infos = model(), []
    opt = NoLoCo(
        torch.optim.SGD(net.parameters(), lr=0.1),
        Partner(None),
        every=3,
        lr=0.7,
        momentum=0.5,
        pull=pull,
        on_round=infos.append,
        lag=0,
    )
    slow = [s.clone() for s in opt.slow]
    velocity = [torch.zeros_like(s) for s in slow]
    for round in range(4):
        alone = copy.deepcopy(net)
        train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), 3, first=3 * round)
        train(net, opt, 3, first=3 * round)
        for v, s, theta in zip(velocity, slow, weights(alone), strict=True):
            v.mul_(0.5).add_(s - theta, alpha=0.7)
            s.sub_(v)
        torch.testing.assert_close(opt.slow, slow, rtol=0, atol=1e-7)
        assert same(weights(net), opt.slow)
        assert (infos[-1].members, infos[-1].key.round, infos[-1].step, infos[-1].lag) == (
            (),
            round,
            3 * round + 3,
            0,
        )


class Late:
    """Schedule that sends after step 3 and applies after step 5."""

    def at(self, step):
        return {3: [Send(0)], 5: [Apply(0)]}.get(step, [])


@pytest.mark.parametrize(("steps", "lag"), [(3, 0), (4, 1), (5, 2)])
def test_flight_is_applied_once(steps, lag):
    """What is in flight is applied once by the schedule or by finish."""
    net, infos = model(), []
    rule = NoLoCoRule(lr=1.0, momentum=0.0)
    opt = OuterOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1),
        Alone(),
        rule=rule,
        schedule=Late(),
        run="r",
        on_round=infos.append,
    )
    opt.finish()
    assert infos == []
    at_send = model()
    train(at_send, torch.optim.SGD(at_send.parameters(), lr=0.1), 3)
    train(net, opt, steps)
    opt.finish()
    opt.finish()
    assert [(info.step, info.lag, info.key.run) for info in infos] == [(steps, lag, "r")]
    torch.testing.assert_close(opt.slow, weights(at_send), rtol=0, atol=1e-7)


def test_rounds_are_labelled_in_order_and_may_be_set_forward():
    partner = Partner(None)
    net = model()
    opt = OuterOptimizer(
        torch.optim.SGD(net.parameters()), partner, rule=NoLoCoRule(), schedule=Every(2), run="mine"
    )
    train(net, opt, 5)
    opt.round = 10
    train(net, opt, 3)
    assert [(key.run, key.round, key.fragment) for key in partner.keys] == [
        ("mine", r, 0) for r in (0, 1, 10, 11)
    ]


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (NoLoCoRule, {"lr": -0.1}, "outer lr must not be negative"),
        (NoLoCoRule, {"momentum": 1.5}, "outer momentum must lie"),
        (NoLoCoRule, {"momentum": -0.1}, "outer momentum must lie"),
        (NoLoCoRule, {"pull": -0.1}, "pull must not be negative"),
        (DiLoCoRule, {"lr": -0.1}, "outer lr must not be negative"),
        (DiLoCoRule, {"momentum": 1.5}, "outer momentum must lie"),
        (DiLoCoRule, {"mix": 2.0}, "mix must be keep or lie"),
        (DiLoCoRule, {"mix": "hold"}, "mix must be keep or lie"),
        (CO2Rule, {"penalty": 0.5}, "penalty must be at least 1"),
        (CO2Rule, {"clip": 0.0}, "clip must be positive"),
        (SpartaRule, {"part": -0.1}, r"part must lie in \[0, 1\]"),
        (SpartaRule, {"part": 1.5}, r"part must lie in \[0, 1\]"),
        (GASLoCRule, {"mix": -0.1}, r"mix must lie in \[0, 1\]"),
        (GASLoCRule, {"mix": 1.5}, r"mix must lie in \[0, 1\]"),
        (Every, {"every": 0}, "at least 1 inner step, got 0"),
    ],
)
def test_rules_and_schedules_refuse_what_cannot_work(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


def test_state_dict_hooks_fire_as_on_any_optimizer():
    net = model()
    opt = NoLoCo(torch.optim.SGD(net.parameters(), lr=0.1), Alone(), every=1, lag=0)
    calls = []
    opt.register_state_dict_pre_hook(lambda given: calls.append(("before saving", given is opt)))
    opt.register_state_dict_post_hook(lambda given, state: state | {"mine": 1})
    train(net, opt, 1)
    state = opt.state_dict()
    assert state["mine"] == 1
    fresh = NoLoCo(torch.optim.SGD(net.parameters(), lr=0.1), Alone(), every=1, lag=0)
    groups = [group | {"lr": 0.7} for group in state["param_groups"]]
    fresh.register_load_state_dict_pre_hook(lambda given, state: state | {"param_groups": groups})
    fresh.register_load_state_dict_post_hook(
        lambda given: calls.append(("after loading", given.param_groups[0]["lr"]))
    )
    fresh.load_state_dict(state)
    assert calls == [("before saving", True), ("after loading", 0.7)]
    assert state["param_groups"][0]["lr"] == 0.1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_in_a_sentence(copied):
    opt = NoLoCo(torch.optim.SGD(model().parameters(), lr=0.1), Alone(), lag=0)
    with pytest.raises(
        TypeError,
        match=r"cannot be copied or pickled: make another .* load this one's state_dict\(\)",
    ):
        copied(opt)


@pytest.mark.parametrize("what", ["step", "after_inner", "finish", "adopt"])
def test_averaged_refuses_what_its_end_would_undo(what):
    """What the end of averaged would undo is refused within it."""
    net = model()
    opt = NoLoCo(torch.optim.SGD(net.parameters(), lr=0.1), Alone(), every=10, lag=0)
    train(net, opt, 3)
    calls = {
        "step": opt.step, "after_inner": lambda: list(opt.after_inner()), "finish": opt.finish,
        "adopt": lambda: opt.adopt(opt.slow, round=3, into_model=True),
    }  # fmt: skip
    with opt.averaged():
        with opt.averaged():
            pass
        shown = weights(net)
        with pytest.raises(RuntimeError, match=r"\(\) within averaged\(\) would be lost"):
            calls[what]()
        assert same(weights(net), shown)
        assert (opt.steps, opt.round) == (3, 0)
    calls[what]()


def test_finish_counts_the_steps_since_the_last_round():
    def after(steps, opt_steps, exchange=None, **options):
        net = model()
        opt = DiLoCo(
            torch.optim.SGD(net.parameters(), lr=0.1),
            exchange or Alone(),
            every=50,
            lr=1.0,
            momentum=0.0,
            **options,
        )
        train(net, opt, steps)
        opt.finish(average=True)
        assert opt.round == opt_steps
        return net, opt

    plain = model()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 70)
    net, opt = after(70, 2)  # a round after step 50, and the mean
    for found, expected in zip(weights(net), weights(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert same(weights(net), opt.slow)
    whole, _ = after(50, 2)
    train(at_end := model(), torch.optim.SGD(at_end.parameters(), lr=0.1), 50)
    for found, expected in zip(weights(whole), weights(at_end), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)

    def peer(exchange):
        net = model()
        opt = DiLoCo(
            torch.optim.SGD(net.parameters(), lr=0.1), exchange, every=50, lr=1.0, momentum=0.0
        )
        train(net, opt, 70, first=1000 * ord(exchange.peer))
        before = weights(net)
        opt.finish(average=True)
        return before, weights(net)

    ends = Simulation(["a", "b"]).run(peer)
    assert same(ends["a"][1], ends["b"][1])
    for a, b, found in zip(ends["a"][0], ends["b"][0], ends["a"][1], strict=True):
        torch.testing.assert_close(found, (a + b) / 2, rtol=0, atol=1e-6)


def test_finish_ends_with_the_bits_of_settle_and_average_over():
    """Mutants: its mean goes by another number than that of the next round; by a second try."""

    def peer(exchange):
        ends = []
        for by_hand in (False, True):
            net, told = model(), []
            inner = torch.optim.SGD(net.parameters(), lr=0.1)
            opt = NoLoCo(inner, exchange, every=4, lag=2, run=f"by hand: {by_hand}")
            train(net, opt, 9, first=1000 * ord(exchange.peer))
            opt.on_round = told.append
            if by_hand:
                opt.settle()
                opt.average_over(exchange, tries=1)
            else:
                opt.finish(average=True)
            ends.append((weights(net), [t.clone() for t in opt.slow], told, opt.round))
        return ends

    for (net, slow, told, round), (net_by_hand, slow_by_hand, _, _) in (
        Simulation(["a", "b"]).run(peer).values()
    ):
        assert same(net, net_by_hand)
        assert same(slow, slow_by_hand)
        assert told[-1].key.round == round - 1
        assert told[-1].members == ("a", "b")


def test_contribution_after_finish_starts_at_the_weights():
    """After finish a contribution is measured from where the weights are."""

    class Drifting(Partner):
        """Partner whose weights are other ones in the plain mean."""

        def start(self, contribution):
            self.theirs = (
                [tensor + 2.0 for tensor in contribution.tensors]
                if contribution.key.fragment == 1
                else None
            )
            return super().start(contribution)

    net = model()
    opt = CO2(torch.optim.SGD(net.parameters(), lr=0.1), partner := Drifting(None), every=2)
    train(net, opt, 4)
    opt.finish(average=True)
    begin = weights(net)
    assert same(begin, opt.slow)
    train(net, opt, 2, first=4)
    alone = model()
    with torch.no_grad():
        for own, start in zip(alone.parameters(), begin, strict=True):
            own.copy_(start)
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), 2, first=4)
    for sent, start, end in zip(partner.sent[-1], begin, weights(alone), strict=True):
        torch.testing.assert_close(sent, start - end, rtol=0, atol=1e-6)


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
