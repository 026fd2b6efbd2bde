"""The access policy of a node: its own lists of peers, and in a swarm by invitation only its invitations.

An invitation admits as many peers at a time as it has uses: of those heard of within ``ttl`` seconds the ones with the earliest
time of joining in their admission, ties in the order of peer ids. That depends on the set of records alone, so all nodes that see
the same records admit the same peers, in whatever order they came; a silent peer has given up its place.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from shoal.swarm.access.invitation import ASK, AdmittedBy, entry_of, expiry
from shoal.swarm.errors import AdmissionError

MAX_PEERS = 4096  # peers whose admission is noted; the one heard of longest ago is dropped
LEFT = float("-inf")
FRESH_S = 1.0
SOON_S = 3600.0  # seconds before the own invitation expires at which that is reported


@dataclass(frozen=True)
class PeerLists:
    """Peer ids chosen by the user: peers in ``deny`` are never met; if ``allow`` is not empty, only those in it are."""

    allow: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()


@dataclass
class _PeerState:
    shown: bytes
    entry: AdmittedBy
    heard: float  # Unix seconds, or LEFT


class AccessPolicy:
    """The access policy of the node ``me``. For any thread; uses no network.

    ``creator``: the signer of valid invitations to ``swarm``; None: the swarm is open to all. ``ticket``: the packed admission
    that this node shows. ``ttl``: seconds for which a silent peer keeps its place.
    """

    def __init__(
        self,
        me: str = "",
        *,
        lists: PeerLists | None = None,
        swarm: str = "",
        creator: str | None = None,
        ticket: bytes = b"",
        ttl: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.me, self.lists, self.ticket = me, lists or PeerLists(), ticket
        self._swarm, self._creator, self._ttl, self._clock = swarm, creator, ttl, clock
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, _PeerState] = OrderedDict()
        self._by_invitation: dict[bytes, set[str]] = {}
        self._first: dict[bytes, tuple[float, list[tuple[float, str]]]] = {}  # invitation -> when counted, peers admitted
        self._reported = ""

    @property
    def by_invitation(self) -> bool:
        """True if peers have to show an invitation."""
        return self._creator is not None

    def denies(self, peer: str) -> bool:
        return peer != self.me and peer in self.lists.deny

    def blocks(self, peer: str) -> bool:
        """Return whether ``peer`` is on the deny list, or missing from an allow list that is not empty."""
        return self.denies(peer) or (bool(self.lists.allow) and peer not in self.lists.allow and peer != self.me)

    def refusal(self, peer: str, shown: bytes) -> str:
        """Note that ``peer`` is here and shows this admission; return one sentence if it is not admitted, else nothing."""
        if self.blocks(peer):
            return "this node's user does not want to meet it."
        return self._note(peer, shown, self._clock())

    def record(self, peer: str, shown: bytes, issued: float, here: bool) -> bool:
        """Note a record of ``peer`` from the directory; return whether its admission is valid, other users of it apart.

        ``issued``: Unix seconds. ``here``: the peer did not announce that it leaves.
        """
        return not self._note(peer, shown, issued if here else LEFT, judge=False)

    def admits(self, peer: str) -> bool:
        """Return whether ``peer`` is admitted, by all that is known of it now."""
        if peer == self.me:
            return True
        if self.blocks(peer):
            return False
        if self._creator is None or peer == self._creator:
            return True
        with self._lock:
            state, now = self._peers.get(peer), self._clock()
            return state is not None and not expiry(state.entry, now) and not self._ahead(peer, state, now)

    def check_own(self) -> None:
        """Raise AdmissionError, one sentence, if this node itself is not admitted by what is known now."""
        if problem := self._note(self.me, self.ticket, self._clock()):
            raise AdmissionError(f"This node may not come in: {problem}")

    def expiry_event(self) -> str:
        """Return one sentence, once each, when this node's invitation expires within an hour, and when it has; else nothing."""
        if self._creator in (None, self.me):
            return ""
        entry = entry_of(self.ticket, self.me, self._swarm, str(self._creator))
        if not isinstance(entry, AdmittedBy):
            return ""
        now = self._clock()
        line = expiry(entry, now)
        if line:
            line = f"The others do not meet this node any more, for {line}"
        elif now > entry.expires - SOON_S:
            minutes = max(round((entry.expires - now) / 60), 0)
            line = f"This node's invitation expires in {minutes} minutes: {ASK}, and join again by it with --resume."
        kind = line[:20]
        if not line or kind == self._reported:
            return ""
        self._reported = kind
        return line

    # -- under the lock --------------------------------------------------------------------------------------------------

    def _note(self, peer: str, shown: bytes, heard: float, *, judge: bool = True) -> str:
        if self._creator is None or peer == self._creator:
            return ""
        entry = entry_of(shown, peer, self._swarm, self._creator)
        if isinstance(entry, str):
            return entry
        now = self._clock()
        if problem := expiry(entry, now):
            return problem
        with self._lock:
            state = self._peers.get(peer)
            if state is None or state.shown != shown:
                self._forget(peer)
                state = self._peers[peer] = _PeerState(shown, entry, heard)
                self._by_invitation.setdefault(entry.id, set()).add(peer)
                self._first.pop(entry.id, None)
            elif heard == LEFT or state.heard < now - self._ttl:
                self._first.pop(entry.id, None)
            state.heard = heard if heard == LEFT else max(state.heard, heard)
            self._peers.move_to_end(peer)
            while len(self._peers) > MAX_PEERS:
                self._forget(next(iter(self._peers)))
            ahead = self._ahead(peer, state, now) if judge else ""
        return f"its invitation, for {entry.uses}, is used by peer {ahead} already: {ASK}." if ahead else ""

    def _ahead(self, peer: str, state: _PeerState, now: float) -> str:
        """Return the last of the peers that fill all places of the invitation before ``peer``; nothing if one is left."""
        when, first = self._first.get(state.entry.id, (0.0, []))
        if not first or not 0 <= now - when < FRESH_S:  # called for every member at a time, so the count is kept for a while
            users = [(other, self._peers[other]) for other in self._by_invitation.get(state.entry.id, ())]
            live = sorted((user.entry.since, other) for other, user in users if user.heard >= now - self._ttl)
            first = live[: state.entry.uses]
            self._first[state.entry.id] = now, first
        return first[-1][1] if len(first) >= state.entry.uses and (state.entry.since, peer) > first[-1] else ""

    def _forget(self, peer: str) -> None:
        state = self._peers.pop(peer, None)
        if state is not None:
            users = self._by_invitation[state.entry.id]
            self._first.pop(state.entry.id, None)
            users.discard(peer)
            if not users:
                del self._by_invitation[state.entry.id]
