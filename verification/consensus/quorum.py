"""Agreement on the electorate of a round, without a leader: each peer states a digest of what it computed (`records.View`).

    begin of round r + 2      votes on claims of r - 1 are over
      + skew_s                each computes its electorate of r, and publishes its view
      + 2 skew_s              one root counts; a peer that computed another pulls the log of one that states it, and opens that
                              electorate as soon as it has it
      + 3 skew_s              draws begin. If no root counts nobody is drawn for r, by anybody (`electorate.void`)

A root counts that more than half of the last known electorate state; or, if they are divided, the commonest that more than a third
state, the smallest if several are: with fewer colluders than that somebody honest has computed it. Only peers count that could vote
now: those gone for long do not block the others. A peer that knows no electorate yet follows the commonest view that it receives,
and trusts its authors. Two views of one peer count as none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Literal

from shoal.verification.consensus.electorate import root
from shoal.verification.consensus.records import View
from shoal.verification.consensus.sortition import Electorate


class ViewQuorum:
    """Views of one ``round``, and which root and table count by them."""

    def __init__(self, round: int) -> None:
        self.round = round
        self._views: dict[str, View] = {}
        self._twice: set[str] = set()
        self._own: View | None = None
        self._voters: frozenset[str] | None = None
        self._known: dict[bytes, Electorate] = {}

    def __len__(self) -> int:
        return len(self._views)

    def take(self, view: View) -> None:
        """Count ``view``. Raises ValueError if it is of another round, or its author stated another one."""
        if view.round != self.round:
            raise ValueError(f"a view of round {view.round} is not one of round {self.round}")
        if self._views.setdefault(view.peer, view) != view:
            self._twice.add(view.peer)
            raise ValueError("a peer stated two views of one round")

    def propose(self, own: View, electorate: Electorate, voters: Collection[str] | None) -> None:
        """Set what this peer computed. ``voters``: those whose views count; None if not known, then everybody's count."""
        self._own, self._voters = own, None if voters is None else frozenset(voters)
        self._views.setdefault(own.peer, own)
        self._known[own.root] = electorate

    @property
    def proposed(self) -> Electorate | None:
        return self._known[self._own.root] if self._own else None

    def learned(self, electorate: Electorate) -> bool:
        """Keep another peer's ``electorate`` and return True if it is the one that counts."""
        if electorate.round != self.round or root(electorate) != self.root:
            return False
        self._known[root(electorate)] = electorate
        return True

    @property
    def root(self) -> bytes | None:
        """Root that counts by the views so far."""
        return self._counted("root")

    @property
    def table(self) -> bytes | None:
        """Digest of the table that counts by the views so far."""
        return self._counted("table")

    @property
    def electorate(self) -> Electorate | None:
        """Electorate that counts, if it is known here."""
        return self._known.get(self.root or b"")

    def sources(self) -> tuple[str, ...]:
        """Return the peers whose log to pull: those who state what counts if that is not the own, or the commonest if none counts.

        Empty if there is nothing to learn. Peers that may know most come first.
        """
        if self._own is None:
            return ()
        missing = self.electorate is None
        rooted = self._stating("root", self._commonest("root")) if missing else set()
        table = self._commonest("table")
        tabled = self._stating("table", table)
        wanted = rooted if self._own.table == table else rooted or tabled
        return tuple(sorted(wanted - {self._own.peer}, key=lambda peer: (peer not in tabled, peer)))

    def _counting(self, field: Literal["root", "table"]) -> dict[str, bytes]:
        return {
            peer: view.root if field == "root" else view.table
            for peer, view in self._views.items()
            if peer not in self._twice and (self._voters is None or peer in self._voters)
        }

    def _counted(self, field: Literal["root", "table"]) -> bytes | None:
        if self._own is None:
            return None
        if self._voters is None:
            return self._commonest(field)
        found, votes = self._commonest(field), self._counting(field)
        return found if sum(value == found for value in votes.values()) * 3 > len(self._voters) else None

    def _commonest(self, field: Literal["root", "table"]) -> bytes | None:
        count = Counter(self._counting(field).values())
        return min(count, key=lambda value: (-count[value], value), default=None)

    def _stating(self, field: Literal["root", "table"], value: bytes | None) -> set[str]:
        return {peer for peer, stated in self._counting(field).items() if stated == value}
