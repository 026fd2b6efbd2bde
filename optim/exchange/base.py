"""The ``Exchange`` protocol: hand in tensors for a round, get their weighted mean with some peers, or None.

The implementations pass one test suite (tests/exchanges): ``Simulation`` (in one process), ``Distributed`` (torch.distributed), and
``PairExchange`` and ``GroupExchange`` in ``shoal.swarm.exchange`` (libp2p); ``Alone`` is here. An exchange never raises because
of a peer, never hangs and never returns a partly averaged tensor: if no peer answered in time, or a member could not commit, the
result is ``None`` and the rule goes on with the own contribution alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from shoal.optim.codecs.base import FLOAT32, Codec


@dataclass(frozen=True, order=True)
class RoundKey:
    """Name of one exchange. Peers average only contributions with equal keys, so nothing depends on arrival order."""

    run: str
    round: int
    fragment: int = 0


@dataclass(frozen=True)
class Mean:
    """Outcome of an exchange."""

    tensors: list[Tensor]
    """Weighted mean, float32 on the CPU, of the shapes handed in."""
    weight: float
    """Sum of the members' weights."""
    members: tuple[str, ...]
    """Sorted peer ids of all who took part, the own one included."""
    counted: int | None = None
    """Number of members with a weight above 0, which the mean is over; None: all."""
    states: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """The members' ``state`` (``ComparesStates``), by peer id, the own one included; empty if there is nothing to compare."""


class Handle(Protocol):
    """Handle of one exchange in flight."""

    def done(self) -> bool:
        """Return True once ``result`` would return without waiting."""
        ...

    def result(self, deadline: float | None = None) -> Mean | None:
        """Wait at most ``deadline`` seconds (None: the exchange's limit). A result of None ends the exchange without a partner."""
        ...


class Exchange(Protocol):
    """Averaging of tensors with other peers."""

    def start(self, key: RoundKey, tensors: Sequence[Tensor], weight: float = 1.0, codec: Codec = FLOAT32) -> Handle:
        """Begin an exchange. The tensors are copied before this returns; the caller may change them at once."""
        ...


@runtime_checkable
class AnnouncesAbsence(Protocol):
    """Exchange whose peers wait for one without a contribution unless it announces its absence."""

    def absent(self, key: RoundKey) -> None:
        """Announce that this peer stays out of the round; return at once."""
        ...


@runtime_checkable
class KnowsOptimizer(Protocol):
    """Exchange that must know the optimizer that uses it, for example to set its first weights."""

    def attach(self, optimizer: Any) -> None:
        """Take note of the ``OuterOptimizer``. Called once, when that is made; an exception prevents its construction."""
        ...


@runtime_checkable
class ComparesStates(Protocol):
    """Exchange over everyone that can equalise what its peers should hold alike, and do not after one has missed a round."""

    @property
    def peer(self) -> str:
        """The own peer id."""
        ...

    def start(
        self, key: RoundKey, tensors: Sequence[Tensor], weight: float = 1.0, codec: Codec = FLOAT32, *, state: Sequence[float] = ()
    ) -> Handle:
        """Begin an exchange whose ``Mean`` has the ``state`` of each member: a few numbers that are equal if what they hold is."""
        ...

    def among(self, key: RoundKey, members: Iterable[str], tensors: Sequence[Tensor], weight: float) -> Handle:
        """Begin a second exchange, as float32, between ``members`` of the round ``key``. All must do so; weight 0: take only."""
        ...


def weighted_mean(contributions: Sequence[tuple[str, float, Iterable[Tensor]]]) -> Mean:
    """Return the weighted mean of (peer id, weight, tensors), computed in the tensors of the peer whose id sorts first.

    The order of additions depends only on the peer ids, so every member gets the same bits. With two equal weights each
    product is exact, and the result is the correctly rounded mean. A peer with weight 0 takes part but is not counted;
    if all weights are 0, all count the same. ValueError unless every weight is finite and not negative.
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
    """Exchange without partners: local training, and the baseline of every comparison."""

    def start(self, key: RoundKey, tensors: Sequence[Tensor], weight: float = 1.0, codec: Codec = FLOAT32) -> Handle:
        """Return the handle of an exchange that is over already."""
        return NoPartner()


class NoPartner:
    """Handle of an exchange that is over without a partner."""

    def done(self) -> bool:
        """Return True."""
        return True

    def result(self, deadline: float | None = None) -> Mean | None:
        """Return None."""
        return None
