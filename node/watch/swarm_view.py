"""Model of a swarm from the statuses of its nodes: fed with events, read by the views.

It never waits, reads no clock and trusts no input: every collection is bounded, and a peer is known
by its key alone.
"""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from shoal.node.watch.events import (
    BootstrapNode,
    Changed,
    Connected,
    Described,
    Disconnected,
    Event,
    Heard,
    MessageRefused,
    Signed,
    Unreachable,
    Watching,
)
from shoal.swarm.changes import ChangePart, described
from shoal.swarm.p2p.addresses import range_met
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.topics.receipts import MAX_TOKEN_RATIO, Receipts, Work, confirmed, total
from shoal.swarm.topics.status import PER_SECOND, Status
from shoal.swarm.wire.record import GONE, TAIL, Checks, Rollouts, Round

FAULTS = {
    "daemon_restarts": ("had to start its network daemon again", "daemon restarts"),
    "internal_errors": ("met an error of its own code, not of the network", "own errors"),
    "without_partner": ("found no partner in a round and kept its own step", "no partner in"),
    "contributions_refused": ("refused a contribution that was too far away", "refused"),
}
"""Kind of fault -> what happened, and a short name before the count."""


def faults_of(status: Status) -> dict[str, int]:
    """Return how often each fault was in the run of the node of ``status``, without those of no
    time.
    """
    faults = {
        "daemon_restarts": status.faults.daemon_restarts,
        "internal_errors": status.faults.internal_errors,
        "without_partner": status.exchanges.without_partner,
        "contributions_refused": status.faults.contributions_refused,
    }
    return {kind: count for kind, count in faults.items() if count}


def fault_sentence(name: str, kind: str, count: int) -> str:
    """Return a sentence about the peer ``name``; ``count``: of all such faults of its run."""
    times = {1: "once", 2: "twice"}.get(count, f"{count:,} times")
    return f"{name} {FAULTS[kind][0]}, {times} so far"


def faults_label(faults: Mapping[str, int]) -> str:
    """Return `faults_of` in a few words; "" where there are none."""
    return ", ".join(f"{FAULTS[kind][1]} {count:,}" for kind, count in faults.items())


def change_sentence(part: ChangePart) -> str:
    """Return what a part of a change sets, and from when on."""
    return f"{described(part.settings())} from round {part.round} on"


MAX_POINTS = 512  # of each curve; a curve that is full keeps every other point
SMOOTHED = 1 / 32  # part of a curve over which it is smoothed
GAP = 6  # times the usual step of a curve, or of the chart: a longer one is a gap
DIGITS = 5  # significant ones in a chart

Points = Sequence[tuple[float, float]]


class Curve:
    """Points (x, y) by growing x, at most `MAX_POINTS`: when full, every other one goes, so the
    whole run stays in view.
    """

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._smooth: list[tuple[float, float]] | None = None
        self._every = 1
        self._skipped = 0

    def add(self, x: float, y: float) -> None:
        """Append a point; one with no larger x takes the place of all from there on (a node that
        resumed from a checkpoint).
        """
        self._smooth = None
        if self.points and x <= self.points[-1][0]:
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
        """Return the points with each y the exponential mean over about `SMOOTHED` of the curve;
        made anew only after `add`.
        """
        if self._smooth is None:
            share = 1 / max(len(self.points) * SMOOTHED, 1)
            found: list[tuple[float, float]] = []
            for x, y in self.points:
                found.append((x, found[-1][1] + (y - found[-1][1]) * share if found else y))
            self._smooth = found
        return self._smooth


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def grid(curves: Sequence[Points], size: int) -> list[float]:
    """Return at most ``size`` growing x at which curves are drawn together: their own, or equal
    steps where there are more.
    """
    found = sorted({x for points in curves for x, _ in points})
    if len(found) <= size:
        return found
    step = (found[-1] - found[0]) / (size - 1)
    return [found[0] + step * index for index in range(size)]


def laid(points: Points, xs: Sequence[float]) -> list[float | None]:
    """Return the y of a curve at each of ``xs``, straight between its points; None where no point
    is near.

    Behind its last point it stays as it was for a moment: others may have reported first.
    """
    steps = sorted(after - before for (before, _), (after, _) in pairwise(points))
    grid_step = (xs[-1] - xs[0]) / max(len(xs) - 1, 1) if xs else 0.0
    gap = GAP * max(steps[len(steps) // 2] if steps else 0.0, grid_step)
    found: list[float | None] = []
    for x in xs:
        at = bisect_left(points, x, key=lambda point: point[0])
        if at < len(points) and points[at][0] == x:
            found.append(rounded(points[at][1]))
        elif at == 0 or x - points[at - 1][0] > gap:
            found.append(None)
        elif at == len(points):
            found.append(rounded(points[-1][1]))
        else:
            (x0, y0), (x1, y1) = points[at - 1], points[at]
            found.append(None if x1 - x0 > gap else rounded(y0 + (y1 - y0) * (x - x0) / (x1 - x0)))
    return found


def chart(curves: Sequence[Points], size: int, most: int) -> dict[str, list[Any]]:
    """Return what a chart of many peers shows: ``x``, ``mean``, ``low`` and ``high`` of all, and
    ``each`` of the first ``most``.

    All have one y for each x, or None where there is none. The peers' curves are laid on the same
    x, so a late one does not bend the mean by where its points happen to be.
    """
    xs = grid(curves, size)
    each = [laid(points, xs) for points in curves]
    known = [[y for y in column if y is not None] for column in zip(*each, strict=True)]
    return {
        "x": [
            float(f"{x:.12g}") for x in xs
        ],  # rounds and seconds: five digits are too few for 100,000
        "mean": [rounded(statistics.fmean(ys)) if ys else None for ys in known],
        "low": [min(ys, default=None) for ys in known],
        "high": [max(ys, default=None) for ys in known],
        "each": each[:most],
    }


# Consensus distance of a swarm: how far apart the peers' slow weights are, from the projections in
# their statuses.


def consensus_distance(projections: Sequence[Sequence[float]]) -> float | None:
    """Return the RMS distance of all pairs over the RMS norm; None below two peers, or if all
    weights are zero.

    ``projections``: of each peer the sums, and last the norm (`shoal.optim.outer.sketch`). With K
    peers the error is about 1 / sqrt(32 (K - 1)) of the distance.
    """
    if len(projections) < 2:
        return None
    sums = [projection[:-1] for projection in projections]
    # The mean square over all pairs is twice the unbiased variance, so no pair has to be looked at.
    mean = [math.fsum(column) / len(sums) for column in zip(*sums, strict=True)]
    apart = 2 * math.fsum(math.dist(one, mean) ** 2 for one in sums) / (len(sums) - 1)
    size = math.fsum(projection[-1] ** 2 for projection in projections) / len(projections)
    return math.sqrt(apart / size) if size else None


MAX_PAIRS = 4096  # exchanges that are remembered
SHOWN = 6  # newest rounds that are told in words
MAX_ROUNDS = 64  # in which peers without a partner are remembered

Pair = tuple[str, str]


class Edge(NamedTuple):
    """Exchanges of one pair: ``times`` of them, the number of the newest ``round``, and the Unix
    time when it was heard of.
    """

    times: int
    round: int
    time: float


class Meetings:
    """Exchanges of a swarm. Peers are named by the ends of their ids."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[int, str, str], float] = OrderedDict()
        self._alone: OrderedDict[int, dict[str, None]] = OrderedDict()

    def add(self, round: int, me: str, partners: tuple[str, ...], now: float) -> None:
        """Note a round of ``me``. Both partners of a pair tell of it; the first to do so counts."""
        for other in partners:
            low, high = sorted((me, other))
            self._pairs.setdefault((round, low, high), now)
        while len(self._pairs) > MAX_PAIRS:
            self._pairs.popitem(last=False)
        if not partners and len(alone := self._alone.setdefault(round, {})) < MAX_PAIRS:
            alone[me] = None
        while len(self._alone) > MAX_ROUNDS:
            self._alone.popitem(last=False)

    def pairs(self, rounds: int = 0) -> dict[Pair, int]:
        """Count the exchanges of each pair; in the newest ``rounds`` rounds if that is not 0."""
        newest = max((number for number, _, _ in self._pairs), default=0)
        return dict(
            Counter(
                (a, b) for number, a, b in self._pairs if not rounds or number > newest - rounds
            )
        )

    def edges(self) -> dict[Pair, Edge]:
        found: dict[Pair, Edge] = {}
        for (number, a, b), time in self._pairs.items():
            before = found.get((a, b), Edge(0, -1, 0.0))
            newer = number >= before.round
            found[a, b] = Edge(
                before.times + 1, number if newer else before.round, time if newer else before.time
            )
        return found

    def newest(self) -> list[tuple[int, list[list[str]], list[str]]]:
        """Return the newest `SHOWN` rounds, newest first: number, the groups that averaged, and who
        had no partner.
        """
        numbers = sorted({number for number, _, _ in self._pairs} | set(self._alone), reverse=True)[
            :SHOWN
        ]
        return [
            (number, self._groups(number), sorted(self._alone.get(number, ())))
            for number in numbers
        ]

    def _groups(self, round: int) -> list[list[str]]:
        groups: dict[str, set[str]] = {}
        for number, a, b in self._pairs:
            if number == round:
                joined = groups.get(a, {a}) | groups.get(b, {b})
                groups.update(dict.fromkeys(joined, joined))
        return sorted(
            sorted(group) for group in {id(group): group for group in groups.values()}.values()
        )


MAX_SIGNED = 16_384  # pairs of a signer and another, of which the newest receipt is kept


class Confirmations:
    """Newest receipts of a swarm's peers for each other."""

    def __init__(self) -> None:
        self._signed = Newest[tuple[str, str], tuple[float, Work]](MAX_SIGNED)

    def add(self, receipts: Receipts) -> None:
        """Take in a record, whose signature was checked."""
        for peer, *_ in receipts.work:
            key = receipts.peer, peer
            if (
                receipts.issued > self._signed.get(key, (-1.0,))[0]
                and (work := receipts.of(peer)) is not None
            ):
                self._signed[key] = receipts.issued, work

    def of(self, peers: Collection[str], rounds: float) -> dict[str, dict[str, Work]]:
        """Return of each of ``peers`` what each other one confirms.

        Of exchanges what both sides signed, no more of one pair than there were ``rounds``; and of
        tokens no more an exchange than `MAX_TOKEN_RATIO` times what is usual: two keys of one owner
        sign for each other what they like.
        """
        found: dict[str, dict[str, Work]] = {peer: {} for peer in peers}
        for (signer, peer), (_, signed) in self._signed.items():
            if signer in found and peer in found:
                own = self._signed.get((peer, signer), (0.0, Work()))[1]
                part = min(rounds / max(own.exchanges, 1), 1.0)
                own = Work(math.ceil(own.exchanges * part), own.rounds * part, own.tokens * part)
                if any(work := confirmed(signed, own)):
                    found[peer][signer] = work
        each = [work for partners in found.values() for work in partners.values()]
        usual = statistics.median(
            [work.tokens / work.exchanges for work in each if work.exchanges] or [0.0]
        )
        return {
            peer: {
                signer: work._replace(
                    tokens=min(work.tokens, MAX_TOKEN_RATIO * usual * work.exchanges)
                )
                for signer, work in partners.items()
            }
            for peer, partners in found.items()
        }


MAX_PEERS = 2048
MAX_LOG = 256
SILENT_S = 8.0  # seconds without a status after which a node of a small swarm is shown as silent
MISSED = 4  # missed statuses, in a large one
SAMPLE_S = 1.0  # seconds between two points of the swarm's curves
COMPARED = 4  # newest exchanges of which the peers' weights are compared
# Of the totals, drawn over time.
RATES = ("steps_per_s", "tokens_per_s", "bytes_sent_per_s", "bytes_received_per_s")


@dataclass
class Peer:
    """Node by its last status. Times in Unix seconds of this machine, rates per second."""

    status: Status
    heard: float
    round: int = 0
    """The round that it is in; its status counts exchanges, of which a round has one for each
    fragment.
    """
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
        return not self.silent and self.status.progress.state not in GONE

    @property
    def doing(self) -> str:
        """What it does, in a word or two, as far as known."""
        progress = self.status.progress
        if self.silent:
            return "silent"
        if progress.state in GONE:
            return progress.state
        return progress.doing or progress.state

    @property
    def relayed(self) -> bool:
        """True if others reach it through a relay only."""
        return bool(self.status.addresses) and all(
            "/p2p-circuit" in address for address in self.status.addresses
        )

    @property
    def roles(self) -> list[str]:
        """What it does for the swarm, as its status says."""
        found = ["trains"]
        if self.status.checks is not None:
            found.append("verifies")
        if self.status.rollouts is not None:
            found.append("shares rollouts")
        return found


@dataclass(frozen=True)
class LogLine:
    """Line of the event log: ``kind`` is peer, change, fault or verdict."""

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
        self.unreachable = Newest[str, str](MAX_PEERS)
        self.refused: Counter[str] = Counter()
        self.heard = 0
        self.log: deque[LogLine] = deque(maxlen=MAX_LOG)
        self.logged = 0
        """Lines of the log so far, with those that are forgotten."""
        self.now = 0.0
        self._rounds_seen: dict[str, tuple[int, int]] = {}
        self.meetings = Meetings()
        self.confirmations = Confirmations()
        self.begun: float | None = None
        """Unix time of the first status."""
        self.rates = {name: Curve() for name in RATES}
        """Totals of the swarm by seconds since `begun`."""
        self.consensus = Curve()
        """Consensus distance of the slow weights, by round."""
        self.bootstrap: set[str] = set()
        """Connected peers that are bootstrap nodes."""
        self.changes: tuple[ChangePart, ...] = ()
        """What the creator has changed of the settings."""
        self._projections: OrderedDict[int, dict[str, tuple[float, ...]]] = OrderedDict()
        self._sampled = float("-inf")

    # -- in ----------------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        self.now = max(self.now, event.time)
        if isinstance(event, Heard):
            # By the newest time: a clock that was set back would make all seem silent.
            self._status(event.status, self.now)
        elif isinstance(event, Signed):
            self.confirmations.add(event.receipts)
        elif isinstance(event, MessageRefused):
            self.refused[
                event.reason if len(self.refused) < 64 or event.reason in self.refused else "other"
            ] += 1
        elif isinstance(event, Connected):
            self.connected.add(event.peer)
            self.unreachable.pop(event.peer, None)
        elif isinstance(event, Disconnected):
            self.connected.discard(event.peer)
            self.bootstrap.discard(event.peer)
        elif isinstance(event, BootstrapNode):
            self.bootstrap |= {event.peer} & self.connected
        elif isinstance(event, Changed):
            self._change(event.parts)
        elif isinstance(event, Unreachable):
            if event.peer not in self.unreachable:
                # Strangers may read it, so without addresses.
                why = re.split(r" \(| at /| /", event.reason)[0]
                self._note("peer", f"…{event.peer[-TAIL:]} {why}")
            self.unreachable[event.peer] = event.reason
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
                self._note("peer", f"{peer.status.name} fell silent in round {peer.round}")
        self._sample()

    def _sample(self) -> None:
        if self.begun is None or self.now - self._sampled < SAMPLE_S:
            return
        self._sampled, totals = self.now, self.totals()
        for name, curve in self.rates.items():
            curve.add(self.now - self.begun, float(totals[name]))

    def _change(self, parts: tuple[ChangePart, ...]) -> None:
        for part in parts:
            if part not in self.changes:
                self._note("change", f"the creator has changed {change_sentence(part)}")
        self.changes = parts

    def _status(self, status: Status, now: float) -> None:
        self.heard += 1
        self.begun = self.now if self.begun is None else self.begun
        fragments = 1 if self.title is None else self.title.fragments
        progress = status.progress
        number = progress.round // fragments
        peer = self.peers.get(status.peer)
        if peer is None:
            peer = Peer(status, now)
            self.peers[status.peer] = peer
            self._note("peer", f"{status.name} is {progress.state} in round {number}")
            self._make_room()
            # Earlier faults are not reported.
            peer.faults = faults_of(status)
        else:
            self._compare(peer, status, number)
        peer.status = status
        peer.round = number
        peer.heard = now
        peer.silent = False
        for done in status.rounds:
            self._round(peer, done, fragments)
        if status.rollouts is not None and status.rollouts.reward is not None:
            peer.reward.add(number, status.rollouts.reward)
        self._compare_weights(status, fragments)
        # In a recording nothing else tells that time goes by.
        if self.now - self._sampled >= SAMPLE_S:
            self.tick(self.now)

    def _compare_weights(self, status: Status, fragments: int) -> None:
        """Take in the projection of a peer's weights; those of an exchange are compared when all
        have sent theirs, or it is old.
        """
        if status.projection is None:
            return
        number, norm, sums = status.projection
        if (
            number not in self._projections
            and (points := self.consensus.points)
            and number / fragments <= points[-1][0]
        ):
            return
        self._projections.setdefault(number, {})[status.peer] = (*sums, norm)
        while self._projections:
            oldest = min(self._projections)
            known = self._projections[oldest]
            complete = len(known) > 1 and all(
                key in known for key, peer in self.peers.items() if peer.here
            )
            if not complete and len(self._projections) <= COMPARED:
                return
            del self._projections[oldest]
            if (distance := consensus_distance(list(known.values()))) is not None:
                self.consensus.add(oldest / fragments, distance)

    def _compare(self, peer: Peer, status: Status, number: int) -> None:
        """Tell what has changed since the peer's status before; it is in round ``number`` now."""
        before = peer.status
        passed = status.issued - before.issued
        if passed > 0:
            sent = max(status.link.bytes_sent - before.link.bytes_sent, 0)
            received = max(status.link.bytes_received - before.link.bytes_received, 0)
            peer.sent_rate = _smooth(peer.sent_rate, sent / passed, passed)
            peer.received_rate = _smooth(peer.received_rate, received / passed, passed)
        state = status.progress.state
        if peer.silent:
            self._note("peer", f"{status.name} is back, {state} in round {number}")
        elif state != before.progress.state:
            self._note("peer", f"{status.name} is {state} now, in round {number}")
        faults = faults_of(status)
        for fault, count in faults.items():
            # The first, and each time that the count has doubled: a fault of every round would
            # leave no room for other news.
            if count.bit_length() > peer.faults.get(fault, 0).bit_length():
                self._note("fault", fault_sentence(status.name, fault, count))
        peer.faults = faults
        self._compare_checks(status.name, status.checks or Checks(), before.checks or Checks())

    def _compare_checks(self, name: str, checks: Checks, before: Checks) -> None:
        if checks.invalid > before.invalid:
            self._note(
                "verdict",
                f"{name} checked a claim of another peer and found it invalid: "
                f"{checks.invalid:,} of {checks.checked:,} checks so far",
            )
        for peer in set(checks.banned) - set(before.banned):
            self._note(
                "verdict",
                f"{self.name(peer[-TAIL:])} is banned, as {name} reports: too many of its claims "
                "were found invalid",
            )

    def _round(self, peer: Peer, done: Round, fragments: int) -> None:
        me = peer.status.peer
        place = (done.step, done.round)
        seen = self._rounds_seen.get(me, (-1, -1))
        # With a lower step than seen it resumed from a checkpoint.
        if place <= seen and seen[0] <= peer.status.progress.step:
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

    # -- out ---------------------------------------------------------------------------------------

    def name(self, tail: str) -> str:
        """Return the display name of the peer whose id ends with ``tail``."""
        return next(
            (peer.status.name for key, peer in self.peers.items() if key.endswith(tail)), "…" + tail
        )

    def rows(self) -> list[tuple[str, Peer]]:
        return sorted(
            self.peers.items(), key=lambda item: (not item[1].here, item[1].status.name, item[0])
        )

    def here(self) -> list[Peer]:
        """Return the peers that take part, as far as known."""
        return [peer for peer in self.peers.values() if peer.here]

    def confirmed(self) -> dict[str, dict[str, Any]]:
        """Return what others confirm of each peer's work: the numbers of `Work`, of partners, and
        of their address ranges.
        """
        rounds = [peer.round for peer in self.peers.values()]
        fragments = 1 if self.title is None else self.title.fragments
        most = (statistics.median(rounds) + 2) * fragments if rounds else 0.0
        places = {
            key: range_met(key, peer.status.addresses, {}) for key, peer in self.peers.items()
        }
        return {
            peer: {
                **total(partners.values())._asdict(),
                "partners": len(partners),
                "ranges": len({places[signer] for signer in partners}),
                "elsewhere": total(
                    work for signer, work in partners.items() if places[signer] != places[peer]
                ).rounds,
            }
            for peer, partners in self.confirmations.of(self.peers, most).items()
        }

    def size(self) -> int:
        """Return about how many peers take part: those heard of, or in buckets the median of their
        estimates, if that is more.
        """
        here = self.here()
        said = [
            peer.status.progress.swarm_size or 0 for peer in here
        ]  # who sees the whole swarm states none: one liar is no majority
        return max(len(here), statistics.median_low(said) if said else 0)

    def totals(self) -> dict[str, Any]:
        """Summarise the swarm: peers, rounds (lowest, highest), mean loss; steps, tokens (without
        waiting) and bytes a second.

        Of a swarm of buckets not everybody is heard of at once: then it is ``sampled``, ``size`` is
        the estimated number of its peers, and what is said a second is that of the ``peers`` heard
        of, times the share that they are.
        """
        here, known, size = self.here(), self.peers.values(), self.size()
        scale = size / max(len(here), 1)
        rounds = [peer.round for peer in here]
        return {
            "peers": len(here),
            "size": size,
            "sampled": size > len(here),
            "known": len(known),
            "connected": len(self.connected),
            "round_min": min(rounds, default=None),
            "round_max": max(rounds, default=None),
            "loss": _mean(peer.status.loss.training for peer in here),
            "reward": _mean((peer.status.rollouts or Rollouts()).reward for peer in here),
            "steps_per_s": sum(peer.status.progress.steps_per_s for peer in here) * scale,
            "tokens_per_s": sum(peer.status.progress.tokens_per_s for peer in here) * scale,
            "bytes_sent_per_s": sum(peer.sent_rate for peer in here) * scale,
            "bytes_received_per_s": sum(peer.received_rate for peer in here) * scale,
            "bytes_sent": sum(peer.status.link.bytes_sent for peer in known),
            "bytes_received": sum(peer.status.link.bytes_received for peer in known),
            **_groups_and_checks(known),
            "confirmed": self._confirmed(),
            "heard": self.heard,
            "refused": sum(self.refused.values()),
        }

    def _confirmed(self) -> dict[str, Any] | None:
        """Sum what is confirmed, each exchange once; ``elsewhere``: rounds confirmed from another
        address range than the peer's.
        """
        each = [one for one in self.confirmed().values() if one["partners"]]
        sums = {name: sum(one[name] for one in each) for name in (*Work._fields, "elsewhere")}
        return (
            {**sums, "exchanges": sums["exchanges"] // 2, "partners": len(each)} if each else None
        )


def _groups_and_checks(peers: Collection[Peer]) -> dict[str, int | None]:
    """Sum what peers that share rollouts, and peers that verify, have counted."""
    rollouts = [peer.status.rollouts for peer in peers if peer.status.rollouts is not None]
    checks = [peer.status.checks for peer in peers if peer.status.checks is not None]
    return {
        "groups_own": _sum(one.groups_own for one in rollouts),
        "groups_foreign": _sum(one.groups_foreign for one in rollouts),
        "claims": _sum(one.claims for one in checks),
        "checked": _sum(one.checked for one in checks),
        "invalid": _sum(one.invalid for one in checks),
    }


def _smooth(before: float, value: float, seconds: float) -> float:
    share = min(seconds / 5.0, 1.0) if before else 1.0
    return before + (value - before) * share


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None


def _sum(values: Iterable[int]) -> int | None:
    found = list(values)
    return sum(found) if found else None
