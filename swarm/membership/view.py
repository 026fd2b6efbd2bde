"""The part of a ``Membership`` that exchanges, downloads and training use: a simulation brings its own."""

from __future__ import annotations

from typing import Protocol

from shoal.swarm.identity import Identity
from shoal.swarm.manifest.manifest import Manifest
from shoal.swarm.membership.membership import NetworkOptions
from shoal.swarm.p2p.host import Host
from shoal.swarm.wire.member import Member


class DirectoryView(Protocol):
    """The reading side of a ``Directory``."""

    def members(self) -> dict[str, Member]:
        """Return the newest record of each peer that is waiting or training, by peer id."""

    def everyone(self) -> dict[str, Member]:
        """Return the same, with the peers that this node refuses to meet, and those of the buckets that it was in just now."""

    def departed(self) -> dict[str, Member]:
        """Return the last record of each peer that said lately that it left or is done, by peer id."""

    def belongs(self, peer: str) -> bool:
        """Return whether this node would see ``peer`` if that were a member: always, but in a swarm of buckets."""

    def is_barred(self, peer: str) -> bool:
        """Return True if this node refuses to meet ``peer``."""

    def look(self) -> None:
        """Read the directory soon."""


class MemberView(Protocol):
    """One peer's place in a swarm: its key, its host, the directory and the manifest."""

    @property
    def identity(self) -> Identity:
        """The key of this peer."""

    @property
    def host(self) -> Host:
        """The network."""

    @property
    def directory(self) -> DirectoryView:
        """The members of the swarm."""

    @property
    def swarm(self) -> str:
        """The swarm's id."""

    @property
    def manifest(self) -> Manifest:
        """The settings that all peers share."""

    @property
    def network(self) -> NetworkOptions:
        """The limits of this peer."""
