"""Saved state loads under any other method: state of the same meaning is kept, and the rest is reported."""

import copy

import pytest
import torch
from torch import nn

from shoal.optim import (
    METHODS,
    Alone,
    DiLoCo,
    Eager,
    LocalSGD,
    Mean,
    NoLoCo,
    StreamingDiLoCo,
    codec_named,
    method_named,
    migrate_state,
    muon,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


LAGS = {"noloco": {"lag": 0}, "local": {"lag": 0}, "gasloc": {"lag": 0}, "streaming": {"lag": 1}, "decoupled": {"lag": 2}}
"""Fixed, for what is in flight is sent again with the next contribution after a change of method."""


class Run:
    """AdamW in a small model of three layers; the batch of a step follows from its number."""

    def __init__(self, method, width=4, lr=0.05, **options):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2), nn.Linear(2, 2))
        self.inner = torch.optim.AdamW(self.net.parameters(), lr=lr)
        factory = method_named(method).make if isinstance(method, str) else method
        self.opt = factory(self.inner, Alone(), model=self.net, **{"every": 4, **LAGS.get(method, {}), **options})

    def train(self, steps):
        for _ in range(steps):
            inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(self.opt.steps))
            self.opt.zero_grad()
            self.net(inputs).square().mean().backward()
            self.opt.count(6)
            self.opt.step()
        return self

    def begin_from(self, other, **options):
        dropped = migrate_state(self.opt, copy.deepcopy(other.opt.state_dict()), **options)
        self.net.load_state_dict(other.net.state_dict())
        return dropped


def same(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def moments(run):
    return [state[name] for state in run.inner.state.values() for name in ("step", "exp_avg", "exp_avg_sq")]


FAMILY = {"diloco", "diloco-hb", "streaming", "decoupled"}  # one buffer, in torch's form, and no other memory


@pytest.mark.parametrize("now", METHODS)
@pytest.mark.parametrize("was", METHODS)
def test_every_method_goes_on_from_every_other(was, now):
    old, new = Run(was).train(10), Run(now)
    dropped = new.begin_from(old, methods=(was, now))
    assert same(new.opt.slow, old.opt.slow)
    assert same(moments(new), moments(old))
    assert (new.opt.steps, new.opt.tokens, new.opt.round) == (10, 60, old.opt.round)
    assert new.opt.applied == [old.opt.round - 1] * new.opt.fragments
    assert new.opt.param_groups is new.inner.param_groups
    has_memory = any(bool(t.any()) for name, ts in old.opt.rule_state.items() if name != "start" for t in ts)
    if was == now or (was in FAMILY and now in {*FAMILY, "eager"}) or not has_memory:
        assert [line for line in dropped if "codec" not in line] == []
        if has_memory:
            assert all(same(new.opt.rule_state[name], tensors) for name, tensors in old.opt.rule_state.items() if name != "start")
    else:
        (line,) = (line for line in dropped if "codec" not in line)
        assert line.endswith(f" of {was} (the method is {now} now)")
    new.train(10)
    assert new.opt.steps == 20
    assert all(bool(tensor.isfinite().all()) for tensor in new.opt.slow)


@pytest.mark.parametrize("name", METHODS)
def test_the_same_method_goes_on_bit_by_bit(name):
    whole = Run(name).train(10)
    again = Run(name)
    assert again.begin_from(whole) == []
    # What is in flight is taken back: with other settings its mean would be another's. So it is sent again with the next one.
    if any(whole.opt.in_flight(fragment) for fragment in range(whole.opt.fragments)):
        strict = Run(name)
        strict.opt.load_state_dict({**copy.deepcopy(whole.opt.whole_state()), "in_flight": []})
        strict.net.load_state_dict(whole.net.state_dict())
        whole = strict
    assert same(again.train(9).opt.slow, whole.train(9).opt.slow)
    assert same(list(again.net.parameters()), list(whole.net.parameters()))


def test_the_outer_momentum_goes_over_within_the_family_and_is_named_elsewhere():
    old = Run("diloco").train(10)
    new = Run(StreamingDiLoCo, fragments=2)
    assert new.begin_from(old) == []
    assert same(new.opt.rule_state["momentum"], old.opt.rule_state["momentum"])
    assert Run("noloco").begin_from(old) == ["the outer momentum of DiLoCo (the method is NoLoCo now)"]
    assert Run("sparseloco").begin_from(old, methods=("diloco", "sparseloco")) == [
        "the outer momentum of diloco (the method is sparseloco now)"
    ]
    assert Run(DiLoCo, momentum=0.0).begin_from(old) == ["the outer momentum of DiLoCo (it is not used any more)"]
    assert Run("noloco").begin_from(Run("diloco").train(3)) == []  # before the first round there is none yet


def test_an_older_checkpoint_does_not_say_its_kind_so_the_caller_may():
    old = Run("diloco").train(10)
    state = {name: value for name, value in old.opt.whole_state().items() if name not in ("kind", "schedule")}
    assert migrate_state(Run("streaming").opt, copy.deepcopy(state), kind="DiLoCo") == []
    assert migrate_state(Run("noloco").opt, copy.deepcopy(state)) == [
        "the outer momentum of a method that was not noted (the method is NoLoCo now)"
    ]


def test_a_rule_that_measures_from_a_start_of_its_own_begins_at_the_slow_weights():
    old, new = Run("diloco").train(10), Run(Eager)
    assert new.begin_from(old) == []
    assert same(new.opt.rule_state["start"], old.opt.slow)


def test_the_memory_of_a_codec_goes_over_where_it_fits_and_is_named_elsewhere():
    def run(codec, **options):
        return Run(DiLoCo, codec=codec_named(codec), **options)

    class Answers(Alone):
        """Partner that returns the decoded contribution, so that error feedback has a residual."""

        def start(self, key, tensors, weight, codec):
            decoded = codec.decode(codec.encode(tensors), [tuple(t.shape) for t in tensors])

            class Done:
                def result(self):
                    return Mean(decoded, weight, ("a", "b"))

            return Done()

    old = run("topk2+ef")
    old.opt.exchange = Answers()
    old.train(10)
    memory = old.opt.whole_state()["codecs"][0]["error"]
    assert any(bool(tensor.any()) for tensor in memory)
    new = run("topk2+ef")
    assert new.begin_from(old) == []
    assert same(new.opt.whole_state()["codecs"][0]["error"], memory)
    assert run("e3m0+ef").begin_from(old) == ["the memory of the codec topk2+ef (the codec is e3m0+ef now)"]
    assert run("float32").begin_from(old) == ["the memory of the codec topk2+ef (the codec is float32 now)"]
    cut = Run(StreamingDiLoCo, fragments=2, codec=codec_named("topk2+ef"))
    assert cut.begin_from(old) == ["the memory of the codec topk2+ef (there are 2 fragments now, not 1)"]
    merged = Run("decoupled", fragments=1, codec=codec_named("topk2+ef"))
    assert merged.begin_from(old) == ["the memory of the codec topk2+ef (other tensors are sent now)"]
    merged.train(5)


@pytest.mark.parametrize(("was", "now"), [(1, 3), (3, 1), (2, 3)])
def test_any_number_of_fragments(was, now):
    old = Run(StreamingDiLoCo, fragments=was, lag=1).train(11)
    new = Run(StreamingDiLoCo, fragments=now, lag=1)
    assert new.begin_from(old) == []
    assert same(new.opt.slow, old.opt.slow)
    assert same(new.opt.rule_state["momentum"], old.opt.rule_state["momentum"])
    new.train(12)
    assert new.opt.round == old.opt.round + 3 * now


def test_another_length_of_rounds_begins_a_round():
    old, new = Run("noloco", every=4).train(10), Run("noloco", every=7)
    new.begin_from(old)
    rounds = []
    new.opt.on_round = lambda info: rounds.append(info.step)
    new.train(14)
    assert rounds == [17, 24]


def test_another_inner_optimizer_begins_anew_and_is_named():
    old, new = Run("noloco").train(6), Run("noloco")
    new.inner = torch.optim.SGD(new.net.parameters(), lr=0.1, momentum=0.9)
    new.opt = NoLoCo(new.inner, Alone(), every=4, lag=0)
    assert new.begin_from(old) == ["the inner optimizer's state (it is another optimizer now)"]
    assert same(new.opt.slow, old.opt.slow)
    new.train(4)


def test_from_adamw_to_muon_the_weights_come_over():
    old, new = Run("noloco").train(6), Run("noloco")
    new.inner = muon(new.net)
    new.opt = NoLoCo(new.inner, Alone(), every=4, lag=0, model=new.net)
    # As nodes save it: torch's form counts parameters by the inner optimizer's groups.
    assert migrate_state(new.opt, old.opt.whole_state()) == ["the inner optimizer's state (it is another optimizer now)"]
    assert same(new.opt.slow, old.opt.slow)
    new.train(4)


def test_learning_rates_come_over_or_stay():
    old, keep, take = Run("noloco", lr=0.3).train(6), Run("noloco", lr=0.1), Run("noloco", lr=0.1)
    keep.begin_from(old, groups=False)
    take.begin_from(old)
    assert (keep.inner.param_groups[0]["lr"], take.inner.param_groups[0]["lr"]) == (0.1, 0.3)
    assert same(moments(keep), moments(take))


@pytest.mark.parametrize("harm", ["width", "groups"])
def test_another_model_is_refused_and_nothing_is_changed(harm):
    new = Run(LocalSGD).train(3)
    before = copy.deepcopy([new.opt.state_dict(), new.net.state_dict()])
    state = Run("noloco", width=5 if harm == "width" else 4).train(6).opt.whole_state()
    if harm == "groups":
        state["inner"]["param_groups"] *= 2
    words = r"'slow' has shape \(5, 3\) at tensor 0, this model has \(4, 3\)" if harm == "width" else "other parameter groups"
    with pytest.raises(ValueError, match=words):
        migrate_state(new.opt, state)
    after = [new.opt.state_dict(), new.net.state_dict()]
    assert str(before) == str(after)


def test_load_state_dict_is_strict_about_whose_momentum_it_is():
    state = Run("diloco").train(6).opt.state_dict()
    with pytest.raises(ValueError, match="the saved outer state is of DiLoCo, not of NoLoCo: resume with the same method"):
        Run("noloco").opt.load_state_dict(state)


def test_a_state_that_is_not_copied_is_the_optimizers_own():
    run = Run("co2").train(6)
    state, copied = run.opt.whole_state(copy=False), run.opt.whole_state()
    assert all(a is b for a, b in zip(state["slow"], run.opt.slow, strict=True))
    assert str(state) == str(copied)
    (pending,) = run.opt._in_flight
    for of, same_ones in ((state, True), (copied, False)):
        sent = of["in_flight"][0]["tensors"]["sent"]
        assert all((a is b) == same_ones for a, b in zip(sent, pending.sent.contribution, strict=True))
    start = [tensor.clone() for tensor in run.opt.rule_state["start"]]
    run.opt.whole_state(copy=False)  # what is in flight is added to a copy, not to the optimizer's own
    assert same(start, run.opt.rule_state["start"])


@pytest.mark.parametrize("name", METHODS)
def test_the_shapes_of_a_contribution_are_known_before_it_is_sent(name):
    sent = []

    class Noting(Alone):
        def start(self, key, tensors, weight=1.0, codec=None, even=0):
            sent.append([tensor.shape for tensor in tensors])
            return super().start(key, tensors)

    weights = [torch.nn.Parameter(torch.ones(300, 2)), torch.nn.Parameter(torch.ones(3))]
    knobs = {"fragments": 1, "lag": 0} if "fragments" in METHODS[name].knobs else {}
    opt = METHODS[name].make(torch.optim.SGD(weights, lr=0.1), Noting(), every=1, **knobs)
    expected = opt._sent_shapes(0)
    opt.count(1)
    opt.step()
    assert sent == [expected]
