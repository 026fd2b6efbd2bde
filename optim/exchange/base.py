"""What an outer optimizer asks of a network: hand in tensors for a round, get the weighted mean with some peers, or nothing.

The implementations pass one test-suite (tests/exchanges): ``Simulation`` (in one process), ``Distributed`` (torch.distributed) and
``swarm.exchange.SwarmExchange`` (libp2p); ``Alone`` is here. An exchange never raises because of a peer, never hangs and never
returns a partly averaged tensor: if nobody answered in time, or the pair could not both commit, the result is ``None`` and the
rule goes on with the own contribution alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from shoal.optim.codecs.base import FLOAT32, Codec


@dataclass(frozen=True, order=True)
class RoundKey:
    """Names one exchange. Two peers average only contributions with equal keys, so nothing depends on arrival order."""

    run: str
    round: int
    fragment: int = 0


@dataclass(frozen=True)
class Mean:
    """The outcome of an exchange."""

    tensors: list[Tensor]
    """Weighted mean, float32 on the CPU, same shapes as handed in."""
    weight: float
    """Sum of the members' weights."""
    members: tuple[str, ...]
    """Sorted peer ids who took part, the own one included."""
    counted: int | None = None
    """How many of them have a weight that is not 0, and so are in the mean; None: all."""


class Handle(Protocol):
    """One exchange in flight."""

    def done(self) -> bool:
        """True once ``result`` would return without waiting."""
        ...

    def result(self, deadline: float | None = None) -> Mean | None:
        """Wait at most ``deadline`` seconds (None: the exchange's own limit). ``None``: go on alone; the exchange is then over."""
        ...


class Exchange(Protocol):
    """A way to average tensors with other peers."""

    def start(self, key: RoundKey, tensors: Sequence[Tensor], weight: float = 1.0, codec: Codec = FLOAT32) -> Handle:
        """Begin an exchange. The tensors are copied before this returns; the caller may change them at once."""
        ...


@runtime_checkable
class AnnouncesAbsence(Protocol):
    """An exchange in which the others would wait for a peer that has nothing to contribute, unless it says so."""

    def absent(self, key: RoundKey) -> None:
        """Stay out of this round; returns at once."""
        ...


@runtime_checkable
class KnowsOptimizer(Protocol):
    """An exchange that must know the optimizer that uses it, to give it the weights to begin with, for instance."""

    def attach(self, optimizer: Any) -> None:
        """Called once with the ``OuterOptimizer``, when that is made; may raise, and then there is no optimizer."""
        ...


def weighted_mean(contributions: Sequence[tuple[str, float, Iterable[Tensor]]]) -> Mean:
    """Weighted mean of (peer id, weight, tensors), computed in place of the first peer's tensors (in order of peer id).

    The order of additions depends only on the peer ids, so every member gets the same bits. With two equal weights each
    product is exact, and the result is the correctly rounded mean. Who has weight 0 takes part, and is not in the mean; where
    nobody has any weight all count the same. ValueError unless every weight is finite and not negative.
    """
    if not contributions or any(not 0 <= weight < float("inf") for _, weight, _ in contributions):
        raise ValueError(f"weights must be finite and not negative, got {[weight for _, weight, _ in contributions]}")
    members = tuple(sorted(peer for peer, _, _ in contributions))
    ordered = sorted((item for item in contributions if item[1] > 0), key=lambda item: item[0])
    if not ordered:
        ordered = [(peer, 1.0, tensors) for peer, _, tensors in sorted(contributions, key=lambda item: item[0])]
    total = sum(weight for _, weight, _ in ordered)
    _, first_weight, first = ordered[0]
    result = list(first)
    for tensor in result:
        tensor.mul_(first_weight / total)
    for _, weight, tensors in ordered[1:]:
        for accumulated, tensor in zip(result, tensors, strict=True):
            accumulated.add_(tensor, alpha=weight / total)
    return Mean(result, total, members, len(ordered))


class Alone:
    """An exchange in which nobody ever answers: local training, and the baseline of every comparison."""

    def start(self, key: RoundKey, tensors: Sequence[Tensor], weight: float = 1.0, codec: Codec = FLOAT32) -> Handle:
        """Begin and end at once."""
        return NoPartner()


class NoPartner:
    """The handle of an exchange that is over without a partner."""

    def done(self) -> bool:
        """Always."""
        return True

    def result(self, deadline: float | None = None) -> Mean | None:
        """NoPartner answered."""
        return None
