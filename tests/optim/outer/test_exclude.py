"""Which tensors of a model take part: what is excluded or frozen, buffers, the cut into fragments,
and float64.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from shoal.optim import (
    METHODS,
    Alone,
    DecoupledDiLoCo,
    DiLoCo,
    LocalSGD,
    NoLoCo,
    Simulation,
    StreamingDiLoCo,
    config_diff,
    method_named,
    strided,
)
from shoal.swarm.training.averaged_state import AveragedState
from shoal.swarm.training.session import Session
from shoal.swarm.training.session_setup import parameters_of
from tests.support.outer_training import Recording, model, train


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2)

    def forward(self, rows):
        return self.head(self.norm(self.blocks(rows)))


def make():
    torch.manual_seed(0)
    return Body()


WAYS = {
    "a module": ["head"],
    "a pattern": ["head.*"],
    "names": ["head.weight", "head.bias"],
    "parameters": None,
}


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "a module") for name in METHODS), *(("streaming", way) for way in WAYS)],
)
def test_what_is_excluded_stays_local_and_the_rest_is_averaged(name, way):
    def peer(exchange):
        net = make()
        own = list(net.head.parameters()) if WAYS[way] is None else WAYS[way]
        method = method_named(name)
        short = {"every": 4} if method.knobs["every"] > 4 else {}
        opt = method.make(
            torch.optim.SGD(net.parameters(), lr=0.1), exchange, model=net, exclude=own, **short
        )
        train(net, opt, 8, target=int(exchange.peer))
        opt.finish()
        with opt.averaged():
            return (
                [p.detach().clone() for p in net.parameters()],
                opt,
                [p.detach().clone() for p in net.head.parameters()],
            )

    found = Simulation(["0", "1"]).run(peer)
    (one, opt, head), (other, _, others_head) = found["0"], found["1"]
    assert len(opt.slow) == len(one) - 2
    assert all(len(tensors) == len(opt.slow) for tensors in opt.rule_state.values())
    assert not any(torch.equal(a, b) for a, b in zip(head, others_head, strict=True))
    if opt.anchored:  # else the peers differ anyway
        assert all(
            torch.allclose(a, b, atol=1e-6) for a, b in zip(one[:-2], other[:-2], strict=True)
        )
    assert all(torch.equal(a, b) for a, b in zip(one[:-2], opt.slow, strict=True))


def test_it_is_not_sent_and_not_restored_by_averaged():
    class Noted(Alone):
        sent = ()

        def start(self, contribution):
            self.sent = [tuple(tensor.shape) for tensor in contribution.tensors]
            return super().start(contribution)

    net, exchange = make(), Noted()
    opt = NoLoCo(
        torch.optim.SGD(net.parameters(), lr=0.1),
        exchange,
        every=2,
        model=net,
        exclude=["head", "norm"],
        buffers="average",
        lag=0,
    )
    train(net, opt, 2)
    assert exchange.sent == [(3, 3), (3,)] * 3  # the buffers of the excluded module neither
    with opt.averaged():
        net.head.bias.data.fill_(7.0)
    assert net.head.bias.tolist() == [7.0, 7.0]
    assert NoLoCo(
        torch.optim.SGD(net.parameters(), lr=0.1), Alone(), model=net, exclude=["*.bias"], lag=0
    ).slow[-1].shape == (2, 3)


def test_a_frozen_one_that_is_excluded_may_be_trained_later():
    net = make()
    net.head.requires_grad_(False)
    opt = DiLoCo(
        torch.optim.SGD(net.parameters(), lr=0.1), Alone(), every=2, model=net, exclude=["head"]
    )
    net.head.requires_grad_(True)
    before = net.head.weight.detach().clone()
    train(net, opt, 2)
    assert not torch.equal(before, net.head.weight)


def test_names_are_those_of_the_plain_model_in_wrappers():
    class Wrap(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    net = make()
    opt = NoLoCo(
        torch.optim.SGD(net.parameters(), lr=0.1),
        Alone(),
        model=Wrap(net),
        exclude=["head.weight"],
        lag=0,
    )
    assert [tuple(slow.shape) for slow in opt.slow[-2:]] == [(3,), (2,)]


def test_what_fits_nothing_is_refused():
    net = make()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    for exclude, words in {
        ("heat",): "no parameter of the model fits 'heat'",
        (nn.Parameter(torch.ones(4)),): r"of shape \(4,\), is not in the inner optimizer",
        "head": "put it into brackets",
        ("*",): "got none",
    }.items():
        with pytest.raises(ValueError, match=words):
            NoLoCo(inner, Alone(), model=net, exclude=exclude, lag=0)
    with pytest.raises(ValueError, match="hand in model="):
        NoLoCo(inner, Alone(), exclude=["head"], lag=0)


def test_fragments_leave_out_excluded_parameters():
    """Peers that exclude others differ and fragments are cut from the rest."""
    net = make()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    one, other = (
        NoLoCo(inner, Alone(), model=net, exclude=[name], lag=0) for name in ("head", "norm")
    )
    assert config_diff(one, other) is not None
    opt = StreamingDiLoCo(inner, Alone(), model=net, fragments=9, exclude=["blocks.1"], lag=1)
    assert opt.fragments == 4  # blocks 0 and 2, norm, head
    plain = DecoupledDiLoCo(
        inner,
        Alone(),
        model=net,
        fragments=2,
        exclude=["blocks.0"],
        plain=list(net.head.parameters()),
        lag=2,
    )
    marked = {plain.positions(fragment)[position] for fragment, position in plain.rule.plain}
    assert [plain.parameters[index].shape for index in sorted(marked)] == [(2, 3), (2,)]


class Adapted(nn.Module):
    """A frozen matrix with a trained adapter of rank 2, as LoRA has it, and a frozen integer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.codes = nn.Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(2, 16)), nn.Parameter(torch.zeros(16, 2))

    def forward(self, inputs):
        return self.base(inputs) + inputs @ self.down.T @ self.up.T


def adapt(net, opt, steps):
    for step in range(steps):
        net(
            torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        ).square().mean().backward()
        opt.count(4)
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize(
    "method", [partial(NoLoCo, lag=0), DiLoCo, partial(StreamingDiLoCo, lag=1, fragments=1)]
)
def test_only_the_adapter_is_sent(
    method,
):
    """Only the adapter is sent and the weights are those of an optimizer without the rest."""
    every, few = Adapted(), Adapted()
    all_given = method(
        torch.optim.AdamW(every.parameters(), lr=0.01), recorded := Recording(), every=2
    )
    only = method(torch.optim.AdamW([few.down, few.up], lr=0.01), Alone(), every=2)
    adapt(every, all_given, 6)
    adapt(few, only, 6)
    assert [[tuple(tensor.shape) for tensor in sent.tensors] for sent in recorded.sent] == [
        [(2, 16), (16, 2)]
    ] * 3
    assert [tensor.numel() for tensor in all_given.slow] == [32, 32]
    assert all(a is b for a, b in zip(all_given.parameters, [every.down, every.up], strict=True))
    assert all(
        torch.equal(a, b)
        for a, b in zip(every.state_dict().values(), few.state_dict().values(), strict=True)
    )


def test_late_unfreezing_is_refused():
    """What is unfrozen later is refused before a step and what is frozen later stays in."""
    net = Adapted()
    opt = NoLoCo(
        torch.optim.SGD(net.parameters(), lr=0.01), recorded := Recording(), every=1, lag=0
    )
    net.down.requires_grad_(False)
    adapt(net, opt, 1)
    net.base.weight.requires_grad_(True)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(
        ValueError, match="frozen at first, is trained now, and would never be averaged"
    ):
        adapt(net, opt, 1)
    assert opt.steps == 1
    assert [len(sent.tensors) for sent in recorded.sent] == [2]
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True)
    )


def test_plain_mean_is_of_the_named_parameter():
    """A plain mean is of the parameter that was named behind frozen ones."""
    net = Adapted()
    opt = DecoupledDiLoCo(
        torch.optim.SGD(net.parameters(), lr=0.01), Alone(), fragments=1, plain=[net.up], lag=2
    )
    assert opt.rule.plain == {(0, 1)}


def test_fragments_are_cut_from_what_is_trained():
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    net[:4].requires_grad_(False)
    assert [[id(p) for p in part] for part in strided(net, 2)] == [
        [id(p) for p in net[place].parameters()] for place in (4, 5)
    ]


def test_session_averages_trained_parameters():
    """A session averages what is trained of a module and of a list."""
    net = Adapted()
    for state in (net, list(net.parameters())):
        assert [id(p) for p in parameters_of(state)] == [id(net.down), id(net.up)]


def test_a_session_sees_what_the_caller_unfreezes():
    """Without an optimizer of its own it knew the trained parameters only, and each peer's backbone
    drifted for itself.
    """
    net = Adapted()
    session = object.__new__(Session)
    session._state, session._ranks = AveragedState.of(parameters_of(net), net, ()), None
    session.exchange, made = Alone, []
    session._made = lambda inner, exchange, **options: (
        made.append(NoLoCo(inner, exchange, every=2, lag=0, model=net)) or made[-1]
    )
    opt = session.optimizer()
    assert [id(p) for p in opt.parameters] == [id(net.down), id(net.up)]
    net.base.weight.requires_grad_(True)
    with pytest.raises(
        ValueError, match="frozen at first, is trained now, and would never be averaged"
    ):
        opt.step()


class Assigns(nn.Module):
    """Module that keeps its running mean by assignment and not in place."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("running", torch.zeros(3))

    def forward(self, inputs):
        self.running = 0.5 * self.running + inputs.mean(0)
        return inputs * self.weight


def norm():
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def converted(net):
    return net.to(torch.float64).to(torch.float32)


@pytest.mark.parametrize(
    ("make", "change", "name"),
    [
        (norm, converted, "1.running_mean"),
        (Assigns, lambda net: net, "running"),
        (norm, lambda net: net, "1.running_mean"),
    ],
    ids=["converted", "assigned", "in place"],
)
def test_statistics_agree_after_a_round(make, change, name):
    """Peers have the same statistics after a round whichever tensor holds them."""

    def peer(exchange):
        torch.manual_seed(0)
        net = make()
        opt = LocalSGD(
            torch.optim.SGD(net.parameters(), lr=0.1),
            exchange,
            every=2,
            buffers="average",
            model=net,
            lag=0,
        )
        change(net)
        own = torch.Generator().manual_seed(ord(exchange.peer))
        for _ in range(4):
            net(torch.randn(8, 3, generator=own)).square().mean().backward()
            if opt.steps == 3:
                before = net.get_buffer(name).clone()
            opt.step()
            opt.zero_grad()
        return before, net.get_buffer(name).clone()

    ends = Simulation(["a", "b"]).run(peer)
    before = [ends[name][0] for name in "ab"]
    assert not torch.equal(*before)
    for _, after in ends.values():
        torch.testing.assert_close(after, sum(before) / 2, rtol=0, atol=1e-6)


def test_reshaped_buffer_is_named_before_sending():
    """A buffer that changed its shape is named before anything is sent."""
    net = Assigns()
    opt = LocalSGD(
        torch.optim.SGD(net.parameters(), lr=0.1),
        Alone(),
        every=1,
        buffers="average",
        model=net,
        lag=0,
    )
    net.running = torch.zeros(4)
    with pytest.raises(
        ValueError, match=r"the averaged buffer 'running' is not of shape \(3,\) any more"
    ):
        opt.step()
    assert opt.round == 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(5)]
        )


class Holds(nn.Module):
    """As DistributedDataParallel, peft and many a training script hold a model; ``held`` may itself
    be wrapped.
    """

    def __init__(self, held):
        super().__init__()
        self.module = held


def cut(model, fragments):
    return [[id(p) for p in part] for part in strided(model, fragments)]


def sizes(parts):
    return [sum(p.numel() for p in part) for part in parts]


@pytest.mark.parametrize("fragments", [1, 2, 3, 4])
def test_a_wrapped_model_is_cut_as_the_plain_one(fragments):
    net = Net()
    plain = cut(net, fragments)
    compiled = torch.compile(net)
    assert next(compiled.named_parameters())[0].startswith("_orig_mod.")
    for wrapped in (
        compiled,
        Holds(net),
        Holds(Holds(compiled)),
        nn.Sequential(net),
        torch.nn.DataParallel(net),
    ):
        assert cut(wrapped, fragments) == plain
    net.blocks[2] = torch.compile(net.blocks[2])
    assert cut(net, fragments) == plain


def test_nested_lists_of_layers_are_cut():
    """A list of layers within a list is cut too and a block of several modules is not."""
    nested = nn.Sequential(
        nn.Embedding(20, 4),
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))),
        nn.Linear(4, 7, bias=False),
    )
    assert sizes(strided(nested, 4)) == [80 + 72, 2 * 72, 2 * 72, 72 + 28]
    assert [len(part) for part in strided(nn.Sequential(nn.Sequential(nested)), 4)] == [3, 4, 4, 3]
    net = Net()
    blocks = {id(p): name.split(".")[1] for name, p in net.named_parameters() if "blocks" in name}
    assert [{blocks[i] for i in part if i in blocks} for part in cut(net, 2)] == [
        {"0", "2", "4"},
        {"1", "3"},
    ]


@pytest.mark.parametrize("method", [StreamingDiLoCo, DecoupledDiLoCo])
def test_the_defaults_need_no_model_and_cut_evenly(method):
    net = Net()
    opt = method(torch.optim.SGD(net.parameters(), lr=0.1), Alone())
    count = len(list(net.parameters()))
    assert opt.fragments == (4 if method is StreamingDiLoCo else min(count, 24))
    own = sizes([opt.slow_of(fragment) for fragment in range(opt.fragments)])
    assert sum(own) == sum(p.numel() for p in net.parameters())
    if method is StreamingDiLoCo:
        assert max(own) - min(own) <= 16
        again = StreamingDiLoCo(torch.optim.SGD(Net().parameters(), lr=0.1), Alone(), lag=1)
        fragments = range(opt.fragments)
        assert [*map(again.positions, fragments)] == [*map(opt.positions, fragments)]


def test_different_cuts_get_one_sentence():
    """Peers that cut their models in other ways get one sentence."""

    def peer(exchange):
        net = Net()
        parts = strided(net, 2) if exchange.peer == "a" else list(reversed(strided(net, 2)))
        opt = StreamingDiLoCo(
            torch.optim.SGD(net.parameters(), lr=0.1), exchange, every=2, lag=0, fragments=parts
        )
        for _ in range(2):
            opt.step()

    sentence = (
        r"peer b sends \d+ tensors in fragment 0 where peer a sends \d+ or other shapes: "
        r"all must have the same model"
    )
    with pytest.raises(ValueError, match=sentence):
        Simulation(["a", "b"]).run(peer)


# knobs with which a round without a partner changes no weight, or keeps exactly what was learnt
KEEPS = {
    "noloco": {"lr": 1.0, "momentum": 0.0, "lag": 0},
    "local": {"lag": 0},
    "gasloc": {"lr": 1.0, "momentum": 0.0, "lag": 0},
    "diloco": {"lr": 1.0, "momentum": 0.0},
    "diloco-hb": {"lr": 1.0, "momentum": 0.0},
    "streaming": {"lr": 1.0, "momentum": 0.0, "fragments": 2, "lag": 0, "mix": 0.0},
    "decoupled": {"lr": 1.0, "momentum": 0.0, "fragments": 2, "lag": 0},
    "eager": {"lr": 1.0, "momentum": 0.0},
    "co2": {"lr": 1.0, "momentum": 0.0, "penalty": 1.0, "clip": None, "keep": True},
    "sparta": {"part": 0.5},
}


def test_these_are_all_methods_but_two():
    """None sends nothing; sparseloco keeps in its residual what its codec leaves out."""
    assert set(METHODS) - set(KEEPS) == {"none", "sparseloco"}
    assert not set(KEEPS) - set(METHODS)


@pytest.mark.parametrize("method", KEEPS)
def test_alone_equals_the_inner_optimizer(method):
    """Without a partner training ends where the inner optimizer alone ends."""
    plain, wrapped = model(dtype=torch.float64), model(dtype=torch.float64)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 8)
    opt = METHODS[method].make(
        torch.optim.SGD(wrapped.parameters(), lr=0.1),
        Alone(),
        every=2,
        model=wrapped,
        **KEEPS[method],
    )
    train(wrapped, opt, 8)
    opt.finish()
    assert {tensor.dtype for tensor in (*opt.slow, *wrapped.parameters())} == {torch.float64}
    for found, expected in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)  # float32 rounds by 1e-8


def test_with_lr_0_a_weight_keeps_all_its_bits():
    net = model(dtype=torch.float64)
    before = [p.detach().clone() for p in net.parameters()]
    opt = DiLoCo(torch.optim.SGD(net.parameters(), lr=0.1), Alone(), every=2, lr=0.0)
    train(net, opt, 4)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("method", KEEPS)
def test_partners_are_sent_float32(method):
    sent = set()

    def peer(exchange):
        start = exchange.start

        def noting(contribution):
            sent.update(tensor.dtype for tensor in contribution.tensors)
            return start(contribution)

        exchange.start = noting
        net = model(dtype=torch.float64)
        opt = METHODS[method].make(
            torch.optim.SGD(net.parameters(), lr=0.1), exchange, every=2, model=net, **KEEPS[method]
        )
        train(net, opt, 6, first=100 * ord(exchange.peer))
        opt.finish(average=True)
        return [p.detach() for p in net.parameters()]

    ends = Simulation(["a", "b"]).run(peer)
    assert sent == {torch.float32}
    for a, b in zip(ends["a"], ends["b"], strict=True):
        assert a.dtype == torch.float64
        assert torch.equal(a, b)


def test_float32_beside_float64_is_not_rounded():
    """A float32 parameter beside a float64 one is not rounded either."""
    parts = [nn.Parameter(torch.rand(3, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    before = [p.detach().clone() for p in parts]
    opt = METHODS["sparta"].make(torch.optim.SGD(parts, lr=0.1), Alone(), every=1, part=1.0)
    opt.step()
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(parts, before, strict=True))


def normed(kind, seed):
    """Return a model whose spectral norms begin their power iteration elsewhere with each seed."""
    torch.manual_seed(0)
    net = nn.Sequential(kind(nn.Linear(3, 8)), nn.BatchNorm1d(8), nn.ReLU(), kind(nn.Linear(8, 1)))
    torch.manual_seed(seed)
    for name, buffer in net.named_buffers():
        if name.endswith(("_u", "_v")):
            buffer.copy_(nn.functional.normalize(torch.randn_like(buffer), dim=0))
    return net


@pytest.mark.parametrize("kind", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_power_iteration_vectors_stay_local(kind):
    """Their mean is no singular vector: the first exchange made both peers' weights NaN."""

    def peer(exchange):
        net = normed(kind, int(exchange.peer) + 1)
        inner = torch.optim.SGD(net.parameters(), lr=0.01)
        opt = NoLoCo(inner, exchange, every=2, lag=0, fragments=1, buffers="average", model=net)
        train(net, opt, 9)
        opt.finish(average=True)
        return net

    one, other = Simulation(["0", "1"]).run(peer).values()
    for net in (one, other):
        assert all(bool(parameter.isfinite().all()) for parameter in net.parameters())
        for name, buffer in net.named_buffers():
            if name.endswith(("_u", "_v")):
                assert float(buffer.norm()) == pytest.approx(1.0, abs=1e-4)
    assert torch.equal(one[1].running_var, other[1].running_var)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
