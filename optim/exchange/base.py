"""``Exchange``: hand in tensors for a round, get their weighted mean with some peers, or None.

    handle = exchange.start(Contribution(RoundKey("run", 7), tensors))
    mean = handle.result()                       # None: no partner in this round

An exchange never raises because of a peer, never hangs and never returns a partly averaged tensor:
if no peer answered in time, or a member could not commit, the result is ``None`` and the rule goes
on with the own contribution alone. ``Simulation``, ``Distributed``, ``PairExchange`` and
``GroupExchange`` pass one test suite (tests/exchanges); ``Alone`` is here. Who meets whom is in
`shoal.optim.exchange.pairing`, the mean in `shoal.optim.exchange.weighted_mean`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.optim.codecs.base import Codec
from shoal.optim.codecs.floats import FLOAT32
from shoal.optim.parameters import AveragedParameters


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
    unweighted_count: int = 0
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

    def encode(self) -> None:
        """Return once the codec has encoded the contribution. ValueError if it refuses that."""

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

    def due(self, round: int, fragment: int) -> int:
        """Return the round in which others expect the contribution of ``fragment`` that is handed
        in now: ``round``, as this peer counts, or another. Asked once for each, in the thread that
        trains.
        """
        return round

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
