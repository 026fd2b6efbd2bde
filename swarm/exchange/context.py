"""The bundles that every part of an exchange is given: the node in its swarm, and the time limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.swarm.identity import Identity
from shoal.swarm.pacing.progress import slow_s
from shoal.swarm.wire.member import Member

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

LEAST_RATE = 1e6  # bytes a second: time for so many is given in any case, and more to what moves (`pacing.progress`)
LARGEST_S = 6 * 3600.0  # seconds that a transfer may take however much it moves
SHARE, LONGEST_S = 0.2, 300.0  # of the time from one round to the next, and seconds at most, that a node waits for others
OVERLAPPED_S = 3600.0  # seconds at most that a node waits for others while that costs no training


def moving_s(least: float, nbytes: int) -> float:
    """Return the seconds that moving ``nbytes`` bytes may take: ``least``, or more where a link of `LEAST_RATE` needs more."""
    return max(least, min(nbytes / LEAST_RATE, LARGEST_S))


def longest_s(least: float, nbytes: int) -> float:
    """Return the seconds that it may take as long as the bytes move quickly enough to be there by then."""
    return max(moving_s(least, nbytes), slow_s(nbytes))


@dataclass(frozen=True)
class PeerContext:
    """One node in one swarm, as its exchange sees it."""

    host: Host
    """Serves the exchange's protocols."""
    identity: Identity
    """Signs what this node sends."""
    swarm: str
    """The swarm id, which is also the run in every ``RoundKey``."""
    model: str
    """``model_digest`` of the parameters; members with another one are ignored."""
    seed: int
    """Seed of the pairing and of the order of leaders, equal at all peers."""
    members: Callable[[], Mapping[str, Member]]
    """Returns the members present now by peer id (``Directory.members``)."""
    look: Callable[[], None] = lambda: None
    """Called when an unknown peer calls (``Directory.look``)."""
    is_barred: Callable[[str], bool] = lambda peer: False
    """Tells the peers with which this node exchanges nothing (``Directory.is_barred``)."""
    known: Callable[[], Mapping[str, Member]] = dict
    """Returns peers that need not be members here any more, whom rounds that are under way still meet (``Directory.everyone``)."""

    @property
    def me(self) -> str:
        return self.identity.peer_id


@dataclass(frozen=True)
class ExchangeTimeouts:
    """The limits of one exchange, in seconds."""

    wait: float = 10.0
    """How long a round waits for a partner or a group."""
    chunk: float = 5.0
    """Silence, no byte and no heartbeat, after which a transfer or a peer is given up."""
    exchange: float = 120.0
    """How long one transfer or reduction may take, if it moves no more than a slow link carries in this time (`moving`)."""
    trial: float = 0.0
    """How much longer a partner may take to accept a contribution: it tries it on data."""

    def moving(self, nbytes: int) -> float:
        """Return how long the transfer of ``nbytes`` bytes each way may take, however little it moves."""
        return moving_s(self.exchange, nbytes)

    def longest(self, nbytes: int) -> float:
        """Return how long it may take if it keeps on moving."""
        return longest_s(self.exchange, nbytes)

    def probe(self, left: float) -> float:
        """Return how long a peer has to answer at all, if ``left`` seconds of a round are left: a third, because two that sleep
        must not use up a round. No constant: a round trip or two must fit, also over a satellite.
        """
        return min(self.chunk, left / 3)

    def limit(self, wait: float, nbytes: int) -> float:
        """Return how long a round may take: ``wait`` to form the pair or group, the transfer of ``nbytes`` bytes, its commit."""
        return wait + self.longest(nbytes) + 8 * self.chunk


class Patience:
    """How long the rounds of one node wait for others: as long as is set, or in long rounds a fifth of the time of a round.

    Peers drift apart by a part of a round, not by seconds: where an inner step takes ten seconds, the best of partners is later
    than a setting that suits quick rounds. The shorter of the last two rounds counts, so that one pause is no measure. A round is
    the time from one sending of a fragment to its next, whatever else is sent meanwhile.
    """

    def __init__(self) -> None:
        self._began: dict[int, float] = {}
        self._periods: dict[int, tuple[float, float]] = {}

    def begin(self, now: float, fragment: int = 0) -> float:
        """Note that a round of ``fragment`` begins; return the seconds since its last one began, infinite for the first."""
        period = now - self._began.get(fragment, float("-inf"))
        self._began[fragment] = now
        if period < float("inf"):
            self._periods[fragment] = (self._periods.get(fragment, (0.0, 0.0))[1], period)
        return period

    def period(self, fragment: int = 0) -> float:
        """Return the seconds of a round of ``fragment``; 0 while they are not known."""
        return min(self._periods.get(fragment, (0.0, 0.0)))

    def of(self, timeouts: ExchangeTimeouts, fragment: int = 0) -> float:
        """Return the seconds to wait in a round of ``fragment``."""
        return max(timeouts.wait, min(self.period(fragment) * SHARE, LONGEST_S))
