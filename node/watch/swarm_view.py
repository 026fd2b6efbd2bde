"""Model of a swarm from the statuses of its nodes: fed with events, read by the views.

It never waits, reads no clock and trusts no input: every collection is bounded, and a peer is known
by its key alone.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal.node.watch.connections import Connections
from shoal.node.watch.consensus import Consensus
from shoal.node.watch.curves import Curve
from shoal.node.watch.event_log import EventLog, LogLine
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
from shoal.node.watch.rate_curves import RateCurves
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
MAX_REASONS = 64  # for refusing a message that are counted apart
SILENT_S = 8.0  # seconds without a status after which a node of a small swarm is shown as silent
MISSED = 4  # missed statuses, in a large one


@dataclass
class Peer:
    """Node by its last status. Times in Unix seconds of this machine, rates per second."""

    status: Status
    heard: float
    round: int = 0
    """The round that it is in; its status counts exchanges, of which a round has one for each
    fragment.
    """
    place: tuple[int, int] = (-1, -1)
    """Step and exchange of the newest round that it has told of."""
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


class SwarmView:
    """Model of one swarm. `take` events, `tick` now and then, and read it."""

    def __init__(self) -> None:
        self.swarm = ""
        self.title: Described | None = None
        self.peers: OrderedDict[str, Peer] = OrderedDict()
        self.connections = Connections()
        self.refused: Counter[str] = Counter()
        self.heard = 0
        self.log = EventLog()
        self.now = 0.0
        self.meetings = Meetings()
        self.confirmations = Confirmations()
        self.begun: float | None = None
        """Unix time of the first status."""
        self.rates = RateCurves()
        self.consensus = Consensus()
        self.changes: tuple[ChangePart, ...] = ()
        """What the creator has changed of the settings."""

    # -- in ----------------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        self.now = max(self.now, event.time)
        if isinstance(event, Heard):
            # By the newest time: a clock that was set back would make all seem silent.
            self._status(event.status, self.now)
        elif isinstance(event, Signed):
            self.confirmations.add(event.receipts)
        elif isinstance(event, MessageRefused):
            is_told = event.reason in self.refused or len(self.refused) < MAX_REASONS
            self.refused[event.reason if is_told else "other"] += 1
        elif isinstance(event, Connected):
            self.connections.opened(event.peer)
        elif isinstance(event, Disconnected):
            self.connections.closed(event.peer)
        elif isinstance(event, BootstrapNode):
            self.connections.known_as_bootstrap(event.peer)
        elif isinstance(event, Changed):
            self._change(event.parts)
        elif isinstance(event, Unreachable):
            if event.peer not in self.connections.unreachable:
                # Strangers may read it, so without addresses.
                why = re.split(r" \(| at /| /", event.reason)[0]
                self._note("peer", f"…{event.peer[-TAIL:]} {why}")
            self.connections.unreachable[event.peer] = event.reason
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
        if self.begun is not None and self.rates.is_due(self.now):
            self.rates.add(self.now, self.begun, self.totals())

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
        if status.projection is not None:
            here = [key for key, peer in self.peers.items() if peer.here]
            self.consensus.add(status.peer, status.projection, here, fragments)
        # In a recording nothing else tells that time goes by.
        if self.rates.is_due(self.now):
            self.tick(self.now)

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
        # With a lower step than seen it resumed from a checkpoint.
        if place <= peer.place and peer.place[0] <= peer.status.progress.step:
            return
        peer.place = place
        peer.partners = done.partners
        if done.loss is not None:
            peer.loss.add(done.round / fragments, done.loss)
            peer.loss_over_time.add(self.now - (self.begun or self.now), done.loss)
        self.meetings.add(done.round, me[-TAIL:], done.partners, self.now)

    def _make_room(self) -> None:
        if len(self.peers) > MAX_PEERS:
            gone = min(self.peers, key=lambda peer: self.peers[peer].heard)
            del self.peers[gone]

    def _note(self, kind: str, text: str) -> None:
        self.log.add(LogLine(self.now, kind, text))

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
            "connected": len(self.connections.peers),
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


def _groups_and_checks(peers: Collection[Peer]) -> dict[str, Any]:
    """Sum what peers that share rollouts, and peers that verify, have counted."""
    rollouts = [peer.status.rollouts for peer in peers if peer.status.rollouts is not None]
    unused = Counter[str]()
    for one in rollouts:
        unused.update(dict(one.unused))
    checks = [peer.status.checks for peer in peers if peer.status.checks is not None]
    return {
        "groups_own": _sum(one.groups_own for one in rollouts),
        "groups_foreign": _sum(one.groups_foreign for one in rollouts),
        "groups_seen": _sum(one.groups_seen for one in rollouts),
        "groups_unused": dict(unused.most_common()) if rollouts else None,
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
