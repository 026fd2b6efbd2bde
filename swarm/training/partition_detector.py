"""Suspects a network partition, by how members vanish.

Members that vanish together, unlike crashed machines, which vanish one by one, show a network
partition. A member vanishes when its record expires though it did not announce that it leaves. A
node suspects a partition if at least two vanished at about the same moment, or all others did, even
a single one: then this node may be the one that is cut off. The suspicion ends when a vanished
member returns. It is no proof: one machine with two nodes looks the same when it loses power.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.swarm.p2p.newest import Newest
from shoal.swarm.wire.messages import Member
from shoal.swarm.wire.record import MAX_MISSING

TOGETHER_S = 12.0
"""By which last signs of peers that were cut off together differ: a record is renewed every 5 s and
read every 5 s, and a margin.
"""
CONFIRM_S = 10.0
"""That a member must be missing: a node that slept itself finds all records expired until it reads
again.
"""
FORGET_S = 3600.0
"""After which a missing member is forgotten."""
MAX_SEEN = 4096
"""Members that are remembered: anybody may publish records, and renew none."""
MAX_NAME_CHARS = 16


@dataclass(frozen=True)
class SuspectedPartition:
    """Suspicion that members ``names`` of ``of`` were cut off: their last signs lie within
    ``within_s`` seconds.
    """

    names: tuple[str, ...]
    of: int
    within_s: float

    def __str__(self) -> str:
        if self.of == 2:
            return (
                f"{some(self.names)} vanished without leaving, and nobody else is here: it has "
                "stopped, or this node is cut off; training goes on without a partner until it "
                "comes back"
            )
        return (
            f"a partition is suspected: {len(self.names)} of {self.of} members vanished within "
            f"{self.within_s:.0f} s ({some(self.names)}); training goes on with "
            f"{self.of - len(self.names)}, and they come together again by themselves"
        )

    def fields(self) -> dict[str, Any]:
        """Return the fields of a `Member` that report it."""
        return {
            "missing": len(self.names),
            "missing_of": self.of,
            "missing_within_s": self.within_s,
            "missing_names": tuple(name[:MAX_NAME_CHARS] for name in self.names[:MAX_MISSING]),
        }


@dataclass
class _LastSign:
    name: str
    issued: float
    heard: float
    missing_since: float | None = None


class PartitionDetector:
    """Detector that follows the members in view.

    ``me``: the own peer id. Seconds are of a monotonic clock of the caller.
    """

    def __init__(self, me: str) -> None:
        self._me = me
        self._seen = Newest[str, _LastSign](MAX_SEEN)
        self.suspected: SuspectedPartition | None = None

    def look(
        self,
        members: Mapping[str, Member],
        left: Collection[str],
        now: float,
        belongs: Callable[[str], bool] = lambda peer: True,
    ) -> list[str]:
        """Note the members in view and those that left on purpose; return what to report, in
        sentences.

        ``belongs``: predicate of peers that would be in view if they were there; others were
        reassigned to another bucket.
        """
        back = self._note_seen(members, now)
        self._note_missing(members, now)
        for peer, seen in list(self._seen.items()):
            if seen.missing_since is None:
                continue
            is_expected = peer not in left and peer != self._me and belongs(peer)
            if not is_expected or now - seen.missing_since > FORGET_S:
                del self._seen[peer]
        before = self.suspected
        self.suspected = self._suspect(members, now)
        return _said(before, self.suspected, back)

    def _note_seen(self, members: Mapping[str, Member], now: float) -> list[str]:
        """Note the last signs of ``members``; return the names of those that were missing."""
        back = []
        for peer, member in members.items():
            seen = self._seen.get(peer)
            if seen is not None and self._confirmed(seen, now):
                back.append(member.name)
            if seen is None or seen.issued != member.issued or seen.missing_since is not None:
                self._seen[peer] = _LastSign(member.name, member.issued, now)
        return back

    def _note_missing(self, members: Mapping[str, Member], now: float) -> None:
        for peer, seen in self._seen.items():
            if peer not in members and seen.missing_since is None:
                seen.missing_since = now

    def _confirmed(self, seen: _LastSign, now: float) -> bool:
        return seen.missing_since is not None and now - seen.missing_since >= CONFIRM_S

    def _suspect(self, members: Mapping[str, Member], now: float) -> SuspectedPartition | None:
        missing = [seen for seen in self._seen.values() if self._confirmed(seen, now)]
        together = _longest_together(sorted(missing, key=lambda seen: seen.heard))
        alone = not members.keys() - {self._me}
        if len(together) < 2 and not (together and alone):
            return None
        names = tuple(sorted(seen.name for seen in together))
        return SuspectedPartition(
            names,
            len(members.keys() | {self._me}) + len(names),
            together[-1].heard - together[0].heard,
        )


def _longest_together(missing: list[_LastSign]) -> list[_LastSign]:
    """Return the most of ``missing``, in the order of their last signs, that vanished together."""
    together: list[_LastSign] = []
    first = 0
    for last, seen in enumerate(missing):
        while seen.heard - missing[first].heard > TOGETHER_S:
            first += 1
        if last + 1 - first > len(together):
            together = missing[first : last + 1]
    return together


def _said(
    before: SuspectedPartition | None, now: SuspectedPartition | None, back: list[str]
) -> list[str]:
    """Return what to report of a suspicion that was another before; ``back``: who has returned."""
    if now is not None and (before is None or set(now.names) - set(before.names)):
        return [str(now)]
    if before is None:
        return []
    returned = sorted(set(back) & set(before.names))
    if not returned:
        return []
    still = f"; {len(now.names)} are still missing" if now is not None else ""
    return [f"together again with {some(returned)}{still}"]


def some(names: Sequence[str]) -> str:
    """Return the first of ``names``, for a sentence."""
    return ", ".join(names[:MAX_MISSING]) + (", …" if len(names) > MAX_MISSING else "")
