"""Agreement on the electorate of a round, without a leader: each peer states a digest of what it
computed (`View`), and one root counts.

    begin of round r + 2      votes on claims of r - 1 are over
      + skew_s                each computes its electorate of r, and publishes its view
      + 2 skew_s              one root counts; a peer that computed another pulls the log of one
                              that states it, and opens that electorate as soon as it has it
      + 3 skew_s              draws begin. If no root counts nobody is drawn for r (`void`)

Which root counts: docs/internals.md, "Agreement on an electorate".
"""

from __future__ import annotations

from collections import defaultdict
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
        """Count ``view``.

        Raises ValueError if it is of another round, or its author stated another one.
        """
        if view.round != self.round:
            raise ValueError(f"a view of round {view.round} is not one of round {self.round}")
        if self._views.setdefault(view.peer, view) != view:
            self._twice.add(view.peer)
            raise ValueError("a peer stated two views of one round")

    def propose(self, own: View, electorate: Electorate, voters: Collection[str] | None) -> None:
        """Set what this peer computed.

        ``voters``: those whose views count; None if not known, then everybody's count.
        """
        self._own = own
        self._voters = None if voters is None else frozenset(voters)
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
        return self._counted("root")

    @property
    def table(self) -> bytes | None:
        return self._counted("table")

    @property
    def electorate(self) -> Electorate | None:
        return self._known.get(self.root or b"")

    def sources(self) -> tuple[str, ...]:
        """Return the peers whose log to pull: those who state what counts if that is not the own,
        or the commonest if none counts.

        Empty if there is nothing to learn. Peers that may know most come first.
        """
        if self._own is None:
            return ()
        wanted: set[str] = set()
        if self.electorate is None:
            _, wanted = self._commonest("root")
        table, tabled = self._commonest("table")
        if self._own.table != table and not wanted:
            wanted = tabled
        others = wanted - {self._own.peer}
        return tuple(sorted(others, key=lambda peer: (peer not in tabled, peer)))

    def _counted(self, field: Literal["root", "table"]) -> bytes | None:
        found, stating = self._commonest(field)
        enough = self._voters is None or len(stating) * 3 > len(self._voters)
        return found if self._own is not None and enough else None

    def _commonest(self, field: Literal["root", "table"]) -> tuple[bytes | None, set[str]]:
        """Return what most state, the smallest if there are several, and who states it."""
        stating: defaultdict[bytes, set[str]] = defaultdict(set)
        for peer in self._views.keys() - self._twice:
            if self._voters is None or peer in self._voters:
                stating[getattr(self._views[peer], field)].add(peer)
        if not stating:
            return None, set()
        return min(stating.items(), key=lambda item: (-len(item[1]), item[0]))
