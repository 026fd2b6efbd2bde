"""The choice of one of several sizes for each layer, so that a budget has the least error.

    allocate(errors=[[9, 1], [4, 2]], sizes=[[1, 2], [1, 2]], budget=3)      # [1, 0]

After L-GreCo (2210.17357), reversed: docs/internals.md, "Codecs".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Table = Sequence[Sequence[float]]
RESOLUTION = 4096
"""Steps into which the dynamic programme divides the budget beyond the smallest choices."""


def allocate(errors: Table, sizes: Table, budget: float) -> list[int]:
    """Return the index of one choice for each layer; ``errors[layer][choice]`` (in any unit that
    adds up), ``sizes`` alike.

    Solves the knapsack by dynamic programming over sizes in steps of the budget / ``RESOLUTION``,
    rounded up, and spends the remainder greedily. The result is exact when the steps are single
    bytes, and never worse than the greedy one or the best single choice for all layers that fits.
    Time: layers x choices x ``RESOLUTION``.

    Raises:
        ValueError: not even the smallest choices fit, or an error is NaN or negative.
    """
    for row in errors:
        if not all(error >= 0 for error in row):
            raise ValueError("errors must be numbers and not negative")
    if sum(min(row) for row in sizes) > budget:
        raise ValueError(
            f"even the smallest sizes need more than the {budget:g} that the budget allows"
        )
    exact = _knapsack(errors, sizes, budget)
    quick = greedy(errors, sizes, budget)
    tries = [_spend(errors, sizes, budget, exact), _spend(errors, sizes, budget, quick)]
    for choice in range(min(map(len, sizes), default=0)):
        if total(sizes, [choice] * len(sizes)) <= budget:
            tries.append([choice] * len(sizes))
    return min(tries, key=lambda picks: total(errors, picks))


def total(table: Table, picks: Sequence[int]) -> float:
    return sum(row[pick] for row, pick in zip(table, picks, strict=True))


def greedy(errors: Table, sizes: Table, budget: float) -> list[int]:
    """Return the best of the choices that minimise error + price x size at one price for all
    layers.

    Optimal for the size that it happens to use, which may lie well below the budget.
    """

    def at(price: float) -> list[int]:
        best: list[int] = []
        for row, size in zip(errors, sizes, strict=True):
            costs = [(error + price * many, many) for error, many in zip(row, size, strict=True)]
            best.append(min(range(len(row)), key=costs.__getitem__))
        return best

    # Decimal logarithms of the price.
    low = -300.0
    high = 300.0
    if total(sizes, at(0.0)) <= budget:
        return at(0.0)
    picks = [min(range(len(size)), key=size.__getitem__) for size in sizes]
    for _ in range(80):
        middle = (low + high) / 2
        candidate = at(10.0**middle)
        if total(sizes, candidate) <= budget:
            picks = candidate
            high = middle
        else:
            low = middle
    return picks


def _knapsack(errors: Table, sizes: Table, budget: float) -> list[int]:
    least = [min(row) for row in sizes]
    spare = budget - sum(least)
    step = max(spare / RESOLUTION, 1.0)
    room = int(spare // step)
    # The least error so far, by the steps spent at most.
    best = torch.zeros(room + 1, dtype=torch.float64, device="cpu")
    picked = []
    for error, size, smallest in zip(errors, sizes, least, strict=True):
        options = torch.full((len(size), room + 1), math.inf, dtype=torch.float64, device="cpu")
        for choice, (e, s) in enumerate(zip(error, size, strict=True)):
            steps = math.ceil((s - smallest) / step)
            if steps <= room:
                options[choice, steps:] = best[: room + 1 - steps] + e
        best, pick = options.min(0)
        picked.append(pick)
    picks = []
    layers = list(zip(picked, sizes, least, strict=True))
    for pick, size, smallest in reversed(layers):
        picks.append(int(pick[room]))
        room -= math.ceil((size[picks[-1]] - smallest) / step)
    return picks[::-1]


def _spend(errors: Table, sizes: Table, budget: float, picks: list[int]) -> list[int]:
    """Improve one layer after another, the largest gain first, as long as the budget allows."""
    picks = list(picks)
    left = budget - total(sizes, picks)
    while True:
        gains: list[tuple[float, int, int]] = []
        for layer, pick in enumerate(picks):
            for choice, (error, size) in enumerate(zip(errors[layer], sizes[layer], strict=True)):
                gain = errors[layer][pick] - error
                if gain > 0 and size - sizes[layer][pick] <= left:
                    gains.append((gain, layer, choice))
        if not gains:
            return picks
        _, layer, choice = max(gains)
        left -= sizes[layer][choice] - sizes[layer][picks[layer]]
        picks[layer] = choice
