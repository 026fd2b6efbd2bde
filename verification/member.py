"""A peer's part in the consensus: it turns duties into signed records on the board. What checking means is up to ``check``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from verification.claims import Claim, Commitment, Record, Reveal, Sign, Signed, Verdict, Vote, hide
from verification.consensus import Consensus, Refused

MAX_VOTES = 4096  # hidden votes that wait to be revealed


class Board(Protocol):
    """Where signed records are published for everybody; this peer's own come back from it too, or not."""

    def publish(self, signed: Signed) -> None:
        """Spread ``signed``, soon; never waits."""


@dataclass(frozen=True)
class Checked:
    """A vote and at most 512 bytes of what was measured."""

    vote: Vote
    evidence: bytes = b""


Check = Callable[[Claim], Checked | None]
"""Verifies a claim; None leaves the seat empty, because the budget is spent or the output cannot be had."""


class Member:
    """``peer`` in ``consensus``. ``salt``: 32 fresh secret bytes with each call, which also feed the next beacon."""

    def __init__(self, peer: str, consensus: Consensus, board: Board, sign: Sign, check: Check, salt: Callable[[], bytes]) -> None:
        self.peer, self.consensus = peer, consensus
        self._board, self._sign, self._check, self._salt = board, sign, check, salt
        self._hidden: dict[tuple[bytes, int], Reveal] = {}
        self._left: set[tuple[bytes, int]] = set()

    def publish(self, record: Record) -> None:
        """Sign, take and spread a record of this peer. Raises Refused if its own view does not take it; then nobody gets it."""
        signed = Signed.by(self._sign, record)
        self.consensus.take(signed)
        self._board.publish(signed)

    def work(self, most: int = 1) -> int:
        """Do what is due; at most ``most`` claims are checked, which is what costs. Returns how many were."""
        checked = 0
        for duty in self.consensus.duties(self.peer):
            key = (duty.case, duty.attempt)
            if duty.what == "check" and key not in self._hidden and key not in self._left and checked < most:
                checked += 1
                self._commit(key, duty.claim)
            elif duty.what == "reveal" and key in self._hidden:
                self._try(self._hidden.pop(key))
            elif duty.what == "state":
                self._hidden.pop(key, None)
                self._left.discard(key)
                self._try(Verdict(peer=self.peer, case=duty.case, attempt=duty.attempt, marks=duty.marks))
        return checked

    def _commit(self, key: tuple[bytes, int], claim: Claim) -> None:
        checked = self._check(claim)
        if checked is None or len(self._hidden) >= MAX_VOTES:
            self._left.add(key)
            return
        reveal = Reveal(
            peer=self.peer, case=key[0], attempt=key[1], vote=checked.vote, evidence=checked.evidence, salt=self._salt()
        )
        if self._try(Commitment(peer=self.peer, case=key[0], attempt=key[1], digest=hide(reveal))):
            self._hidden[key] = reveal

    def _try(self, record: Record) -> bool:
        """Time goes on while a claim is checked, so a record can be too late by now; the consensus has counted that."""
        try:
            self.publish(record)
        except Refused:
            return False
        return True
