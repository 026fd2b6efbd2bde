"""The bundles that every part of an exchange is given: the node in its swarm, and the time limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.swarm.identity import Identity
from shoal.swarm.wire.member import Member

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host


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

    @property
    def me(self) -> str:
        """This node's peer id."""
        return self.identity.peer_id


@dataclass(frozen=True)
class ExchangeTimeouts:
    """The limits of one exchange, in seconds."""

    wait: float = 10.0
    """How long a round waits for a partner or a group."""
    chunk: float = 5.0
    """Silence, no byte and no heartbeat, after which a transfer or a peer is given up."""
    exchange: float = 120.0
    """How long one transfer or reduction may take."""

    def probe(self, left: float) -> float:
        """Return how long a peer has to answer at all, if ``left`` seconds of a round are left: a third, because two that sleep
        must not use up a round. No constant: a round trip or two must fit, also over a satellite.
        """
        return min(self.chunk, left / 3)

    @property
    def limit(self) -> float:
        """The longest possible round: forming the pair or group, one transfer, its commit."""
        return self.wait + self.exchange + 8 * self.chunk
