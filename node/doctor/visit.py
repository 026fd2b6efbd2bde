"""What ``shoal doctor`` and ``shoal plan`` learn of a swarm without joining it.

Later checks read what earlier ones found.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from shoal.swarm.access.link import Link
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.membership.clock_check import clock_skew
from shoal.swarm.p2p.reachability import DialBackView, Outcome
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.wire.messages import Member

if TYPE_CHECKING:
    from shoal.swarm.manifest import Manifest
    from shoal.swarm.membership.directory import Directory
    from shoal.swarm.p2p.host import Host

OPEN_S = 10.0
"""Seconds at most to open a stream to a peer."""

T = TypeVar("T")


@dataclass
class Visit:
    """State of one run of the checks; without ``link``, of this machine and its daemon only."""

    link: Link | None
    port: int = 0
    """TCP port on which the node is to listen; 0: any."""
    hooks: str | None = None
    """This machine's copy of the swarm's task, as in ``task.hooks``."""
    parameters: bool = False
    """Whether to name the parameters that each inner optimizer trains, where there are several."""
    identity: Identity = field(default_factory=Identity.ephemeral)
    host: Host | None = None
    daemon_began: float = 0.0
    """When the daemon was started, seconds of the monotonic clock."""
    directory: Directory | None = None
    reached: list[str] = field(default_factory=list)
    """Full multiaddrs of members that answered."""
    seeds: list[str] = field(default_factory=list)
    """Full multiaddrs of bootstrap nodes that answered."""
    manifest: Manifest | None = None
    seen: list[DialBackView] = field(default_factory=list)
    """What each asked peer sees of this machine: its address and its clock."""
    outcome: Outcome | None = None
    """What a peer found when it dialled back; None if none could tell."""
    opened_at: str | None = None
    """IP address, without port, at which a peer came in by a port that the router opened."""

    def ask(
        self, address: str, protocol: str, work: Callable[[Stream], Awaitable[T]], seconds: float
    ) -> T:
        """Do ``work`` on a stream to the peer of a full multiaddr, in ``seconds`` with opening.

        Raises NetworkError or MessageError.
        """
        host = self.running()

        async def asked() -> T:
            peer = address.rpartition("/p2p/")[2]
            stream = await host.open(peer, protocol, timeout=OPEN_S)
            with contextlib.closing(stream):
                return await work(stream)

        return host.call(asked(), seconds)

    def running(self) -> Host:
        """Return the host that the check "daemon" started. NetworkError: there is none."""
        if self.host is None:
            raise NetworkError("the network daemon does not run.")
        return self.host

    def agreed(self) -> Manifest:
        """Return the manifest that the check "swarm" fetched. MessageError: there is none."""
        if self.manifest is None:
            raise MessageError("the swarm's manifest is not there.")
        return self.manifest

    def members(self) -> dict[str, Member]:
        return {} if self.directory is None else self.directory.members()

    def now(self) -> float:
        """Return Unix seconds by the peers' clocks where they differ harmfully from this machine's,
        else by this machine's.
        """
        return time.time() + clock_skew(self.seen)

    def close(self) -> None:
        with contextlib.suppress(NetworkError):
            if self.directory is not None:
                self.directory.close()
        if self.host is not None:
            self.host.close()
