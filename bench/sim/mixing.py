"""How well buckets mix: the consensus distance of peers that average in pairs within their buckets,
against pairs drawn among all.

Every round each peer's values take a random step, then the pairs of the round take their mean.
Buckets, their depth and the pairs are those of the production code (`shoal.swarm.membership`,
`shoal.optim.exchange.pairing`); nobody is late, and no link is simulated. The variance left after
averaging is what a partner that is drawn from fewer costs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

import torch

from shoal.optim.exchange.pairing import groups
from shoal.swarm.membership.bucket_depth import depth_for
from shoal.swarm.membership.records import bits_in

PEERS, ROUNDS, EPOCH_ROUNDS = 1024, 240, 4
SETTLED = 40  # rounds before the first that counts
VALUES = 128  # of each peer
SEEDS = 3

Deal = Callable[[int], Sequence[Sequence[str]]]


def mixing(
    bucket: int,
    *,
    peers: int = PEERS,
    rounds: int = ROUNDS,
    every: int = EPOCH_ROUNDS,
    seeds: int = SEEDS,
    seed: int = 0,
) -> dict[str, Any]:
    """Return ``variance``: the squared consensus distance in buckets drawn anew every ``every``
    rounds, over that of all pairs.

    ``members``: peers in a bucket, on average. ``error``: standard error over the ``seeds``, None
    for one. ``variance_full``, ``error_full``: the same for buckets of as many as ``bucket``
    admits, on average, which a swarm does not let become so full.
    """
    names = [f"peer {number}" for number in range(peers)]
    depth, full = depth_for(peers, 0, bucket), max(round(math.log2(peers / bucket)), 0)
    ratios: dict[int, list[float]] = defaultdict(list)
    for number in range(seed, seed + seeds):
        among_all = _variance(names, lambda _: [names], rounds, number)
        for bits in sorted({depth, full}):
            ratios[bits].append(
                _variance(names, _dealt(names, bits, every, number), rounds, number) / among_all
            )
    errors = {
        bits: stdev(of) / len(of) ** 0.5 if len(of) > 1 else None for bits, of in ratios.items()
    }
    return {
        "peers": peers,
        "bucket": bucket,
        "members": peers / 2**depth,
        "rounds_per_epoch": every,
        "rounds": rounds,
        "variance": fmean(ratios[depth]),
        "error": errors[depth],
        "variance_full": fmean(ratios[full]),
        "error_full": errors[full],
    }


def _dealt(names: Sequence[str], depth: int, every: int, seed: int) -> Deal:
    """Return a function from a round to its buckets, of prefixes of ``depth`` bits."""
    known: dict[int, list[list[str]]] = {}

    def deal(round: int) -> list[list[str]]:
        epoch = round // every
        if epoch not in known:
            found: dict[str, list[str]] = defaultdict(list)
            for name in names:
                found[bits_in(f"mixing {seed}", epoch, name)[:depth]].append(name)
            known.clear()
            known[epoch] = list(found.values())
        return known[epoch]

    return deal


def _variance(names: Sequence[str], deal: Deal, rounds: int, seed: int) -> float:
    """Return the mean over rounds of the variance between peers, of steps of variance 1."""
    places = {name: place for place, name in enumerate(names)}
    dice = torch.Generator().manual_seed(seed)
    values = torch.zeros(len(names), VALUES, device="cpu")
    found = []
    for round in range(rounds):
        values += torch.randn(values.shape, generator=dice, device="cpu")
        pairs = [
            pair for bucket in deal(round) for pair in groups(seed, round, bucket) if len(pair) == 2
        ]
        one, two = (
            torch.tensor([places[pair[side]] for pair in pairs], device="cpu") for side in (0, 1)
        )
        values[one] = values[two] = (values[one] + values[two]) / 2
        if round >= SETTLED:
            found.append(float(values.var(0).mean()))
    return fmean(found)
