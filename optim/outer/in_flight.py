"""Contributions between their sending and the application of their means; checks of saved outer
state before it is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from shoal.optim.codecs.base import Codec, Rejectable, Resendable
from shoal.optim.exchange.base import Handle, Mean, RoundKey
from shoal.optim.outer.inner import SETTINGS, Parts
from shoal.optim.outer.rule import RoundContext, Rule
from shoal.optim.outer.weights import ModelWeights
from shoal.optim.schedule import Schedule

Given = Mapping[str, Sequence[Tensor]]


def check_rank(saved: Sequence[int] | None, own: Sequence[int] | None) -> None:
    """Raise ValueError unless the state is of the same part of a peer: rank and number of ranks,
    None if it is one process.
    """
    if saved == own:
        return
    was, now = (
        "one process" if rank is None else f"rank {rank[0]} of {rank[1]}" for rank in (saved, own)
    )
    raise ValueError(
        f"the saved outer state is of {was}, and this is {now}: each rank loads its own, and "
        "shoal.optim.ranks.orders saves and "
        "loads what goes with any number of ranks"
    )


def check_keys(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state. ValueError, naming the first, if something is missing."""
    for name in ("inner", "slow", "rule", "steps", "round"):
        if name not in state:
            raise ValueError(
                f"the saved state has no {name!r}, so it is not an outer optimizer's: load it into "
                "the inner one"
            )
    return state


def check_shapes(what: str, theirs: Sequence[Tensor], mine: Sequence[Tensor]) -> None:
    """Raise ValueError, naming the first difference, unless the shapes are equal."""
    if len(theirs) != len(mine):
        raise ValueError(f"{what} has {len(theirs)} tensors, this model has {len(mine)}")
    for index, (their, own) in enumerate(zip(theirs, mine, strict=True)):
        if their.shape != own.shape:
            raise ValueError(
                f"{what} has shape {tuple(their.shape)} at tensor {index}, this model has "
                f"{tuple(own.shape)}"
            )


def check_record(record: Mapping[str, Any], parts: int, steps: int, position: int) -> None:
    """Raise ValueError unless the numbers of a saved exchange in flight are possible.

    Its tensors are checked elsewhere.
    """
    facts = record["facts"]
    bounds = {
        "round": 2**63,
        "fragment": parts - 1,
        "step": steps,
        "position": position,
        "lag": 2**31,
        "even": 2**31,
    }
    for name, most in bounds.items():
        if not isinstance(facts[name], int) or not 0 <= facts[name] <= most:
            raise ValueError(
                f"the saved exchange in flight has {name} {facts[name]!r}, which must lie between "
                f"0 and {most}"
            )
    for name in ("weight", "counts"):
        if not 0 <= float(facts[name]) < math.inf:
            raise ValueError(
                f"the saved exchange in flight has {name} {facts[name]!r}: it must be finite and "
                "not negative"
            )
    if facts["arrived"] is not None and not 0 < int(facts["arrived"]) <= position:
        raise ValueError(
            f"the saved exchange in flight has arrived {facts['arrived']!r}, before it was sent or "
            "after now"
        )


def check_given(
    slow: Sequence[Tensor],
    shared: Given,
    applied: Sequence[int] | None,
    own: Sequence[Tensor],
    own_shared: Given,
    fragments: int,
) -> None:
    """Raise ValueError unless what is to be adopted has the names and shapes of the own."""
    check_shapes("the given list of slow weights", slow, own)
    for name, tensors in shared.items():
        if name not in own_shared:
            raise ValueError(
                f"the given shared state has {name!r}, which this method does not share"
            )
        check_shapes(f"the given shared state {name!r}", tensors, own_shared[name])
    if applied is not None and len(applied) != fragments:
        raise ValueError(
            f"the given weights are in {len(applied)} fragments, this optimizer's in {fragments}"
        )


def settings_of(rule: Rule) -> dict[str, Any]:
    values = {field.name: getattr(rule, field.name) for field in fields(rule)}  # type: ignore[arg-type]
    return {
        name: value
        for name, value in values.items()
        if value is None or isinstance(value, int | float)
    }


def groups_of(state: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = state["groups"]
    if len(groups) != count:
        raise ValueError(
            f"the saved outer state has {len(groups)} parameter groups, this optimizer {count}"
        )
    return groups


def settings_changed(
    state: Mapping[str, Any], rule: Rule, schedule: Schedule, restored: Collection[str] = ()
) -> str | None:
    """Return a clause on the settings, but for those ``restored``, that were others when ``state``
    was saved, or None.
    """
    was, now = state["settings"], settings_of(rule)
    names = [
        name for name in now if name in was and was[name] != now[name] and name not in restored
    ]
    before, after = ([f"{name} {values[name]}" for name in names] for values in (was, now))
    if state["schedule"] != repr(schedule):
        before, after = [*before, state["schedule"]], [*after, repr(schedule)]
    return (
        f"the saved outer state had {', '.join(before)}, this optimizer has {', '.join(after)}"
        if before
        else None
    )


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
