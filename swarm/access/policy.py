"""Whom a node meets: the peers that its user chose, and in a swarm by invitation who came by one.

    policy = AccessPolicy(me, swarm=swarm, creator=creator, ticket=shown)
    policy.refusal(peer, its_admission)      # one sentence, or nothing
    policy.admits(peer)

Why all nodes admit the same peers: docs/internals.md, "Invitations".
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from shoal.swarm.access.invitation import ASK, AdmittedBy, entry_of, expiry
from shoal.swarm.errors import AdmissionError
from shoal.swarm.repeats import Repeats

MAX_PEERS = 4096
"""Whose admission is noted; the one heard of longest ago is dropped."""
LEFT = float("-inf")
"""In place of when a peer was heard of: it announced that it leaves."""
COUNT_LASTS_S = 1.0
"""For which the users of an invitation are not counted anew: each member is judged by the count."""
EXPIRES_SOON_S = 3600.0
"""Before the own invitation expires, at which that is reported."""


@dataclass(frozen=True)
class PeerLists:
    """Peer ids chosen by the user: peers in ``deny`` are never met; if ``allow`` is not empty, only
    those in it are.
    """

    allow: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()


@dataclass
class _User:
    shown: bytes
    entry: AdmittedBy
    heard: float
    """Unix seconds, or `LEFT`."""


@dataclass(frozen=True)
class _Holders:
    """The users that have an invitation's places: (since, peer), the first first."""

    counted_at: float
    places: list[tuple[float, str]]


class InvitationUsers:
    """Which peers use which invitation, and which of them hold its places.

    Those that joined first hold them, as long as they are heard of every ``ttl`` seconds.
    """

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._users: OrderedDict[str, _User] = OrderedDict()
        self._by_invitation: dict[bytes, set[str]] = {}
        self._holders: dict[bytes, _Holders] = {}

    def note(self, peer: str, shown: bytes, entry: AdmittedBy, heard: float, now: float) -> None:
        """Note that ``peer`` came by ``entry``, as it showed it, and was heard of."""
        user = self._users.get(peer)
        if user is None or user.shown != shown:
            self._forget(peer)
            user = _User(shown, entry, heard)
            self._users[peer] = user
            self._by_invitation.setdefault(entry.id, set()).add(peer)
            self._holders.pop(entry.id, None)
        elif heard == LEFT or user.heard < now - self._ttl:
            self._holders.pop(entry.id, None)
        user.heard = heard if heard == LEFT else max(user.heard, heard)
        self._users.move_to_end(peer)
        while len(self._users) > MAX_PEERS:
            self._forget(next(iter(self._users)))

    def entry(self, peer: str) -> AdmittedBy | None:
        user = self._users.get(peer)
        return None if user is None else user.entry

    def ahead_of(self, peer: str, now: float) -> str:
        """Return the last of the peers that hold all places of the invitation of ``peer`` before
        it; nothing if one is left.
        """
        user = self._users.get(peer)
        if user is None:
            return ""
        entry = user.entry
        holders = self._holders.get(entry.id)
        is_fresh = holders is not None and 0 <= now - holders.counted_at < COUNT_LASTS_S
        if holders is None or not holders.places or not is_fresh:
            holders = _Holders(now, self._count(entry, now))
            self._holders[entry.id] = holders
        places = holders.places
        if len(places) >= entry.uses and (entry.since, peer) > places[-1]:
            return places[-1][1]
        return ""

    def _count(self, entry: AdmittedBy, now: float) -> list[tuple[float, str]]:
        here = []
        for peer in self._by_invitation.get(entry.id, ()):
            user = self._users[peer]
            if user.heard >= now - self._ttl:
                here.append((user.entry.since, peer))
        return sorted(here)[: entry.uses]

    def _forget(self, peer: str) -> None:
        user = self._users.pop(peer, None)
        if user is None:
            return
        self._holders.pop(user.entry.id, None)
        peers = self._by_invitation[user.entry.id]
        peers.discard(peer)
        if not peers:
            del self._by_invitation[user.entry.id]


class AccessPolicy:
    """The access policy of the node ``me``. For any thread; uses no network.

    ``creator``: the signer of valid invitations to ``swarm``; None: the swarm is open to all.
    ``ticket``: the packed admission that this node shows. ``ttl``: seconds for which a silent peer
    keeps its place.
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
        self.me = me
        self.lists = lists or PeerLists()
        self.ticket = ticket
        self._swarm = swarm
        self._creator = creator
        self._clock = clock
        self._lock = threading.Lock()  # guards the next one
        self._users = InvitationUsers(ttl)
        self._said = Repeats()

    @property
    def by_invitation(self) -> bool:
        return self._creator is not None

    def denies(self, peer: str) -> bool:
        return peer != self.me and peer in self.lists.deny

    def blocks(self, peer: str) -> bool:
        """Return whether ``peer`` is on the deny list, or missing from an allow list that is not
        empty.
        """
        if peer == self.me:
            return False
        is_missing = bool(self.lists.allow) and peer not in self.lists.allow
        return is_missing or peer in self.lists.deny

    def refusal(self, peer: str, shown: bytes) -> str:
        """Note that ``peer`` is here and shows this admission; return one sentence if it is not
        admitted, else nothing.
        """
        if self.blocks(peer):
            return "this node's user does not want to meet it."
        return self._judge(peer, shown)

    def record(self, peer: str, shown: bytes, issued: float, here: bool) -> bool:
        """Note a record of ``peer`` from the directory; return whether its admission is valid,
        other users of it apart.

        ``issued``: Unix seconds. ``here``: the peer did not announce that it leaves.
        """
        heard = issued if here else LEFT
        return not isinstance(self._note(peer, shown, heard, self._clock()), str)

    def admits(self, peer: str) -> bool:
        """Return whether ``peer`` is admitted, by all that is known of it now."""
        if peer == self.me:
            return True
        if self.blocks(peer):
            return False
        if self._creator is None or peer == self._creator:
            return True
        with self._lock:
            entry = self._users.entry(peer)
            now = self._clock()
            if entry is None or expiry(entry, now):
                return False
            return not self._users.ahead_of(peer, now)

    def check_own(self, who: str = "This node") -> None:
        """Raise AdmissionError, one sentence about ``who``, if this node itself is not admitted by
        what is known now.
        """
        problem = self._judge(self.me, self.ticket)
        if problem:
            raise AdmissionError(f"{who} may not come in: {problem}")

    def expiry_event(self) -> str:
        """Return one sentence, once each, when this node's invitation expires within an hour, and
        when it has; else nothing.
        """
        entry = self._own_entry()
        if entry is None:
            return ""
        now = self._clock()
        problem = expiry(entry, now)
        if problem:
            if self._said.due("expired"):
                return f"The others do not meet this node any more, for {problem}"
        elif now > entry.expires - EXPIRES_SOON_S and self._said.due("expires soon"):
            minutes = max(round((entry.expires - now) / 60), 0)
            return (
                f"This node's invitation expires in {minutes} minutes: {ASK}, and join again by "
                "it with --resume."
            )
        return ""

    def has_expired(self) -> bool:
        """Return whether this node's own invitation has, so that the others do not meet it."""
        entry = self._own_entry()
        return entry is not None and bool(expiry(entry, self._clock()))

    def _own_entry(self) -> AdmittedBy | None:
        """Return by which invitation this node came in; None if it needs none."""
        if self._creator is None or self._creator == self.me:
            return None
        entry = entry_of(self.ticket, self.me, self._swarm, self._creator)
        return entry if isinstance(entry, AdmittedBy) else None

    def _judge(self, peer: str, shown: bytes) -> str:
        """Note that ``peer`` is here; return one sentence if it is not admitted, else nothing."""
        now = self._clock()
        entry = self._note(peer, shown, now, now)
        if isinstance(entry, str) or entry is None:
            return entry or ""
        with self._lock:
            ahead = self._users.ahead_of(peer, now)
        if ahead:
            return f"its invitation, for {entry.uses}, is used by peer {ahead} already: {ASK}."
        return ""

    def _note(self, peer: str, shown: bytes, heard: float, now: float) -> AdmittedBy | str | None:
        """Note a peer that was heard of.

        Return what it was admitted by, a sentence if that is not valid, or None if it needs none.
        """
        if self._creator is None or peer == self._creator:
            return None
        entry = entry_of(shown, peer, self._swarm, self._creator)
        if isinstance(entry, str):
            return entry
        problem = expiry(entry, now)
        if problem:
            return problem
        with self._lock:
            self._users.note(peer, shown, entry, heard, now)
        return entry
