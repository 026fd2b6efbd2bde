"""Detection of network partitions: members that vanish together, unlike crashed machines, which vanish one by one.

A member vanishes when its record expires though it did not announce that it leaves. A node suspects a partition if at least two
vanished at about the same moment, or all others did, even a single one: then this node may be the one that is cut off. The
suspicion ends when a vanished member returns. It is no proof: one machine with two nodes looks the same when it loses power.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.swarm.wire.member import MAX_MISSING, Member

# A record is renewed every 5 s and read every 5 s: last signs of peers that were cut off together differ by both and a margin.
WITHIN = 12.0
CONFIRM = 10.0  # seconds that a member must be missing: a node that slept itself finds all records expired until it reads again
FORGET = 3600.0  # seconds after which a missing member is forgotten


@dataclass(frozen=True)
class SuspectedPartition:
    """Suspicion that members ``names`` of ``of`` were cut off: their last signs lie within ``within_s`` seconds."""

    names: tuple[str, ...]
    of: int
    within_s: float

    def __str__(self) -> str:
        some = ", ".join(self.names[:MAX_MISSING]) + (", …" if len(self.names) > MAX_MISSING else "")
        return (
            f"a partition is suspected: {len(self.names)} of {self.of} members vanished within {self.within_s:.0f} s ({some}); "
            f"training goes on with {self.of - len(self.names)}, and they come together again by themselves"
        )

    def fields(self) -> dict[str, Any]:
        """Return the fields of a `Member` that report it."""
        return {
            "missing": len(self.names),
            "missing_of": self.of,
            "missing_within_s": self.within_s,
            "missing_names": tuple(name[:16] for name in self.names[:MAX_MISSING]),
        }


@dataclass
class _LastSign:
    name: str
    issued: float
    heard: float
    missing_since: float | None = None


class PartitionDetector:
    """Detector that follows the members in view. ``me``: the own peer id. Seconds are of a monotonic clock of the caller."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._seen: dict[str, _LastSign] = {}
        self.suspected: SuspectedPartition | None = None

    def look(
        self,
        members: Mapping[str, Member],
        left: Collection[str],
        now: float,
        belongs: Callable[[str], bool] = lambda peer: True,
    ) -> list[str]:
        """Note the members in view and those that left on purpose; return what to report, in sentences.

        ``belongs``: predicate of peers that would be in view if they were there; others were dealt into another bucket.
        """
        back = []
        for peer, member in members.items():
            seen = self._seen.get(peer)
            if seen is None or seen.issued != member.issued or seen.missing_since is not None:
                if seen is not None and self._confirmed(seen, now):
                    back.append(member.name)
                self._seen[peer] = _LastSign(member.name, member.issued, now)
        for peer in [peer for peer in self._seen if peer not in members]:
            seen = self._seen[peer]
            if seen.missing_since is None:
                seen.missing_since = now
            if peer in left or peer == self._me or not belongs(peer) or now - seen.missing_since > FORGET:
                del self._seen[peer]
        before, self.suspected = self.suspected, self._suspect(members, now)
        if self.suspected is not None and (before is None or set(self.suspected.names) - set(before.names)):
            return [str(self.suspected)]
        if before is not None and (returned := sorted(set(back) & set(before.names))):
            still = f"; {len(self.suspected.names)} are still missing" if self.suspected is not None else ""
            return [f"together again with {', '.join(returned[:MAX_MISSING])}{', …' if len(returned) > MAX_MISSING else ''}{still}"]
        return []

    def _confirmed(self, seen: _LastSign, now: float) -> bool:
        return seen.missing_since is not None and now - seen.missing_since >= CONFIRM

    def _suspect(self, members: Mapping[str, Member], now: float) -> SuspectedPartition | None:
        missing = sorted((seen for seen in self._seen.values() if self._confirmed(seen, now)), key=lambda seen: seen.heard)
        together: list[_LastSign] = []
        for first, earliest in enumerate(missing):
            these = [seen for seen in missing[first:] if seen.heard - earliest.heard <= WITHIN]
            together = max(together, these, key=len)
        alone = not members.keys() - {self._me}
        if len(together) < 2 and not (together and alone):
            return None
        names = tuple(sorted(seen.name for seen in together))
        return SuspectedPartition(names, len(members.keys() | {self._me}) + len(names), together[-1].heard - together[0].heard)
