"""The time limits of one exchange: ``ExchangeTimeouts``.

    ExchangeTimeouts(wait=10.0).moving(nbytes)    # seconds for a transfer, however little it moves

They are the least. What moves has longer, and what holds up training has less
(`shoal.swarm.exchange.training_time`). Why: docs/internals.md, "A slow partner".
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.swarm.pacing.progress import extension_s

# bytes a second: time for so many is given in any case, and more to what moves
# (`shoal.swarm.pacing.progress`)
LEAST_RATE = 1e6
LEAST_ASKING_S = 1.0  # seconds for a question on a link where silence is noticed sooner
LARGEST_S = 6 * 3600.0  # seconds that a transfer may take however much it moves


@dataclass(frozen=True)
class ExchangeTimeouts:
    """The limits of one exchange, in seconds."""

    wait: float = 10.0
    """How long a round waits for a partner or a group."""
    chunk: float = 5.0
    """Silence, no byte and no heartbeat, after which a transfer or a peer is given up."""
    exchange: float = 120.0
    """How long one transfer or reduction may take, if it moves no more than a slow link carries in
    this time (`moving`).
    """
    trial: float = 0.0
    """How much longer a partner may take to accept a contribution: it tries it on data."""

    @property
    def asking(self) -> float:
        """How long a peer asks once more how an exchange was decided: a new connection over a
        satellite takes several round trips. Who does not answer is given up before a round is.
        """
        return max(self.chunk / 2, LEAST_ASKING_S)

    def moving(self, nbytes: int) -> float:
        """Return how long the transfer of ``nbytes`` bytes each way may take, however little it
        moves.
        """
        return max(self.exchange, min(nbytes / LEAST_RATE, LARGEST_S))

    def longest(self, nbytes: int) -> float:
        """Return how long it may take if it keeps on moving."""
        return max(self.moving(nbytes), extension_s(nbytes))

    def probe(self, left: float) -> float:
        """Return how long a peer has to answer at all, if ``left`` seconds of a round are left: a
        third, because two that sleep must not use up a round. No constant: a round trip or two must
        fit, also over a satellite.
        """
        return min(self.chunk, left / 3)
