"""Several processes of a torch.distributed job as one peer of a swarm.

    dist.init_process_group()                                          # under torchrun, one process for each GPU
    model = DistributedDataParallel(model)                             # or fully_shard(model)
    inner = torch.optim.AdamW(model.parameters())
    ranks = Ranks()
    opt = NoLoCo(inner, exchange if ranks.first else Alone(), every=50, model=model, ranks=ranks)

Every rank trains with its part of the batch and calls the same methods of its optimizer in the same order. Rank 0 speaks to the
other peers. Slow weights and outer state are distributed to the ranks by whole parameters, so what the ranks have together is what
one process would have, bit by bit, and peers of any layout average with each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.optim.exchange.base import ComparesStates, Exchange
from shoal.optim.ranks.exchange import ComparingRankExchange, RankExchange
from shoal.optim.ranks.group import RankGroup
from shoal.optim.ranks.weights import RankWeights
from shoal.optim.schedule.round_length import RoundLength, Steps
from shoal.optim.schedule.schedule import Schedule


class Ranks(RankGroup):
    """The ranks of one peer, for ``OuterOptimizer(ranks=)``. All ranks make it, in the same order."""

    def weights(self, params: Sequence[Tensor], model: nn.Module | None, place: torch.device | Path) -> RankWeights:
        """Return this rank's part of the slow weights."""
        return RankWeights(params, model, place, self)

    def exchange(self, real: Exchange) -> RankExchange:
        """Return the exchange of this rank around rank 0's ``real`` one."""
        compares = self.agreed(isinstance(real, ComparesStates))
        return ComparingRankExchange(self, real) if compares else RankExchange(self, real)

    def length(self, real: RoundLength) -> RoundLength:
        """Return a length of rounds that rank 0 decides for all."""
        return real if isinstance(real, Steps) else RankLength(self, real)


class RankLength:
    """``RoundLength`` by which every rank reaches the positions that rank 0 reaches with the ``real`` one."""

    def __init__(self, group: RankGroup, real: RoundLength) -> None:
        self._group, self._real = group, real

    def reached(self, position: int, schedule: Schedule, tokens: int) -> Iterator[int]:
        """Yield rank 0's positions. ValueError, on all ranks, if its length raises it."""
        own = self._real.reached(position, schedule, tokens)
        while (found := self._group.agreed(self._group.tried(lambda: next(own, None)))) is not None:
            yield found

    def state_dict(self) -> dict[str, Any]:
        return self._real.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], tokens: int) -> None:
        self._real.load_state_dict(state_dict, tokens)

    def __copy__(self) -> RankLength:
        return RankLength(self._group, copy(self._real))
