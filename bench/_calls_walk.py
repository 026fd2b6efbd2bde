"""How far apart peers are that learn at random, by who exchanges what with whom, and when.

    walk = RandomWalk(setting)
    Rounds(setting, walk).run()
    walk.variance

Each step adds noise to what a peer holds, and outcomes are applied by NoLoCo's rule, as late as
they come. The variance between the peers tells protocols apart that the losses of a few runs do
not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench._calls_protocol import Setting

SIZE = 64
"""Values of a fragment."""
MOMENTUM = 0.3
SETTLING_ROUNDS = 20
"""Not measured: the variance grows at first."""


class RandomWalk:
    """``Training`` without a model."""

    def __init__(self, setting: Setting) -> None:
        self._noise = setting.every**-0.5
        self._skipped = SETTLING_ROUNDS * setting.every * setting.peers
        self._generator = torch.Generator().manual_seed(setting.seed)
        shape = (setting.peers, setting.fragments, SIZE)
        self._fast = torch.zeros(shape)
        self._slow = torch.zeros(shape)
        self._velocity = torch.zeros(shape)
        self._sent = torch.zeros(shape)
        self._mean = torch.zeros(shape)
        self._steps = 0
        self._measured = 0
        self._total = 0.0

    @property
    def variance(self) -> float:
        return self._total / max(self._measured, 1)

    def step(self, peer: int, applied: Sequence[tuple[int, int]], staged: Sequence[int]) -> None:
        fast = self._fast[peer]
        fast += self._noise * torch.randn(fast.shape, generator=self._generator)
        for fragment, _ in applied:
            self._apply(peer, fragment)
        for fragment in staged:
            self._sent[peer, fragment] = fast[fragment]
        self._steps += 1
        if self._steps > self._skipped and self._steps % len(self._fast) == 0:
            self._measured += 1
            self._total += float(self._fast.var(0).mean())

    def _apply(self, peer: int, fragment: int) -> None:
        velocity = self._velocity[peer, fragment]
        slow = self._slow[peer, fragment]
        velocity *= MOMENTUM
        velocity += slow - self._mean[peer, fragment]
        slow -= velocity
        self._fast[peer, fragment] += slow - self._sent[peer, fragment]

    def exchange(self, fragment: int, one: int, other: int) -> None:
        pair = [one, other]
        self._mean[pair, fragment] = self._sent[pair, fragment].mean(0)

    def alone(self, fragment: int, peer: int) -> None:
        self._mean[peer, fragment] = self._sent[peer, fragment]
