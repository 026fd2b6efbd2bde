"""Streaming DiLoCo in torchft's phase against what torchft recorded of its own: the six histories
of its regression test (test_fixtures of pytorch/torchft).

Two replicas of two fragments of one parameter, which begins at 1; the gradient is 2, the inner rate
1, the outer rate 2 without momentum, and each fragment is synced once in 6 steps.
"""

from typing import NamedTuple

import pytest
import torch

from shoal.optim import Simulation, StreamingDiLoCo

EVERY, START, GRADIENT, OUTER_LR = 6, 1.0, 2.0, 2.0
SYNCED = (3, 6, 9, 12)
"""Steps after which the fixtures have the global parameters, by fragments in turn."""
ALONE = [START - GRADIENT * step for step in range(1, 16)]


class Recorded(NamedTuple):
    """One fixture: both fragments after each step, and the global parameters after ``SYNCED``."""

    delay: int
    alpha: float
    first: list[float]
    second: list[float]
    synced: list[tuple[float, float]]


FIXTURES = [
    Recorded(
        0,
        0.0,
        [-1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
        [-1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
        [(-11, 1), (-11, -23), (-35, -23), (-35, -47)],
    ),
    Recorded(
        0,
        0.5,
        [-1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25],
        [-1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
        [(-11, 1), (-11, -23), (-29, -23), (-29, -35)],
    ),
    Recorded(0, 1.0, ALONE, ALONE, [(-11, 1), (-11, -23), (-23, -23), (-23, -23)]),
    Recorded(
        1,
        0.0,
        [-1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
        [-1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45],
        [(-7, 1), (-7, -19), (-27, -19), (-27, -39)],
    ),
    Recorded(
        1,
        0.5,
        [-1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
        [-1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
        [(-7, 1), (-7, -19), (-25, -19), (-25, -31)],
    ),
    Recorded(1, 1.0, ALONE, ALONE, [(-7, 1), (-7, -19), (-23, -19), (-23, -23)]),
]


def replica(fixture):
    """Return what a replica does in a simulation: its parameters and slow weights by step."""

    def train(exchange):
        weights = [torch.nn.Parameter(torch.tensor([[START]])) for _ in range(2)]
        opt = StreamingDiLoCo(
            torch.optim.SGD(weights, lr=1.0),
            exchange,
            every=EVERY,
            fragments=[[weight] for weight in weights],
            lag=fixture.delay,
            phase="apply",
            mix=fixture.alpha,
            lr=OUTER_LR,
            momentum=0.0,
        )
        fast, slow = [], []
        for _ in ALONE:
            for weight in weights:
                weight.grad = torch.full_like(weight, GRADIENT)
            opt.step()
            fast.append([weight.item() for weight in weights])
            slow.append(tuple(tensor.item() for tensor in opt.slow))
        return fast, slow

    return train


@pytest.mark.filterwarnings("ignore:outer lr 2 .* may diverge:UserWarning")
@pytest.mark.parametrize("number", range(6))
def test_histories_are_those_torchft_recorded(number):
    """Equal to the bit at every step: what is sent when, what is applied, and the mixture."""
    fixture = FIXTURES[number]
    found = Simulation(["a", "b"], seed=0, size=2).run(replica(fixture))
    for fast, slow in found.values():
        assert [first for first, _ in fast] == fixture.first
        assert [second for _, second in fast] == fixture.second
        assert [slow[step - 1] for step in SYNCED] == fixture.synced
