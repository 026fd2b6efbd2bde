"""How a model's slow weights are shared out to the ranks of a peer.

Each rank has the slow weights and the outer state of the parameters that ``deal`` gives it. Of the
others it keeps empty tensors of shape (0,), on which every rule is a no-op, so any rule works on
whole tensors, whatever the training does with the model (DDP, FSDP2, or both).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.optim.codecs.base import Shape
from shoal.optim.outer.sharded import local, reshard
from shoal.optim.outer.sketch import sketches, total
from shoal.optim.outer.weights import ModelWeights
from shoal.optim.ranks.group import RankGroup, T


def deal(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that owns each parameter, given their numbers of values: the largest first,
    each to the least loaded rank.

    It depends on the arguments alone, so all ranks agree. A rank has at most the mean load plus the
    largest parameter.
    """
    loads = [0] * ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owner = min(range(ranks), key=lambda rank: (loads[rank], rank))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


class RankWeights(ModelWeights):
    """One rank's part of a model's slow weights.

    All ranks make it, and call each method in the same order.

    A sharded parameter is gathered, one at a time, and kept by its owner alone. If all ranks have
    it (DDP), the owner's counts.
    """

    dealt = True

    def __init__(
        self,
        params: Sequence[Tensor],
        model: nn.Module | None,
        place: torch.device | Path,
        group: RankGroup,
    ) -> None:
        self.group = group
        self.first = group.first
        self.rank = [group.rank, group.size]
        self.shapes = [tuple(param.shape) for param in params]
        self.owners = deal([param.numel() for param in params], group.size)
        super().__init__(params, model, place)

    def owns(self, index: int) -> bool:
        return self.owners[index] == self.group.rank

    def held(self, index: int) -> Tensor:
        """Return the whole parameter if this rank owns it, else an empty tensor."""
        param = self.params[index]
        if hasattr(param, "full_tensor"):
            with torch.no_grad():
                param = param.full_tensor()  # all ranks take part
        return param if self.owns(index) else param.new_empty(0)

    def _staged(self, index: int) -> Tensor:
        whole = self.owns(index) and not hasattr(self.params[index], "full_tensor")
        return super()._staged(index) if whole else self._buffer(index)

    @torch.no_grad()
    def write(self, part: Sequence[int], weights: Sequence[Tensor]) -> None:
        """Copy the owners' ``weights`` into the model, in all ranks, one parameter at a time."""
        for index in part:
            param = self.params[index]
            if self.owns(index):
                mine = weights[index].to(param.dtype)
            else:
                mine = torch.empty(self.shapes[index], dtype=param.dtype, device="cpu")
            given = self.group.spread(mine, self.owners[index])
            if local(param).data_ptr() != weights[index].data_ptr():
                if hasattr(param, "device_mesh"):
                    given = local(cut_like(given, param))
                local(param).copy_(given)
        self._synchronize(part)
        reshard(self.model)

    def sizes(self, part: Sequence[int]) -> Sequence[int]:
        return [self.params[index].numel() for index in part]

    def agreed(self, value: T) -> T:
        return self.group.agreed(value)

    def of_owners(self, part: Sequence[int], scalars: Sequence[Tensor]) -> list[Tensor]:
        """Return one scalar for each parameter of ``part`` (or several rows of them) as its owner
        has it, on all ranks.
        """
        own = []
        for place, scalar in enumerate(scalars):
            owned = self.owns(part[place % len(part)])
            own.append(scalar if owned else scalar.new_zeros(()))
        if not own:
            return []
        # Adding zeros changes no value.
        return list(self.group.sum(torch.stack(own)).to(own[0].device))

    def whole(self, part: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return whole tensors like those of a ``Rule`` on rank 0, its own ones not copied; an
        empty list on the others.
        """
        tensors = list(tensors)  # those computed on demand, once
        return self.gather(part, tensors, self.shapes_of(part, tensors))

    def projection(self, part: Sequence[int]) -> tuple[float, ...]:
        """Return nothing: it is for who watches, and not worth a collective of all ranks in every
        round.
        """
        return ()

    def sketch(self, part: Sequence[int]) -> tuple[float, ...]:
        """Return the sketch with the bits that one process would have, on all ranks."""
        # Of what this rank does not own they are 0.
        rows = sketches(self.slow[index] for index in part)
        return total(self.group.sum(torch.stack(rows)))

    def shapes_of(self, part: Sequence[int], tensors: Sequence[Tensor]) -> list[Shape]:
        """Return the whole shapes of tensors like those of a ``Rule``: tensor i has that of
        parameter i % n of ``part``, or ().
        """
        shapes: list[Shape] = []
        for place, tensor in enumerate(tensors):
            whole = self.shapes[part[place % len(part)]]
            shapes.append(() if tensor.dim() == 0 else whole)
        return shapes

    def gather(
        self, part: Sequence[int], tensors: Sequence[Tensor], shapes: Sequence[Shape]
    ) -> list[Tensor]:
        """Return on rank 0 the owners' tensors of these whole shapes, taken one at a time; an empty
        list on the others.
        """
        numbers: list[Tensor] = []
        indices: list[int] = []
        for place, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
            if shape == ():
                numbers.append(tensor if tensor.dim() == 0 else tensor.new_zeros(()))
                indices.append(part[place % len(part)])
        scalars = iter(self.of_owners(indices, numbers))
        found: list[Tensor] = []
        for place, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
            owner = self.owners[part[place % len(part)]]
            if shape == ():
                tensor = next(scalars)
            elif self.first and owner != 0:
                room = torch.empty(shape, dtype=tensor.dtype, device="cpu")
                tensor = self.group.take(room, owner)
            elif owner == self.group.rank != 0:
                self.group.give(tensor, 0)
            if self.first:
                found.append(tensor)
        return found

    def scatter(
        self,
        part: Sequence[int],
        whole: Sequence[Tensor],
        shapes: Sequence[Shape],
        mine: Sequence[Shape],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Return each owner's tensors of those that rank 0 has, on the CPU, and empty ones for the
        rest.

        ``shapes`` are those of ``whole``, ``mine`` those that this rank gave in their place: a
        scalar goes to all that gave one.
        """
        numbers = [place for place, shape in enumerate(shapes) if shape == ()]
        packed = torch.empty(len(numbers), dtype=dtype, device="cpu")
        if self.first and numbers:
            torch.stack([whole[place].to(packed) for place in numbers], out=packed)
        scalars = iter(self.group.spread(packed, 0).unbind() if numbers else ())
        found: list[Tensor] = []
        for place, shape in enumerate(shapes):
            owner = self.owners[part[place % len(part)]]
            tensor = torch.empty(0, dtype=dtype, device="cpu")
            if shape == ():
                number = next(scalars)
                if mine[place] == ():
                    tensor = number
            elif self.first and owner != 0:
                self.group.give(whole[place].to(dtype), owner)
            elif self.first:
                tensor = whole[place]
            elif owner == self.group.rank:
                room = torch.empty(shape, dtype=dtype, device="cpu")
                tensor = self.group.take(room, 0)
            found.append(tensor)
        return found


def cut_like(whole: Tensor, param: Any) -> Tensor:
    """Return ``whole`` as this rank has ``param``: a copy, or cut in the same way, without a
    message.
    """
    if not hasattr(param, "device_mesh"):
        return whole.clone()
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
