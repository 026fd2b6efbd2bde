"""A visit to a swarm by a node that is no member: what the checks learn, one from another."""

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
from shoal.swarm.p2p.reachability import DialBackView
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.wire.messages import Member

if TYPE_CHECKING:
    from shoal.swarm.manifest import Manifest
    from shoal.swarm.membership.directory import Directory
    from shoal.swarm.p2p.host import Host

OPEN_S = 10.0
"""For a stream to a peer."""

T = TypeVar("T")


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
    """The address at which the router was found to let peers in, at a port that it opened for the
    daemon.
    """

    def ask(
        self, address: str, protocol: str, work: Callable[[Stream], Awaitable[T]], seconds: float
    ) -> T:
        """Do ``work`` on a stream to the peer of a full multiaddr.

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
        if self.host is None:
            raise NetworkError("the network daemon does not run.")
        return self.host

    def agreed(self) -> Manifest:
        if self.manifest is None:
            raise MessageError("the swarm's manifest is not there.")
        return self.manifest

    def members(self) -> dict[str, Member]:
        return {} if self.directory is None else self.directory.members()

    def now(self) -> float:
        """Return Unix seconds by the clocks of the peers that said theirs; by this machine's if
        none did.
        """
        return time.time() + clock_skew(self.seen)

    def close(self) -> None:
        with contextlib.suppress(NetworkError):
            if self.directory is not None:
                self.directory.close()
        if self.host is not None:
            self.host.close()
