"""DiLoCo and the rules built on it: SGD with momentum on the slow weights, along the mean pseudo-gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from shoal.optim.exchange.on_demand import OnDemand, differences
from shoal.optim.rules.base import RoundContext, State, assign, check_rate_and_momentum, pseudo_gradient, zeros


@dataclass(frozen=True)
class DiLoCoRule:
    """DiLoCo's rule (2311.08105): with momentum m, outer lr b and G = mean(g),

        v <- m v + G;   slow <- slow - b (G + m v)   (nesterov)   or   slow <- slow - b v   (heavy ball);   fast <- slow

    The Nesterov form is that of torch.optim.SGD(nesterov=True), which the paper's and most public code uses. It equals the form
    with lr inside the buffer (MuLoCo's code) only while lr is constant. The "DiLoCo" of NoLoCo's authors is the heavy ball.

    With one peer it is SNOO (2510.15830), and Lookahead without momentum. Without momentum over everyone: SparseLoCo's outer step.

    ``mix`` (Streaming DiLoCo, 2501.18512; torchft and MaxText do the same): fast <- mix fast + (1 - mix) slow. 0 discards the
    progress made while the exchange was in flight, 1 ignores the others. "keep" (ours) discards nothing: fast <- fast + (slow -
    fast when it was sent), so all that was learnt meanwhile is in the next pseudo-gradient, once. That is measured from the new
    slow weights, not from the mix. The inner optimizer's state is neither sent nor reset.
    """

    shared: ClassVar[tuple[str, ...]] = ("momentum",)
    lr: float = 0.7
    momentum: float = 0.6
    nesterov: bool = True
    mix: float | Literal["keep"] = 0.0

    def __post_init__(self) -> None:
        check_rate_and_momentum(self.lr, self.momentum)
        if self.mix != "keep" and (isinstance(self.mix, str) or not 0 <= self.mix <= 1):
            raise ValueError(f"mix must be keep or lie in [0, 1], got {self.mix}: 0 takes the slow weights, 1 keeps the fast ones")

    def initial(self, slow: Sequence[Tensor]) -> State:
        """Return momentum 0; no buffer without momentum."""
        return {"momentum": zeros(slow)} if self.momentum else {}

    def contribution(self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext) -> OnDemand:
        return differences(slow, fast)

    def apply(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], mean: Sequence[Tensor], state: State, context: RoundContext
    ) -> None:
        """Take one outer step."""
        keeps = self.mix == "keep" and context.lag > 0
        if keeps:
            for f, s, g in zip(fast, slow, context.sent, strict=True):
                f.sub_(s).add_(g)  # what was learnt since: exactly 0 if nothing was
        outer_step(slow, mean, state, self.lr, self.momentum, self.nesterov)
        for s, f in zip(slow, fast, strict=True):
            if keeps:
                f.add_(s)
            elif self.mix == "keep" or self.mix == 0:
                f.copy_(s)
            elif self.mix < 1:
                f.mul_(self.mix).add_(s, alpha=1 - self.mix)


def outer_step(
    slow: Sequence[Tensor], gradients: Sequence[Tensor], state: State, lr: float, momentum: float, nesterov: bool
) -> None:
    """Take a step of SGD with momentum in torch's form on ``slow``, in place; ``gradients`` are not changed."""
    if momentum == 0:
        for s, g in zip(slow, gradients, strict=True):
            s.sub_(g, alpha=lr)
        return
    for v, s, g in zip(state["momentum"], slow, gradients, strict=True):
        v.mul_(momentum).add_(g)
        if nesterov:
            s.sub_(g, alpha=lr).sub_(v, alpha=lr * momentum)
        else:
            s.sub_(v, alpha=lr)


def rda(mean_units: Sequence[Tensor], mean_norms: Sequence[Tensor]) -> list[Tensor]:
    """Return Decoupled DiLoCo's merge (2604.21428): mean length times direction of the mean direction, tensor by tensor.

    Args:
        mean_units: weighted means of g / ||g||, of the parameters' shapes.
        mean_norms: weighted means of ||g||, scalars. The paper prints this radial factor as a vector, which is an erratum.
    """
    merged = []
    for unit, norm in zip(mean_units, mean_norms, strict=True):
        length = torch.linalg.vector_norm(unit)
        merged.append(unit * torch.where(length > 0, norm / length.clamp_min(torch.finfo(length.dtype).tiny), 0.0))
    return merged


@dataclass(frozen=True)
class DecoupledRule:
    """Decoupled DiLoCo's rule (2604.21428): DiLoCo's Nesterov form on the ``rda`` merge of the pseudo-gradients.

    Directions and lengths are both sent, so that the merge needs means only and any exchange can provide them. The merge restores
    the full length even if a codec distorts the direction, so use codecs that preserve it (one toy run with top-k and error
    feedback ended far worse than in float32; the cause is not isolated). The quorum, the grace window and the merging server
    belong to the exchange; tokens^2 / steps is ``by_rate``. A peer that receives a fragment goes on from the slow weights (the
    paper's choice).
    """

    shared: ClassVar[tuple[str, ...]] = ("momentum",)
    lr: float = 0.7
    momentum: float = 0.6
    plain: frozenset[tuple[int, int]] = frozenset()
    """(fragment, position in it) of the parameters that get a plain mean, as the paper has it for embeddings."""

    def __post_init__(self) -> None:
        check_rate_and_momentum(self.lr, self.momentum)

    def initial(self, slow: Sequence[Tensor]) -> State:
        return {"momentum": zeros(slow)} if self.momentum else {}

    def contribution(self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext) -> list[Tensor]:
        """Return unit vectors (the pseudo-gradient itself where plain), then one scalar length for each."""
        gradients = pseudo_gradient(slow, fast)
        lengths = [torch.linalg.vector_norm(g) for g in gradients]
        for position, (g, length) in enumerate(zip(gradients, lengths, strict=True)):
            if not self._is_plain(position, context):
                g.div_(torch.where(length > 0, length, 1))
        return gradients + lengths

    def apply(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], mean: Sequence[Tensor], state: State, context: RoundContext
    ) -> None:
        count = len(slow)
        merged = rda(mean[:count], mean[count:])
        for position in range(count):
            if self._is_plain(position, context):
                merged[position] = mean[position]
        outer_step(slow, merged, state, self.lr, self.momentum, nesterov=True)
        assign(fast, slow)

    def _is_plain(self, position: int, context: RoundContext) -> bool:
        place = context.places[position] if context.places else position
        return (context.key.fragment, place) in self.plain
