"""Which records are in time, by the round that is on and when it began."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.verification.consensus.records import Claim, Dispute, Entry, Opening, Refused, View
from shoal.verification.consensus.sortition import OPENS


@dataclass(frozen=True)
class RecordWindow:
    """Records of ``round`` are taken, and those that a neighbour's clock explains: of the next
    round, and of the last one in the first ``skew_s`` seconds.
    """

    round: int
    since: float
    """Time at which the round began."""
    skew_s: float

    def has_begun(self, round: int) -> bool:
        """Return whether ``round`` may have begun at a neighbour."""
        return round <= self.round + 1

    def check(
        self, record: Claim | Entry | Dispute | Opening, came: float, *, is_opened: bool
    ) -> None:
        """Refuse a record of another round that came ``came``; ``is_opened``: verifiers were drawn
        for its round.
        """
        if not self.has_begun(record.round):
            raise Refused(f"A {record.KIND} was refused: its round has not begun.", "future")
        just_over = record.round == self.round - 1 and came < self.since + self.skew_s
        if just_over and not is_opened:
            return
        if record.round < self.round:
            raise Refused(f"A {record.KIND} was refused: its round is over.", "late")

    def check_view(self, view: View) -> None:
        """Refuse a view of another round than the one whose electorate is due, or the next."""
        if not self.has_begun(view.round + OPENS):
            raise Refused("A view was refused: its round has not begun.", "future")
        if view.round < self.round - OPENS:
            raise Refused("A view was refused: its round is over.", "late")
