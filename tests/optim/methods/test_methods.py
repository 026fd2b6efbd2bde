"""Properties of all methods: saving at any step, weights, buffers, the last mean, bfloat16, tied and grouped parameters."""

import io
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
from shoal.optim.codecs.base import BufferTailCodec
from tests.optim.outer.test_resume import equal, everything, flat

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
    "eager": lambda inner, exchange, every, model: OuterOptimizer(inner, exchange, rule=EagerRule(), schedule=Every(every)),
    "co2": lambda inner, exchange, every, model: OuterOptimizer(inner, exchange, rule=CO2Rule(), schedule=Every(every)),
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
    "with a memory": lambda *args, **o: StreamingDiLoCo(*args, fragments=2, lag=3, codec=codec_named("topk2+ef:0.95"), **o),
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
        torch.save([self.net.state_dict(), self.opt.state_dict(), self.scheduler.state_dict()], file)
        return file.getvalue()

    def load(self, saved):
        net, opt, scheduler = torch.load(io.BytesIO(saved), weights_only=True)
        self.net.load_state_dict(net)
        self.opt.load_state_dict(opt)
        self.scheduler.load_state_dict(scheduler)
        return self


@pytest.mark.parametrize("name", AT_ONCE)
def test_saved_at_any_inner_step_it_goes_on_to_the_same_bits(name):
    method = AT_ONCE[name]

    def straight(exchange):
        run, saved = Run(exchange, method), []
        for step in range(STEPS):
            saved.append(run.save())
            run.train(step, step + 1)
        return saved, everything(run)

    first = Simulation(PEERS, size=3).run(straight)
    assert all(tensor.isfinite().all() for tensor in flat([entry["outer"]["slow"] for entry in first["a"][1][1]["state"].values()]))
    for at in range(0, STEPS, 2) if name != "streaming" else range(STEPS):

        def onwards(exchange, at=at):
            run = Run(exchange, method).load(first[exchange.peer][0][at])
            run.train(at, STEPS)
            return everything(run)

        for peer, found in Simulation(PEERS, size=3).run(onwards).items():
            assert equal(found, first[peer][1])


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


def test_a_last_mean_of_gossiping_peers_is_the_mean_of_their_slow_weights():
    def peer(exchange, average):
        run = Run(exchange, partial(NoLoCo, buffers="average"))
        run.train(0, 11)
        run.opt.finish(average=average)
        return [tensor.clone() for tensor in run.opt.slow], run.net

    apart = Simulation(PEERS, size=2).run(lambda exchange: peer(exchange, False))
    one = Simulation(PEERS, size=3)

    def together(exchange):
        run = Run(exchange, partial(NoLoCo, buffers="average"))
        for mine, saved in zip(run.opt.slow, apart[exchange.peer][0], strict=True):
            mine.copy_(saved)
        run.opt.finish(average=True)
        return run.opt.slow, run.net

    for slow, net in one.run(together).values():
        for index, tensor in enumerate(slow):
            mean = torch.stack([apart[p][0][index] for p in PEERS]).mean(0)
            torch.testing.assert_close(tensor, mean, rtol=0, atol=1e-6)
        assert torch.equal(net.head.bias, slow[3])
    assert not equal(apart["a"][0], apart["b"][0])


def test_finish_with_a_last_mean_without_a_partner_leaves_the_slow_weights_in_the_model():
    weight = nn.Parameter(torch.ones(2))
    infos = []
    opt = DiLoCo(torch.optim.SGD([weight], lr=0.1), Alone(), every=5, on_round=infos.append)
    weight.grad = torch.ones(2)
    for _ in range(7):
        opt.step()
    opt.finish(average=True)
    assert torch.equal(weight, opt.slow[0])
    assert [info.key.round for info in infos] == [0, 1, 2]  # a whole round, one of two steps, the mean
    assert opt.round == 3


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
        opt = method(torch.optim.SGD(net.parameters(), lr=0.01), exchange, every=4, model=net, buffers=choice, codec=FLOAT16)
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
            if choice == "average" and step == applied:  # as float32, though the weights go as float16
                means = [torch.stack([f[0][sent - 1][i] for f in found.values()]).mean(0) for i in range(2)]
                torch.testing.assert_close(after[step - 1], means, rtol=1e-6, atol=1e-6)
                assert equal(after[step - 1], found["a"][1][step - 1])
            else:
                assert equal(after[step - 1], forward[step - 1])


def test_buffers_need_a_model_and_only_saved_floats_are_meant():
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for wrong in ({"buffers": "average"}, {"buffers": "mean", "model": Net()}):
        with pytest.raises(ValueError, match='buffers must be "ignore", or "average" together with model='):
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


def test_a_checkpoint_of_another_method_or_of_other_fragments_is_refused():
    def make(method, **options):
        torch.manual_seed(0)
        net = Net()
        return method(torch.optim.SGD(net.parameters(), lr=0.1), Alone(), model=net, **options)

    state = make(DiLoCo).whole_state()
    make(DiLoCo, nesterov=False).load_state_dict(state)
    with pytest.raises(ValueError, match="'momentum', which this method does not use: resume with the same method"):
        make(LocalSGD, lag=0).load_state_dict(state)
    with pytest.raises(ValueError, match="has 1 fragments, this optimizer 2"):
        make(StreamingDiLoCo, fragments=2, lag=1).load_state_dict(state)


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


def test_adopting_slow_weights_only_leaves_a_bfloat16_model_where_it_is_to_the_last_bit():
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    opt = LocalSGD(torch.optim.SGD([weight], lr=0.0), Alone(), every=1, lag=0)
    opt.adopt([torch.full((2,), 1.001)], round=0, into_model=True)
    opt.adopt([torch.full((2,), 5.003)], round=3)
    opt.step()
    torch.testing.assert_close(opt.slow[0], torch.full((2,), 1.001), rtol=0, atol=2e-7)
