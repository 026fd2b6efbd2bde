"""A contribution between its sending and the application of its mean, and what is reported then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoal.optim.codecs.base import Codec
from shoal.optim.codecs.state import Rejectable
from shoal.optim.exchange.base import Handle, Mean, RoundKey
from shoal.optim.outer.param_groups import Parts
from shoal.optim.outer.weights import ModelWeights
from shoal.optim.rules.base import RoundContext


@dataclass
class PendingExchange:
    """Record of an exchange whose mean ``OuterOptimizer`` has not applied yet."""

    weights: ModelWeights
    part: Sequence[int]
    """Positions of the fragment's parameters."""
    handle: Handle
    context: RoundContext
    contribution: Sequence[Tensor]
    rules: Parts
    """The rules that made it, and that apply its mean."""
    step: int
    position: int
    """Position in the schedule at which it was sent."""
    finished: bool = False
    mean: Mean | None = None
    listening: bool = False
    """True if it was sent with weight 0."""
    fast: Sequence[Tensor] = ()
    """The fast weights when it was sent, if the rule wants them (``KeepsFast``)."""

    def wait(self, codec: Codec) -> None:
        """Wait for the outcome, once, and report it to the codec."""
        if self.finished:
            return
        self.mean = self.handle.result()
        self.finished = True
        if self._awaited(codec):
            if self.mean is None:
                self._reject(codec)
            elif isinstance(codec, Rejectable) and self.weights.first:
                codec.accepted()

    def cancel(self, codec: Codec) -> None:
        """Abandon the exchange. The difference of slow and fast weights still holds its contribution, so it is sent again."""
        if not self.finished and self._awaited(codec):
            self._reject(codec)

    def state_of(self, codec: Codec) -> dict[str, Any]:
        """Return the codec's state to save: the contribution will be sent again with the next one."""
        if self.finished or not self._awaited(codec):
            return codec.state_dict()
        unsent = self.weights.whole(self.part, self.contribution)
        return codec.state_dict(unsent) if isinstance(codec, Rejectable) and self.weights.first else codec.state_dict()

    def _awaited(self, codec: Codec) -> bool:
        """Return True if the codec awaits the outcome; an exchange without a partner in view need not have encoded."""
        return isinstance(codec, Rejectable) and self.weights.agreed(codec.pending)

    def _reject(self, codec: Codec) -> None:
        contribution = self.weights.whole(self.part, self.contribution)  # the codec has seen the whole
        if isinstance(codec, Rejectable) and self.weights.first:
            codec.rejected(contribution)


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
    """True if that was longer than planned when it was sent."""
