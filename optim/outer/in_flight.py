"""A contribution between its sending and the application of its mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal.optim.codecs.base import Codec
from shoal.optim.codecs.state import Rejectable
from shoal.optim.exchange.base import Handle, Mean
from shoal.optim.outer.param_groups import Parts
from shoal.optim.rules.base import RoundContext


@dataclass
class PendingExchange:
    """Record of an exchange whose mean ``OuterOptimizer`` has not applied yet."""

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

    def wait(self, codec: Codec) -> None:
        """Wait for the outcome, once, and report it to the codec."""
        if self.finished:
            return
        self.mean = self.handle.result()
        self.finished = True
        if isinstance(codec, Rejectable) and codec.pending:  # an exchange without a partner in view need not have encoded
            if self.mean is None:
                codec.rejected(self.contribution)
            else:
                codec.accepted()

    def cancel(self, codec: Codec) -> None:
        """Abandon the exchange. The difference of slow and fast weights still holds its contribution, so it is sent again."""
        if not self.finished and isinstance(codec, Rejectable) and codec.pending:
            codec.rejected(self.contribution)
