"""A node's account of its own exchanges and of missing members, for its record in the directory and for its user.

Members that vanish together, unlike crashed machines, which vanish one by one, show a network partition. A member vanishes when its
record expires though it did not announce that it leaves. A node suspects a partition if at least two vanished at about the same
moment, or all others did, even a single one: then this node may be the one that is cut off. The suspicion ends when a vanished
member returns. It is no proof: one machine with two nodes looks the same when it loses power.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.swarm.exchange.attempt import RECENT, ExchangeStats
from shoal.swarm.membership.membership import DirectoryView
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.fields import Sketch
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

        ``belongs``: predicate of peers that would be in view if they were there; others were reassigned to another bucket.
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


LOOK_S = 1.0  # seconds between two looks at the members: records change every five
AGAIN_S = 600.0  # seconds between two sentences about weights that differ: a hostile peer may say so of its own in each round


class SelfReport:
    """One node's account. ``sketch`` gives a sketch of the slow weights (``shoal.swarm.state.resync``); ``clock``: seconds."""

    def __init__(
        self,
        stats: ExchangeStats,
        directory: DirectoryView,
        me: str,
        sketch: Callable[[], Sketch | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats, self._directory, self._sketch, self._clock = stats, directory, sketch, clock
        self.absence = PartitionDetector(me)
        self._waits: deque[float] = deque(maxlen=RECENT)
        self._looked = float("-inf")
        self._apart: dict[bool, float] = {}
        """When it was said last that weights differ, by whether this node gives way."""
        self._news: list[str] = []

    def waited(self, seconds: float) -> None:
        """Note that training stood still for ``seconds`` in the round that has just ended."""
        self._waits.append(seconds)

    def apart(self, peers: Collection[str], members: Mapping[str, Member], gives_way: bool) -> None:
        """Note, for ``news``, that the weights of ``peers`` differ from this node's; once for each event."""
        now = self._clock()
        if not peers or now - self._apart.get(gives_way, float("-inf")) < AGAIN_S:
            return
        self._apart[gives_way] = now
        names = [members[peer].name if peer in members else short(peer) for peer in sorted(peers)]
        them = "1 other member" if len(names) == 1 else f"{len(names)} other members"
        them += f" ({', '.join(names[:MAX_MISSING])}{', …' if len(names) > MAX_MISSING else ''})"
        who = (
            f"this node's weights differ from those of {them}, so it takes over theirs"
            if gives_way
            else f"the weights of {them} differ from this node's, and are to give way to them"
        )
        self._news.append(f"{who}; to load other weights on purpose, call opt.restart_from_model() on all members")

    def news(self) -> list[str]:
        """Return the sentences about differing weights that were not returned yet."""
        news, self._news = self._news, []
        return news

    def details(self) -> dict[str, Any]:
        """Return the fields of this node's ``Member`` that have defaults."""
        suspected = self.absence.suspected
        return {
            **self.stats.report(),
            "wait_s": sum(self._waits) / len(self._waits) if self._waits else 0.0,
            "sketch": self._sketch(),
            **(suspected.fields() if suspected is not None else {}),
        }

    def events(self) -> list[str]:
        """Return sentences about members that vanished or came back. Looks at most once a second, and touches no network."""
        now = self._clock()
        if now - self._looked < LOOK_S:
            return []
        self._looked = now
        return self.absence.look(self._directory.everyone(), self._directory.departed(), now, self._directory.belongs)
