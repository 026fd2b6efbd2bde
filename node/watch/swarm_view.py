"""Model of a swarm from the statuses of its nodes: fed with events, read by the views.

It never waits, reads no clock and trusts no input: every collection is bounded, and a peer is known by its key alone.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from shoal.node.watch import sentences
from shoal.node.watch.consensus import consensus_distance
from shoal.node.watch.curves import Curve
from shoal.node.watch.events import Connected, Described, Disconnected, Event, Heard, MessageRefused, Unreachable, Watching
from shoal.node.watch.meetings import Meetings
from shoal.swarm.topics.status import PER_SECOND, TAIL, RoundStatus, Status

MAX_PEERS = 2048
MAX_LOG = 256
SILENT_S = 8.0  # seconds without a status after which a node of a small swarm is shown as silent
MISSED = 4  # missed statuses, in a large one
GONE = ("leaving", "done")
SAMPLE_S = 1.0  # seconds between two points of the swarm's curves
COMPARED = 4  # newest exchanges of which the peers' weights are compared
RATES = ("steps_per_s", "tokens_per_s", "sent_per_s", "received_per_s")  # of the totals, drawn over time


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
    loss_over_time: Curve = field(default_factory=Curve)
    """The same by seconds since the first status that was heard."""
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

    @property
    def relayed(self) -> bool:
        """True if others reach it through a relay only."""
        return bool(self.status.addresses) and all("/p2p-circuit" in address for address in self.status.addresses)

    @property
    def roles(self) -> list[str]:
        """What it does for the swarm, as its status says."""
        found = ["trains"]
        if self.status.checked is not None:
            found.append("verifies")
        if self.status.rollouts_own is not None:
            found.append("shares rollouts")
        return found


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
        self.meetings = Meetings()
        self.begun: float | None = None
        """Unix time of the first status."""
        self.rates = {name: Curve() for name in RATES}
        """Totals of the swarm by seconds since `begun`."""
        self.consensus = Curve()
        """Consensus distance of the slow weights, by round."""
        self.met: dict[str, float] = {}
        """Connected peers, and since when (Unix time)."""
        self._projections: OrderedDict[int, dict[str, tuple[float, ...]]] = OrderedDict()
        self._sampled = float("-inf")

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
            self.met.setdefault(event.peer, event.time)
            self.unreachable.pop(event.peer, None)
        elif isinstance(event, Disconnected):
            self.connected.discard(event.peer)
            self.met.pop(event.peer, None)
        elif isinstance(event, Unreachable):
            if event.peer not in self.unreachable:
                why = re.split(r" \(| at /| /", event.reason)[0]  # strangers may read it, so without addresses
                self._note("peer", f"…{event.peer[-TAIL:]} {why}")
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
        limit = max(SILENT_S, MISSED * max(len(self.peers), self.size()) / PER_SECOND)
        for peer in self.peers.values():
            if peer.here and self.now - peer.heard > limit:
                peer.silent = True
                self._note("peer", f"{peer.status.name} fell silent in round {peer.status.round}")
        self._sample()

    def _sample(self) -> None:
        if self.begun is None or self.now - self._sampled < SAMPLE_S:
            return
        self._sampled, totals = self.now, self.totals()
        for name, curve in self.rates.items():
            curve.add(self.now - self.begun, float(totals[name]))

    def _status(self, status: Status, now: float) -> None:
        self.heard += 1
        self.begun = self.now if self.begun is None else self.begun
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
        self._compare_weights(status, fragments)
        if self.now - self._sampled >= SAMPLE_S:  # in a recording nothing else tells that time goes by
            self.tick(self.now)

    def _compare_weights(self, status: Status, fragments: int) -> None:
        """Take in the projection of a peer's weights; those of an exchange are compared when all have sent theirs, or it is old."""
        if status.projection is None:
            return
        number, norm, sums = status.projection
        if number not in self._projections and (points := self.consensus.points) and number / fragments <= points[-1][0]:
            return
        self._projections.setdefault(number, {})[status.peer] = (*sums, norm)
        while self._projections:
            oldest = min(self._projections)
            known = self._projections[oldest]
            complete = len(known) > 1 and all(key in known for key, peer in self.peers.items() if peer.here)
            if not complete and len(self._projections) <= COMPARED:
                return
            del self._projections[oldest]
            if (distance := consensus_distance(list(known.values()))) is not None:
                self.consensus.add(oldest / fragments, distance)

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
                self._note("fault", sentences.fault(status.name, fault, count))
            peer.faults[fault] = count
        if (status.invalid or 0) > (before.invalid or 0):
            self._note("verdict", sentences.invalid(status.name, status.invalid or 0, status.checked or 0))
        for banned in set(status.banned) - set(before.banned):
            self._note("verdict", sentences.banned(self.name(banned[-TAIL:]), status.name))

    def _round(self, peer: Peer, done: RoundStatus, fragments: int) -> None:
        me, place = peer.status.peer, (done.step, done.round)
        seen = self._rounds_seen.get(me, (-1, -1))
        if place <= seen and seen[0] <= peer.status.step:  # else it resumed from a checkpoint
            return
        self._rounds_seen[me] = place
        peer.partners = done.partners
        if done.loss is not None:
            peer.loss.add(done.round / fragments, done.loss)
            peer.loss_over_time.add(self.now - (self.begun or self.now), done.loss)
        self.meetings.add(done.round, me[-TAIL:], done.partners, self.now)

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
        return self.meetings.pairs(rounds)

    def size(self) -> int:
        """Return about how many peers take part: those heard of, or in buckets the median of their estimates, if that is more."""
        here = self.here()
        said = [peer.status.peers for peer in here if peer.status.peers is not None]
        return max(len(here), round(statistics.median(said)) if said else 0)

    def totals(self) -> dict[str, Any]:
        """Summarise the swarm: peers, rounds (lowest, highest), mean loss; steps, tokens (without waiting) and bytes a second.

        Of a swarm of buckets not everybody is heard of at once: then it is ``sampled``, ``size`` is the estimated number of its
        peers, and what is said a second is that of the ``peers`` heard of, times the share that they are.
        """
        here, size = self.here(), self.size()
        scale = size / max(len(here), 1)
        rounds = [peer.status.round for peer in here]
        return {
            "peers": len(here),
            "size": size,
            "sampled": size > len(here),
            "known": len(self.peers),
            "connected": len(self.connected),
            "round_min": min(rounds, default=None),
            "round_max": max(rounds, default=None),
            "loss": _mean(peer.status.loss for peer in here),
            "reward": _mean(peer.status.reward for peer in here),
            "steps_per_s": sum(peer.status.steps_per_s for peer in here) * scale,
            "tokens_per_s": sum(peer.status.tokens_per_s for peer in here) * scale,
            "sent_per_s": sum(peer.sent_rate for peer in here) * scale,
            "received_per_s": sum(peer.received_rate for peer in here) * scale,
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
