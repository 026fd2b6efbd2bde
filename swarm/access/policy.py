"""Who may come in: the node's own lists of peers, and in a swarm that is by invitation only its invitations.

Of one invitation that several peers use at a time the first come are in, as many as it has uses: of those heard of within ``ttl``
seconds the ones with the earliest moment in their admission, ties in the order of peer ids. That depends on the set of records
alone, so all nodes that see the same records let in the same peers, whoever was seen first; who is silent has left its place.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from shoal.swarm.access.invitation import ASK, AdmittedBy, entry_of, expiry
from shoal.swarm.errors import AdmissionError

MAX_PEERS = 4096  # peers of which is noted how they came in; who was heard of longest ago gives way
LEFT = float("-inf")
FRESH_S = 1.0
SOON_S = 3600.0  # seconds before the own invitation expires at which that is told


@dataclass(frozen=True)
class PeerLists:
    """Peer ids of the node's own choice: ``deny`` is never met; if there is an ``allow``, nobody else is."""

    allow: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()


@dataclass
class _PeerState:
    shown: bytes
    entry: AdmittedBy
    heard: float  # Unix seconds, or LEFT


class AccessPolicy:
    """The door of the node ``me``. For any thread; touches no network.

    ``creator``: whose invitations count in ``swarm``; None: the swarm is open to all. ``ticket``: the packed admission that this
    node shows. ``ttl``: seconds for which a silent guest keeps its place.
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
        self._guests: OrderedDict[str, _PeerState] = OrderedDict()
        self._by_invitation: dict[bytes, set[str]] = {}
        self._first: dict[bytes, tuple[float, list[tuple[float, str]]]] = {}  # invitation -> when counted, who is in
        self._told = ""

    @property
    def by_invitation(self) -> bool:
        """Whether peers have to show an invitation."""
        return self._creator is not None

    def denies(self, peer: str) -> bool:
        """Whether the node's user wants nothing to do with ``peer``."""
        return peer != self.me and peer in self.lists.deny

    def blocks(self, peer: str) -> bool:
        """As ``denies``, or there is a list of those allowed, and it is not on it."""
        return self.denies(peer) or (bool(self.lists.allow) and peer not in self.lists.allow and peer != self.me)

    def refusal(self, peer: str, shown: bytes) -> str:
        """Note that ``peer`` is here and shows this admission; why it may not come in, as one sentence, or nothing."""
        if self.blocks(peer):
            return "this node's user does not want to meet it."
        return self._note(peer, shown, self._clock())

    def record(self, peer: str, shown: bytes, issued: float, here: bool) -> bool:
        """Note a record of ``peer`` from the directory; whether its admission, apart from its place, is right.

        ``issued``: Unix seconds. ``here``: it did not say that it leaves.
        """
        return not self._note(peer, shown, issued if here else LEFT, judge=False)

    def admits(self, peer: str) -> bool:
        """Whether ``peer`` may come in, by all that is known of it now."""
        if peer == self.me:
            return True
        if self.blocks(peer):
            return False
        if self._creator is None or peer == self._creator:
            return True
        with self._lock:
            guest, now = self._guests.get(peer), self._clock()
            return guest is not None and not expiry(guest.entry, now) and not self._ahead(peer, guest, now)

    def check_own(self) -> None:
        """AdmissionError, one sentence, if this node may not come in itself by what is known now."""
        if problem := self._note(self.me, self.ticket, self._clock()):
            raise AdmissionError(f"This node may not come in: {problem}")

    def news(self) -> str:
        """One sentence, once each, when this node's invitation will have expired within an hour, and when it has; else nothing."""
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
        if not line or kind == self._told:
            return ""
        self._told = kind
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
            guest = self._guests.get(peer)
            if guest is None or guest.shown != shown:
                self._forget(peer)
                guest = self._guests[peer] = _PeerState(shown, entry, heard)
                self._by_invitation.setdefault(entry.id, set()).add(peer)
                self._first.pop(entry.id, None)
            elif heard == LEFT or guest.heard < now - self._ttl:
                self._first.pop(entry.id, None)
            guest.heard = heard if heard == LEFT else max(guest.heard, heard)
            self._guests.move_to_end(peer)
            while len(self._guests) > MAX_PEERS:
                self._forget(next(iter(self._guests)))
            ahead = self._ahead(peer, guest, now) if judge else ""
        return f"its invitation, for {entry.uses}, is used by peer {ahead} already: {ASK}." if ahead else ""

    def _ahead(self, peer: str, guest: _PeerState, now: float) -> str:
        """The last of those who fill all places of the guest's invitation before it; nothing if one is left."""
        when, first = self._first.get(guest.entry.id, (0.0, []))
        if not first or not 0 <= now - when < FRESH_S:  # asked for every member each time: not counted anew each time
            users = [(other, self._guests[other]) for other in self._by_invitation.get(guest.entry.id, ())]
            live = sorted((user.entry.since, other) for other, user in users if user.heard >= now - self._ttl)
            first = live[: guest.entry.uses]
            self._first[guest.entry.id] = now, first
        return first[-1][1] if len(first) >= guest.entry.uses and (guest.entry.since, peer) > first[-1] else ""

    def _forget(self, peer: str) -> None:
        guest = self._guests.pop(peer, None)
        if guest is not None:
            users = self._by_invitation[guest.entry.id]
            self._first.pop(guest.entry.id, None)
            users.discard(peer)
            if not users:
                del self._by_invitation[guest.entry.id]
