"""Model of a swarm from the statuses of its nodes: fed with events, read by the views.

It never waits, reads no clock and trusts no input: every collection is bounded, and a peer is known by its key alone.
"""

from __future__ import annotations

import statistics
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.node.watch.events import Connected, Described, Disconnected, Event, Heard, MessageRefused, Unreachable, Watching
from shoal.swarm.topics.status import PER_SECOND, TAIL, RoundStatus, Status

MAX_PEERS = 2048
MAX_POINTS = 512  # of each curve; a curve that is full keeps every other point
MAX_PAIRS = 4096  # exchanges that are remembered
MAX_LOG = 256
SMOOTHED = 1 / 32  # part of a curve over which it is smoothed
BINS = 64  # points of the curve of the mean
SILENT_S = 8.0  # seconds without a status after which a node of a small swarm is shown as silent
MISSED = 4  # missed statuses, in a large one
GONE = ("leaving", "done")


class Curve:
    """Points (x, y) by growing x, at most `MAX_POINTS`: when full, every other one goes, so the whole run stays in view."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._smooth: list[tuple[float, float]] | None = None
        self._every = 1
        self._skipped = 0

    def add(self, x: float, y: float) -> None:
        """Append a point; one with no larger x begins the curve anew (a node that resumed from a checkpoint)."""
        self._smooth = None
        if self.points and x < self.points[-1][0]:
            self.points = [point for point in self.points if point[0] < x]
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self.points.append((x, y))
        if len(self.points) > MAX_POINTS:
            self.points = self.points[::2]
            self._every *= 2

    def smooth(self) -> list[tuple[float, float]]:
        """Return the points with each y the exponential mean over about `SMOOTHED` of the curve; made anew only after `add`."""
        if self._smooth is None:
            share = 1 / max(len(self.points) * SMOOTHED, 1)
            found: list[tuple[float, float]] = []
            for x, y in self.points:
                found.append((x, found[-1][1] + (y - found[-1][1]) * share if found else y))
            self._smooth = found
        return self._smooth


def mean_curve(curves: Iterable[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return the mean of all ``curves`` in `BINS` equal parts of x; parts without a point are left out."""
    points = [point for curve in curves for point in curve]
    low, high = min((x for x, _ in points), default=0.0), max((x for x, _ in points), default=0.0)
    bins: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        bins.setdefault(int((x - low) * (BINS - 1) / ((high - low) or 1.0)), []).append((x, y))
    return [(statistics.fmean(x for x, _ in part), statistics.fmean(y for _, y in part)) for _, part in sorted(bins.items())]


@dataclass
class Peer:
    """Node by its last status. Times in Unix seconds of this machine, rates per second."""

    status: Status
    heard: float
    since: float
    silent: bool = False
    sent_rate: float = 0.0
    received_rate: float = 0.0
    partners: tuple[str, ...] = ()
    """Ends of the ids of its partners in its newest round."""
    loss: Curve = field(default_factory=Curve)
    """Training loss in nats, by round."""
    reward: Curve = field(default_factory=Curve)
    faults: dict[str, int] = field(default_factory=dict)

    @property
    def here(self) -> bool:
        """True if it takes part, as far as known."""
        return not self.silent and self.status.state not in GONE

    @property
    def doing(self) -> str:
        """What it does, in a word or two, as far as known."""
        return (
            "silent" if self.silent else self.status.state if self.status.state in GONE else self.status.doing or self.status.state
        )


@dataclass(frozen=True)
class LogLine:
    """Line of the event log: ``kind`` is peer, fault or verdict."""

    time: float
    kind: str
    text: str


class SwarmView:
    """Model of one swarm. `take` events, `tick` now and then, and read it."""

    def __init__(self) -> None:
        self.swarm = ""
        self.title: Described | None = None
        self.peers: OrderedDict[str, Peer] = OrderedDict()
        self.connected: set[str] = set()
        self.unreachable: OrderedDict[str, str] = OrderedDict()
        self.refused: Counter[str] = Counter()
        self.heard = 0
        self.log: deque[LogLine] = deque(maxlen=MAX_LOG)
        self.logged = 0
        """Lines of the log so far, with those that are forgotten."""
        self.now = 0.0
        self._rounds_seen: dict[str, tuple[int, int]] = {}
        self._pairs: OrderedDict[tuple[int, str, str], None] = OrderedDict()

    # -- in --------------------------------------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        """Take in an event."""
        self.now = max(self.now, event.time)
        if isinstance(event, Heard):
            self._status(event.status, event.time)
        elif isinstance(event, MessageRefused):
            self.refused[event.reason if len(self.refused) < 64 or event.reason in self.refused else "other"] += 1
        elif isinstance(event, Connected):
            self.connected.add(event.peer)
            self.unreachable.pop(event.peer, None)
        elif isinstance(event, Disconnected):
            self.connected.discard(event.peer)
        elif isinstance(event, Unreachable):
            self.unreachable[event.peer] = event.reason
            if len(self.unreachable) > MAX_PEERS:
                self.unreachable.popitem(last=False)
        elif isinstance(event, Described):
            self.title = event
        elif isinstance(event, Watching):
            self.swarm = event.swarm

    def tick(self, now: float) -> None:
        """Mark peers without a recent status as silent."""
        self.now = max(self.now, now)
        limit = max(SILENT_S, MISSED * len(self.peers) / PER_SECOND)
        for peer in self.peers.values():
            if peer.here and self.now - peer.heard > limit:
                peer.silent = True
                self._note("peer", f"{peer.status.name} fell silent in round {peer.status.round}")

    def _status(self, status: Status, now: float) -> None:
        self.heard += 1
        fragments = 1 if self.title is None else self.title.fragments
        status = status.model_copy(update={"round": status.round // fragments})  # each fragment's exchange has a number there
        peer = self.peers.get(status.peer)
        if peer is None:
            peer = self.peers[status.peer] = Peer(status, now, now)
            self._note("peer", f"{status.name} is {status.state} in round {status.round}")
            self._make_room()
            peer.faults = dict(status.faults)  # earlier faults are not reported
        else:
            self._compare(peer, status, now)
        peer.status, peer.heard, peer.silent = status, now, False
        for done in status.rounds:
            self._round(peer, done, fragments)
        if status.reward is not None:
            peer.reward.add(status.round, status.reward)

    def _compare(self, peer: Peer, status: Status, now: float) -> None:
        before = peer.status
        passed = status.issued - before.issued
        if passed > 0:
            peer.sent_rate = _smooth(peer.sent_rate, max(status.sent - before.sent, 0) / passed, passed)
            peer.received_rate = _smooth(peer.received_rate, max(status.received - before.received, 0) / passed, passed)
        if peer.silent:
            self._note("peer", f"{status.name} is back, {status.state} in round {status.round}")
        elif status.state != before.state:
            self._note("peer", f"{status.name} is {status.state} now, in round {status.round}")
        for fault, count in status.faults:
            # The first, and each time that the count has doubled: a fault of every round would leave no room for other news.
            if count.bit_length() > peer.faults.get(fault, 0).bit_length():
                self._note("fault", f"{status.name}: {fault}, so far {count}")
            peer.faults[fault] = count
        if (status.invalid or 0) > (before.invalid or 0):
            self._note("verdict", f"{status.name} found a claim invalid, {status.invalid} of {status.checked or 0} so far")
        for banned in set(status.banned) - set(before.banned):
            self._note("verdict", f"{self.name(banned[-TAIL:])} is banned, says {status.name}")

    def _round(self, peer: Peer, done: RoundStatus, fragments: int) -> None:
        me, place = peer.status.peer, (done.step, done.round)
        seen = self._rounds_seen.get(me, (-1, -1))
        if place <= seen and seen[0] <= peer.status.step:  # else it resumed from a checkpoint
            return
        self._rounds_seen[me] = place
        peer.partners = done.partners
        if done.loss is not None:
            peer.loss.add(done.round / fragments, done.loss)
        for other in done.partners:
            low, high = sorted((me[-TAIL:], other))
            self._pairs[(done.round, low, high)] = None
        while len(self._pairs) > MAX_PAIRS:
            self._pairs.popitem(last=False)

    def _make_room(self) -> None:
        if len(self.peers) > MAX_PEERS:
            gone = min(self.peers, key=lambda peer: self.peers[peer].heard)
            del self.peers[gone]
            self._rounds_seen.pop(gone, None)

    def _note(self, kind: str, text: str) -> None:
        self.logged += 1
        self.log.append(LogLine(self.now, kind, text))

    # -- out -------------------------------------------------------------------------------------------------------------

    def name(self, tail: str) -> str:
        """Return the display name of the peer whose id ends with ``tail``."""
        return next((peer.status.name for key, peer in self.peers.items() if key.endswith(tail)), "…" + tail)

    def rows(self) -> list[tuple[str, Peer]]:
        """Return all peers, those that take part first, by name."""
        return sorted(self.peers.items(), key=lambda item: (not item[1].here, item[1].status.name, item[0]))

    def here(self) -> list[Peer]:
        """Return the peers that take part, as far as known."""
        return [peer for peer in self.peers.values() if peer.here]

    def pairs(self, rounds: int = 0) -> dict[tuple[str, str], int]:
        """Count the exchanges of each pair, by the ends of their ids; in the newest ``rounds`` rounds if that is not 0."""
        newest = max((number for number, _, _ in self._pairs), default=0)
        counted = Counter((a, b) for number, a, b in self._pairs if not rounds or number > newest - rounds)
        return dict(counted)

    def totals(self) -> dict[str, Any]:
        """Summarise the swarm: peers, rounds (lowest, highest), mean loss; steps, tokens (without waiting) and bytes a second."""
        here = self.here()
        rounds = [peer.status.round for peer in here]
        return {
            "peers": len(here),
            "known": len(self.peers),
            "connected": len(self.connected),
            "round_min": min(rounds, default=None),
            "round_max": max(rounds, default=None),
            "loss": _mean(peer.status.loss for peer in here),
            "reward": _mean(peer.status.reward for peer in here),
            "steps_per_s": sum(peer.status.steps_per_s for peer in here),
            "tokens_per_s": sum(peer.status.tokens_per_s for peer in here),
            "sent_per_s": sum(peer.sent_rate for peer in here),
            "sent": sum(peer.status.sent for peer in self.peers.values()),
            "received": sum(peer.status.received for peer in self.peers.values()),
            "rollouts_own": _sum(peer.status.rollouts_own for peer in self.peers.values()),
            "rollouts_foreign": _sum(peer.status.rollouts_foreign for peer in self.peers.values()),
            "claims": _sum(peer.status.claims for peer in self.peers.values()),
            "checked": _sum(peer.status.checked for peer in self.peers.values()),
            "invalid": _sum(peer.status.invalid for peer in self.peers.values()),
            "heard": self.heard,
            "refused": sum(self.refused.values()),
        }

    def snapshot(self) -> dict[str, Any]:
        """Return the whole model as JSON, for a page."""
        return {
            "swarm": self.swarm,
            "title": None if self.title is None else self.title.model_dump(include={"name", "task", "method"}),
            "now": self.now,
            "totals": self.totals(),
            "refused": dict(self.refused),
            "unreachable": dict(list(self.unreachable.items())[-8:]),
            "peers": [
                {
                    "id": key,
                    "tail": key[-TAIL:],
                    "here": peer.here,
                    "silent": peer.silent,
                    "doing": peer.doing,
                    "age": max(self.now - peer.heard, 0.0),
                    "sent_per_s": peer.sent_rate,
                    "received_per_s": peer.received_rate,
                    "partners": [self.name(tail) for tail in peer.partners],
                    "curve": peer.loss.smooth(),
                    "rewards": peer.reward.smooth(),
                    **peer.status.model_dump(mode="json", exclude={"doing", "swarm", "peer", "rounds", "addresses"}),
                }
                for key, peer in self.rows()
            ],
            "means": {
                "curve": mean_curve(peer.loss.smooth() for peer in self.peers.values()),
                "rewards": mean_curve(peer.reward.smooth() for peer in self.peers.values()),
            },
            "pairs": [[a, b, count] for (a, b), count in sorted(self.pairs().items())],
            "news": [[item.time, item.kind, item.text] for item in self.log],
        }


def _smooth(before: float, value: float, seconds: float) -> float:
    """Return a running mean over about five seconds."""
    share = min(seconds / 5.0, 1.0) if before else 1.0
    return before + (value - before) * share


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None


def _sum(values: Iterable[int | None]) -> int | None:
    found = [value for value in values if value is not None]
    return sum(found) if found else None
