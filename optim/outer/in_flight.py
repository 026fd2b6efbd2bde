"""Contributions between their sending and the application of their means; checks of saved outer
state before it is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoal.optim.codecs.base import Codec, Rejectable, Resendable
from shoal.optim.exchange.base import Handle, Mean, RoundKey
from shoal.optim.outer.outer_groups import SETTINGS, Parts
from shoal.optim.outer.rule import RoundContext
from shoal.optim.outer.weights import ModelWeights

Record = dict[str, Any]
"""A pending exchange as it is saved: "facts", which JSON can hold, and lists of "tensors" by name.
"""


@dataclass(frozen=True)
class Sent:
    """What was handed to the exchange."""

    contribution: Sequence[Tensor]
    tail: Sequence[Tensor]
    """Averaged buffers, which follow the contribution."""
    weight: float
    """0: the peer listens.

    None was handed in if it is out of the round (``PendingExchange.absent``).
    """
    even: int = 0
    state: tuple[float, ...] = ()
    """The sketch of the slow weights, if the exchange ``compares``."""


@dataclass(eq=False)
class PendingExchange:
    """Record of an exchange whose mean ``OuterOptimizer`` has not applied yet."""

    weights: ModelWeights
    part: Sequence[int]
    """Positions of the fragment's parameters."""
    context: RoundContext
    sent: Sent
    rules: Parts
    """The rules that made it, and that apply its mean."""
    step: int
    position: int
    """Position in the schedule at which it was sent."""
    lag: int
    """Positions after which it is applied under a fixed schedule; with lag "auto" those that were
    expected when it was sent.
    """
    absent: bool = False
    """True if this peer stayed out of the round."""
    fast: Sequence[Tensor] = ()
    """The fast weights when it was sent, if the rule wants them (``KeepsFast``)."""
    handle: Handle | None = None
    """None: loaded from saved state, and not begun anew yet."""
    arrived: int | None = None
    """Positions after which it was seen to be over; None: not yet."""
    finished: bool = False
    mean: Mean | None = None

    @property
    def fragment(self) -> int:
        return self.context.key.fragment

    def result(self) -> Mean | None:
        assert self.handle is not None  # all are begun before anything else
        return self.handle.result()

    def wait(self, codec: Codec) -> None:
        """Wait for the outcome, once, and report it to the codec."""
        if self.finished:
            return
        self.mean = self.result()
        self.finished = True
        if self._awaited(codec):
            if self.mean is None:
                self._reject(codec)
            elif isinstance(codec, Rejectable) and self.weights.first:
                codec.accepted()

    def cancel(self, codec: Codec) -> None:
        """Abandon the exchange.

        The difference of slow and fast weights still holds its contribution, so it is sent again.
        """
        if not self.finished and self.handle is not None:
            self.handle.close()
        if not self.finished and self._awaited(codec):
            self._reject(codec)

    def state_of(self, codec: Codec) -> dict[str, Any]:
        """Return the codec's state as if the contribution had been refused, so that it is sent
        again with the next one.
        """
        if self.finished or not self._awaited(codec):
            return codec.state_dict()
        unsent = self.weights.whole(self.part, self.sent.contribution)
        return (
            codec.state_dict(unsent)
            if isinstance(codec, Rejectable) and self.weights.first
            else codec.state_dict()
        )

    def record(self, codec: Codec, start: Sequence[Tensor], *, copy: bool) -> Record:
        """Return what is needed to begin the exchange anew: with it nothing need be taken back.

        ``start``: the rule's START.

        ``copy=False``: with the tensors themselves, for a caller that writes them at once.
        """
        awaited = self._awaited(codec) and self.weights.first
        memory = codec.state_dict() if awaited else {}
        payload = codec.payload if awaited and isinstance(codec, Resendable) else None
        tensors = {
            "sent": self.sent.contribution,
            "tail": self.sent.tail,
            "fast": self.fast,
            "start": start,
        }
        tensors |= {
            "error": memory.pop("error", None) or (),
            "payload": () if payload is None else [payload],
        }
        facts = {
            "round": self.context.key.round,
            "fragment": self.fragment,
            "weight": self.sent.weight,
            "counts": self.context.weight,
            "even": self.sent.even,
            "state": list(self.sent.state),
            "settings": [
                [
                    {name: getattr(rule, name) for name in SETTINGS if hasattr(rule, name)},
                    list(places),
                ]
                for rule, places in self.rules
            ],
            "step": self.step,
            "position": self.position,
            "lag": self.lag,
            "absent": self.absent,
            "arrived": self.arrived,
            "codec": memory or None,
        }
        return {
            "facts": facts,
            "tensors": {
                name: [t.clone() if copy else t for t in some] for name, some in tensors.items()
            },
        }

    def _awaited(self, codec: Codec) -> bool:
        """Return True if the codec awaits the outcome; an exchange without a partner in view need
        not have encoded.
        """
        return isinstance(codec, Rejectable) and self.weights.agreed(codec.pending)

    def _reject(self, codec: Codec) -> None:
        contribution = self.weights.whole(
            self.part, self.sent.contribution
        )  # the codec has seen the whole
        if isinstance(codec, Rejectable) and self.weights.first:
            codec.rejected(contribution)


class InFlight:
    """The exchanges whose means are not applied yet: by fragment, and of a fragment the oldest
    first.
    """

    def __init__(self, fragments: int) -> None:
        self._of: list[list[PendingExchange]] = [[] for _ in range(fragments)]

    def __iter__(self) -> Iterator[PendingExchange]:
        return iter([pending for some in self._of for pending in some])

    def of(self, fragment: int) -> list[PendingExchange]:
        return list(self._of[fragment]) if fragment < len(self._of) else []

    def add(self, pending: PendingExchange) -> None:
        self._of[pending.fragment].append(pending)

    def remove(self, pending: PendingExchange) -> None:
        self._of[pending.fragment].remove(pending)

    def due(self, fragment: int, position: int | None) -> PendingExchange | None:
        """Return the fragment's that was sent at ``position``, or its oldest; None if there is
        none.
        """
        return next(
            (p for p in self._of[fragment] if position is None or p.position == position), None
        )

    def drop(self, fragment: int, codec: Codec, until: float = math.inf) -> None:
        """Cancel a fragment's exchanges from rounds up to ``until``."""
        for pending in [
            pending for pending in self._of[fragment] if pending.context.key.round <= until
        ]:
            pending.cancel(codec)
            self._of[fragment].remove(pending)

    def poll(self, position: int) -> None:
        for pending in self:
            if pending.arrived is None and pending.handle is not None and pending.handle.done():
                pending.arrived = max(position - pending.position, 1)


@dataclass(frozen=True)
class RoundInfo:
    """Outcome of one exchange, as handed to ``on_round``."""

    key: RoundKey
    members: tuple[str, ...]
    """Peer ids in the mean; empty if no peer answered."""
    step: int
    """Inner steps finished when the mean was applied."""
    lag: int
    """Inner steps between sending and applying."""
    late: bool = False
    """True if it was not there within the lag that was expected when it was sent (lag "auto")."""
