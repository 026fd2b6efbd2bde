"""SPARTA (openreview stFPf3gzq1): a small random part of the weights is averaged. Experimental.

    opt = SPARTA(inner, exchange, every=1, part=0.005)

Every peer draws the same positions from the round's key, so no mask is sent. How they are drawn:
docs/internals.md, "SPARTA".
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.optim.codecs.base import check_sends_weights
from shoal.optim.codecs.floats import FLOAT32
from shoal.optim.codecs.pair_message import mixed
from shoal.optim.codecs.partial import check_can_divide
from shoal.optim.device import to_device
from shoal.optim.exchange.base import Exchange, RoundKey
from shoal.optim.outer.inner import Inner
from shoal.optim.outer.optimizer import OuterOptimizer
from shoal.optim.outer.options import Options
from shoal.optim.outer.rule import RoundContext, State, assign
from shoal.optim.schedule.schedules import Every

if TYPE_CHECKING:
    from typing import Unpack

SEED_BYTES = 16
"""Bytes of the key's digest that enter the draws, four at a time."""


@dataclass(frozen=True)
class SpartaRule:
    """SPARTA's rule: at the positions that are chosen from the round's key,

        fast <- mean(fast)          or, ``lag`` steps late,  fast <- fast + mean(sent) - sent
        slow <- fast                of all values: there is no outer optimizer

    A fixed number of values is chosen over the whole fragment, so small tensors are reached too.
    """

    part: float = 0.005
    """Part of all values, in [0, 1]."""

    def __post_init__(self) -> None:
        if not 0 <= self.part <= 1:
            raise ValueError(
                f"part must lie in [0, 1], got {self.part}: it is the part of all values that is "
                "averaged"
            )

    def initial(self, slow: Sequence[Tensor]) -> State:
        return {}

    def contribution(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext
    ) -> list[Tensor]:
        """Return one flat tensor: the chosen values of each parameter, in their order."""
        places = self._places(fast, context)
        values = [f.reshape(-1)[at] for f, at in zip(fast, places, strict=True)]
        return [torch.cat(values)]

    def apply(
        self,
        slow: Sequence[Tensor],
        fast: Sequence[Tensor],
        mean: Sequence[Tensor],
        state: State,
        context: RoundContext,
    ) -> None:
        places = self._places(fast, context)
        sizes = [at.numel() for at in places]
        means = torch.split(mean[0], sizes)
        sent = torch.split(context.sent[0], sizes)
        for f, at, theirs, own in zip(fast, places, means, sent, strict=True):
            flat = f.view(-1)
            flat[at] = theirs if context.lag == 0 else flat[at] + (theirs - own)
        assign(slow, fast)

    def counts(self, sizes: Sequence[int], key: RoundKey) -> list[int]:
        """Return how many of the chosen values each parameter has."""
        _, cuts = self._chosen(sizes, key)
        return [end - begin for begin, end in itertools.pairwise(cuts)]

    def _chosen(self, sizes: Sequence[int], key: RoundKey) -> tuple[Tensor, list[int]]:
        """Return the chosen positions in the concatenation of all tensors, and where those of each
        tensor begin among them.
        """
        ends = torch.tensor(sizes, device="cpu").cumsum(0)
        flat = chosen(key, int(ends[-1]), self.part)
        return flat, [0, *torch.searchsorted(flat, ends).tolist()]

    def _places(self, tensors: Sequence[Tensor], context: RoundContext) -> list[Tensor]:
        """Return the chosen positions in each tensor; none in one that another rank owns."""
        sizes = context.sizes or [tensor.numel() for tensor in tensors]
        flat, cuts = self._chosen(sizes, context.key)
        offsets = [0, *itertools.accumulate(sizes)]
        places = []
        for index, tensor in enumerate(tensors):
            if tensor.numel():
                places.append(flat[cuts[index] : cuts[index + 1]] - offsets[index])
            else:
                places.append(flat[:0])
        return to_device(places, tensors[0].device)


def chosen(key: RoundKey, count: int, part: float) -> Tensor:
    """Return round(part * count) different positions below ``count``, ascending, int64 on the CPU.

    They follow from the key alone, in integers, on any machine and with any version of torch.
    """
    wanted = min(round(part * count), count)
    if wanted == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    # One position of each of ``wanted`` runs, whose lengths differ by at most one.
    edges = torch.arange(wanted + 1, dtype=torch.int64, device="cpu")
    # edges * count // wanted, without overflow
    edges = edges * (count // wanted) + edges * (count % wanted) // wanted
    first = edges[:-1]
    length = edges[1:] - edges[:-1]
    seed = hashlib.sha256(f"shoal/sparta/1:{key.run}:{key.round}:{key.fragment}".encode()).digest()
    draws = torch.arange(wanted, dtype=torch.int64, device="cpu")
    for start in range(0, SEED_BYTES, 4):
        word = int.from_bytes(seed[start : start + 4], "little")
        draws = mixed((draws ^ word) & 0xFFFFFFFF)
    return first + draws % length


class SPARTA(OuterOptimizer):
    """SPARTA, which averages a random ``part`` of the parameters every ``every`` inner steps
    (``SpartaRule``).
    """

    def __init__(
        self,
        inner: Inner,
        exchange: Exchange,
        *,
        every: int = 1,
        part: float = 0.005,
        **options: Unpack[Options],
    ) -> None:
        check_sends_weights(options.get("codec", FLOAT32), "SPARTA")
        check_can_divide(options.get("codec", FLOAT32), "SPARTA")
        super().__init__(inner, exchange, rule=SpartaRule(part), schedule=Every(every), **options)
