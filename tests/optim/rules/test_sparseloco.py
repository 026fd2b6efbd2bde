"""SparseLoCo with its own codec against references in NumPy, for the paper's mean and for that of its authors' code."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.optim import RoundKey, Simulation, SparseLoCo, codec_named
from shoal.optim.exchange.averaging import sender_mean
from shoal.optim.exchange.base import Contribution

EVERY, ROUNDS, LR, BETA = 4, 12, 0.9, 0.95
PARTS = (slice(0, 3), slice(3, 5))
PAPER, CODE = "topk2+ef:0.95", "topk2-senders+ef:0.95"


def by_peers(sent):
    """Average as the paper does: phi <- phi - lr (1/K) sum of what was sent."""
    return sum(sent) / len(sent)


def by_senders(sent):
    """Average one tensor as the authors' code does: norms clipped to torch's median, then a scatter with reduce="mean"."""
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
    """Of the tensors of 3 and 2 values one value each is sent, as a bfloat16: e <- beta e + g - sent; slow <- slow - lr mean."""
    found = lab.run(lambda inner, exchange, **o: SparseLoCo(inner, exchange, codec=codec_named(codec), **o),
                    EVERY * ROUNDS, every=EVERY, lr=LR)  # fmt: skip
    slow, errors = lab.start(), {peer: np.zeros(5) for peer in lab.PEERS}
    for round in range(ROUNDS):
        sent = []
        for peer in lab.PEERS:
            total = BETA * errors[peer] + slow - lab.trained(peer, slow, EVERY)
            kept = np.zeros(5)
            for part in PARTS:
                best = np.abs(total[part]).argmax()
                kept[part][best] = np.sign(total[part][best]) * bfloat16(abs(total[part][best]))
            errors[peer] = total - kept
            sent.append(kept)
        slow = slow - LR * np.concatenate([average([kept[part] for kept in sent]) for part in PARTS])
        for peer in lab.PEERS:
            lab.close(found[peer].slow[EVERY - 1 :: EVERY][round], slow, atol=3e-6)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 9), seed=st.integers(0, 2**16), density=st.sampled_from([0.05, 0.5, 1.0]))
def test_the_mean_by_sender_is_that_of_the_authors_code(count, seed, density):
    rng = np.random.default_rng(seed)
    scales = rng.lognormal(sigma=2.0, size=count)
    sent = [(s * rng.normal(size=(7, 11)) * (rng.random((7, 11)) < density)).astype(np.float32) for s in scales]
    found = sender_mean([1.0] * count, [torch.from_numpy(x.copy()) for x in sent])
    np.testing.assert_allclose(found.numpy(), by_senders([x.astype(np.float64) for x in sent]), rtol=1e-5, atol=1e-6)


def test_weights_count_among_the_senders_and_who_has_none_is_not_asked():
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
        mean = exchange.start(Contribution(RoundKey("run", 0), [value, tail], weight, codec_named("topk2-senders"))).result()
        return [tensor.tolist() for tensor in mean.tensors], mean.weight, mean.members, mean.counted

    for found in Simulation(["a", "b", "listener"], size=3).run(peer).values():
        assert found == ([[2.0, 0.0, 0.0], [2.0]], 2.0, ("a", "b", "listener"), 2)


def test_averaged_buffers_are_a_plain_mean_beside_it():
    from shoal.optim.codecs.base import BufferTailCodec

    def peer(exchange):
        value = {"a": 2.0, "b": 8.0}[exchange.peer]
        tensors = [torch.tensor([value, 0.0]), torch.tensor([value, 0.0])]
        mean = exchange.start(
            Contribution(RoundKey("run", 0), tensors, 1.0, BufferTailCodec(codec_named("topk2-senders"), 1))
        ).result()
        return [tensor.tolist() for tensor in mean.tensors]

    assert list(Simulation(["a", "b"]).run(peer).values()) == [[[2.0, 0.0], [5.0, 0.0]]] * 2
