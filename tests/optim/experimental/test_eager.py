"""Eager updates against a float64 reference and DiLoCo."""

import itertools

import numpy as np
import pytest

from shoal.optim import DiLoCo, Eager, EagerRule, Every, OuterOptimizer

EVERY, ROUNDS = 4, 9
STEPS = EVERY * ROUNDS


def ends(found):
    return found.slow[EVERY - 1 :: EVERY]


def eager(lab, peers, lr, momentum):
    """Return {peer: slow after each round}, and the eager pseudo-gradients."""
    share = 1 / len(peers)
    slow, velocity = {p: lab.start() for p in peers}, {p: np.zeros(5) for p in peers}
    late, early, path, applied = None, {p: np.zeros(5) for p in peers}, {p: [] for p in peers}, []
    for _ in range(ROUNDS):
        motion = {p: slow[p] - lab.trained(p, slow[p], EVERY) for p in peers}
        first = late is None  # nobody has answered yet: the own motion alone
        g = {}
        for p in peers:
            now = motion[p] * (1 if first else share)
            g[p] = (0 if first else np.mean(list(late.values()), axis=0)) - early[p] + now
            early[p] = now
            velocity[p] = momentum * velocity[p] + g[p]
            slow[p] = slow[p] - lr * (g[p] + momentum * velocity[p])
            path[p].append(slow[p])
        applied.append((motion, g))
        late = motion
    return path, applied


@pytest.mark.parametrize("count", [2, 4])
def test_eager_matches_the_reference_and_the_paper(lab, count):
    """Eager is the reference and the mean of what is applied is as in the paper."""
    peers = lab.PEERS[:count]
    found = lab.run(Eager, STEPS, peers, every=EVERY, lr=0.4, momentum=0.6)
    path, applied = eager(lab, peers, 0.4, 0.6)
    for peer in peers:
        lab.close(ends(found[peer]), path[peer])
        assert [info.lag for info in found[peer].infos] == [EVERY] * (ROUNDS - 1)
    for (before, _), (now, g) in itertools.pairwise(applied[1:]):
        was, mean = (np.mean(list(motion.values()), axis=0) for motion in (before, now))
        lab.close(np.mean(list(g.values()), axis=0), was + (mean - was) / count)
        for peer in peers:  # the paper's own formula
            lab.close(g[peer], was + (now[peer] - before[peer]) / count)


@pytest.mark.parametrize("nesterov", [True, False])
def test_eager_for_one_peer_is_diloco(lab, nesterov):
    options = {"every": EVERY, "lr": 0.4, "momentum": 0.9, "nesterov": nesterov}
    found, expected = (
        lab.run(method, STEPS, ["anna"], **options)["anna"] for method in (Eager, DiLoCo)
    )
    lab.close(found.slow, expected.slow)
    lab.close(found.fast, expected.fast)


def test_eager_without_lag_is_diloco(lab):
    def method(inner, exchange, *, every, on_round):
        return OuterOptimizer(
            inner, exchange, rule=EagerRule(0.4, 0.9), schedule=Every(every), on_round=on_round
        )

    found = lab.run(method, STEPS, every=EVERY)
    for peer, expected in lab.run(DiLoCo, STEPS, every=EVERY, lr=0.4, momentum=0.9).items():
        lab.close(found[peer].slow, expected.slow)
