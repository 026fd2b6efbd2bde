"""A peer as a verifier: it turns duties into signed records. A callback checks the claims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.verification.consensus.protocol import Consensus
from shoal.verification.consensus.records import Claim, Commitment, Reveal, Sign, Signed, Verdict, Vote, VoteRecord, hide
from shoal.verification.consensus.types import Refused

MAX_VOTES = 4096  # hidden votes that wait to be revealed


@dataclass(frozen=True)
class Checked:
    """Vote and at most 512 bytes of what was measured."""

    vote: Vote
    evidence: bytes = b""


Check = Callable[[Claim], Checked | None]
"""Verifies a claim; None abstains, because the budget is spent or the output cannot be had."""


class Voter:
    """``peer`` as a verifier in ``consensus``. ``publish`` spreads a record soon, and never waits; it may come back to this peer.
    ``salt``: 32 fresh secret bytes with each call, which also feed the next beacon.
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
        self.peer, self.consensus = peer, consensus
        self._publish, self._sign, self._check, self._salt = publish, sign, check, salt
        self._hidden: dict[tuple[bytes, int], Reveal] = {}
        self._left: set[tuple[bytes, int]] = set()
        self._takes = 0.0  # seconds that a check is expected to take

    def publish(self, record: VoteRecord) -> None:
        """Sign, take and spread a record of this peer. Raises Refused if the own consensus refuses it; then it is not sent."""
        signed = Signed.by(self._sign, record)
        self.consensus.take(signed)
        self._publish(signed)

    def work(self, most: int = 1) -> int:
        """Do what is due, first what others wait for; check at most ``most`` claims, which costs. Returns how many."""
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
            if self.consensus.now() + self._takes >= duty.until:
                self._left.add(key)  # it would end too late, and keep this peer from revealing other votes in time
                self._takes *= 0.75  # one slow check must not keep it from trying again
                continue
            checked += 1
            self._commit(key, duty.claim)
        if checked:
            self._publish_due()
        return checked

    def _publish_due(self) -> None:
        """Publish the reveals and verdicts that are due."""
        for duty in self.consensus.duties(self.peer):
            key = (duty.case, duty.attempt)
            if duty.what == "reveal" and key in self._hidden:
                self._try(self._hidden.pop(key))
            elif duty.what == "state":
                self._hidden.pop(key, None)
                self._left.discard(key)
                self._try(Verdict(peer=self.peer, case=duty.case, attempt=duty.attempt, marks=duty.marks))

    def _commit(self, key: tuple[bytes, int], claim: Claim) -> None:
        before = self.consensus.now()
        checked = self._check(claim)
        self._takes = self.consensus.now() - before
        if checked is None or len(self._hidden) >= MAX_VOTES:
            self._left.add(key)
            return
        reveal = Reveal(
            peer=self.peer, case=key[0], attempt=key[1], vote=checked.vote, evidence=checked.evidence, salt=self._salt()
        )
        if self._try(Commitment(peer=self.peer, case=key[0], attempt=key[1], digest=hide(reveal))):
            self._hidden[key] = reveal
        else:
            self._left.add(key)

    def _try(self, record: VoteRecord) -> bool:
        """Publish; return False if the record came too late, as after a long check. The consensus has counted that."""
        try:
            self.publish(record)
        except Refused:
            return False
        return True
