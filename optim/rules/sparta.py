"""SPARTA (openreview stFPf3gzq1): averaging of a small random part of the parameters every few steps."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.optim.device import to_device
from shoal.optim.exchange.base import RoundKey
from shoal.optim.rules.base import RoundContext, State, assign

MASK_32 = 0xFFFFFFFF


def chosen(key: RoundKey, count: int, part: float) -> Tensor:
    """Return round(part * count) different positions below ``count``, ascending, int64 on the CPU.

    They follow from the key alone, in integer arithmetic, so that every peer computes the same on any machine and with any version
    of torch, and no mask is sent. The positions are cut into as many runs as are wanted, of lengths that differ by at most one, and
    one is drawn in each: so their number is fixed, and each position is drawn with probability ``part`` (up to that one).
    """
    wanted = min(round(part * count), count)
    if wanted == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    seed = hashlib.sha256(f"shoal/sparta/1:{key.run}:{key.round}:{key.fragment}".encode()).digest()
    edges = torch.arange(wanted + 1, dtype=torch.int64, device="cpu")
    edges = edges * (count // wanted) + edges * (count % wanted) // wanted  # = edges * count // wanted, without overflow
    low, length = edges[:-1], edges[1:] - edges[:-1]
    draws = torch.arange(wanted, dtype=torch.int64, device="cpu")
    for start in range(0, 16, 4):
        draws = _mixed(draws ^ int.from_bytes(seed[start : start + 4], "little"))
    return low + draws % length


def _mixed(values: Tensor) -> Tensor:
    """Scramble 32-bit numbers (held in int64) by a bijection: two rounds of xorshift and multiply."""
    for factor in (0x7FEB352D, 0x68E31DA5):  # below 2^31, so that no product leaves int64
        values = values & MASK_32
        values = ((values ^ (values >> 16)) * factor) & MASK_32
    return values ^ (values >> 15)


@dataclass(frozen=True)
class SpartaRule:
    """SPARTA's rule: the chosen values of ``fast`` become their mean over the group; all others stay the peer's own.

    The mask follows from (run, round, fragment): the public code sends it, which costs more than the values. It has a fixed number
    of values over the whole fragment, so that small tensors are reached too. There is no outer optimizer: slow equals fast.
    With a late mean the values move by (mean - contribution), so that the progress since then stays.
    """

    part: float = 0.005
    """Part of all values, in [0, 1]."""

    def __post_init__(self) -> None:
        if not 0 <= self.part <= 1:
            raise ValueError(f"part must lie in [0, 1], got {self.part}: it is the part of all values that is averaged")

    def initial(self, slow: Sequence[Tensor]) -> State:
        return {}

    def contribution(self, slow: Sequence[Tensor], fast: Sequence[Tensor], state: State, context: RoundContext) -> list[Tensor]:
        """Return one flat tensor of the chosen values."""
        return [torch.cat([f.reshape(-1)[at] for f, at in zip(fast, self._places(fast, context), strict=True)])]

    def apply(
        self, slow: Sequence[Tensor], fast: Sequence[Tensor], mean: Sequence[Tensor], state: State, context: RoundContext
    ) -> None:
        """Replace (or, if the mean is late, shift) the chosen values."""
        places = self._places(fast, context)
        sizes = [at.numel() for at in places]
        sent = torch.split(context.sent[0], sizes)
        for f, at, theirs, own in zip(fast, places, torch.split(mean[0], sizes), sent, strict=True):
            flat = f.view(-1)
            flat[at] = theirs if context.lag == 0 else flat[at] + (theirs - own)
        assign(slow, fast)

    def counts(self, sizes: Sequence[int], key: RoundKey) -> list[int]:
        """Return how many values of each parameter are chosen."""
        return [high - low for low, high in itertools.pairwise(self._chosen(sizes, key)[1])]

    def _chosen(self, sizes: Sequence[int], key: RoundKey) -> tuple[Tensor, list[int]]:
        """Return the chosen positions in the concatenation of all tensors, and where those of each tensor begin among them."""
        ends = torch.tensor(sizes, device="cpu").cumsum(0)
        flat = chosen(key, int(ends[-1]), self.part)
        return flat, [0, *torch.searchsorted(flat, ends).tolist()]

    def _places(self, tensors: Sequence[Tensor], context: RoundContext) -> list[Tensor]:
        """Return the chosen positions in each tensor; none in one that another rank owns."""
        sizes = context.sizes or [tensor.numel() for tensor in tensors]
        flat, cuts = self._chosen(sizes, context.key)
        begins = [0, *itertools.accumulate(sizes)]
        parts = zip(cuts, cuts[1:], begins, tensors, strict=False)
        found = [flat[first:last] - begin if tensor.numel() else flat[:0] for first, last, begin, tensor in parts]
        return to_device(found, tensors[0].device)
