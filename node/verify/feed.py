"""Output of verification: sentences for people, events for the metrics, standings for the report."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from shoal.node.verify.audit.auditing import Audit
from shoal.node.verify.peers import reasons
from shoal.verification.consensus.reputation import Table

MOST_WAITING = 256  # sentences, and events, that wait to be passed on
ABSENT = (
    "this node is not drawn as a verifier for a while, because {} of its votes did not come; it stays a member, and its claims are "
    "checked as before. If this comes back, raise node.verify_seconds, or run less on this machine"
)
BACK = "this node is drawn as a verifier again"


class Feed:
    """Queue filled by the thread of verification and drained by another. ``name`` returns a peer's display name."""

    def __init__(self, me: str, name: Callable[[str], str], round_s: float) -> None:
        self._me, self._name, self._round_s = me, name, round_s
        self._sentences: deque[str] = deque(maxlen=MOST_WAITING)
        self._events: deque[dict[str, Any]] = deque(maxlen=MOST_WAITING)
        self._banned = dict[str, int]()
        self._absent = False

    def drain(self, notify: Callable[[str], None], write: Callable[..., None]) -> None:
        """Pass on what was queued since the last call: sentences to ``notify``, events to ``write``."""
        while self._sentences:
            notify(self._sentences.popleft())
        while self._events:
            write("verify", **self._events.popleft())

    def notify(self, sentence: str) -> None:
        """Queue a sentence for people."""
        self._sentences.append(sentence)

    def audited(self, audit: Audit) -> None:
        """Report a claim that was checked here, if it is invalid."""
        if not audit.accepted:
            self.notify(f"claim {audit.claim.id.hex()[:12]} of {self._name(audit.claim.peer)} is invalid: {audit.reason}")

    def alarmed(self, peer: str) -> None:
        """Report a peer whose claims, taken together, are not honest ones."""
        self.notify(
            f"the claims of {self._name(peer)}, taken together, are not honest ones: `shoal verify explain {peer}` says why"
        )

    def settled(self, table: Table, check_s: float) -> None:
        """Report new bans by ``table``, and whether this node is drawn. ``check_s``: seconds that checking took so far."""
        banned = {peer: until for peer in table.standings if (until := table.banned_until(peer)) is not None}
        for peer, until in banned.items():
            if self._banned.get(peer) != until:
                ends = time.strftime("%H:%M:%S", time.localtime((until + 1) * self._round_s))
                who = "this node" if peer == self._me else self._name(peer)
                self.notify(f"{who} is banned until {ends}: {reasons(table.standings[peer])}")
        self._banned = banned
        if table.is_absent(self._me) != self._absent:
            self._absent = not self._absent
            self.notify(ABSENT.format(table.standings[self._me].votes["absent"]) if self._absent else BACK)
        self._events.append({"round": table.round, "banned": sorted(banned), "check_s": check_s})


def standings(table: Table) -> dict[str, Any]:
    """Return the standing of each peer, for JSON."""
    return {
        peer: {
            "score": standing.score / 1000,
            "claims": standing.claims,
            "seats": standing.votes,
            "appeals": standing.appeals,
            "banned_until": table.banned_until(peer),
        }
        for peer, standing in table.standings.items()
    }
