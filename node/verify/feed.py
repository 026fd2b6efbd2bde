"""What the thread of verification has to say: sentences for people, and events for the metrics."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from shoal.node.verify.peers import reasons
from shoal.verification.consensus.reputation import Table

MAX_WAITING = 256
"""Sentences, and events, that wait to be passed on."""
ABSENT = (
    "this node is not drawn as a verifier for a while, because {} of its votes did not come; it "
    "stays a member, and its claims are checked as before. If this comes back, run less on this "
    "machine"
)
BACK = "this node is drawn as a verifier again"


class Feed:
    """Queue filled by the thread of verification and drained by another.

    ``name`` returns a peer's display name.
    """

    def __init__(self, me: str, name: Callable[[str], str], round_s: float) -> None:
        self._me = me
        self._name = name
        self._round_s = round_s
        self._sentences: deque[str] = deque(maxlen=MAX_WAITING)
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_WAITING)
        self._banned = dict[str, int]()
        self._voted = set[bytes]()
        """Own claims whose votes were counted."""
        self._absent = False

    def drain(self, notify: Callable[[str], None], write: Callable[..., None]) -> None:
        """Pass on what was queued since the last call: sentences to ``notify``, events to
        ``write``.
        """
        while self._sentences:
            notify(self._sentences.popleft())
        while self._events:
            write("verify", **self._events.popleft())

    def notify(self, sentence: str) -> None:
        self._sentences.append(sentence)

    def settled(self, table: Table, check_s: float) -> None:
        """Report new bans by ``table``, and whether this node is drawn.

        ``check_s``: seconds that checking took so far.
        """
        banned: dict[str, int] = {}
        for peer, standing in table.standings.items():
            until = table.banned_until(peer)
            if until is None:
                continue
            banned[peer] = until
            if self._banned.get(peer) != until:
                ends = time.strftime("%H:%M:%S", time.localtime((until + 1) * self._round_s))
                who = "this node" if peer == self._me else self._name(peer)
                self.notify(f"{who} is banned until {ends}: {reasons(standing)}")
        self._banned = banned
        is_absent = table.is_absent(self._me)
        if is_absent and not self._absent:
            self.notify(ABSENT.format(table.standings[self._me].votes["absent"]))
        elif self._absent and not is_absent:
            self.notify(BACK)
        self._absent = is_absent
        votes = self._votes(table)
        self._events.append(
            {"round": table.round, "banned": sorted(banned), "check_s": check_s, **votes}
        )

    def _votes(self, table: Table) -> dict[str, Any]:
        """Return the votes of others on claims of this node that were not returned yet, and how
        many it has cast itself.
        """
        votes: Counter[str] = Counter()
        mine: set[bytes] = set()
        for claim, ruling in table.rulings.items():
            if ruling.claim.peer != self._me:
                continue
            mine.add(claim)
            if claim in self._voted:
                continue
            for trial in ruling.trials:
                for peer, mark in zip(trial.verifiers, trial.marks, strict=True):
                    if mark in ("valid", "invalid"):
                        votes[peer] += 1
        self._voted = mine
        cast = table.standings[self._me].votes if self._me in table.standings else {}
        return {
            "votes": dict(votes),
            "voted": sum(cast.get(kind, 0) for kind in ("agreed", "against", "missed")),
        }
