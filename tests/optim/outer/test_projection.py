"""Random projections estimate norms and distances, also where all values are alike; the consensus
distance follows from them.
"""

import math

import pytest
import torch

from shoal.node.watch.consensus import consensus_distance
from shoal.optim.outer.sketch import BLOCK, PROJECTED, projection
from shoal.swarm.topics import status


def drawn(seed, scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    return [
        scale * torch.randn(300, 400, generator=draw),
        scale * torch.randn(BLOCK + 5, generator=draw),
        torch.ones(3),
    ]


def test_it_is_linear_and_has_the_numbers_of_a_status():
    one, other = drawn(0), drawn(1)
    both = projection(a + b for a, b in zip(one, other, strict=True))
    assert len(both) - 1 == PROJECTED == status.PROJECTED
    assert both[:-1] == pytest.approx(
        [a + b for a, b in zip(projection(one), projection(other), strict=True)][:-1], abs=1e-2
    )


@pytest.mark.parametrize("values", [drawn(0), [torch.ones(20 * BLOCK)], [torch.ones(64)] * 4000])
def test_its_norm_is_about_that_of_the_values(values):
    norm = math.sqrt(sum(tensor.square().sum().item() for tensor in values))
    *sums, length = projection(values)
    assert length == pytest.approx(norm)
    assert math.hypot(*sums) == pytest.approx(norm, rel=0.35)


def test_the_consensus_distance_is_estimated_from_them():
    shared = drawn(9)
    peers = [[a + b for a, b in zip(shared, drawn(seed, 0.1), strict=True)] for seed in range(6)]
    flat = torch.stack([torch.cat([tensor.reshape(-1) for tensor in peer]) for peer in peers])
    real = (torch.pdist(flat).square().mean() / flat.square().sum(1).mean()).sqrt().item()
    assert consensus_distance([projection(peer) for peer in peers]) == pytest.approx(real, rel=0.2)


def test_projection_of_equal_or_single_peers():
    """Of equal weights it is none and of one peer it is not known."""
    same = projection(drawn(0))
    assert consensus_distance([same, same]) == pytest.approx(0.0, abs=1e-9)
    assert consensus_distance([same]) is None
    assert consensus_distance([(0.0,) * (PROJECTED + 1)] * 2) is None
