"""DiLoCo's equivalences, in both forms, and SparseLoCo's, each against an independent float64
reference.
"""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.optim import (
    Alone,
    DiLoCo,
    DiLoCoRule,
    Faults,
    LocalSGD,
    OuterOptimizer,
    RoundKey,
    Simulation,
    SparseLoCo,
    Streaming,
    by_rate,
    by_steps,
    by_tokens,
    codec_named,
    equal,
)
from shoal.optim.exchange.averaging import sender_mean
from shoal.optim.exchange.base import Contribution
from tests.support.outer_training import Recording

EVERY, ROUNDS = 5, 8


def ends(found, every=EVERY):
    return found.slow[every - 1 :: every]


def diloco(lab, peers, lr, momentum, nesterov, every=EVERY, rounds=ROUNDS, weights=None):
    """Return the slow weights after each round. The outer step is torch's own, in float64."""
    slow = torch.tensor(lab.start())
    outer = torch.optim.SGD([slow], lr=lr, momentum=momentum, nesterov=nesterov)
    path = []
    for _ in range(rounds):
        moved = [slow.numpy() - lab.trained(peer, slow.numpy().copy(), every) for peer in peers]
        slow.grad = torch.tensor(np.average(moved, axis=0, weights=weights))
        outer.step()
        path.append(slow.numpy().copy())
    return np.array(path)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(
    "method",
    [partial(DiLoCo, lr=1.0, momentum=0.0), partial(LocalSGD, lag=0)],
    ids=["DiLoCo", "LocalSGD"],
)
def test_2_rate_one_averages_parameters(lab, method, every):
    """With rate one and no momentum it averages parameters under any inner optimizer."""
    found = lab.run(
        method, 12, every=every, inner=lambda weights: torch.optim.AdamW(weights, lr=0.01)
    )
    replicas = {peer: torch.nn.Parameter(torch.tensor(lab.start())) for peer in lab.PEERS}
    inner = {peer: torch.optim.AdamW([weights], lr=0.01) for peer, weights in replicas.items()}
    for step in range(1, 13):
        for peer, weights in replicas.items():
            weights.grad = torch.tensor(lab.gradient(peer, weights.detach().numpy()))
            inner[peer].step()
        if step % every == 0:
            with torch.no_grad():
                mean = torch.stack(list(replicas.values())).mean(0)
                for weights in replicas.values():
                    weights.copy_(mean)
        for peer in lab.PEERS:
            lab.close(found[peer].fast[step - 1], replicas[peer].detach().numpy())


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("peers", [["anna"], ["anna", "bert", "cleo", "dora"]])
def test_3_equals_torch_sgd_and_snoo(lab, peers, nesterov):
    """It is torch sgd on the mean pseudo gradient and for one peer snoo."""
    found = lab.run(
        DiLoCo, EVERY * ROUNDS, peers, every=EVERY, lr=0.7, momentum=0.9, nesterov=nesterov
    )
    for peer in peers:
        lab.close(ends(found[peer]), diloco(lab, peers, 0.7, 0.9, nesterov))
        lab.close(found[peer].fast[EVERY - 1 :: EVERY], ends(found[peer]), atol=0)


@pytest.mark.parametrize(("nesterov", "factor"), [(True, 0.81), (False, 0.9)])
def test_5_momentum_alone_moves_idle_weights(nesterov, factor):
    """When nothing is learnt only the momentum moves the slow weights."""
    weight = torch.nn.Parameter(torch.ones(3))
    opt = DiLoCo(
        torch.optim.SGD([weight], lr=0.0), Alone(), every=2, lr=0.7, momentum=0.9, nesterov=nesterov
    )
    for _ in range(4):
        opt.step()
    assert opt.slow[0].tolist() == [1, 1, 1]
    opt.rule_state["momentum"][0].fill_(0.5)
    for _ in range(2):
        opt.step()
    torch.testing.assert_close(
        opt.slow[0], torch.full((3,), 1 - 0.7 * factor * 0.5), rtol=0, atol=1e-7
    )
    torch.testing.assert_close(
        opt.rule_state["momentum"][0], torch.full((3,), 0.45), rtol=0, atol=1e-7
    )


def test_6_replicas_are_bit_equal_under_any_name(lab):
    """All replicas have the same bits and their names do not matter."""
    found = lab.run(DiLoCo, 40, every=EVERY)
    assert all(np.array_equal(ends(f), ends(found["anna"])) for f in found.values())
    renamed = dict(zip(lab.PEERS, ["dora", "cleo", "anna", "bert"], strict=True))
    other = lab.run(
        DiLoCo,
        40,
        every=EVERY,
        loss=lambda peer, weights: lab.least_squares(renamed[peer], weights),
    )
    for peer in lab.PEERS:
        lab.close(ends(other[peer]), ends(found[renamed[peer]]))


def test_8_weights_scale_the_displacements(lab):
    """Equal weights change nothing and unequal ones weigh the displacements."""
    plain = lab.run(DiLoCo, 40, every=EVERY)
    thrice = lab.run(DiLoCo, 40, every=EVERY, weight=lambda peer, _: 3.0)
    weights = dict(zip(lab.PEERS, [1.0, 2.0, 4.0, 0.5], strict=True))
    uneven = lab.run(DiLoCo, 40, every=EVERY, weight=lambda peer, _: weights[peer])
    expected = diloco(lab, lab.PEERS, 0.7, 0.6, True, weights=list(weights.values()))
    for peer in lab.PEERS:
        lab.close(thrice[peer].slow, plain[peer].slow)
        lab.close(ends(uneven[peer]), expected)


def test_8_weight_zero_equals_absence(lab):
    """A peer of weight zero is as good as absent."""
    found = lab.run(DiLoCo, 40, every=EVERY, weight=lambda peer, _: float(peer != "dora"))
    expected = diloco(lab, lab.PEERS[:3], 0.7, 0.6, True)
    for peer in lab.PEERS[:3]:
        lab.close(ends(found[peer])[-1], expected[-1])
        assert found[peer].members[-1] == tuple(lab.PEERS[:3])
    assert set(found["dora"].members) == {()}
    lab.close(ends(found["dora"]), diloco(lab, ["dora"], 0.7, 0.6, True))


@pytest.mark.parametrize(
    ("weight", "tokens"),
    [(by_tokens, 12 * 8), (by_steps, 3), (by_rate, 96 * 96 / 3), (equal, 1), (2.5, 2.5)],
)
def test_weights_count_what_was_done_since_the_fragment_was_sent(weight, tokens):
    exchange = Recording()
    opt = DiLoCo(
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1),
        exchange,
        every=3,
        weight=weight,
    )
    for _ in range(6):
        opt.count(32)
        opt.step()
    assert [sent.weight for sent in exchange.sent] == [tokens, tokens]


def test_weights_that_cannot_be_are_refused():
    def step(weight):
        DiLoCo(
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1),
            Alone(),
            every=1,
            weight=weight,
        ).step()

    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and not negative"):
            step(weight)
    for function in (by_tokens, by_rate):
        with pytest.raises(ValueError, match=r"no tokens were counted: call opt.count\(tokens\)"):
            step(function)


class TopWithMemory:
    """The largest ``count`` values of each tensor in float32 (as a dense payload), with error
    feedback.
    """

    name, displacement = "top-test", True

    def __init__(self, count, beta):
        self.count, self.beta, self.error, self.sent, self.pending, self.rejections = (
            count,
            beta,
            None,
            None,
            False,
            0,
        )

    def nbytes(self, shapes):
        return 4 * sum(int(np.prod(shape)) for shape in shapes)

    def encode(self, tensors):
        error = self.error or [torch.zeros_like(t) for t in tensors]
        total = [self.beta * e + t for e, t in zip(error, tensors, strict=True)]
        self.sent = [
            torch.where(
                t.abs() >= t.abs().flatten().topk(min(self.count, t.numel())).values[-1], t, 0.0
            )
            for t in total
        ]
        self.error, self.pending = [t - s for t, s in zip(total, self.sent, strict=True)], True
        return torch.cat([s.flatten() for s in self.sent]).view(torch.uint8)

    def decode(self, payload, shapes):
        parts = torch.split(payload.view(torch.float32), [int(np.prod(shape)) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def fresh(self):
        return TopWithMemory(self.count, self.beta)

    def accepted(self):
        self.pending = False

    def rejected(self, applied):
        self.pending, self.rejections = False, self.rejections + 1
        self.error = [e + s - g for e, s, g in zip(self.error, self.sent, applied, strict=True)]

    def state_dict(self, unsent=None):
        return {"error": [e.clone() for e in self.error or []]}

    def load_state_dict(self, state):
        self.error = [e.clone() for e in state["error"]] or None


def sparse(inner, exchange, count=1, beta=0.95, **options):
    return SparseLoCo(inner, exchange, codec=TopWithMemory(count, beta), **options)


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_full_sparseloco_is_diloco(lab, beta):
    """Sparseloco that sends everything is DiLoCo without momentum for any beta."""
    found = lab.run(partial(sparse, count=5, beta=beta), 40, every=EVERY)
    expected = diloco(lab, lab.PEERS, 1.0, 0.0, False)
    for peer in lab.PEERS:
        lab.close(ends(found[peer]), expected)


def test_residual_is_kept_per_fragment(lab):
    """A contribution in no mean goes back into the residual and each fragment has its own."""
    lost = Faults(drop=lambda peer, key: key.round == 1)
    found = lab.run(sparse, 3 * EVERY, ["anna", "bert"], every=EVERY, faults=lost)["anna"]
    assert found.members == [("anna", "bert"), (), ("anna", "bert")]
    assert found.opt.codec.rejections == 1

    codec = TopWithMemory(1, 0.9)
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    opt = OuterOptimizer(
        torch.optim.SGD(weights, lr=0.1),
        Alone(),
        rule=DiLoCoRule(),
        schedule=Streaming(2, 2),
        codec=codec,
        fragments=[weights[:1], weights[1:]],
    )
    assert opt._fragments[0].codec is codec
    assert opt._fragments[1].codec is not codec


PACE, TIMES, LR, BETA = 4, 12, 0.9, 0.95
PARTS = (slice(0, 3), slice(3, 5))
PAPER, CODE = "topk2+ef:0.95", "topk2-senders+ef:0.95"


def by_peers(sent):
    """Average as the paper does: phi <- phi - lr (1/K) sum of what was sent."""
    return sum(sent) / len(sent)


def by_senders(sent):
    """Average one tensor as the authors' code does: norms clipped to torch's median, then a scatter
    with reduce="mean".
    """
    norms = [float(np.sqrt((x * x).sum())) for x in sent]
    median = sorted(norms)[(len(norms) - 1) // 2]
    clipped = [x * min(median / (norm + 1e-8), 1.0) for x, norm in zip(sent, norms, strict=True)]
    mean = np.zeros_like(sent[0])
    for index in range(mean.size):
        here = [x.flat[index] for x, raw in zip(clipped, sent, strict=True) if raw.flat[index] != 0]
        mean.flat[index] = sum(here) / len(here) if here else 0.0
    return mean


def bfloat16(value):
    return float(torch.tensor(value).bfloat16())


@pytest.mark.parametrize(("codec", "average"), [(PAPER, by_peers), (CODE, by_senders)])
def test_it_is_the_recursion_with_either_mean(lab, codec, average):
    """Of the tensors of 3 and 2 values one value each is sent, as a bfloat16: e <- beta e + g -
    sent; slow <- slow - lr mean.
    """
    found = lab.run(
        lambda inner, exchange, **o: SparseLoCo(inner, exchange, codec=codec_named(codec), **o),
        PACE * TIMES,
        every=PACE,
        lr=LR,
    )
    slow, errors = lab.start(), {peer: np.zeros(5) for peer in lab.PEERS}
    for round in range(TIMES):
        sent = []
        for peer in lab.PEERS:
            total = BETA * errors[peer] + slow - lab.trained(peer, slow, PACE)
            kept = np.zeros(5)
            for part in PARTS:
                best = np.abs(total[part]).argmax()
                kept[part][best] = np.sign(total[part][best]) * bfloat16(abs(total[part][best]))
            errors[peer] = total - kept
            sent.append(kept)
        slow = slow - LR * np.concatenate(
            [average([kept[part] for kept in sent]) for part in PARTS]
        )
        for peer in lab.PEERS:
            lab.close(found[peer].slow[PACE - 1 :: PACE][round], slow, atol=3e-6)


@settings(max_examples=60)
@given(
    count=st.integers(1, 9), seed=st.integers(0, 2**16), density=st.sampled_from([0.05, 0.5, 1.0])
)
def test_the_mean_by_sender_is_that_of_the_authors_code(count, seed, density):
    rng = np.random.default_rng(seed)
    scales = rng.lognormal(sigma=2.0, size=count)
    sent = [
        (s * rng.normal(size=(7, 11)) * (rng.random((7, 11)) < density)).astype(np.float32)
        for s in scales
    ]
    found = sender_mean([1.0] * count, [torch.from_numpy(x.copy()) for x in sent])
    np.testing.assert_allclose(
        found.numpy(), by_senders([x.astype(np.float64) for x in sent]), rtol=1e-5, atol=1e-6
    )


def test_weights_count_among_senders_only():
    """Weights count among the senders and who has none is not asked."""
    ones = torch.ones(3)
    found = sender_mean([1.0, 3.0], [torch.tensor([2.0, 0.0, 0.0]), torch.tensor([2.0, 0.0, 0.0])])
    assert found.tolist() == [2.0, 0.0, 0.0]
    found = sender_mean([1.0, 3.0], [torch.tensor([4.0, 3.0, 0.0]), torch.tensor([0.0, 3.0, 4.0])])
    assert found.tolist() == [4.0, 3.0, 4.0]
    found = sender_mean([1.0, 3.0], [2 * ones, -2 * ones])
    assert found.tolist() == [-1.0] * 3

    def peer(exchange):
        weight = float(exchange.peer != "listener")
        value = torch.full((3,), {"a": 2.0, "b": 4.0, "listener": 100.0}[exchange.peer])
        tail = torch.full((1,), value[0].item())
        mean = exchange.start(
            Contribution(RoundKey("run", 0), [value, tail], weight, codec_named("topk2-senders"))
        ).result()
        return [tensor.tolist() for tensor in mean.tensors], mean.weight, mean.members, mean.counted

    for found in Simulation(["a", "b", "listener"], size=3).run(peer).values():
        assert found == ([[2.0, 0.0, 0.0], [2.0]], 2.0, ("a", "b", "listener"), 2)


def test_averaged_buffers_are_a_plain_mean_beside_it():
    from shoal.optim.codecs.buffer_tail import BufferTailCodec

    def peer(exchange):
        value = {"a": 2.0, "b": 8.0}[exchange.peer]
        tensors = [torch.tensor([value, 0.0]), torch.tensor([value, 0.0])]
        mean = exchange.start(
            Contribution(
                RoundKey("run", 0), tensors, 1.0, BufferTailCodec(codec_named("topk2-senders"), 1)
            )
        ).result()
        return [tensor.tolist() for tensor in mean.tensors]

    assert list(Simulation(["a", "b"]).run(peer).values()) == [[[2.0, 0.0], [5.0, 0.0]]] * 2
