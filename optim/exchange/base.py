"""``Exchange``: hand in tensors for a round, get their weighted mean with some peers, or None.

    handle = exchange.start(Contribution(RoundKey("run", 7), tensors))
    mean = handle.result()                       # None: no partner in this round

An exchange never raises because of a peer, never hangs and never returns a partly averaged tensor:
if no peer answered in time, or a member could not commit, the result is ``None`` and the rule goes
on with the own contribution alone. ``Simulation``, ``Distributed``, ``PairExchange`` and
``GroupExchange`` pass one test suite (tests/exchanges); ``Alone`` is here.

Pairing needs no coordinator: every peer orders the peers that it sees by hash(seed, round, peer
id), so those that see the same membership compute the same groups. Those that see another disagree
about some pairs only; ``candidates`` is the order in which such a peer tries the others.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, overload

import torch
from torch import Tensor

from shoal.optim.codecs.base import FLOAT32, Codec
from shoal.optim.parameters import AveragedParameters

SLAB = 1 << 18
"""Values that are computed at a time: 1 MB of float32, which stays in the cache."""

Item = Tensor | tuple[Tensor, Tensor]
"""A tensor, or two that stand for their difference, the first less the second."""


class OnDemand(Sequence[Tensor]):
    """Sequence of tensors that nobody may change: some are those handed in, others the difference
    of two, computed when taken.

    So a contribution need not be held in memory. The tensors handed in must stay as they are while
    this is in use.

    Args:
        items: what it is made of.
        through: dtype to which they are rounded, as if they had travelled in it, and then float32;
            None: they are as they are.
    """

    def __init__(self, items: Sequence[Item], through: torch.dtype | None = None) -> None:
        self._items = list(items)
        self._through = through

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        wholes = [item if isinstance(item, Tensor) else item[0] for item in self._items]
        return [tuple(whole.shape) for whole in wholes]

    @property
    def on_cpu(self) -> bool:
        """True if all are in main memory."""
        for item in self._items:
            tensors = [item] if isinstance(item, Tensor) else item
            if any(tensor.device.type != "cpu" for tensor in tensors):
                return False
        return True

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, place: int) -> Tensor: ...
    @overload
    def __getitem__(self, place: slice) -> OnDemand: ...
    def __getitem__(self, place: int | slice) -> Tensor | OnDemand:
        if isinstance(place, slice):
            return OnDemand(self._items[place], self._through)
        item = self._items[place]
        whole = item if isinstance(item, Tensor) else item[0] - item[1]
        return whole if self._through is None else whole.to(self._through).float()

    def rounded(self, through: torch.dtype) -> OnDemand:
        """Return the same as float32 values that have travelled in ``through``."""
        return OnDemand(
            [item.float() if isinstance(item, Tensor) else item for item in self._items], through
        )

    def joined(self, tensors: Sequence[Tensor]) -> OnDemand:
        """Return the same with ``tensors`` at its end."""
        return OnDemand([*self._items, *tensors], self._through)

    @torch.no_grad()
    def values(self, place: int, start: int, stop: int) -> Tensor:
        """Return the values from ``start`` to ``stop`` of one tensor, flat, float32, on the CPU;
        maybe a view of it.
        """
        item = self._items[place]
        if isinstance(item, Tensor):
            part = item.detach().reshape(-1)[start:stop].to("cpu", torch.float32)
        else:
            first, second = (whole.detach().reshape(-1)[start:stop] for whole in item)
            part = torch.sub(first, second).to("cpu", torch.float32)
        return part if self._through is None else part.to(self._through).float()


def differences(first: Sequence[Tensor], second: Sequence[Tensor]) -> OnDemand:
    return OnDemand(list(zip(first, second, strict=True)))


def slabs(tensors: OnDemand) -> Iterator[tuple[int, int, int]]:
    """Return (place, start, stop) of pieces of at most ``SLAB`` values that together are all
    tensors, in order.
    """
    for place, shape in enumerate(tensors.shapes):
        size = torch.Size(shape).numel()
        for start in range(0, size, SLAB):
            yield place, start, min(start + SLAB, size)


def held_at_once(tensors: Iterable[Tensor]) -> Sequence[Tensor]:
    """Return all of ``tensors``; those that are computed on demand still are."""
    return tensors if isinstance(tensors, OnDemand) else list(tensors)


MOST = 4.0
"""Largest weight in a mean, in median weights of its members: a stated weight is a claim that
nobody checks.
"""


@dataclass(frozen=True, order=True)
class RoundKey:
    """Name of one exchange.

    Peers average only contributions with equal keys, so nothing depends on arrival order.
    """

    run: str
    round: int
    fragment: int = 0


@dataclass(frozen=True)
class Mean:
    """Outcome of an exchange."""

    tensors: list[Tensor]
    """Weighted mean, float32 on the CPU, of the shapes handed in."""
    weight: float
    """Sum of the members' weights, as they counted."""
    members: tuple[str, ...]
    """Sorted peer ids of all who took part, the own one included."""
    counted: int | None = None
    """Number of members with a weight above 0, which the mean is over; None: all."""
    states: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """The members' ``state``, by peer id, the own one included; empty if there is nothing to
    compare.
    """
    limit: float = math.inf
    """What a larger stated weight counted as."""


@dataclass(frozen=True)
class Contribution:
    """What a peer hands in for a round."""

    key: RoundKey
    tensors: Sequence[Tensor]
    """Those of an ``OnDemand`` must stay as they are until the outcome is there: should they
    change, the contribution counts nowhere, for what is sent no longer has the digest that was
    announced. Others are copied before ``start`` returns.
    """
    weight: float = 1.0
    """0: take the mean of the others."""
    codec: Codec = FLOAT32
    even: int = 0
    """How many of the first tensors get a plain mean over the members that count, whatever their
    weights.
    """
    state: Sequence[float] = ()
    """A few numbers that are equal if what the peers should hold alike is, where the exchange
    ``compares``.
    """
    members: Sequence[str] = ()
    """Of the round ``key``: they, and all of them, begin a second exchange in it, as float32;
    empty: the exchange's first one.
    """


class Handle:
    """Handle of one exchange in flight; a subclass has at least ``done`` and ``result``."""

    def done(self) -> bool:
        """Return True once ``result`` would return without waiting."""
        raise NotImplementedError

    def result(self, deadline: float | None = None) -> Mean | None:
        """Wait at most ``deadline`` seconds (None: the exchange's limit).

        A result of None ends the exchange without a partner.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Give the exchange up, without waiting: if it is not committed yet, it is over without a
        partner on both sides.
        """

    def leave_out(self) -> bool:
        """Leave the fragment out of its next round if a partner was found and bytes are on their
        way; return whether it is.
        """
        return False


class Exchange:
    """Averaging of tensors with other peers; a subclass has at least ``start``."""

    peer: str = ""
    """The id of this peer."""
    shards: int = 1
    """Processes of this peer, each with an optimizer and an exchange of its own.

    They poll at different times, so none may act on
    what it alone sees.
    """
    compares: bool = False
    """True if a ``Mean`` has the members' ``states``, and a second exchange between ``members`` may
    follow: what all should hold alike, and do not after one has missed a round, can be made equal.
    """
    codec: Codec | None = None
    """That of an optimizer that names none."""
    fragments: Sequence[Sequence[Tensor]] = ()
    """The parameters of each fragment, as which an optimizer with that number of them takes its
    own.
    """

    def start(self, contribution: Contribution) -> Handle:
        """Begin an exchange; return at once."""
        raise NotImplementedError

    def absent(self, key: RoundKey) -> None:
        """Announce that this peer stays out of the round, where others would wait for it; return at
        once.
        """

    def attach(self, optimizer: Any) -> None:
        """Take note of the ``OuterOptimizer``.

        Called once, when that is made; an exception prevents its construction.
        """

    def ordered(self, parameters: AveragedParameters) -> AveragedParameters:
        """Return the averaged parameters in the order on which peers agree.

        An exception prevents the optimizer's construction.
        """
        return parameters


def counted_weights(stated: Sequence[float]) -> tuple[list[float], float]:
    """Return the weights that count in a mean of members that stated these, and the largest that
    any of them can have.

    That is ``MOST`` times the median of those above 0, the lower of two, so in a pair ``MOST``
    times the smaller one. A minority can therefore state what it likes, and no pair is one peer's
    alone. It depends on what all members know, so they agree on it. If all are 0, all count as 1.
    ValueError unless every weight is finite and not negative.
    """
    if not stated or any(not 0 <= weight < math.inf for weight in stated):
        raise ValueError(f"weights must be finite and not negative, got {list(stated)}")
    positive = [weight for weight in stated if weight > 0]
    if not positive:
        return [1.0] * len(stated), MOST
    limit = MOST * median_low(positive)
    return [min(weight, limit) for weight in stated], limit


def weighted_mean(
    contributions: Sequence[tuple[str, float, Iterable[Tensor]]], even: int = 0
) -> Mean:
    """Return the mean of (peer id, stated weight, tensors) by ``counted_weights``, and a plain one
    of the first ``even`` tensors.

    It is computed in the tensors of the peer whose id sorts first. The order of additions depends
    only on the peer ids, so every member gets the same bits. With two equal weights each product is
    exact, and the result is the correctly rounded mean. A peer with weight 0 takes part but is not
    counted. ValueError as of ``counted_weights``.
    """
    ordered = sorted(contributions, key=lambda item: item[0])
    weights, limit = counted_weights([weight for _, weight, _ in ordered])
    counted = []
    spare: Iterable[Tensor] | None = None
    for (peer, _, tensors), weight in zip(ordered, weights, strict=True):
        if weight > 0:
            counted.append((peer, weight, tensors))
        elif spare is None:
            spare = tensors
    return Mean(
        tensors=combined(counted, even, spare),
        weight=sum(weights),
        members=tuple(peer for peer, _, _ in ordered),
        counted=len(counted),
        limit=limit,
    )


def combined(
    contributions: Sequence[tuple[str, float, Iterable[Tensor]]],
    even: int = 0,
    spare: Iterable[Tensor] | None = None,
) -> list[Tensor]:
    """Return the sum of the tensors, each times its positive weight's share of all, or the same
    share in the first ``even``.

    It is computed in the tensors of one of them, or in ``spare``, other than ``OnDemand`` ones,
    which are only read.
    """
    ordered = sorted(contributions, key=lambda item: item[0])
    total = sum(weight for _, weight, _ in ordered)
    shares = [(1 / len(ordered), weight / total) for _, weight, _ in ordered]
    first = ordered[0][2]
    if isinstance(first, OnDemand):
        return _into_another(first, [tensors for _, _, tensors in ordered[1:]], shares, even, spare)
    result: list[Tensor] = []
    for (_, _, tensors), share in zip(ordered, shares, strict=True):
        if not result:
            result = [tensor.mul_(share[place >= even]) for place, tensor in enumerate(tensors)]
        elif isinstance(tensors, OnDemand):
            flat = [tensor.view(-1) for tensor in result]
            for place, start, stop in slabs(tensors):
                flat[place][start:stop].add_(
                    tensors.values(place, start, stop), alpha=share[place >= even]
                )
        else:
            for place, (accumulated, tensor) in enumerate(zip(result, tensors, strict=True)):
                accumulated.add_(tensor, alpha=share[place >= even])
    return result


def _into_another(
    first: OnDemand,
    others: Sequence[Iterable[Tensor]],
    shares: Sequence[Sequence[float]],
    even: int,
    spare: Iterable[Tensor] | None,
) -> list[Tensor]:
    """Return the sum that begins with ``first``, in the same order of additions, piece by piece in
    the tensors of another.
    """
    rest = [tensors if isinstance(tensors, OnDemand) else list(tensors) for tensors in others]
    result: list[Tensor] = []
    for tensors in (*rest, spare):
        if tensors is not None and not isinstance(tensors, OnDemand):
            result = list(tensors)
            break
    else:
        result = [torch.empty(shape, device="cpu") for shape in first.shapes]
    flat: list[OnDemand | list[Tensor]] = []
    for tensors in rest:
        if isinstance(tensors, OnDemand):
            flat.append(tensors)
        else:
            flat.append([tensor.view(-1) for tensor in tensors])
    for place, start, stop in slabs(first):
        piece = first.values(place, start, stop) * shares[0][place >= even]
        for tensors, share in zip(flat, shares[1:], strict=True):
            if isinstance(tensors, OnDemand):
                part = tensors.values(place, start, stop)
            else:
                part = tensors[place][start:stop]
            piece.add_(part, alpha=share[place >= even])
        result[place].view(-1)[start:stop] = piece
    return result


class Alone(Exchange):
    """Exchange without partners: local training, and the baseline of every comparison."""

    def start(self, contribution: Contribution) -> Handle:
        return NoPartner()


class NoPartner(Handle):
    """Handle of an exchange that is over without a partner."""

    def done(self) -> bool:
        return True

    def result(self, deadline: float | None = None) -> Mean | None:
        return None


@functools.lru_cache(maxsize=8192)  # a round needs the rank of each peer several times
def rank(seed: int, round: int, peer: str) -> bytes:
    """Return the 32 bytes by which a peer is ordered in a round; uniform, and new each round."""
    return hashlib.sha256(f"shoal/pairing/1:{seed}:{round}:{peer}".encode()).digest()


def order(seed: int, round: int, peers: Iterable[str]) -> list[str]:
    return sorted(set(peers), key=functools.partial(rank, seed, round))


def groups(seed: int, round: int, peers: Iterable[str], size: int = 2) -> list[tuple[str, ...]]:
    """Return consecutive groups of ``size``; the last may be smaller (with pairs: one peer has no
    partner if the number is odd).
    """
    if size < 1:
        raise ValueError(f"a group needs at least one peer, got size {size}")
    ordered = order(seed, round, peers)
    return [tuple(ordered[start : start + size]) for start in range(0, len(ordered), size)]


def partner_of(seed: int, round: int, me: str, peers: Iterable[str]) -> str | None:
    """Return the partner of ``me`` in the round, or None if the number of peers leaves it over."""
    (pair,) = (pair for pair in groups(seed, round, {*peers, me}) if me in pair)
    return next((peer for peer in pair if peer != me), None)


def candidates(seed: int, round: int, me: str, peers: Iterable[str]) -> list[str]:
    """Return the partner of ``me``, then every other peer in the order of the round, starting after
    ``me`` and wrapping around.
    """
    peers = list(peers)
    partner = partner_of(seed, round, me, peers)
    ordered = order(seed, round, {*peers, me})
    here = ordered.index(me)
    behind = ordered[here + 1 :] + ordered[:here]
    if partner is None:
        return behind
    return [partner, *(peer for peer in behind if peer != partner)]


def common(held: Mapping[int, int]) -> tuple[int, int]:
    """Return the members whose contributions make the mean and those that take it, as bit sets of
    places; both 0 if there is none.

    The mean is over the contributions that every taker holds, including those of members that died
    meanwhile, and each taker's own is in it. Survivors that prevent this are left out one by one:
    first the one with the most others whose contribution it lacks or who lack its own; among equals
    the one whose contribution the fewest hold. So a member that claims to lack those of many
    excludes itself, not them.

    Args:
        held: for each survivor's place, the places whose complete contributions it holds, as bits,
            its own among them.
    """
    takers = dict(held)
    while len(takers) >= 2:
        mean = -1
        for places in takers.values():
            mean &= places
        if all(mean >> place & 1 for place in takers):
            return mean, sum(1 << place for place in takers)
        scores = {}
        for place, own in takers.items():
            holders = sum(places >> place & 1 for places in takers.values())
            lacks = sum(not own >> other & 1 for other in takers)
            scores[place] = (holders - lacks, holders, place)
        del takers[min(takers, key=scores.__getitem__)]
    return 0, 0
