"""Decoupled DiLoCo (2604.21428): fragments of uneven peers, merged by direction. Experimental.

    opt = DecoupledDiLoCo(inner, exchange, every=24, model=model)
    opt.count(tokens)                              # each step: a peer weighs tokens^2 / steps

Quorum, grace window and merging server of the paper belong to the exchange. Why directions and
lengths are both sent: docs/internals.md, "Decoupled DiLoCo".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from shoal.optim.exchange.base import Exchange
from shoal.optim.methods import DEFAULT_LAG
from shoal.optim.outer.contribution_weight import by_rate
from shoal.optim.outer.fragments import positions
from shoal.optim.outer.inner import Inner
from shoal.optim.outer.optimizer import OuterOptimizer
from shoal.optim.outer.options import Fragments, Options, averaged_parameters, cut
from shoal.optim.outer.rule import (
    RoundContext,
    State,
    assign,
    check_rate_and_momentum,
    pseudo_gradient,
    zeros,
)
from shoal.optim.rules.diloco import outer_step
from shoal.optim.rules.stability import warn_if_unstable
from shoal.optim.schedule.schedules import Lag, Streaming

if TYPE_CHECKING:
    from typing import Unpack


@dataclass(frozen=True)
class DecoupledRule:
    """Decoupled DiLoCo's rule (2604.21428): for each tensor of g = slow - fast

        g / ||g|| and ||g||         are sent
        G    <- rda(mean(g / ||g||), mean(||g||))
        slow <- DiLoCo's Nesterov step with G;   fast <- slow

    With error feedback or top-k the direction suffers, and the merge restores its full length: use
    codecs that preserve it.
    """

    shared: ClassVar[tuple[str, ...]] = ("momentum",)
    lr: float = 0.7
    momentum: float = 0.6
    plain: frozenset[tuple[int, int]] = frozenset()
    """(fragment, position in it) of the parameters that get a plain mean, as the paper has it for
    embeddings.
    """

    def __post_init__(self) -> None:
        check_rate_and_momentum(self.lr, self.momentum)

    def initial(self, slow: Sequence[Tensor]) -> State:
        return {"momentum": zeros(slow)} if self.momentum else {}

    def contribution(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext
    ) -> list[Tensor]:
        """Return unit vectors (the pseudo-gradient itself where plain), then one scalar length for
        each.
        """
        gradients = pseudo_gradient(slow, fast)
        lengths = [torch.linalg.vector_norm(g) for g in gradients]
        for position, (g, length) in enumerate(zip(gradients, lengths, strict=True)):
            if not self._is_plain(position, context):
                g.div_(torch.where(length > 0, length, 1))
        return gradients + lengths

    def apply(
        self,
        slow: Sequence[Tensor],
        fast: Sequence[Tensor],
        mean: Sequence[Tensor],
        state: State,
        context: RoundContext,
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


def rda(mean_units: Sequence[Tensor], mean_norms: Sequence[Tensor]) -> list[Tensor]:
    """Return Decoupled DiLoCo's merge (2604.21428): mean length times direction of the mean
    direction, tensor by tensor.

    Args:
        mean_units: weighted means of g / ||g||, of the parameters' shapes.
        mean_norms: weighted means of ||g||, scalars. The paper prints this radial factor as a
            vector, which is an erratum.
    """
    merged = []
    for unit, norm in zip(mean_units, mean_norms, strict=True):
        length = torch.linalg.vector_norm(unit)
        smallest = torch.finfo(length.dtype).tiny
        factor = torch.where(length > 0, norm / length.clamp_min(smallest), 0.0)
        merged.append(unit * factor)
    return merged


class DecoupledDiLoCo(OuterOptimizer):
    """Decoupled DiLoCo (2604.21428): fragments, the RDA merge, weights tokens^2 / steps
    (``DecoupledRule``).

    Call ``count(tokens)`` each step. ``plain``: parameters merged by a plain mean (embeddings). lr
    is that of reimplementations, whose momentum is 0.9 (docs/methods.md has what was measured); the
    paper's outer lr was not available to us.
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 24,
        fragments: Fragments = 24,
        lag: Lag = DEFAULT_LAG,
        lr: float = 0.7,
        momentum: float = 0.6,
        plain: Sequence[Tensor] = (),
        **options: Unpack[Options],
    ) -> None:
        parts = cut(fragments, inner, exchange, options)
        parameters = averaged_parameters(inner, exchange, options)
        marked = {id(parameter) for parameter in plain}
        places = set()
        for number, part in enumerate(positions(parts or [parameters], parameters)):
            for position, index in enumerate(part):
                if id(parameters[index]) in marked:
                    places.add((number, position))
        warn_if_unstable(lr, momentum, 0, nesterov=True)
        schedule = Streaming(every, len(parts) if parts else 1, lag)
        options.setdefault("weight", by_rate)
        super().__init__(
            inner,
            exchange,
            rule=DecoupledRule(lr, momentum, frozenset(places)),
            schedule=schedule,
            fragments=parts,
            **options,
        )
