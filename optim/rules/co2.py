"""The CO2-style method (2401.16265): an exchange takes a whole round, and a penalty divides its
late mean.

    opt = CO2(inner, exchange, every=48, momentum=0.2)

Each round ends with: send the own displacement of this round, wait for the mean of the round
before, and apply it. What is the paper's and what is ours: docs/internals.md, "CO2".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from shoal.optim.exchange.base import Exchange
from shoal.optim.outer.inner import Inner
from shoal.optim.outer.optimizer import OuterOptimizer
from shoal.optim.outer.options import Options
from shoal.optim.outer.rule import (
    START,
    RoundContext,
    State,
    assign,
    check_rate_and_momentum,
    pseudo_gradient,
    zeros,
)
from shoal.optim.rules.stability import warn_if_unstable
from shoal.optim.schedule.schedules import Delayed

if TYPE_CHECKING:
    from typing import Unpack

DECAY = 0.9
"""Factor by which C, the running mean of ||G||, keeps its old value each round: a memory of about
ten rounds.
"""


@dataclass(frozen=True)
class CO2Rule:
    """CO2-style rule (2401.16265): with G the mean of the round before, penalty L and momentum b,

        g    <- start - fast        is sent, and start <- fast
        m    <- clip(b m + G / L, +-clip)
        slow <- slow - lr m;        fast <- slow;        start <- slow

    The gap-aware penalty is L = 1 + ||slow's last move|| / C, with C the running mean of ||G||
    (at first ||G||, then 0.9 C + 0.1 ||G||), both over the fragment, or over each part of it where
    parameter groups differ in lr or momentum. The first round has no mean: nothing moves.

    By default what was just sent is taken out of ``fast`` again, and comes back with its mean one
    round later. ``keep=True`` leaves it there: fast and start then move by slow's move plus the own
    g that the mean contains, so it is never applied twice.
    """

    shared: ClassVar[tuple[str, ...]] = ("momentum", "moved", "usual")
    """See ``Anchored``. With a constant penalty the state has only the momentum."""
    lr: float = 1.0
    momentum: float = 0.2
    penalty: float | None = None
    """None: gap-aware; else a constant of at least 1."""
    clip: float | None = 1.0
    """Largest absolute value in the momentum; None: no limit."""
    keep: bool = False

    def __post_init__(self) -> None:
        check_rate_and_momentum(self.lr, self.momentum)
        if self.penalty is not None and not self.penalty >= 1:
            raise ValueError(f"penalty must be at least 1, got {self.penalty}: 1 is no penalty")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive, got {self.clip}: None is no clip")

    def initial(self, slow: Sequence[Tensor]) -> State:
        """Return momentum 0, start = slow, ``moved`` (squared length of each tensor's last move)
        and ``usual`` (C, the same number for every tensor); with a constant penalty not the last
        two.
        """
        state = {"momentum": zeros(slow), START: [tensor.clone() for tensor in slow]}
        if self.penalty is None:
            state["moved"] = [tensor.new_zeros(()) for tensor in slow]
            state["usual"] = [tensor.new_zeros(()) for tensor in slow]
        return state

    def contribution(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext
    ) -> list[Tensor]:
        """Return g, and begin the next displacement at ``fast``."""
        displacement = pseudo_gradient(state[START], fast)
        assign(state[START], fast)
        return displacement

    def apply(
        self,
        slow: Sequence[Tensor],
        fast: Sequence[Tensor],
        mean: Sequence[Tensor],
        state: State,
        context: RoundContext,
    ) -> None:
        if context.members == 0:
            return
        penalty = self._penalty(mean, state, context)
        tensors = zip(state["momentum"], state[START], slow, fast, mean, strict=True)
        for index, (m, start, s, f, g) in enumerate(tensors):
            m.mul_(self.momentum).add_(g / penalty)
            if self.clip is not None:
                m.clamp_(-self.clip, self.clip)
            s.sub_(m, alpha=self.lr)
            if self.keep:
                correction = context.sent[index] - self.lr * m
                f.add_(correction)
                start.add_(correction)
            else:
                # Keep what fast has moved since this round's send (nothing, under ``Delayed``).
                f.sub_(start).add_(s)
                start.copy_(s)
        if self.penalty is None:
            moved = [(self.lr * torch.linalg.vector_norm(m)) ** 2 for m in state["momentum"]]
            assign(state["moved"], context.of_owners(moved))

    def _penalty(
        self, mean: Sequence[Tensor], state: State, context: RoundContext
    ) -> float | Tensor:
        """Return L for this mean, and advance C."""
        if self.penalty is not None:
            return self.penalty
        lengths = context.of_owners([torch.linalg.vector_norm(tensor) for tensor in mean])
        length = torch.stack(lengths).square().sum().sqrt()
        usual = state["usual"][0]
        usual = torch.where(usual > 0, DECAY * usual + (1 - DECAY) * length, length)
        assign(state["usual"], [usual] * len(mean))
        moved = torch.stack(state["moved"]).sum().sqrt()
        smallest = torch.finfo(usual.dtype).tiny
        return 1 + torch.where(usual > 0, moved / usual.clamp_min(smallest), 0.0)


class CO2(OuterOptimizer):
    """The CO2-style method (2401.16265): an exchange takes a whole round; heavy ball with staleness
    penalty (``CO2Rule``).

    Defaults from the official code: 48 steps and lr 1 (fairscale), momentum 0.2 and clip 1 (its
    language-model script; fairscale has 0.5 and none). Its penalty is 1; ours is gap-aware.
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 48,
        lr: float = 1.0,
        momentum: float = 0.2,
        penalty: float | None = None,
        clip: float | None = 1.0,
        keep: bool = False,
        **options: Unpack[Options],
    ) -> None:
        damping = penalty
        if damping is None:
            # With a constant mean and no clip the gap-aware penalty settles at
            # L = 1 + lr / (L (1 - momentum)); the warning takes this root as an estimate.
            damping = (1 + (1 + 4 * lr / max(1 - momentum, 1e-9)) ** 0.5) / 2
        rule = CO2Rule(lr, momentum, penalty, clip, keep)
        warn_if_unstable(lr / damping, momentum, lag=1, nesterov=False)
        super().__init__(inner, exchange, rule=rule, schedule=Delayed(every), **options)
