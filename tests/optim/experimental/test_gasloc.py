"""GASLoC: the paper's recursion, and the mean over all peers, which no matching changes."""

import numpy as np
import pytest

from shoal.optim import GASLoC, groups

EVERY, ROUNDS = 4, 9
STEPS = EVERY * ROUNDS


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("size", "mix", "momentum"), [(2, 1.0, 0.5), (2, 0.6, 0.3), (3, 1.0, 0.0), (4, 0.5, 0.9)]
)
def test_gasloc_is_the_papers_recursion_on_a_random_matching(lab, size, mix, momentum, weighted):
    weights = {"weight": lambda peer, _: 1.0 + lab.PEERS.index(peer)} if weighted else {}
    options = {
        "every": EVERY,
        "size": size,
        "seed": 5,
        "begin": lab.own_start,
        "lr": 0.6,
        "momentum": momentum,
        "mix": mix,
    }
    found = lab.run(GASLoC, STEPS, **options, **weights, lag=0)
    slow = {peer: lab.own_start(peer) for peer in lab.PEERS}
    before = dict(slow)
    for round in range(ROUNDS):
        u = {
            peer: slow[peer] + 0.6 * (lab.trained(peer, slow[peer], EVERY) - slow[peer])
            for peer in lab.PEERS
        }
        for group in groups(5, round, lab.PEERS, size):
            for peer in group:
                laplacian = sum(
                    u[peer] - u[other] for other in group
                )  # of the complete graph on the group
                slow[peer] = (
                    u[peer] - mix / len(group) * laplacian + momentum * (u[peer] - before[peer])
                )
        before = u
        for peer in lab.PEERS:
            lab.close(found[peer].slow[EVERY - 1 :: EVERY][round], slow[peer])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_mean_is_kept_whatever_the_mixing(lab, size):
    """The mean over the peers depends neither on the mixing nor on the matching."""
    options = {
        "every": EVERY,
        "size": size,
        "loss": lab.linear,
        "begin": lab.own_start,
        "lr": 0.3,
        "momentum": 0.5,
    }
    found = lab.run(
        GASLoC, STEPS, weight=lambda peer, _: 1.0 + lab.PEERS.index(peer), mix=0.8, **options, lag=0
    )
    alone = lab.run(GASLoC, STEPS, **options | {"size": 1}, lag=0)
    mean = [np.mean([f.slow for f in run.values()], axis=0) for run in (found, alone)]
    lab.close(*mean)
