"""The node in its swarm, as an exchange sees it: ``PeerContext``.

The time limits of an exchange are in `shoal.swarm.exchange.timeouts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.swarm.identity import Identity
from shoal.swarm.wire.messages import Member

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
    """``model_digest`` of the averaged parameters; members with another one are ignored."""
    seed: int
    """Seed of the pairing and of the order of leaders, equal at all peers."""
    members: Callable[[], Mapping[str, Member]]
    """Returns the members present now by peer id (``Directory.members``)."""
    look: Callable[[], None] = lambda: None
    """Called when an unknown peer calls (``Directory.look``)."""
    is_barred: Callable[[str], bool] = lambda peer: False
    """Tells the peers with which this node exchanges nothing (``Directory.is_barred``)."""
    known: Callable[[], Mapping[str, Member]] = dict
    """Returns peers that need not be members here any more, whom rounds that are under way still
    meet (``Directory.everyone``).
    """

    @property
    def me(self) -> str:
        return self.identity.peer_id
