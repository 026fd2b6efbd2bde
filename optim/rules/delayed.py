"""Rules for means that arrive a whole round late, while the next round is computed: CO2-style and eager updates.

Under ``Delayed`` each round ends with: wait for the mean of the round before, send the own displacement of this round, then apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.optim.rules.base import START, RoundContext, State, assign, check_rate_and_momentum, pseudo_gradient, zeros
from shoal.optim.rules.diloco import outer_step
from shoal.optim.rules.stability import warn_if_unstable

DECAY = 0.9
"""Decay of the running mean of the mean pseudo-gradient's length."""


@dataclass(frozen=True)
class CO2Rule:
    """CO2-style rule (2401.16265): heavy ball on the mean of the round before, with a penalty for its staleness and a clip.

        g = start - fast is sent;  G = mean(g of the round before)
        m <- clip(momentum m + G / L, +-clip);   slow <- slow - lr m;   fast <- slow

    "CO2-style": only the paper's abstract, reviews and code were available to us. Ours, not necessarily the paper's, is the
    gap-aware penalty L = 1 + ||slow's last move|| / C, C = running mean of ||G|| (first G, then 0.9 C + 0.1 ||G||), both over the
    fragment. A number for ``penalty`` is that constant L, as in the official code (whose default 1 is no penalty).
    Not followed: the official code clips a copy (so never), and averages the live parameters while they are trained.
    The paper sends the weights, we send their displacement; with equal starts that is the same, and it suits any codec.

    The displacement since the last send is in no mean yet. By default it is discarded from ``fast`` and comes back with its mean
    one round later. ``keep=True`` leaves it there: fast moves by (slow's move + own g of the round before), so that the own
    displacement is never applied twice.

    The first round has no mean: fast stays as it is.
    """

    shared: ClassVar[tuple[str, ...]] = ("momentum", "moved", "usual")
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
        """Return momentum 0, start = slow, ``moved`` (squared length of each tensor's last move) and ``usual`` (C)."""
        state = {"momentum": zeros(slow), START: [tensor.clone() for tensor in slow]}
        if self.penalty is None:
            state["moved"] = [tensor.new_zeros(()) for tensor in slow]
            state["usual"] = [tensor.new_zeros(()) for tensor in slow]
        return state

    def contribution(self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext) -> list[Tensor]:
        displacement = pseudo_gradient(state[START], fast)
        assign(state[START], fast)
        return displacement

    def apply(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], mean: Sequence[Tensor], state: State, context: RoundContext
    ) -> None:
        """Take one outer step, if there is a mean."""
        if context.members == 0:
            return
        gap = self._gap(mean, state, context)
        for index, (m, start, s, f, g) in enumerate(zip(state["momentum"], state[START], slow, fast, mean, strict=True)):
            m.mul_(self.momentum).add_(g / gap)
            if self.clip is not None:
                m.clamp_(-self.clip, self.clip)
            s.sub_(m, alpha=self.lr)
            if self.keep:
                correction = context.sent[index] - self.lr * m
                f.add_(correction)
                start.add_(correction)
            else:
                f.sub_(start).add_(s)  # keeps the displacement since the last send, if any
                start.copy_(s)
        if self.penalty is None:
            moved = [(self.lr * torch.linalg.vector_norm(m)) ** 2 for m in state["momentum"]]
            assign(state["moved"], context.of_owners(moved))

    def _gap(self, mean: Sequence[Tensor], state: State, context: RoundContext) -> float | Tensor:
        """Return the penalty of this mean and advance C."""
        if self.penalty is not None:
            return self.penalty
        length = torch.stack(context.of_owners([torch.linalg.vector_norm(tensor) for tensor in mean])).square().sum().sqrt()
        usual = state["usual"][0]
        usual = torch.where(usual > 0, DECAY * usual + (1 - DECAY) * length, length)
        assign(state["usual"], [usual] * len(mean))
        moved = torch.stack(state["moved"]).sum().sqrt()
        return 1 + torch.where(usual > 0, moved / usual.clamp_min(torch.finfo(usual.dtype).tiny), 0.0)


@dataclass(frozen=True)
class EagerRule:
    """Rule of eager updates (2502.12996): the others' displacement of the round before, the own one of this round.

        e = (1/K) g of this round;   G = mean(g of the round before) - e of the round before + e
        DiLoCo's outer step with G;   fast <- slow

    1/K is the own share in the last mean: 1 before the first answer (the paper does not define the first round), so without a
    partner this is DiLoCo up to rounding. The eagerly applied part is saved, so that exactly this is taken back when the mean
    arrives, even if the share has changed or an exchange was cancelled.

    The more peers, the larger the late part of the mean: at momentum 0.9 lr must stay below 0.77 for 2 peers, 0.41 for 4, 0.32 for
    8 (``stability.limit``); a warning says so once the share is known.

    The slow weights differ between the peers by their own eager parts. The paper does not say whether to equalise them from time to
    time; ``finish(average=True)`` does so at the end.
    """

    lr: float = 0.4
    momentum: float = 0.6
    nesterov: bool = True

    def __post_init__(self) -> None:
        check_rate_and_momentum(self.lr, self.momentum)

    def initial(self, slow: Sequence[Tensor]) -> State:
        """Return momentum 0, start = slow, no eager part, and share 1."""
        state = {START: [tensor.clone() for tensor in slow], "eager": zeros(slow)}
        state["share"] = [tensor.new_ones(()) for tensor in slow]
        return state | ({"momentum": zeros(slow)} if self.momentum else {})

    def contribution(self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext) -> list[Tensor]:
        """Return the displacement since the last outer step."""
        return pseudo_gradient(state[START], fast)

    def apply(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], mean: Sequence[Tensor], state: State, context: RoundContext
    ) -> None:
        """Take one outer step. If the mean is not late, it holds the whole displacement and nothing is applied eagerly."""
        if context.members > 0:
            for share in state["share"]:
                share.fill_(context.share)
            if context.lag > 0:
                warn_if_unstable(self.lr, self.momentum, 1, nesterov=self.nesterov, fresh=round(context.share, 2))
        gradients = []
        for index, (e, share) in enumerate(zip(state["eager"], state["share"], strict=True)):
            g = -e
            if context.members == 0 or context.lag > 0:
                e.copy_((state[START][index] - fast[index]) * share)
                g.add_(e)
            else:
                e.zero_()
            gradients.append(g if context.members == 0 else g.add_(mean[index]))
        outer_step(slow, gradients, state, self.lr, self.momentum, self.nesterov)
        assign(fast, slow)
        assign(state[START], slow)
