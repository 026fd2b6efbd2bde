"""One contribution between its sending and its applying."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from optim.codec import Codec
from optim.exchange import Handle, Mean
from optim.rule import RoundFacts
from optim.saved import Rejectable


@dataclass
class Flight:
    """What ``OuterOptimizer`` remembers of an exchange."""

    handle: Handle
    facts: RoundFacts
    contribution: list[Tensor]
    step: int
    position: int
    """In the schedule, when it was sent."""
    landed: bool = False
    mean: Mean | None = None

    def land(self, codec: Codec) -> None:
        """Wait for the outcome, once."""
        if self.landed:
            return
        self.mean = self.handle.result()
        self.landed = True
        if self.mean is None and isinstance(codec, Rejectable):
            codec.rejected()
