"""Connections of a watcher: to whom it has one, and who could not be reached."""

from __future__ import annotations

from shoal.swarm.p2p.newest import Newest

MAX_UNREACHABLE = 2048


class Connections:
    """Peers by the state of the connection to them; those in ``bootstrap`` are among ``peers``."""

    def __init__(self) -> None:
        self.peers: set[str] = set()
        self.bootstrap: set[str] = set()
        self.unreachable = Newest[str, str](MAX_UNREACHABLE)
        """Why the last attempt failed, of peers without a connection since."""

    def opened(self, peer: str) -> None:
        self.peers.add(peer)
        self.unreachable.pop(peer, None)

    def closed(self, peer: str) -> None:
        self.peers.discard(peer)
        self.bootstrap.discard(peer)

    def known_as_bootstrap(self, peer: str) -> None:
        if peer in self.peers:
            self.bootstrap.add(peer)
