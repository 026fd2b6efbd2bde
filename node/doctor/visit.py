"""State that the checks of the network share: the daemon, the reached peers and their answers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from shoal.swarm.access.link import Link
from shoal.swarm.errors import MessageError, NetworkError, ShoalError
from shoal.swarm.identity import Identity
from shoal.swarm.membership.clock_check import clock_skew
from shoal.swarm.p2p.reachability import DialBackView
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.wire.member import Member

if TYPE_CHECKING:  # hivemind, and so torch, which may be what is missing
    from shoal.swarm.manifest.manifest import Manifest
    from shoal.swarm.membership.directory import Directory
    from shoal.swarm.p2p.host import Host

T = TypeVar("T")


class FoundError(ShoalError):
    """Fault between this machine and the swarm."""


@dataclass
class Visit:
    """Visit of a node that is no member to the swarm of ``link``, if there is one."""

    link: Link | None
    port: int = 0
    hooks: str | None = None
    parameters: bool = False
    """Name the parameters that each of several inner optimizers trains."""
    identity: Identity = field(default_factory=Identity.ephemeral)
    host: Host | None = None
    began: float = 0.0
    """When it was started, by the monotonic clock."""
    directory: Directory | None = None
    reached: list[str] = field(default_factory=list)
    """Full multiaddrs of members that answered."""
    seeds: list[str] = field(default_factory=list)
    """Full multiaddrs of bootstrap nodes that answered."""
    manifest: Manifest | None = None
    seen: list[DialBackView] = field(default_factory=list)
    outcome: str | None = None
    """Outcome of dialling back, if it was tried."""
    opened: str | None = None
    """The address at which the router was found to let peers in, at a port that it opened for the daemon."""

    def ask(self, address: str, protocol: str, work: Callable[[Stream], Awaitable[T]], seconds: float) -> T:
        """Do ``work`` on a stream to the peer of a full multiaddr. Raises NetworkError or MessageError."""
        host = self.running()

        async def asked() -> T:
            stream = await host.open(address.rpartition("/p2p/")[2], protocol, timeout=10.0)
            try:
                return await work(stream)
            finally:
                stream.close()

        return host.call(asked(), seconds)

    def running(self) -> Host:
        """Host of the visit. NetworkError before its start."""
        if self.host is None:
            raise NetworkError("the network daemon does not run.")
        return self.host

    def agreed(self) -> Manifest:
        """Manifest of the swarm. MessageError if there is none."""
        if self.manifest is None:
            raise MessageError("the swarm's manifest is not there.")
        return self.manifest

    def members(self) -> dict[str, Member]:
        """Return the members of the swarm, by peer id."""
        return {} if self.directory is None else self.directory.members()

    def now(self) -> float:
        """Return Unix seconds by the clocks of the peers that said theirs; by this machine's if none did."""
        return time.time() + clock_skew(self.seen)

    def close(self) -> None:
        """End the daemon."""
        with contextlib.suppress(NetworkError):
            if self.directory is not None:
                self.directory.close()
        if self.host is not None:
            self.host.close()
