"""The members that are reached past a relay, and when those are asked that are not."""

from __future__ import annotations

from collections.abc import Collection

MAX_PUNCHED = 64
"""Members that are reached past a relay."""
FIRST_ASK_S = 3.0
"""That a member is relayed before it is asked: it has to learn of this one too."""
ASK_AGAIN_S = (5.0, 15.0, 600.0)
"""Before each further attempt, the first if nobody was dialled; the last repeats."""


class PunchedMembers:
    """Members by the id of their second daemon. On one loop."""

    def __init__(self) -> None:
        self.reached: frozenset[str] = frozenset()
        """Those that were connected past a relay at the last look."""
        self._daemons: dict[str, str] = {}  # member -> the id of its second daemon
        self._owners: dict[str, str] = {}  # and back

    def daemon_of(self, peer: str) -> str | None:
        return self._daemons.get(peer)

    def owner(self, daemon_id: str) -> str | None:
        return self._owners.get(daemon_id)

    def all(self) -> list[str]:
        return list(self._daemons)

    def see(self, daemon_ids: Collection[str]) -> None:
        """Note the second daemons that are connected."""
        self.reached = frozenset(
            self._owners[daemon_id] for daemon_id in daemon_ids if daemon_id in self._owners
        )

    def make_room(self, peer: str) -> bool:
        """Return whether there is a place for ``peer``, after taking one from who is not reached if
        there was none.
        """
        if peer in self._daemons or len(self._daemons) < MAX_PUNCHED:
            return True
        for other in self._daemons:
            if other not in self.reached:
                self._owners.pop(self._daemons.pop(other), None)
                return True
        return False

    def put(self, peer: str, daemon_id: str) -> None:
        """Note the second daemon of a member, in place of an earlier one."""
        before = self._daemons.get(peer)
        if before is not None:
            self._owners.pop(before, None)
        self._daemons[peer] = daemon_id
        self._owners[daemon_id] = peer

    def forget_way(self, peer: str) -> None:
        """Leave ``peer`` relayed until this connection has ended and another is made."""
        self._daemons.pop(peer, None)


class AskTimes:
    """When each relayed member is asked for a connection next. On one loop."""

    def __init__(self) -> None:
        self._due: dict[str, tuple[float, int]] = {}
        """Member -> when it is asked next, and how often it was."""
        self._lost: set[str] = set()
        """Members whose connection this node's daemon took with it, which they do not see yet."""

    def keep(self, peers: Collection[str]) -> None:
        """Forget the members that are not connected at all any more."""
        for gone in self._due.keys() - set(peers):
            del self._due[gone]
            self._lost.discard(gone)

    def lose(self, peers: Collection[str]) -> None:
        """Note that the connections with ``peers`` went with this node's daemon."""
        self._lost |= set(peers)
        self._due.clear()

    def is_due(self, peer: str, now: float, *, asks: bool) -> bool:
        """Return whether to ask ``peer`` now.

        ``asks``: this node is the one of the two that does, unless its daemon took the connection.
        """
        due, _ = self._due.setdefault(peer, (now + FIRST_ASK_S, 0))
        return now >= due and (asks or peer in self._lost)

    def was_asked(self, peer: str, now: float) -> None:
        _, tried = self._due[peer]
        self._due[peer] = now + _pause_s(tried), tried + 1

    def was_answered(self, peer: str, now: float) -> None:
        """Note that ``peer`` answered, and that both dial now."""
        _, tried = self._due.get(peer, (0.0, 0))
        tried = max(tried, 2)
        self._due[peer] = now + _pause_s(tried - 1), tried

    def is_reached(self, peer: str) -> None:
        self._due.pop(peer, None)
        self._lost.discard(peer)


def _pause_s(tried: int) -> float:
    return ASK_AGAIN_S[min(tried, len(ASK_AGAIN_S) - 1)]
