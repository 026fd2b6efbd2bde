"""Simulation of many peers in one process with a virtual clock: deterministic, instant, with faults
on demand.

Each peer is a thread running an ordinary training loop, but only one runs at a time: the one whose
virtual time is least. The same seed therefore gives the same bits on any machine under any load.

    def peer(exchange):
        opt = NoLoCo(inner(model), exchange, every=25)
        # a step takes 0.1 virtual seconds
        for batch in batches: ...; opt.step(); exchange.sleep(0.1)
        return model
    models = Simulation(["a", "b", "c", "d"], seed=0).run(peer)         # {peer: what it returned}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from torch import Tensor

from shoal.optim.codecs.base import Codec, Shape
from shoal.optim.codecs.mod4 import check_no_pair, for_pairs
from shoal.optim.codecs.pair_message import PairMessage, Reading
from shoal.optim.codecs.two_way import Average, two_way
from shoal.optim.exchange.averaging import mean_of, middle_mean, pair_mean
from shoal.optim.exchange.base import Contribution, Exchange, Handle, Mean, RoundKey
from shoal.optim.exchange.butterfly import (
    applies,
    assemble,
    average_share,
    deal,
    mean_of_averages,
)
from shoal.optim.exchange.common_mean import common_mean
from shoal.optim.exchange.pairing import chains, groups
from shoal.optim.exchange.update_screen import TRUSTING, UpdateScreen
from shoal.optim.exchange.virtual_time import VirtualTime

T = TypeVar("T")


@dataclass(frozen=True)
class Faults:
    """Faults of a simulation as pure functions: the same in every run."""

    delay: Callable[[str, RoundKey], float] = lambda peer, key: 0.0
    """Virtual seconds between a peer's start of an exchange and the arrival of its contribution."""
    drop: Callable[[str, RoundKey], bool] = lambda peer, key: False
    """True: this peer's contribution is lost, and its whole group gets no mean in that round."""
    kill: Mapping[str, float] = field(default_factory=dict)
    """Peer id -> virtual time of its death."""


@dataclass
class _Posted:
    """What a peer contributed to a round."""

    at: float
    """Virtual time of its arrival."""
    weight: float
    tensors: list[Tensor]
    """As they arrive: encoded and decoded."""
    codec: Codec
    state: tuple[float, ...]
    message: PairMessage | None
    """What was sent by a codec for pairs."""
    unweighted_count: int = 0

    def release(self) -> None:
        self.tensors.clear()
        self.message = None


@dataclass(frozen=True)
class _Share:
    """What one peer takes of one exchange."""

    members: tuple[str, ...]
    """Those of the mean."""
    reading: tuple[Reading, bytes] | None
    """With a codec for pairs: its partner's contribution as it reads it, and the blocks that the
    partner refuses.
    """


@dataclass(frozen=True)
class _Averaged:
    """What a compressed butterfly ends with."""

    tensors: list[Tensor]
    """The mean, of the same bits for all."""
    averages: Mapping[str, Average]
    """What each member sent back of its share."""


@dataclass(frozen=True)
class _Decision:
    """How a round ends for one peer."""

    group: tuple[str, ...]
    shares: tuple[_Share, ...]
    """Of the exchanges that count for it: none if it goes on without a partner, two for the middle
    of a chain.
    """


@dataclass
class _Round:
    """What the peers know of one exchange."""

    key: RoundKey
    first: tuple[str, str, list[Shape]]
    """The first peer, its codec, and the shapes that it sent: all must be alike."""
    only: tuple[str, ...]
    """The only peers of it, in place of all; empty: all."""
    posted: dict[str, _Posted] = field(default_factory=dict)
    unpartnered: set[str] = field(default_factory=set)
    decided: dict[str, _Decision] = field(default_factory=dict)
    fetched: set[str] = field(default_factory=set)
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Each peer's group, as long as the same peers are there."""
    averaged: dict[tuple[str, ...], _Averaged] = field(default_factory=dict)
    """By the members of a group that did not gather."""
    drawn_at: tuple[int, int] | None = None
    """The ``departures`` at which the groups were drawn."""


class Simulation(Generic[T]):
    """Run of several peers against an in-process exchange.

    Args:
        peers: their ids; all are members from the start.
        seed: of the pairing.
        size: peers per group; 2 is NoLoCo's pair, ``len(peers)`` averages over everyone. If pairs
            leave a peer over, the last three are a chain (`shoal.optim.exchange.pairing`).
        redrawn: rounds after which the groups are drawn anew; buckets of a swarm keep theirs for an
            epoch.
        wait: virtual seconds that a peer waits for its group in a round before it goes on without a
            partner.
        screens: the update screens of some peers; the others accept all. As over the network, a
            pair parts if one refuses the other's contribution, and a group goes on without a
            contribution that not all of the others accept.
    """

    def __init__(
        self,
        peers: Sequence[str],
        *,
        seed: int = 0,
        size: int = 2,
        redrawn: int = 1,
        wait: float = 10.0,
        faults: Faults | None = None,
        screens: Mapping[str, UpdateScreen] | None = None,
    ) -> None:
        self.peers = list(peers)
        if len(set(self.peers)) < len(self.peers):
            raise ValueError("two peers have the same id: give each an id of its own")
        self.seed = seed
        self.size = size
        self.redrawn = redrawn
        self.wait = wait
        self.faults = faults or Faults()
        self.screens = dict(screens or {})
        self.time = VirtualTime(self.peers, self.faults.kill)
        self.rounds: dict[RoundKey, _Round] = {}

    @property
    def now(self) -> float:
        return self.time.now

    def run(self, peer: Callable[[SimulatedExchange], T]) -> dict[str, T]:
        """Run ``peer(exchange)`` for every peer and return the results; killed peers have no entry.

        Raises a peer's exception.

        A simulation runs once only (RuntimeError), since its clock and its rounds are used up then.
        """
        return self.time.run(lambda name: peer(SimulatedExchange(self, name)))

    def group_of(self, name: str, round: _Round) -> tuple[str, ...]:
        """Return the peer's group among those available: a dead partner is replaced if another peer
        is left over.
        """
        if name in round.decided:
            return round.decided[name].group
        if name in round.unpartnered:
            return (name,)
        if round.drawn_at != self.time.departures:
            round.groups = {}
            for group in self._draw_groups(round):
                round.groups.update(dict.fromkeys(group, group))
            round.drawn_at = self.time.departures
        return round.groups[name]

    def is_complete(self, group: tuple[str, ...], round: _Round) -> bool:
        for peer in group:
            if peer not in round.posted or round.posted[peer].at > self.now:
                return False
        return True

    def part(self, group: tuple[str, ...], round: _Round) -> None:
        """End the round for a group of which not all are there. An exchange of a chain counts if
        its two peers are; all others have no partner: else they would find each other complete.
        """
        for exchange in self._exchanges_of(group, round):
            if exchange != group and self.is_complete(exchange, round):
                self.decide(exchange, round)
        round.unpartnered.update(peer for peer in group if peer not in round.decided)
        round.drawn_at = None

    def decide(self, group: tuple[str, ...], round: _Round) -> None:
        """Fix the group's mean, or those of a chain's exchanges.

        The first member to see the group complete decides; every other then gets this mean, or
        dies. A decided group leaves as a whole, so the groups of the others do not change.
        """
        shares: defaultdict[str, list[_Share]] = defaultdict(list)
        for exchange in self._exchanges_of(group, round):
            readings = _read_each_other(exchange, round)
            held = {}
            for place in range(len(exchange)):
                held[place] = self._held(place, exchange, round, readings)
            mean, takers = common_mean(held)
            members = tuple(peer for place, peer in enumerate(exchange) if mean >> place & 1)
            if members == exchange and self._averages_shares(exchange, round):
                averaged = _averaged(exchange, round)
                if averaged is not None:
                    round.averaged[exchange] = averaged
            for place, peer in enumerate(exchange):
                if members and takers >> place & 1:
                    shares[peer].append(_Share(members, readings.get(peer)))
        for peer in group:
            round.decided[peer] = _Decision(group, tuple(shares[peer]))

    def screen_of(self, peer: str, round: _Round) -> UpdateScreen:
        return TRUSTING if round.only else self.screens.get(peer, TRUSTING)

    def _averages_shares(self, group: tuple[str, ...], round: _Round) -> bool:
        """Return whether the members average a share each for all (a compressed butterfly)."""
        gathers = any(self.screen_of(peer, round).gathers for peer in group)
        return applies(round.posted[group[0]].codec, len(group), gathers=gathers)

    def _draw_groups(self, round: _Round) -> list[tuple[str, ...]]:
        available = []
        for peer in round.only or self.peers:
            has_left = self.time.is_over(peer) and peer not in round.posted
            is_settled = peer in round.unpartnered or peer in round.decided
            if self.time.is_alive(peer) and not has_left and not is_settled:
                available.append(peer)
        if round.only:
            return [tuple(available)]
        number = round.key.round // self.redrawn
        if self.size == 2:
            return chains(self.seed, number, available)
        return groups(self.seed, number, available, self.size)

    def _exchanges_of(self, group: tuple[str, ...], round: _Round) -> list[tuple[str, ...]]:
        """Return the exchanges of a group: itself, or the two of a chain."""
        if self.size != 2 or round.only or len(group) < 3:
            return [group]
        return [group[:2], group[1:]]

    def _held(
        self,
        me: int,
        group: tuple[str, ...],
        round: _Round,
        readings: Mapping[str, tuple[Reading, bytes]],
    ) -> int:
        """Return the places of the members whose contributions member ``me`` accepts, as bits."""
        screen = self.screen_of(group[me], round)
        mine = round.posted[group[me]]
        held = 1 << me
        for place, peer in enumerate(group):
            if place == me:
                continue
            theirs: Sequence[Tensor] = round.posted[peer].tensors
            if mine.message is not None:
                theirs = mine.message.seen(readings[group[me]][0])
            if not all(bool(tensor.isfinite().all()) for tensor in theirs):
                continue
            if screen.problem(round.key, lambda: mine.tensors, peer, theirs) is None:
                held |= 1 << place
        return held


def _averaged(group: tuple[str, ...], round: _Round) -> _Averaged | None:
    """Return the mean of a compressed butterfly, and what each owner is left with; None if a value
    of it is not finite: then the group gathers.
    """
    shapes = round.first[2]
    shares = deal(shapes, group)
    averages: dict[str, Average] = {}
    for owner, share in shares.items():
        codec = two_way(round.posted[owner].codec)
        assert codec is not None
        contributions = []
        for peer in group:
            posted = round.posted[peer]
            contributions.append((peer, posted.weight, share.take(posted.tensors)))
        unweighted_count = round.posted[owner].unweighted_count
        try:
            averages[owner] = average_share(codec, share, contributions, unweighted_count)
        except ValueError:
            return None
    assert codec is not None
    parts = []
    for owner, average in averages.items():
        parts.append((shares[owner], codec.decode_averages(average.payload, shares[owner])))
    return _Averaged(assemble(shapes, parts), averages)


def _read_each_other(group: tuple[str, ...], round: _Round) -> dict[str, tuple[Reading, bytes]]:
    """Return what two peers with a codec for pairs read of each other; empty for other codecs."""
    if len(group) != 2:
        return {}
    one, other = group
    first = round.posted[one].message
    second = round.posted[other].message
    if first is None or second is None:
        return {}
    by_first = first.read(second.payload)
    by_second = second.read(first.payload)
    return {one: (by_first, by_second.bits), other: (by_second, by_first.bits)}


class SimulatedExchange(Exchange):
    """One peer's exchange in a ``Simulation``; also its clock."""

    def __init__(self, simulation: Simulation[Any], peer: str) -> None:
        self.simulation = simulation
        self.peer = peer
        self.compares = simulation.size >= len(simulation.peers)

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass, as computation does."""
        self.simulation.time.wait(self.peer, self.simulation.now + seconds)

    def start(self, contribution: Contribution) -> _SimulatedHandle:
        """Post the contribution, encoded and decoded by the codec."""
        simulation = self.simulation
        key = contribution.key
        codec = contribution.codec
        tensors = list(contribution.tensors)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if contribution.members:
            key = replace(key, run=f"{key.run}, states")
        opened = _Round(key, (self.peer, codec.name, shapes), tuple(contribution.members))
        round = simulation.rounds.setdefault(key, opened)
        self._check_alike(round, codec, shapes)
        message = None
        pairs = for_pairs(codec)
        if pairs is None:
            arrived = codec.decode(codec.encode(tensors), shapes)
        else:
            message = pairs[0].post([tensor.clone() for tensor in tensors], pairs[1])
            arrived = message.tensors()
        at = float("inf")
        if not simulation.faults.drop(self.peer, key):
            at = simulation.now + simulation.faults.delay(self.peer, key)
        round.posted[self.peer] = _Posted(
            at,
            contribution.weight,
            arrived,
            codec,
            tuple(contribution.state),
            message,
            contribution.unweighted_count,
        )
        simulation.time.expect(at)
        return _SimulatedHandle(simulation, self.peer, round)

    def _check_alike(self, round: _Round, codec: Codec, shapes: list[Shape]) -> None:
        """Raise ValueError unless this peer sends what the first one sends."""
        other, name, theirs = round.first
        fragment = round.key.fragment
        if name != codec.name:
            raise ValueError(
                f"peer {self.peer} sends {codec.name} in fragment {fragment} where peer {other} "
                f"sends {name}"
            )
        if theirs != shapes:
            raise ValueError(
                f"peer {self.peer} sends {len(shapes)} tensors in fragment {fragment} where peer "
                f"{other} sends {len(theirs)} or other shapes: all must have the same model, "
                "fragments, buffers and method"
            )
        if self.simulation.size > 2:
            check_no_pair(codec)


class _SimulatedHandle(Handle):
    def __init__(self, simulation: Simulation[Any], peer: str, round: _Round) -> None:
        self.simulation = simulation
        self.peer = peer
        self.round = round
        self.until = simulation.now + simulation.wait
        self._mean: Mean | None = None

    def done(self) -> bool:
        group = self.simulation.group_of(self.peer, self.round)
        if len(group) == 1 or self.simulation.is_complete(group, self.round):
            return True
        return self.simulation.now >= self.until

    def result(self, deadline: float | None = None) -> Mean | None:
        if self._mean is not None:  # its tensors may have been released
            return self._mean
        simulation = self.simulation
        round = self.round
        until = self.until
        if deadline is not None:
            until = min(until, simulation.now + deadline)
        simulation.time.wait(self.peer, until, self.done)
        group = simulation.group_of(self.peer, round)
        if len(group) == 1 or not simulation.is_complete(group, round):
            simulation.part(group, round)
        elif self.peer not in round.decided:
            simulation.decide(group, round)
        decision = round.decided.get(self.peer)
        if decision is None:
            round.posted[self.peer].release()
            return None
        means = [self._mean_of(share, decision.group) for share in decision.shares]
        if len(means) == 2:
            self._mean = self._middle_mean(means)
        elif means:
            self._mean = means[0]
        self._release(decision.group)
        return self._mean

    def _mean_of(self, share: _Share, group: tuple[str, ...]) -> Mean:
        if share.reading is None:
            return self._group_mean(share.members, group)
        return self._pair_mean(share.members, *share.reading)

    def _middle_mean(self, means: Sequence[Mean]) -> Mean:
        mine = self.round.posted[self.peer]
        return middle_mean(mine.codec, mine.tensors, mine.weight, means, mine.unweighted_count)

    def _group_mean(self, members: tuple[str, ...], group: tuple[str, ...]) -> Mean:
        averaged = self.round.averaged.get(members)
        if averaged is not None:
            mean = self._mean_of_averages(members, averaged)
        else:
            mean = self._gathered_mean(members)
        takers = [peer for peer in group if self.round.decided[peer].shares]
        states = {peer: self.round.posted[peer].state for peer in takers}
        return replace(mean, states=states if all(states.values()) else {})

    def _gathered_mean(self, members: tuple[str, ...]) -> Mean:
        mine = self.round.posted[self.peer]
        contributions = []
        for peer in members:
            posted = self.round.posted[peer]
            copies = [tensor.clone() for tensor in posted.tensors]
            contributions.append((peer, posted.weight, copies))
        return mean_of(
            self.simulation.screen_of(self.peer, self.round),
            mine.codec,
            self.peer,
            self.round.key.fragment,
            contributions,
            mine.unweighted_count,
        )

    def _mean_of_averages(self, members: tuple[str, ...], averaged: _Averaged) -> Mean:
        """Return the mean of a compressed butterfly, and let the codec keep what it owes."""
        codec = two_way(self.round.posted[self.peer].codec)
        assert codec is not None
        codec.keep(averaged.averages[self.peer])
        stated = [(peer, self.round.posted[peer].weight) for peer in members]
        return mean_of_averages(stated, [tensor.clone() for tensor in averaged.tensors])

    def _pair_mean(self, pair: tuple[str, ...], reading: Reading, refused: bytes) -> Mean:
        """Return the mean of two peers that read each other by their own weights, and let the codec
        learn from it.
        """
        other = next(peer for peer in pair if peer != self.peer)
        mine = self.round.posted[self.peer]
        message = mine.message
        pairs = for_pairs(mine.codec)
        assert pairs is not None
        assert message is not None
        pairs[0].learn(message, reading)
        return pair_mean(
            self.simulation.screen_of(self.peer, self.round),
            self.round.key.fragment,
            (self.peer, mine.weight, message),
            (other, self.round.posted[other].weight, reading),
            refused,
            mine.unweighted_count,
        )

    def _release(self, group: tuple[str, ...]) -> None:
        """Delete the round's tensors once the whole group has them: a long run would keep them
        all.
        """
        self.round.fetched.add(self.peer)
        if self.round.fetched.issuperset(group):
            self.round.averaged.clear()
            for peer in group:
                self.round.posted[peer].release()
