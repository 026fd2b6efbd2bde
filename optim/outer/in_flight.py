"""A fragment between its rounds, and its exchanges in flight: sent, and not applied yet.

    send at step 100 --> PendingExchange in FragmentState.in_flight --> apply at step 105

Without a lag a fragment has no exchange in flight between two steps. With one it has at most one,
under ``Delayed`` and while its first mean is waited for two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.optim.codecs.base import Codec, Rejectable, Resendable
from shoal.optim.exchange.base import Handle, Mean, RoundKey
from shoal.optim.outer.outer_groups import SETTINGS, Parts
from shoal.optim.outer.rule import RoundContext
from shoal.optim.outer.weights import ModelWeights

Record = dict[str, Any]
"""An exchange as it is saved: "facts", which JSON can hold, and lists of "tensors" by name."""


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


@dataclass(frozen=True)
class Sent:
    """What was handed to the exchange."""

    contribution: Sequence[Tensor]
    tail: Sequence[Tensor]
    """Averaged buffers, which follow the contribution."""
    weight: float
    """0: this peer listens, or is out of the round (``PendingExchange.absent``)."""
    unweighted_count: int = 0
    """How many of the first tensors need a plain mean, whatever the weights."""
    state: tuple[float, ...] = ()
    """The sketch of the slow weights, if the exchange ``compares``."""


@dataclass(eq=False)
class PendingExchange:
    """An exchange whose mean is not applied yet."""

    weights: ModelWeights
    part: Sequence[int]
    """Positions of the fragment's parameters."""
    context: RoundContext
    sent: Sent
    rules: Parts
    """The rules that made the contribution, and that apply its mean."""
    step: int
    """Inner steps when it was sent."""
    position: int
    """Position in the schedule at which it was sent."""
    lag: int
    """Positions after which it is applied, with lag "auto" those expected when it was sent."""
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
        """Wait for the outcome, and return it."""
        assert self.handle is not None  # all are begun before anything else
        return self.handle.result()

    def wait(self, codec: Codec) -> None:
        """Wait for the outcome, once, and report it to the codec."""
        if self.finished:
            return
        self.mean = self.result()
        self.finished = True
        if not self._awaited(codec):
            return
        if self.mean is None:
            self._reject(codec)
        elif isinstance(codec, Rejectable) and self.weights.first:
            codec.accepted()

    def cancel(self, codec: Codec) -> None:
        """Abandon the exchange.

        The difference of slow and fast weights still holds its contribution, so it is sent again.
        """
        if self.finished:
            return
        if self.handle is not None:
            self.handle.close()
        if self._awaited(codec):
            self._reject(codec)

    def poll(self, position: int) -> None:
        """Note when it was over, if it is."""
        if self.arrived is None and self.handle is not None and self.handle.done():
            self.arrived = max(position - self.position, 1)

    def codec_state(self, codec: Codec) -> dict[str, Any]:
        """Return the codec's state as if the contribution had been refused.

        So it would be sent again with the next one.
        """
        if self.finished or not self._awaited(codec):
            return codec.state_dict()
        unsent = self._whole_contribution()
        if isinstance(codec, Rejectable) and self.weights.first:
            return codec.state_dict(unsent)
        return codec.state_dict()

    def record(self, codec: Codec, start: Sequence[Tensor], *, copy: bool) -> Record:
        """Return what is needed to begin the exchange anew, so that nothing need be taken back.

        Args:
            codec: of the fragment.
            start: the rule's START for the fragment.
            copy: False: the tensors themselves, for a caller that writes them at once.
        """
        tensors: dict[str, Sequence[Tensor]] = {
            "sent": self.sent.contribution,
            "tail": self.sent.tail,
            "fast": self.fast,
            "start": start,
            "error": (),
            "payload": (),
        }
        memory: dict[str, Any] = {}
        if self._awaited(codec) and self.weights.first:
            memory = codec.state_dict()
            tensors["error"] = memory.pop("error", None) or ()
            if isinstance(codec, Resendable) and codec.payload is not None:
                tensors["payload"] = [codec.payload]
        facts = {
            "round": self.context.key.round,
            "fragment": self.fragment,
            "weight": self.sent.weight,
            "counts": self.context.weight,
            "even": self.sent.unweighted_count,
            "state": list(self.sent.state),
            "settings": [[_settings(rule), list(places)] for rule, places in self.rules],
            "step": self.step,
            "position": self.position,
            "lag": self.lag,
            "absent": self.absent,
            "arrived": self.arrived,
            "codec": memory or None,
        }
        saved: dict[str, list[Tensor]] = {}
        for name, some in tensors.items():
            saved[name] = [tensor.clone() if copy else tensor for tensor in some]
        return {"facts": facts, "tensors": saved}

    def _awaited(self, codec: Codec) -> bool:
        """Return True if the codec awaits the outcome.

        An exchange without a partner in view need not have encoded. One that encodes in a thread of
        its own is waited for.
        """
        if not isinstance(codec, Rejectable):
            return False
        if self.handle is not None:
            try:
                self.handle.encode()
            except ValueError:  # refused, as its result says: nothing changed
                return False
        return self.weights.agreed(codec.pending)

    def _reject(self, codec: Codec) -> None:
        contribution = self._whole_contribution()
        if isinstance(codec, Rejectable) and self.weights.first:
            codec.rejected(contribution)

    def _whole_contribution(self) -> Sequence[Tensor]:
        """Return what the codec has seen: the contribution of all ranks."""
        return self.weights.whole(self.part, self.sent.contribution)


def _settings(rule: object) -> dict[str, float]:
    return {name: getattr(rule, name) for name in SETTINGS if hasattr(rule, name)}


@dataclass(eq=False)
class FragmentState:
    """One fragment of a model between its rounds."""

    part: list[int]
    """Positions of its parameters, ascending."""
    codec: Codec
    """How its contributions become bytes, with what it remembers of the last one."""
    sent_at: tuple[int, int] = (0, 0)
    """Steps and tokens counted when it was sent last."""
    listens: bool = False
    """True if its next contribution does not count."""
    in_flight: list[PendingExchange] = field(default_factory=list)
    """The oldest first."""

    def sent_at_position(self, position: int) -> PendingExchange | None:
        """Return the exchange that was sent there in the schedule, if it is in flight."""
        for pending in self.in_flight:
            if pending.position == position:
                return pending
        return None

    def wait(self, pending: PendingExchange) -> None:
        """Wait for the outcome of one of its exchanges.

        ValueError if the codec refuses what was handed in; then the exchange is over.
        """
        try:
            pending.wait(self.codec)
        except ValueError:
            self.in_flight.remove(pending)
            raise

    def drop(self, until: float = math.inf) -> None:
        """Cancel its exchanges of rounds up to ``until``."""
        for pending in list(self.in_flight):
            if pending.context.key.round <= until:
                pending.cancel(self.codec)
                self.in_flight.remove(pending)

    def codec_state(self) -> dict[str, Any]:
        """Return the codec's state as if the contribution that is on its way had been refused."""
        for pending in self.in_flight:
            if not pending.finished:
                return pending.codec_state(self.codec)
        return self.codec.state_dict()
