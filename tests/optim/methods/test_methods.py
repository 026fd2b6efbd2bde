"""Properties of all methods: saving at any step, also in flight, weights, buffers, the last mean,
bfloat16, tied parameters.
"""

import io
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from shoal.optim import (
    CO2,
    FLOAT16,
    SPARTA,
    Alone,
    CO2Rule,
    DecoupledDiLoCo,
    DiLoCo,
    Eager,
    EagerRule,
    Every,
    Faults,
    GASLoC,
    LocalSGD,
    NoLoCo,
    OuterOptimizer,
    Simulation,
    SparseLoCo,
    StreamingDiLoCo,
    by_tokens,
    codec_named,
    float_buffers,
)
from shoal.optim.codecs.buffer_tail import BufferTailCodec
from tests.support.outer_state import equal, everything

PEERS, EVERY, STEPS = ["a", "b", "c"], 4, 13

AT_ONCE = {
    "local": partial(LocalSGD, lag=0),
    "noloco": partial(NoLoCo, pull=0.3, lag=0),
    "gasloc": partial(GASLoC, lag=0),
    "diloco": partial(DiLoCo, weight=by_tokens),
    "heavy ball": partial(DiLoCo, nesterov=False, buffers="average"),
    "sparseloco": partial(SparseLoCo, codec=FLOAT16),
    "sparta": partial(SPARTA, part=0.2),
    "streaming": partial(StreamingDiLoCo, fragments=2, lag=0, mix=0.5),
    "decoupled": partial(DecoupledDiLoCo, fragments=3, lag=0),
    "eager": lambda inner, exchange, every, model: OuterOptimizer(
        inner, exchange, rule=EagerRule(), schedule=Every(every)
    ),
    "co2": lambda inner, exchange, every, model: OuterOptimizer(
        inner, exchange, rule=CO2Rule(), schedule=Every(every)
    ),
}
LATE = {
    "streaming": partial(StreamingDiLoCo, fragments=2, lag=3),
    "decoupled": partial(DecoupledDiLoCo, fragments=3, lag=2),
    "eager": partial(Eager, lr=0.3, momentum=0.5),
    "co2": CO2,
    "co2 keep": partial(CO2, keep=True),
    "noloco": partial(NoLoCo, fragments=2, lag=3, buffers="average"),
    "noloco weighted": partial(NoLoCo, fragments=3, lag=1, pull=0.3, weight=by_tokens),
    "local": partial(LocalSGD, fragments=1, lag=2),
    "gasloc": partial(GASLoC, fragments=2, lag=3),
    "a lag of its own": partial(NoLoCo, fragments=2, lag="auto"),
    "with a memory": lambda *args, **o: StreamingDiLoCo(
        *args, fragments=2, lag=3, codec=codec_named("topk2+ef:0.95"), **o
    ),
    "with two": lambda *args, **o: CO2(*args, codec=codec_named("auto:2+ef"), **o),
}


class Net(nn.Module):
    """A tied weight, a BatchNorm, a bfloat16 part."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.middle = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.middle(self.norm(self.embed(tokens)).bfloat16()).float().tanh())


class Run:
    """One peer's training under a method."""

    def __init__(self, exchange, method):
        torch.manual_seed(0)
        self.net = Net()
        groups = [
            {"params": self.net.middle.parameters(), "lr": 0.01},
            {"params": [*self.net.embed.parameters(), self.net.head.bias]},
            {"params": self.net.norm.parameters()},
        ]
        self.opt = method(torch.optim.AdamW(groups, lr=0.02), exchange, every=EVERY, model=self.net)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, STEPS)
        self.exchange = exchange

    def train(self, first, last):
        for step in range(first, last):
            generator = torch.Generator().manual_seed(100 * PEERS.index(self.exchange.peer) + step)
            tokens = torch.randint(0, 7, (6,), generator=generator)
            self.opt.zero_grad()
            nn.functional.cross_entropy(self.net(tokens), tokens.roll(1)).backward()
            self.opt.count(6 + PEERS.index(self.exchange.peer))
            self.opt.step()
            self.scheduler.step()

    def save(self):
        file = io.BytesIO()
        torch.save(
            [self.net.state_dict(), self.opt.state_dict(), self.scheduler.state_dict()], file
        )
        return file.getvalue()

    def load(self, saved):
        net, opt, scheduler = torch.load(io.BytesIO(saved), weights_only=True)
        self.net.load_state_dict(net)
        self.opt.load_state_dict(opt)
        self.scheduler.load_state_dict(scheduler)
        return self


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", AT_ONCE)
def test_resumes_at_any_step_bit_equal(name):
    """Saved at any inner step it goes on to the same bits."""
    method = AT_ONCE[name]

    def straight(exchange):
        run, saved = Run(exchange, method), []
        for step in range(STEPS):
            saved.append(run.save())
            run.train(step, step + 1)
        return saved, everything(run)

    first = Simulation(PEERS, size=3).run(straight)
    assert all(
        entry["outer"]["slow"].isfinite().all() for entry in first["a"][1][1]["state"].values()
    )
    for at in range(0, STEPS, 2) if name != "streaming" else range(STEPS):

        def onwards(exchange, at=at):
            run = Run(exchange, method).load(first[exchange.peer][0][at])
            run.train(at, STEPS)
            return everything(run)

        for peer, found in Simulation(PEERS, size=3).run(onwards).items():
            assert equal(found, first[peer][1])


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", AT_ONCE | LATE)
def test_every_method_learns_drops_included(name):
    losses = {}

    def peer(exchange):
        run = Run(exchange, (AT_ONCE | LATE)[name])
        tokens = torch.arange(7)
        before = nn.functional.cross_entropy(run.net(tokens), tokens.roll(1)).item()
        for _ in range(60):
            run.opt.zero_grad()
            nn.functional.cross_entropy(run.net(tokens), tokens.roll(1)).backward()
            run.opt.count(7)
            run.opt.step()
        run.opt.finish(average=True)
        after = nn.functional.cross_entropy(run.net(tokens), tokens.roll(1)).item()
        losses[exchange.peer] = (before, after)
        return [s.clone() for s in run.opt.slow], [p.detach().clone() for p in run.net.parameters()]

    faults = Faults(drop=lambda peer, key: key.round % 5 == 1 and peer == "b" and key.round < 7)
    ends = Simulation(PEERS, size=3, faults=faults).run(peer)
    for before, after in losses.values():
        assert after < 0.7 * before
    assert equal(ends["a"], ends["b"])
    assert equal(ends["a"], ends["c"])  # the last mean made them so
    names = [name for name, _ in Net().named_parameters()]
    assert len(names) == len(ends["a"][1])


@pytest.mark.filterwarnings("ignore:the model's weights changed outside step")
def test_last_mean_is_of_the_models():
    """A last mean of gossiping peers is the mean of their models, steps since the last round
    included.

    Mutant: it is the mean of their slow weights.
    """

    def peer(exchange):
        run = Run(exchange, partial(NoLoCo, buffers="average"))
        run.train(0, 11)
        run.opt.finish()
        return [param.detach().float() for param in run.opt.parameters], run.opt.slow

    apart = Simulation(PEERS, size=2).run(peer)
    one = Simulation(PEERS, size=3)

    def together(exchange):
        run = Run(exchange, partial(NoLoCo, buffers="average"))
        for mine, saved in zip(run.opt.parameters, apart[exchange.peer][0], strict=True):
            mine.detach().copy_(saved)
        run.opt.finish(average=True)
        return run.opt.slow, run.net, run.opt.parameters.names.index("head.bias")

    for slow, net, at in one.run(together).values():
        for index, tensor in enumerate(slow):
            mean = torch.stack([apart[p][0][index] for p in PEERS]).mean(0)
            torch.testing.assert_close(tensor, mean, rtol=0, atol=1e-6)
        assert torch.equal(net.head.bias, slow[at])
    assert not equal(apart["a"][0], apart["b"][0])
    assert not equal(*apart["a"])


AVERAGED = [
    DiLoCo,
    partial(StreamingDiLoCo, fragments=2, lag=1),
    partial(LocalSGD, lag=0),
    partial(NoLoCo, pull=0.2, lag=0),
]


@pytest.mark.parametrize("choice", ["ignore", "average"])
@pytest.mark.parametrize("method", AVERAGED)
def test_batchnorm_buffers_are_averaged_by_choice_only_whatever_the_codec(choice, method):
    def peer(exchange):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        torch.manual_seed(PEERS.index(exchange.peer))
        opt = method(
            torch.optim.SGD(net.parameters(), lr=0.01),
            exchange,
            every=4,
            model=net,
            buffers=choice,
            codec=FLOAT16,
        )
        forward, after = [], []
        for _ in range(4):
            net(torch.randn(8, 3) * 100 + PEERS.index(exchange.peer)).mean().backward()
            forward.append([b.clone() for b in float_buffers(net)])
            opt.step()
            after.append([b.clone() for b in float_buffers(net)])
        assert net[1].num_batches_tracked == 4
        return forward, after

    found = Simulation(PEERS, size=3).run(peer)
    sent, applied = (2, 3) if "Streaming" in repr(method) else (4, 4)
    for forward, after in found.values():
        assert len(after[0]) == 2
        for step in range(1, 5):
            if (
                choice == "average" and step == applied
            ):  # as float32, though the weights go as float16
                means = [
                    torch.stack([f[0][sent - 1][i] for f in found.values()]).mean(0)
                    for i in range(2)
                ]
                torch.testing.assert_close(after[step - 1], means, rtol=1e-6, atol=1e-6)
                assert equal(after[step - 1], found["a"][1][step - 1])
            else:
                assert equal(after[step - 1], forward[step - 1])


def test_buffers_need_a_model_and_only_saved_floats_are_meant():
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for wrong in ({"buffers": "average"}, {"buffers": "mean", "model": Net()}):
        with pytest.raises(
            ValueError, match='buffers must be "ignore", or "average" together with model='
        ):
            DiLoCo(inner, Alone(), **wrong)
    net = nn.BatchNorm1d(3)
    net.register_buffer("mask", torch.ones(3), persistent=False)
    assert [id(b) for b in float_buffers(net)] == [id(net.running_mean), id(net.running_var)]


@pytest.mark.parametrize("sizes", [[(3,), (2, 2)], [(1,), (5,), (0,), ()]])
@pytest.mark.parametrize("count", [1, 2])
def test_the_tail_of_a_payload_is_exact(sizes, count):
    codec = BufferTailCodec(FLOAT16, count)
    tensors = [torch.randn(size) * 1e4 for size in sizes]
    payload = codec.encode(tensors)
    assert payload.numel() == codec.nbytes(sizes)
    back = codec.decode(payload, sizes)
    for index, (before, after) in enumerate(zip(tensors, back, strict=True)):
        assert torch.equal(after, before if index >= len(sizes) - count else before.half().float())
    with pytest.raises(ValueError, match=r"these shapes need \d+ in float16,\dxfloat32"):
        codec.decode(payload[:-1], sizes)
    assert codec.fresh() == codec
    codec.load_state_dict(codec.state_dict())


@pytest.mark.parametrize("name", ["eager", "co2", "co2 keep"])
def test_a_joiner_measures_from_the_adopted_weights(name):
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    opt = LATE[name](torch.optim.SGD(net.parameters(), lr=0.0), Alone(), every=2)
    for _ in range(3):
        opt.step()
    opt.adopt([torch.full((2, 2), 3.0), torch.full((2,), 4.0)], round=9, into_model=True)
    for _ in range(7):
        opt.step()
    assert (net.weight == 3).all()
    assert (net.bias == 4).all()
    assert opt.round == 13


def test_adopting_slow_weights_keeps_the_bfloat16_model():
    """Adopting slow weights only leaves a bfloat16 model where it is to the last bit."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    opt = LocalSGD(torch.optim.SGD([weight], lr=0.0), Alone(), every=1, lag=0)
    opt.adopt([torch.full((2,), 1.001)], round=0, into_model=True)
    opt.adopt([torch.full((2,), 5.003)], round=3)
    opt.step()
    torch.testing.assert_close(opt.slow[0], torch.full((2,), 1.001), rtol=0, atol=2e-7)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", LATE)
def test_resumed_flight_is_begun_anew(name):
    """A lag of its own depends on when the others answer, so a peer with one is alone here."""
    size = 2 if isinstance(Run(Nobody(), LATE[name]).opt, NoLoCo | LocalSGD | GASLoC) else 3
    peers = PEERS[:1] if name == "a lag of its own" else PEERS

    def straight(exchange):
        run, saved, under_way = Run(exchange, LATE[name]), [], 0
        for step in range(STEPS):
            saved.append(run.save())
            run.train(step, step + 1)
            under_way += len(list(run.opt._in_flight))
        run.opt.finish()
        return saved, everything(run), under_way

    first = Simulation(peers, size=size, seed=1).run(straight)
    assert all(under_way > 3 for _, _, under_way in first.values())
    for at in (4, 5, 7, 11):

        def onwards(exchange, at=at):
            run = Run(exchange, LATE[name]).load(first[exchange.peer][0][at])
            again = run.save()  # before anything is begun anew
            run = Run(exchange, LATE[name]).load(again)
            run.train(at, STEPS)
            run.opt.finish()
            return everything(run)

        for peer, found in Simulation(peers, size=size, seed=1).run(onwards).items():
            assert equal(found, first[peer][1]), at


class Nobody(Alone):
    peer = "a"


@pytest.mark.parametrize("name", LATE)
def test_loader_without_restart_takes_flights_back(name):
    """As with torch.distributed.checkpoint, which reads only what a new optimizer has too."""
    run = Run(Nobody(), LATE[name])
    run.train(0, 4)
    assert any(run.opt.in_flight(fragment) for fragment in range(run.opt.fragments))
    state = run.opt.state_dict()
    for entry in state["state"].values():
        for key in [key for key in entry["outer"] if key.startswith("in_flight")]:
            del entry["outer"][key]
    other = Run(Nobody(), LATE[name])
    other.net.load_state_dict(run.net.state_dict())
    other.opt.load_state_dict(state)
    assert not list(other.opt._in_flight)
    other.train(4, STEPS)
    other.opt.finish()
    assert all(tensor.isfinite().all() for tensor in other.opt.slow)


SPOILT = {
    "a fragment that is not there": (
        lambda facts, tensors: facts.update(fragment=9),
        "has fragment 9, which must lie between",
    ),
    "a step to come": (lambda facts, tensors: facts.update(step=99), "has step 99"),
    "a position to come": (lambda facts, tensors: facts.update(position=99), "has position 99"),
    "a lag that is none": (
        lambda facts, tensors: facts.update(lag=-1),
        "has lag -1, which must lie between 0 and",
    ),
    "a weight that is none": (
        lambda facts, tensors: facts.update(weight=float("nan")),
        "has weight nan",
    ),
    "an arrival to come": (lambda facts, tensors: facts.update(arrived=50), "has arrived 50"),
    "other tensors": (
        lambda facts, tensors: tensors.update(sent=tensors["sent"][1:]),
        "has 'sent' of other tensors",
    ),
    "a fast weight less": (
        lambda facts, tensors: tensors.update(fast=tensors["fast"][1:]),
        "has 'fast' of other tensors",
    ),
    "a start": (
        lambda facts, tensors: tensors.update(start=tensors["sent"]),
        "has 'start' of other tensors",
    ),
    "buffers": (
        lambda facts, tensors: tensors.update(tail=[torch.ones(2)]),
        "has 'tail' of other tensors",
    ),
    "a rule for nothing": (
        lambda facts, tensors: facts["settings"][0][1].clear(),
        "do not fit together",
    ),
}


@pytest.mark.parametrize(("spoil", "sentence"), SPOILT.values(), ids=SPOILT)
def test_a_saved_exchange_that_does_not_fit_changes_nothing(spoil, sentence):
    run = Run(Nobody(), LATE["gasloc"])
    run.train(0, 5)
    before, state = everything(run), run.opt.whole_state()
    spoil(state["in_flight"][0]["facts"], state["in_flight"][0]["tensors"])
    with pytest.raises(ValueError, match=sentence):
        run.opt.load_state_dict(state)
    assert equal(everything(run), before)
    state = run.opt.whole_state()
    state["in_flight"] *= 2
    with pytest.raises(ValueError, match="do not fit together"):
        run.opt.load_state_dict(state)


def test_another_lag_takes_back_what_its_schedule_would_not_apply():
    run = Run(Nobody(), LATE["noloco"])
    run.train(0, 4)
    assert len(list(run.opt._in_flight)) == 2
    for lag, kept in ((3, 2), (2, 0), (0, 0), ("auto", 2)):
        other = Run(Nobody(), partial(NoLoCo, fragments=2, lag=lag, buffers="average"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the lag is another
            other.opt.load_state_dict(run.opt.state_dict())
        assert len(list(other.opt._in_flight)) == kept
        other.train(4, STEPS)
        other.opt.finish()
        assert not list(other.opt._in_flight)


def test_codec_without_echo_is_taken_back():
    """As one of the user's own, written before exchanges in flight were saved: its contribution is
    sent again with the next one.
    """

    class Own:
        name, displacement = "own", True

        def __init__(self):
            self.wrapped = codec_named("topk2+ef")
            for name in (
                "nbytes",
                "encode",
                "decode",
                "accepted",
                "rejected",
                "state_dict",
                "load_state_dict",
            ):
                setattr(self, name, getattr(self.wrapped, name))

        def fresh(self):
            return Own()

        @property
        def pending(self):
            return self.wrapped.pending

    saved = []

    def two(exchange):
        run = Run(exchange, partial(StreamingDiLoCo, every=4, fragments=2, lag=1, codec=Own()))
        run.train(0, 4)
        assert list(run.opt._in_flight)
        saved.append(run.opt.whole_state()["in_flight"])
        run.opt.finish()

    Simulation(PEERS[:2], seed=1).run(two)
    assert saved == [[], []]
