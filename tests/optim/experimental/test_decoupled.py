"""Decoupled DiLoCo: lengths and directions are merged apart."""

import numpy as np
import pytest
import torch

from shoal.optim import DecoupledDiLoCo, StreamingDiLoCo, rda
from tests.optim.references import streaming

EVERY = 6
FIRST, SECOND = slice(0, 3), slice(3, 5)


@pytest.mark.parametrize("plain", [False, True])
def test_decoupled_merges_lengths_and_directions_apart(lab, plain):
    def merge(moved):
        parts = []
        for number, part in enumerate((FIRST, SECOND)):
            pieces = [m[part] for m in moved]
            if plain and number == 1:
                parts.append(np.average(pieces, axis=0, weights=WEIGHTS))
                continue
            direction = np.average([p / np.linalg.norm(p) for p in pieces], axis=0, weights=WEIGHTS)
            length = np.average([np.linalg.norm(p) for p in pieces], weights=WEIGHTS)
            parts.append(length * direction / np.linalg.norm(direction))
        return np.concatenate(parts)

    tokens = dict(zip(lab.PEERS, [10, 20, 12, 8], strict=True))
    WEIGHTS = [(EVERY * t) ** 2 / EVERY for t in tokens.values()]

    def method(inner, exchange, **options):
        second = inner.param_groups[0]["params"][1]
        opt = DecoupledDiLoCo(
            inner, exchange, fragments=1, lag=2, plain=[second] if plain else [], **options
        )
        inner.register_step_post_hook(lambda *_: opt.count(tokens[exchange.peer]))
        return opt

    found = lab.run(method, 40, every=EVERY)
    expected = streaming(
        lab,
        lab.PEERS,
        40,
        every=EVERY,
        slices=[slice(0, 5)],
        lag=2,
        mix=0.0,
        lr=0.7,
        momentum=0.6,
        merge=merge,
    )
    for peer in lab.PEERS:
        lab.close(found[peer].slow, expected[peer][0])
    alone = lab.run(
        DecoupledDiLoCo, 40, ["anna"], every=EVERY, fragments=1, lag=2, weight=lambda *_: 1.0
    )["anna"]
    diloco = lab.run(
        StreamingDiLoCo, 40, ["anna"], every=EVERY, fragments=1, lag=2, mix=0.0, lr=0.7
    )["anna"]
    lab.close(alone.slow, diloco.slow)


def test_merge_of_equal_and_opposite_gradients():
    """The merge of equal gradients is the gradient and of opposite ones zero."""
    g = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(rda([g / 5], [torch.tensor(5.0)])[0], g)
    assert rda([torch.zeros(2)], [torch.tensor(5.0)])[0].tolist() == [0, 0]
