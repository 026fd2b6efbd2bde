"""Several processes of a torch.distributed job as one peer of a swarm.

    dist.init_process_group()                  # under torchrun, one process for each GPU
    model = DistributedDataParallel(model)     # or fully_shard(model)
    inner = torch.optim.AdamW(model.parameters())
    ranks = Ranks()
    opt = NoLoCo(inner, exchange if ranks.first else Alone(), every=50, model=model, ranks=ranks)

Every rank trains with its part of the batch and calls the same methods of its optimizer in the same
order. Rank 0 speaks to the other peers. Slow weights and outer state are distributed to the ranks
by whole parameters, so what the ranks have together is what one process would have, bit by bit, and
peers of any layout average with each other. What a contribution takes of rank 0's memory:
docs/internals.md, "Several processes".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.optim.codecs.base import Shape
from shoal.optim.codecs.buffer_tail import BufferTailCodec
from shoal.optim.exchange.base import Contribution, Exchange, Handle, Mean, RoundKey
from shoal.optim.outer.rule import SendsValues
from shoal.optim.outer.state import OuterState
from shoal.optim.ranks.group import RankGroup, in_thread
from shoal.optim.ranks.rank_weights import RankWeights
from shoal.optim.schedule.round_length import RoundLength, Steps
from shoal.optim.schedule.schedules import Schedule


class RankExchange(Exchange):
    """Exchange of one rank, for the outer optimizer of that rank; all ranks start and await the
    same rounds in the same order.

    Args:
        group: the ranks.
        real: the exchange with other peers; only rank 0's is used, but each rank's gets its
            optimizer if it is to know it.
    """

    def __init__(self, group: RankGroup, real: Exchange) -> None:
        self._group = group
        self._real = real
        self.peer, self.compares = group.agreed((real.peer, real.compares))
        self._opt: OuterState | None = None

    def attach(self, optimizer: OuterState) -> None:
        """Take note of this rank's optimizer, whose parameters are distributed to the ranks."""
        self._opt = optimizer
        self._real.attach(optimizer)

    def due(self, round: int, fragment: int) -> int:
        return self._real.due(round, fragment)

    def start(self, contribution: Contribution) -> Handle:
        """Begin an exchange.

        ValueError, on all ranks, if the real exchange raises it, or RuntimeError if it raises
        another.
        """
        assert self._opt is not None
        tail = contribution.codec.count if isinstance(contribution.codec, BufferTailCodec) else 0
        tensors = list(contribution.tensors)
        parcel = _Parcel(self._group, self._opt, contribution.key, tensors, tail)
        whole = replace(contribution, tensors=parcel.gather(tensors))
        return RankHandle(self._group, parcel, self._group.tried(lambda: self._real.start(whole)))

    def absent(self, key: RoundKey) -> None:
        if self._group.first:
            self._real.absent(key)


class RankHandle(Handle):
    """Handle of an exchange of all ranks.

    ``result`` is for all of them; ``done`` asks nobody, so that it differs between them.
    """

    def __init__(self, group: RankGroup, parcel: _Parcel, real: Handle | None) -> None:
        self._group = group
        self._parcel = parcel
        self._real = real
        self._over = False
        self._mean: Mean | None = None

    def done(self) -> bool:
        """Return True if this rank need not wait for the real exchange."""
        return self._over or (self._real is not None and self._real.done())

    def leave_out(self) -> bool:
        """Leave the fragment out of its next round if bytes of the real exchange move; False but on
        rank 0.
        """
        return self._real is not None and self._real.leave_out()

    def result(self, deadline: float | None = None) -> Mean | None:
        """Wait for rank 0's outcome and return this rank's part of it.

        RuntimeError, on all ranks, if the real exchange raises.
        """
        if self._over:
            return self._mean
        real = self._real
        outcome = None
        if real is not None:
            # In a thread of its own: ``Handle.result`` with a short deadline would end the
            # exchange.
            outcome = in_thread(lambda: real.result(deadline))
        # Rank 0 lets the others know that it still lives.
        while True:
            waits = outcome is not None and not wait([outcome], self._group.timeout / 3).done
            if not self._group.agreed(waits):
                break
        self._over = True
        self._real = None
        mean = self._group.tried(lambda: None if outcome is None else outcome.result())
        names = ("weight", "members", "counted", "limit", "states")
        facts = None
        if mean is not None:
            facts = {name: getattr(mean, name) for name in names}
        facts = self._group.agreed(facts)
        if facts is not None:
            tensors = self._parcel.scatter([] if mean is None else mean.tensors)
            self._group.barrier()  # none takes the outcome unless all have it
            self._mean = Mean(tensors, **facts)
        return self._mean

    def close(self) -> None:
        """Give the real exchange up, on rank 0."""
        if self._real is not None:
            self._real.close()


class _Parcel:
    """How the tensors of one contribution, and of its mean, are shared out to ranks; each has the
    ``tail`` ones, the buffers.
    """

    def __init__(
        self, group: RankGroup, opt: OuterState, key: RoundKey, tensors: Sequence[Tensor], tail: int
    ) -> None:
        assert isinstance(opt._weights, RankWeights)
        self._group = group
        self._weights = opt._weights
        # The mean of the slow weights of all fragments, and of the buffers.
        last = key.fragment >= opt.fragments
        self._part: Sequence[int]
        if last:
            self._part = self._weights.everything
            tail = len(tensors) - len(self._part)
        else:
            self._part = opt.positions(key.fragment)
        self._count = len(tensors) - tail
        self._tail_shapes = [tuple(tensor.shape) for tensor in tensors[self._count :]]
        self._values: list[int] | None = None
        if isinstance(opt.rule, SendsValues) and not last:
            self._values = opt.rule.counts(self._weights.sizes(self._part), key)
        own = self._cut(tensors[: self._count])
        self._mine = [tuple(tensor.shape) for tensor in own]
        self._shapes: list[Shape] = self._weights.shapes_of(self._part, own)
        if self._values is not None:
            self._shapes = [(count,) for count in self._values]

    def _cut(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's flat tensor of values as one tensor for each parameter; others as they
        are.
        """
        if self._values is None:
            return list(tensors)
        sizes = []
        for count, index in zip(self._values, self._part, strict=True):
            sizes.append(count if self._weights.owns(index) else 0)
        return list(torch.split(tensors[0], sizes))

    def gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the whole contribution on rank 0, and an empty list on the others.

        Of each rank's tensors the mean counts.
        """
        whole = self._weights.gather(self._part, self._cut(tensors[: self._count]), self._shapes)
        if self._values is not None and self._group.first:
            whole = [torch.cat(whole)]
        tail = tensors[self._count :]
        own = [self._group.sum(tensor.detach() / self._group.size) for tensor in tail]
        return [*whole, *own] if self._group.first else []

    def scatter(self, mean: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's part of a mean that rank 0 has."""
        whole: Sequence[Tensor] = mean[: self._count]
        if self._values is not None and self._group.first:
            whole = torch.split(whole[0], self._values)
        found = self._weights.scatter(self._part, whole, self._shapes, self._mine, torch.float32)
        if self._values is not None:
            found = [torch.cat(found)]
        own = mean[self._count :]
        if not self._group.first:
            own = [torch.empty(shape, device="cpu") for shape in self._tail_shapes]
        return [*found, *(self._group.spread(tensor, 0) for tensor in own)]


class Ranks(RankGroup):
    """The ranks of one peer, for ``OuterOptimizer(ranks=)``. All ranks make it, in the same
    order.
    """

    def weights(
        self, params: Sequence[Tensor], model: nn.Module | None, place: torch.device | Path
    ) -> RankWeights:
        return RankWeights(params, model, place, self)

    def exchange(self, real: Exchange) -> RankExchange:
        return RankExchange(self, real)

    def length(self, real: RoundLength) -> RoundLength:
        return real if isinstance(real, Steps) else RankLength(self, real)


class RankLength:
    """``RoundLength`` by which every rank reaches the positions that rank 0 reaches with the
    ``real`` one.
    """

    def __init__(self, group: RankGroup, real: RoundLength) -> None:
        self._group = group
        self._real = real

    def reached(self, position: int, schedule: Schedule, tokens: int) -> Iterator[int]:
        """Yield rank 0's positions. ValueError, on all ranks, if its length raises it."""
        own = self._real.reached(position, schedule, tokens)
        while True:
            found = self._group.agreed(self._group.tried(lambda: next(own, None)))
            if found is None:
                return
            yield found

    def state_dict(self) -> dict[str, Any]:
        return self._real.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], tokens: int) -> None:
        self._real.load_state_dict(state_dict, tokens)

    def __copy__(self) -> RankLength:
        return RankLength(self._group, copy(self._real))
