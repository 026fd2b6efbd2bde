"""The peers met before, kept in a file.

They lead to the swarm when every address of the link is dead.

Most places are for peers that have answered, one of each address range before the second of any:
however many others are heard of, they do not displace them. The file also has the addresses that
this node listened on: peers that have only old addresses find it again on the same port.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal.swarm.access.address import address_problem
from shoal.swarm.file_lock import replace_file
from shoal.swarm.p2p.addresses import by_peer, by_turns, host_of

log = logging.getLogger(__name__)

MAX_PEERS = 64
ANSWERED_PLACES = 48  # of them, for peers that have answered
MAX_ADDRESSES = 4  # of one peer
MAX_LISTEN = 8  # own addresses
# Of the file; 64 peers with 4 addresses of 512 characters, each named twice, fit in.
MAX_FILE_BYTES = 384 * 1024
# Times of answers are kept in whole hours, or each dial would be a write.
ANSWERED_STEP_S = 3600.0


class Peerstore:
    """The peers heard of last, newest last, each with its newest addresses, and when each answered.

    For any thread.

    ``own``: the id of this node, which is not stored. ``path``: the file that keeps those of
    ``swarm`` from run to run. Its addresses have to pass the rules of a link; a file that is
    damaged, or of another swarm, is ignored and written anew. ``clock``: Unix seconds.
    """

    def __init__(
        self,
        own: str,
        path: Path | None = None,
        swarm: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._own = own
        self._clock = clock
        self.met: Mapping[str, str] = {}  # where each peer was met last, as in `DialBackoff`
        self._path = None if path is None else path.absolute()
        self._swarm = swarm
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._peers: dict[str, tuple[str, ...]] = {}
        self._answered: dict[str, float] = {}  # of those addresses, when each answered last
        self.listened: tuple[str, ...] = ()
        """Addresses, ports included, on which this node listens, or did in an earlier run."""
        if path is not None:
            self._note(self._load(path))
        self._saved = self._content()

    def __contains__(self, peer: str) -> bool:
        return peer in self._peers

    def remember(self, addresses: Iterable[str]) -> None:
        """Note full multiaddrs, the best one of each peer first.

        Leave out this node's own, and those that no link can hold. What is heard of while none is
        known is written to the file at once, but this does not wait for the disk; all others come
        into it with the next `save`. So a node that is killed early has the address of its partner
        if that came first, and not a bootstrap node's or a stranger's.
        """
        knew_none = not self._peers
        self._note(addresses)
        if knew_none and self._peers and self._path is not None:
            threading.Thread(target=self.save, name="shoal-peers", daemon=True).start()

    def _note(self, addresses: Iterable[str]) -> None:
        found = by_peer(address for address in addresses if address_problem(address) is None)
        found.pop(self._own, None)
        with self._lock:
            for peer, new in found.items():
                merged = list(dict.fromkeys((*new, *self._peers.pop(peer, ()))))
                last = max(merged, key=self._when)
                # The one that is known to lead there.
                if self._when(last) and last not in merged[:MAX_ADDRESSES]:
                    merged.insert(MAX_ADDRESSES - 1, last)
                self._peers[peer] = tuple(merged[:MAX_ADDRESSES])
            self._forget()

    def learn(self, answered: Iterable[str]) -> None:
        """Note the peers that answered a dial: at the address of the host at which each was met, or
        else at any of its own.
        """
        now = self._clock()
        with self._lock:
            for peer in answered:
                known = self._peers.get(peer, ())
                there = [address for address in known if host_of(address) == self.met.get(peer)]
                self._answered.update(dict.fromkeys(there or known, now))

    def addresses(self) -> list[str]:
        """Return all addresses, those of the peer heard of last first."""
        with self._lock:
            return [address for peer in reversed(self._peers) for address in self._peers[peer]]

    def save(self) -> None:
        """Write the file, whole or not at all, if anything changed. A failure is logged."""
        with self._writing:
            with self._lock:
                kept = self._content()
            # Dicts are equal in any order: a change of the order is not worth a write.
            if self._path is None or kept == self._saved:
                return
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(self._path, json.dumps({"swarm": self._swarm, **kept}, indent=1))
                self._saved = kept
            except OSError as error:
                log.warning(
                    "the addresses of known peers were not saved in %s (%s)",
                    self._path,
                    error.strerror,
                )

    def _content(self) -> dict[str, Any]:
        answered = {}
        for address, when in self._answered.items():
            answered[address] = int(when // ANSWERED_STEP_S * ANSWERED_STEP_S)
        return {"peers": dict(self._peers), "listened": self.listened, "answered": answered}

    def _when(self, address: str) -> float:
        return self._answered.get(address, 0.0)

    def _forget(self) -> None:
        """Leave out whoever has no place: beyond those that answered last, the peers not heard of
        for longest.
        """
        if len(self._peers) > MAX_PEERS:
            kept = self._best_answered()
            others = [peer for peer in self._peers if peer not in kept]
            kept.update(others[-(MAX_PEERS - len(kept)) :])
            self._peers = {peer: own for peer, own in self._peers.items() if peer in kept}
        there: set[str] = set()
        for addresses in self._peers.values():
            there.update(addresses)
        self._answered = {at: when for at, when in self._answered.items() if at in there}

    def _best_answered(self) -> set[str]:
        """Return the peers that answered last, one of each address range before a second of any."""
        best = {peer: max(addresses, key=self._when) for peer, addresses in self._peers.items()}
        answered = [peer for peer in best if self._when(best[peer])]
        answered.sort(key=lambda peer: -self._when(best[peer]))
        return set(by_turns((peer, host_of(best[peer])) for peer in answered)[:ANSWERED_PLACES])

    def _load(self, path: Path) -> list[str]:
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return []
        except OSError as error:
            log.warning(
                "the addresses of known peers in %s cannot be read (%s) and are ignored",
                path,
                error.strerror,
            )
            return []
        try:
            if len(data) > MAX_FILE_BYTES:
                raise ValueError("it is too large")
            value = json.loads(data)
            if value["swarm"] != self._swarm:
                return []
            return self._take(value)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            log.warning(
                "the addresses of known peers in %s are damaged and ignored (%s)", path, error
            )
            return []

    def _take(self, value: dict[str, Any]) -> list[str]:
        """Take the content of a file of this swarm; return the peers' addresses.

        Raises whatever malformed content makes Python raise.
        """
        addresses = []
        for own in list(value["peers"].values())[-MAX_PEERS:]:
            addresses += [address for address in own[:MAX_ADDRESSES] if isinstance(address, str)]
        listened = list(value.get("listened", ()))[:MAX_LISTEN]
        self.listened = tuple(str(address) for address in listened)
        now = self._clock()
        self._answered = {
            address: float(max(0, min(when, now)))
            for address, when in dict(value.get("answered", {})).items()
            if isinstance(when, int)
        }
        return addresses
