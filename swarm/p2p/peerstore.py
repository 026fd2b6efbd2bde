"""Addresses of peers met before, kept in a file: they lead to the swarm when every address of the link is dead.

The file also has the addresses that this node listened on: peers that have only old addresses find it again on the same port.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from shoal.swarm.access.link import address_problem

log = logging.getLogger(__name__)

MAX_PEERS = 64
MAX_EACH = 4  # addresses of one peer
MAX_LISTEN = 8  # own addresses
MAX_BYTES = 256 * 1024  # of the file; 64 peers with 4 addresses of 512 characters fit in


class Peerstore:
    """The peers heard of last, newest last, each with its newest addresses. For any thread.

    ``own``: the id of this node, which is not stored. ``path``: the file that keeps those of ``swarm`` from run to run. Its
    addresses have to pass the rules of a link; a file that is damaged, or of another swarm, is ignored and written anew.
    """

    def __init__(self, own: str, path: Path | None = None, swarm: str | None = None) -> None:
        self._own = own
        self._path = path
        self._swarm = swarm
        self._lock = threading.Lock()
        self._peers: dict[str, tuple[str, ...]] = {}
        self.listened: tuple[str, ...] = ()
        """Addresses, ports included, on which this node listens, or did in an earlier run."""
        if path is not None:
            self.remember(self._load(path))
        self._saved: tuple[dict[str, tuple[str, ...]], tuple[str, ...]] = dict(self._peers), self.listened

    def __contains__(self, peer: str) -> bool:
        return peer in self._peers

    def remember(self, addresses: Iterable[str]) -> None:
        """Note full multiaddrs, the best one of each peer first. Leave out this node's own, and those that no link can hold."""
        found: dict[str, list[str]] = {}
        for address in addresses:
            peer = address.rpartition("/p2p/")[2]
            if peer != self._own and address_problem(address) is None:
                found.setdefault(peer, []).append(address)
        with self._lock:
            for peer, new in found.items():
                old = self._peers.pop(peer, ())
                self._peers[peer] = tuple(dict.fromkeys((*new, *old)))[:MAX_EACH]
            for peer in list(self._peers)[:-MAX_PEERS]:
                del self._peers[peer]

    def addresses(self) -> list[str]:
        """Return all addresses, those of the peer heard of last first."""
        with self._lock:
            return [address for peer in reversed(self._peers) for address in self._peers[peer]]

    def save(self) -> None:
        """Write the file, whole or not at all, if anything changed. A failure is logged."""
        with self._lock:
            peers, listened = dict(self._peers), self.listened
        # Dicts are equal in any order: a change of the order is not worth a write.
        if self._path is None or (peers, listened) == self._saved:
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = {"swarm": self._swarm, "peers": peers, "listened": listened}
            temporary.write_text(json.dumps(kept, indent=1), encoding="utf-8")
            os.replace(temporary, self._path)
            self._saved = peers, listened
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            log.warning("the addresses of known peers were not saved in %s (%s)", self._path, error.strerror)

    def _load(self, path: Path) -> list[str]:
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return []
        except OSError as error:
            log.warning("the addresses of known peers in %s cannot be read (%s) and are ignored", path, error.strerror)
            return []
        try:
            if len(data) > MAX_BYTES:
                raise ValueError("it is too large")
            value = json.loads(data)
            if value["swarm"] != self._swarm:
                return []
            lists = list(value["peers"].values())[-MAX_PEERS:]
            self.listened = tuple(str(address) for address in list(value.get("listened", ()))[:MAX_LISTEN])
            return [address for each in lists for address in each[:MAX_EACH] if isinstance(address, str)]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            log.warning("the addresses of known peers in %s are damaged and ignored (%s)", path, error)
            return []
