"""Selection of one choice for each layer, so that the sizes fit a budget and the sum of the errors is least.

After L-GreCo (2210.17357), reversed: there the error is given and the size minimised, here the size is given, since a receiver must
know it beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Table = Sequence[Sequence[float]]
RESOLUTION = 4096
"""Steps into which the dynamic programme divides the budget beyond the smallest choices."""


def allocate(errors: Table, sizes: Table, budget: float) -> list[int]:
    """Return the index of one choice for each layer; ``errors[layer][choice]`` (in any unit that adds up), ``sizes`` alike.

    Solves the knapsack by dynamic programming over sizes in steps of the budget / ``RESOLUTION``, rounded up, and spends the
    remainder greedily. The result is exact when the steps are single bytes, and never worse than the greedy one or the best
    single choice for all layers that fits. Time: layers x choices x ``RESOLUTION``.

    Raises:
        ValueError: not even the smallest choices fit, or an error is NaN or negative.
    """
    if any(not error >= 0 for row in errors for error in row):
        raise ValueError("errors must be numbers and not negative")
    if total(sizes, [row.index(min(row)) for row in map(list, sizes)]) > budget:
        raise ValueError(f"even the smallest sizes need more than the {budget:g} that the budget allows")
    tries = [_spend(errors, sizes, budget, pick) for pick in (_knapsack(errors, sizes, budget), greedy(errors, sizes, budget))]
    for choice in range(min(map(len, sizes), default=0)):
        if total(sizes, [choice] * len(sizes)) <= budget:
            tries.append([choice] * len(sizes))
    return min(tries, key=lambda picks: total(errors, picks))


def total(table: Table, picks: Sequence[int]) -> float:
    return sum(row[pick] for row, pick in zip(table, picks, strict=True))


def greedy(errors: Table, sizes: Table, budget: float) -> list[int]:
    """Return the best of the choices that minimise error + price x size at one price for all layers.

    Optimal for the size that it happens to use, which may lie well below the budget.
    """

    def at(price: float) -> list[int]:
        return [
            min(range(len(row)), key=lambda c: (row[c] + price * size[c], size[c])) for row, size in zip(errors, sizes, strict=True)
        ]

    low, high = -300.0, 300.0  # decimal logarithm of the price
    if total(sizes, at(0.0)) <= budget:
        return at(0.0)
    picks = [min(range(len(size)), key=size.__getitem__) for size in sizes]
    for _ in range(80):
        middle = (low + high) / 2
        candidate = at(10.0**middle)
        if total(sizes, candidate) <= budget:
            picks, high = candidate, middle
        else:
            low = middle
    return picks


def _knapsack(errors: Table, sizes: Table, budget: float) -> list[int]:
    least = [min(row) for row in sizes]
    spare = budget - sum(least)
    step = max(spare / RESOLUTION, 1.0)
    room = int(spare // step)
    best = torch.zeros(room + 1, dtype=torch.float64, device="cpu")  # least error so far, by the steps spent at most
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
    for pick, size, smallest in zip(reversed(picked), reversed(sizes), reversed(least), strict=True):
        picks.append(int(pick[room]))
        room -= math.ceil((size[picks[-1]] - smallest) / step)
    return picks[::-1]


def _spend(errors: Table, sizes: Table, budget: float, picks: list[int]) -> list[int]:
    """Improve one layer after another, the largest gain first, as long as the budget allows."""
    picks = list(picks)
    left = budget - total(sizes, picks)
    while True:
        gains = [
            (errors[layer][pick] - errors[layer][choice], layer, choice)
            for layer, pick in enumerate(picks)
            for choice in range(len(sizes[layer]))
            if errors[layer][choice] < errors[layer][pick] and sizes[layer][choice] - sizes[layer][pick] <= left
        ]
        if not gains:
            return picks
        _, layer, choice = max(gains)
        left -= sizes[layer][choice] - sizes[layer][picks[layer]]
        picks[layer] = choice
