"""A peer as a verifier.

    voter = Voter(peer, consensus, publish, sign, check, salt)
    voter.work(most=1)         # commit, reveal and state what is due; check at most one claim

It turns its duties into signed records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.verification.consensus.protocol import Consensus
from shoal.verification.consensus.records import (
    Claim,
    Commitment,
    Refused,
    Reveal,
    Sign,
    Signed,
    Verdict,
    Vote,
    VoteRecord,
    hide,
)

MAX_VOTES = 4096
"""Hidden votes that wait to be revealed, at most."""
PATIENCE = 0.75
"""After a check that would end too late, the expected time of the next is this much of it: one slow
check must not keep a verifier from trying again.
"""


@dataclass(frozen=True)
class Checked:
    """Vote and at most 512 bytes of what was measured."""

    vote: Vote
    evidence: bytes = b""


Check = Callable[[Claim], Checked | None]
"""Verifies a claim; None abstains, because the budget is spent or the output is not served."""


class Voter:
    """``peer`` as a verifier: it turns duties in ``consensus`` into signed records.

    ``publish`` spreads a record soon, and never waits; it may come back to this peer. ``salt``: 32
    fresh secret bytes with each call, which also feed the next beacon.
    """

    def __init__(
        self,
        peer: str,
        consensus: Consensus,
        publish: Callable[[Signed], None],
        sign: Sign,
        check: Check,
        salt: Callable[[], bytes],
    ) -> None:
        self.peer = peer
        self.consensus = consensus
        self._publish = publish
        self._sign = sign
        self._check = check
        self._salt = salt
        self._hidden: dict[tuple[bytes, int], Reveal] = {}
        self._left: set[tuple[bytes, int]] = set()
        self._check_s = 0.0
        """Seconds that a check is expected to take."""

    def publish(self, record: VoteRecord) -> None:
        """Sign, take and spread a record of this peer.

        Raises Refused if the own consensus refuses it; then it is not sent.
        """
        signed = Signed.by(self._sign, record)
        self.consensus.take(signed)
        self._publish(signed)

    def try_publish(self, record: VoteRecord) -> bool:
        """Publish; return False if the own consensus refuses the record, as after a long check: it
        has counted that.
        """
        try:
            self.publish(record)
        except Refused:
            return False
        return True

    def reveal(self) -> None:
        """Reveal every vote that waits, before leaving: one that never comes costs its author; an
        early one can only be copied.
        """
        for reveal in self._hidden.values():
            self.try_publish(reveal)
        self._hidden.clear()

    def work(self, most: int = 1) -> int:
        """Do what is due, first what others wait for; check at most ``most`` claims, which costs.

        Returns how many.
        """
        if len(self._left) > MAX_VOTES:
            self._left.clear()
        self._publish_due()
        checked = 0
        for duty in self.consensus.duties(self.peer):
            key = (duty.case, duty.attempt)
            if duty.what != "check" or key in self._hidden or key in self._left:
                continue
            if checked >= most:
                break
            if self.consensus.now() + self._check_s >= duty.until:
                # It would end too late, and keep this peer from revealing other votes in time.
                self._left.add(key)
                self._check_s *= PATIENCE
                continue
            checked += 1
            self._commit(key, duty.claim)
        if checked:
            self._publish_due()
        return checked

    def _publish_due(self) -> None:
        for duty in self.consensus.duties(self.peer):
            key = (duty.case, duty.attempt)
            if duty.what == "reveal" and key in self._hidden:
                self.try_publish(self._hidden.pop(key))
            elif duty.what == "state":
                self._hidden.pop(key, None)
                self._left.discard(key)
                verdict = Verdict(
                    peer=self.peer, case=duty.case, attempt=duty.attempt, marks=duty.marks
                )
                self.try_publish(verdict)

    def _commit(self, key: tuple[bytes, int], claim: Claim) -> None:
        before = self.consensus.now()
        checked = self._check(claim)
        # More than the time to commit is sleep, or a clock set forward.
        self._check_s = min(self.consensus.now() - before, self.consensus.times.commit_s)
        if checked is None or len(self._hidden) >= MAX_VOTES:
            self._left.add(key)
            return
        case, attempt = key
        reveal = Reveal(
            peer=self.peer,
            case=case,
            attempt=attempt,
            vote=checked.vote,
            evidence=checked.evidence,
            salt=self._salt(),
        )
        commitment = Commitment(peer=self.peer, case=case, attempt=attempt, digest=hide(reveal))
        if self.try_publish(commitment):
            self._hidden[key] = reveal
        else:
            self._left.add(key)
