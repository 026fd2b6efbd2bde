"""The exchange that a session hands out: it says which optimizer it got, and when the session is over nobody answers any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shoal.optim import FLOAT32, Codec, Handle, OuterOptimizer, RoundKey
from shoal.optim.exchange.base import Nobody
from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange.group.exchange import GroupExchange
from shoal.swarm.exchange.pair.exchange import SwarmExchange


class SessionExchange:
    """An ``optim.Exchange`` in front of ``inner``; ``attached`` is called with the optimizer that it was given to."""

    def __init__(self, inner: SwarmExchange | GroupExchange, attached: Callable[[OuterOptimizer], None]) -> None:
        self.inner, self._attached = inner, attached
        self._closed = False

    def attach(self, optimizer: OuterOptimizer) -> None:
        """Called by the optimizer when it is made."""
        self._attached(optimizer)

    def start(self, key: RoundKey, tensors: Sequence[Tensor], weight: float = 1.0, codec: Codec = FLOAT32) -> Handle:
        """Begin a round; alone once the session is over, or the network gone."""
        if self._closed:
            return Nobody()
        try:
            return self.inner.start(key, tensors, weight, codec)
        except NetworkError:
            return Nobody()

    def close(self) -> None:
        """Go on alone from now on."""
        self._closed = True
