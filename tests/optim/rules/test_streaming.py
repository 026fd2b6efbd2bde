"""Streaming DiLoCo: the schedule, the fragments, and the equivalences against float64
references.
"""

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.optim import (
    Alone,
    Apply,
    Delayed,
    DiLoCo,
    DiLoCoRule,
    Faults,
    NoLoCo,
    OuterOptimizer,
    Send,
    Streaming,
    StreamingDiLoCo,
    strided,
)
from shoal.optim.schedule.schedules import SentAhead
from tests.optim.references import streaming

EVERY = 6
FIRST, SECOND = slice(0, 3), slice(3, 5)


def two(peer, weights):
    return [weights[:1], weights[1:]]


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("lag", "mix"),
    [(0, 0.0), (0, 0.5), (1, 0.5), (2, 0.0), (3, 0.25), (5, 0.5), (5, 0.0)]
    + [(lag, "keep") for lag in (0, 1, 3, 5)],
)
def test_it_is_the_reference_with_fragments_in_flight(lab, lag, mix):
    """With a lag of more than EVERY / 2 both fragments are in flight at once."""
    found = lab.run(StreamingDiLoCo, 40, every=EVERY, fragments=two, lag=lag, mix=mix)
    expected = streaming(
        lab,
        lab.PEERS,
        40,
        every=EVERY,
        slices=[FIRST, SECOND],
        lag=lag,
        mix=mix,
        lr=0.7,
        momentum=0.6,
    )
    for peer in lab.PEERS:
        lab.close(found[peer].slow, expected[peer][0])
        lab.close(found[peer].fast, expected[peer][1])
        assert all(info.lag == lag and len(info.members) == 4 for info in found[peer].infos)


@pytest.mark.parametrize("mix", [0.0, "keep"])
def test_1_one_fragment_is_diloco(lab, mix):
    """One fragment without lag and mix is DiLoCo to the bit."""
    found = lab.run(StreamingDiLoCo, 30, every=5, fragments=1, lag=0, mix=mix, lr=0.7)
    for peer, expected in lab.run(DiLoCo, 30, every=5).items():
        assert np.array_equal(found[peer].slow, expected.slow)
        assert np.array_equal(found[peer].fast, expected.fast)


def test_unchanged_weight_ends_as_the_slow_one(lab):
    """A weight that does not change ends as exactly the slow one."""

    def still(weights):
        return torch.optim.SGD(
            [{"params": [w], "lr": lab.RATE * (i == 0)} for i, w in enumerate(weights)]
        )

    found = lab.run(StreamingDiLoCo, 31, every=EVERY, fragments=2, lag=3, mix="keep", inner=still)
    for peer in lab.PEERS:
        assert np.array_equal(found[peer].fast[-1][SECOND], found[peer].slow[-1][SECOND])


@pytest.mark.parametrize("lag", [0, 2, 5])
@pytest.mark.parametrize("count", [1, 4])
def test_3_and_4_mix_one_never_hears_the_others(lab, lag, count):
    """With mix one the fast weights never hear the others."""
    found = lab.run(
        StreamingDiLoCo, 30, lab.PEERS[:count], every=EVERY, fragments=2, lag=lag, mix=1.0
    )
    for peer in lab.PEERS[:count]:
        weights, path = torch.tensor(lab.start(), dtype=torch.float32), []
        lab.close(
            found[peer].fast, [lab.trained(peer, lab.start(), steps) for steps in range(1, 31)]
        )
        parameters = [nn.Parameter(weights[:3].clone()), nn.Parameter(weights[3:].clone())]
        alone = torch.optim.SGD(parameters, lr=lab.RATE)
        for _ in range(30):
            alone.zero_grad()
            lab.least_squares(peer, parameters).backward()
            alone.step()
            path.append(torch.cat(parameters).detach().double().numpy())
        assert np.array_equal(found[peer].fast, path)


@given(every=st.integers(1, 40), fragments=st.integers(1, 40), lag=st.integers(0, 39))
def test_6_fragments_are_evenly_spaced(every, fragments, lag):
    """Each fragment is sent once a round evenly apart and applied after the lag."""
    if fragments > every or lag >= every:
        with pytest.raises(ValueError, match=r"fragments must be between|lag must be at least 0"):
            Streaming(every, fragments, lag)
        return
    schedule = Streaming(every, fragments, lag)
    actions = [(step, action) for step in range(1, 3 * every + 1) for action in schedule.at(step)]
    sends = {
        action.fragment: [s for s, a in actions if a == action]
        for _, action in actions
        if isinstance(action, Send)
    }
    assert sorted(sends) == list(range(fragments))
    for fragment, steps in sends.items():
        first = (fragment + 1) * every // fragments
        assert steps == [first, first + every, first + 2 * every]
        applied = [s for s, a in actions if a == Apply(fragment, lag)]
        assert applied == [s + lag for s in steps if s + lag <= 3 * every]
    assert schedule.at(0) == schedule.at(-every) == []
    delayed = Delayed(every, fragments)
    for step in range(1, 3 * every + 1):
        sent = [a.fragment for a in schedule.at(step) if isinstance(a, Send)]
        assert delayed.at(step) == [action for f in sent for action in (Send(f), Apply(f, every))]


@given(every=st.integers(1, 40), fragments=st.integers(1, 40), lag=st.integers(0, 39))
def test_sent_ahead_applies_on_the_fragments_steps(every, fragments, lag):
    """Each fragment is applied where it would be sent, and sent the lag before, once a round."""
    fragments = min(fragments, every)
    if lag >= every // fragments:
        with pytest.raises(ValueError, match=r"lag must be at least 0|below its share of a round"):
            SentAhead(every, fragments, lag)
        return
    usual, ahead = Streaming(every, fragments, lag), SentAhead(every, fragments, lag)
    under_way = {}
    for step in range(-every, 3 * every + 1):
        due = [action.fragment for action in usual.at(step) if isinstance(action, Send)]
        later = [action.fragment for action in usual.at(step + lag) if isinstance(action, Send)]
        sends = [Send(fragment) for fragment in later if step > 0]
        for action in sends:
            assert action.fragment not in under_way
            under_way[action.fragment] = step
        applies = [Apply(fragment, lag) for fragment in due]
        for action in applies:
            assert under_way.pop(action.fragment) == step - lag
        assert ahead.at(step) == sends + applies
    if lag == 0:
        assert all(ahead.at(step) == usual.at(step) for step in range(3 * every))


def test_what_is_sent_ahead_needs_a_number():
    with pytest.raises(ValueError, match="needs a lag in steps, and auto is known only afterwards"):
        SentAhead(6, 2, "auto")
    weights = [torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(ValueError, match="phase must be send or apply, got 'late'"):
        StreamingDiLoCo(torch.optim.SGD(weights), Alone(), fragments=1, lag=1, phase="late")


def test_7_transport_within_the_lag_is_free(lab):
    """A transport that takes less than the lag changes no bit and costs no time."""
    steps, lag = 40, 3

    def delayed(delay):
        return lab.run(
            StreamingDiLoCo, steps, every=EVERY, fragments=2, lag=lag, faults=Faults(delay=delay)
        )

    prompt = delayed(lambda peer, key: 0.0)
    late = delayed(
        lambda peer, key: 0.1 * (lab.PEERS.index(peer) + key.round % 2) * 0.7
    )  # at most 2.8 steps
    later = delayed(lambda peer, key: 0.35)  # half a step more than there is
    for peer in lab.PEERS:
        assert np.array_equal(prompt[peer].slow, late[peer].slow)
        assert np.array_equal(prompt[peer].fast, late[peer].fast)
        assert np.array_equal(prompt[peer].fast, later[peer].fast)
        assert late[peer].now == pytest.approx(steps * lab.STEP_S)
        assert later[peer].now == pytest.approx(
            steps * lab.STEP_S + 6 * 0.05
        )  # meanwhile the next one has a head start


def test_lost_fragment_keeps_its_progress(lab):
    """Each fragment has a momentum of its own and a lost one keeps what was learnt."""
    lost = Faults(drop=lambda peer, key: key.fragment == 0)
    found = lab.run(StreamingDiLoCo, 36, every=EVERY, fragments=two, lag=0, mix=0.0, faults=lost)
    for peer in lab.PEERS:
        for info in found[peer].infos:
            assert len(info.members) == (0 if info.key.fragment == 0 else 4)
        assert np.array_equal(found[peer].slow[-1][SECOND], found["anna"].slow[-1][SECOND])
        assert peer == "anna" or not np.array_equal(
            found[peer].slow[-1][FIRST], found["anna"].slow[-1][FIRST]
        )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(5)]
        )
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def test_fragments_are_strided_by_layer_and_hold_every_parameter_once():
    model = Net()
    names = {id(p): name for name, p in model.named_parameters()}
    parts = [[names[id(p)] for p in part] for part in strided(model, 3)]
    layers = [
        list(dict.fromkeys(".".join(n.split(".")[: 2 if "blocks" in n else 1]) for n in part))
        for part in parts
    ]
    assert layers == [
        ["embed", "blocks.2", "norm"],
        ["blocks.0", "blocks.3"],
        ["blocks.1", "blocks.4"],
    ]
    assert Counter(name for part in parts for name in part) == Counter(names.values())
    with pytest.raises(ValueError, match="between 1 and the number of layers, 12, got 13"):
        strided(model, 13)


def test_module_fragments_hold_their_parameters():
    """Fragments named by modules are those of their parameters and a tied one is the firsts."""
    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    names = [name for name, _ in model.named_parameters()]
    opt = StreamingDiLoCo(inner, Alone(), fragments=[[model.head, model.norm], model.blocks], lag=1)
    found = [{names[at].split(".")[0] for at in opt.positions(number)} for number in range(2)]
    assert found == [{"embed", "norm"}, {"blocks"}]  # the head's weight is the embedding's
    opt = NoLoCo(
        inner,
        Alone(),
        fragments=[
            [model.embed, *model.blocks[:2]],
            nn.ModuleList([model.head, *model.blocks[2:], model.norm]),
        ],
    )
    assert names[opt.positions(0)[0]] == "embed.weight"
    assert sum(len(opt.positions(number)) for number in range(2)) == len(names)


@pytest.mark.parametrize(
    ("fragments", "message"),
    [
        (
            lambda net: [net, net.head],
            r"fragments\[1\] has a module of fragments\[0\]: put every module into exactly one",
        ),
        (lambda net: [net.blocks[0], net.blocks], r"fragments\[1\] has a module of fragments\[0\]"),
        (lambda net: [net.blocks, net.head], r"parameter \d+ of shape \(4,\) is in 0 fragments"),
        (lambda net: net, "fragments must be a number, or a list of modules, got Net"),
        (lambda net: "blocks", "fragments must be a number, or a list of modules, got 'blocks'"),
        (lambda net: 2.0, "fragments must be a number, or a list of modules, got 2.0"),
        (
            lambda net: [net.blocks, "head"],
            r"fragments\[1\] must be a module, or a list of modules and parameters, got 'head'",
        ),
        (
            lambda net: [[net.blocks, 3]],
            r"fragments\[0\] must be a module, or a list of modules and parameters, got 3",
        ),
        (
            lambda net: [net.head.weight],
            r"fragments\[0\] must be a module, or a list of modules and parameters, got Parameter",
        ),
    ],
)
def test_invalid_fragments_are_refused(fragments, message):
    """Fragments that overlap lack parameters or are of another type are refused in one sentence."""
    model = Net()
    for method in (StreamingDiLoCo, NoLoCo):
        with pytest.raises(ValueError, match=message):
            method(torch.optim.SGD(model.parameters(), lr=0.1), Alone(), fragments=fragments(model))


def test_a_method_that_sends_the_whole_model_refuses_fragments():
    """It catches fragments after the first that are never sent."""
    model = Net()
    with pytest.raises(
        ValueError, match="sends one fragment, so of 2 fragments= most would never be averaged"
    ):
        DiLoCo(
            torch.optim.SGD(model.parameters(), lr=0.1),
            Alone(),
            fragments=[model.blocks, [model.norm, model.embed]],
        )


def test_every_parameter_must_be_in_exactly_one_fragment():
    a, b = (nn.Parameter(torch.ones(size)) for size in (2, 3))
    inner = torch.optim.SGD([a, b], lr=0.1)
    for parts, message in [
        (
            [[a]],
            r"parameter 1 of "
            r"shape \(3,\) is in 0 fragments",
        ),
        ([[a, b], [b]], "parameter 1 .* in 2"),
        ([[a, b], []], "fragment 1 has no parameter"),
    ]:
        with pytest.raises(ValueError, match=message):
            StreamingDiLoCo(inner, Alone(), fragments=parts, lag=1)
    with pytest.raises(ValueError, match="lag must be at least 0 and below every"):
        StreamingDiLoCo(inner, Alone(), fragments=1, every=5, lag=5)


def test_restart_from_a_mix_is_not_rounded():
    """Nothing is learnt: slow and fast weights must stay where the mix put them, whatever bfloat16
    can hold.
    """
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    opt = StreamingDiLoCo(
        torch.optim.SGD([weight], lr=1.0),
        Alone(),
        every=2,
        fragments=1,
        lag=1,
        mix=0.5,
        lr=1.0,
        momentum=0.0,
    )
    opt.slow[0].fill_(
        1.001
    )  # the model holds 1, so the first pseudo-gradient is what it could not hold
    opt.adopt([torch.full((4,), 1.001)], round=0, into_model=True)
    for _ in range(3):
        opt.step()
    weight.grad = torch.full((4,), -(2.0**-6), dtype=torch.bfloat16)
    opt.step()  # sent after this step: 1.001 + 2^-6
    weight.grad = None
    opt.step()
    expected = 1.001 + 2.0**-6
    torch.testing.assert_close(opt.slow[0], torch.full((4,), expected), rtol=0, atol=3e-7)
    for _ in range(10):
        opt.step()
        torch.testing.assert_close(opt.slow[0], torch.full((4,), expected), rtol=0, atol=3e-7)


def test_unrepresentable_mix_is_remembered():
    """A mix that bfloat16 cannot hold is remembered saved and restored."""

    def make():
        weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        options = {"every": 2, "fragments": 1, "lag": 1, "mix": 0.5, "lr": 0.3, "momentum": 0.0}
        return weight, StreamingDiLoCo(torch.optim.SGD([weight], lr=1.0), Alone(), **options)

    def step(weight, opt, count):
        for _ in range(count):
            weight.grad = torch.full((3,), 2.0**-5, dtype=torch.bfloat16)
            opt.step()

    weight, opt = make()
    exact_fast = exact_slow = 1.0
    sent = None
    for number in range(1, 12):
        step(weight, opt, 1)
        exact_fast -= 2.0**-5
        if sent is not None:
            exact_slow -= 0.3 * sent
            exact_fast, sent = 0.5 * exact_fast + 0.5 * exact_slow, None
        if number % 2 == 0:
            sent = exact_slow - exact_fast
        assert opt.slow[0][0].item() == pytest.approx(exact_slow, abs=1e-6)
    assert opt._weights.rounding
    saved, bits = copy.deepcopy(opt.state_dict()), weight.detach().clone()
    step(weight, opt, 7)
    other, resumed = make()
    other.data.copy_(bits)
    resumed.load_state_dict(saved)
    step(other, resumed, 7)
    assert torch.equal(resumed.slow[0], opt.slow[0])
    assert torch.equal(other, weight)


def test_a_schedule_with_more_fragments_than_there_are_is_refused():
    opt = OuterOptimizer(
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1),
        Alone(),
        rule=DiLoCoRule(),
        schedule=Streaming(2, 2),
    )
    opt.step()
    with pytest.raises(ValueError, match="the schedule sends fragment 1, but there are only 1"):
        opt.step()


def test_the_bytes_of_the_fragments_add_up_to_the_model(lab):
    sent = Counter()

    class Counting(Alone):
        def start(self, mine):
            sent[mine.key.fragment] += mine.codec.nbytes([tuple(t.shape) for t in mine.tensors])
            return super().start(mine)

    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = StreamingDiLoCo(inner, Counting(), every=8, fragments=4, model=model, lag=1)
    for _ in range(24):
        opt.step()
    assert sum(sent.values()) == 3 * 4 * sum(p.numel() for p in model.parameters())
    assert sorted(sent) == [0, 1, 2, 3]
