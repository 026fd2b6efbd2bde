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

import heapq
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from torch import Tensor

from shoal.optim.codecs.base import Codec, Shape
from shoal.optim.codecs.mod4 import PairMessage, Reading, check_no_pair, for_pairs
from shoal.optim.exchange.averaging import mean_of, pair_mean
from shoal.optim.exchange.base import Contribution, Exchange, Handle, Mean, RoundKey
from shoal.optim.exchange.common_mean import common_mean
from shoal.optim.exchange.pairing import groups
from shoal.optim.exchange.update_screen import TRUSTING, UpdateScreen

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


class _Killed(BaseException):
    """Exception that unwinds a killed peer's thread; no ``Exception``, so that a training loop does
    not catch it.
    """


@dataclass
class _Peer:
    name: str
    turn: threading.Event = field(default_factory=threading.Event)
    wake: float = 0.0
    ready: Callable[[], bool] | None = None
    """The peer wakes before ``wake`` as soon as this is true."""
    over: bool = False
    value: Any = None
    error: BaseException | None = None


class Simulation(Generic[T]):
    """Run of several peers against an in-process exchange.

    Args:
        peers: their ids; all are members from the start.
        seed: of the pairing.
        size: peers per group; 2 is NoLoCo's pair, ``len(peers)`` averages over everyone.
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
        self.seed = seed
        self.size = size
        self.redrawn = redrawn
        self.wait = wait
        self.faults = faults or Faults()
        self.screens = dict(screens or {})
        self.now = 0.0
        self._peers = {name: _Peer(name) for name in self.peers}
        self._scheduler = threading.Event()
        self._posted: dict[tuple[RoundKey, str], tuple[float, float, list[Tensor]]] = {}
        self._states: dict[tuple[RoundKey, str], tuple[float, ...]] = {}
        self._codecs: dict[tuple[RoundKey, str], Codec] = {}
        self._messages: dict[tuple[RoundKey, str], PairMessage] = {}
        """What each peer sent by a codec for pairs, while it is needed."""
        self._readings: dict[tuple[RoundKey, str], tuple[Reading, bytes]] = {}
        """The partner's contribution as such a peer reads it, and the blocks that the partner
        refuses.
        """
        self._among: dict[RoundKey, tuple[str, ...]] = {}
        """The only peers of a key, in place of all."""
        self._first: dict[RoundKey, tuple[str, str, list[Shape]]] = {}
        """The first peer of each round, its codec, and the shapes that it sent."""
        self._fetched: set[tuple[RoundKey, str]] = set()
        self._unpartnered: set[tuple[RoundKey, str]] = set()
        self._decided: dict[tuple[RoundKey, str], tuple[str, ...]] = {}
        self._means: dict[tuple[RoundKey, str], tuple[str, ...]] = {}
        """Members of the mean that a peer takes; empty if it goes on without a partner."""
        self._events = sorted(self.faults.kill.values())
        """Heap of the times at which a peer may become ready sooner."""
        self._groups: dict[RoundKey, tuple[int, dict[str, tuple[str, ...]]]] = {}
        """By round, while valid: the number of deaths by then, and each peer's group."""

    def run(self, peer: Callable[[SimulatedExchange], T]) -> dict[str, T]:
        """Run ``peer(exchange)`` for every peer and return the results; killed peers have no entry.

        Raises a peer's exception.

        A simulation runs once only (RuntimeError), since its clock and its rounds are used up then.
        """
        if any(p.over for p in self._peers.values()):
            raise RuntimeError("this simulation has run: make a new one")
        for p in self._peers.values():
            thread = threading.Thread(
                target=self._thread, args=(p, peer), name=f"peer-{p.name}", daemon=True
            )
            thread.start()
        while running := [p for p in self._peers.values() if not p.over]:
            chosen = min(running, key=self._wakes_at)  # ties: the order of ``peers``
            while self._events and self._events[0] <= self.now:
                heapq.heappop(self._events)
            if self._events and self._events[0] < self._wakes_at(chosen):
                self.now = self._events[0]  # an arrival or a death may make a peer ready sooner
                continue
            self.now = max(self.now, self._wakes_at(chosen))
            chosen.turn.set()
            self._scheduler.wait()
            self._scheduler.clear()
        for p in self._peers.values():
            if p.error is not None and not isinstance(p.error, _Killed):
                raise p.error
        return {p.name: p.value for p in self._peers.values() if p.error is None}

    def _wakes_at(self, peer: _Peer) -> float:
        if not self._alive(peer.name):
            return self.now  # to unwind; it has no group any more, so ``ready`` must not be called
        if peer.ready is not None and peer.ready():
            return min(self.now, peer.wake)
        return min(peer.wake, self.faults.kill.get(peer.name, float("inf")))

    def _thread(self, peer: _Peer, function: Callable[[SimulatedExchange], T]) -> None:
        try:
            self._wait_for_turn(peer)
            peer.value = function(SimulatedExchange(self, peer.name))
        except BaseException as error:
            peer.error = error
        finally:
            peer.over = True
            self._groups.clear()
            self._scheduler.set()

    def _wait_for_turn(self, peer: _Peer) -> None:
        peer.turn.wait()
        peer.turn.clear()
        if not self._alive(peer.name):
            raise _Killed

    def _alive(self, name: str) -> bool:
        return self.now < self.faults.kill.get(name, float("inf"))

    def _yield(self, name: str, until: float, ready: Callable[[], bool] | None = None) -> None:
        peer = self._peers[name]
        peer.wake = until
        peer.ready = ready
        self._scheduler.set()
        self._wait_for_turn(peer)
        peer.ready = None

    def _group(self, name: str, key: RoundKey) -> tuple[str, ...]:
        """Return the peer's group of the round among those available: a dead partner is replaced if
        another peer is left over.
        """
        if (key, name) in self._decided:
            return self._decided[key, name]
        if (key, name) in self._unpartnered:
            return (name,)
        deaths = sum(at <= self.now for at in self.faults.kill.values())
        if key not in self._groups or self._groups[key][0] != deaths:
            group_of = {}
            for group in self._draw_groups(key):
                group_of.update(dict.fromkeys(group, group))
            self._groups[key] = (deaths, group_of)
        return self._groups[key][1][name]

    def _draw_groups(self, key: RoundKey) -> list[tuple[str, ...]]:
        among = self._among.get(key)
        available = [p for p in among or self.peers if self._is_available(p, key)]
        if among:
            return [tuple(available)]
        return groups(self.seed, key.round // self.redrawn, available, self.size)

    def _is_available(self, name: str, key: RoundKey) -> bool:
        gone = self._peers[name].over and (key, name) not in self._posted
        settled = (key, name) in self._unpartnered or (key, name) in self._decided
        return self._alive(name) and not gone and not settled

    def _complete(self, group: tuple[str, ...], key: RoundKey) -> bool:
        for peer in group:
            if (key, peer) not in self._posted or self._posted[key, peer][0] > self.now:
                return False
        return True

    def _decide(self, group: tuple[str, ...], key: RoundKey) -> None:
        """Fix the group's mean.

        The first member to see the group complete decides; every other then gets this mean, or
        dies.
        """
        if (key, group[0]) in self._messages:
            self._read(group, key)
        held = {place: self._held(place, group, key) for place in range(len(group))}
        mean, takers = common_mean(held)
        members = tuple(p for at, p in enumerate(group) if mean >> at & 1)
        for place, peer in enumerate(group):
            self._decided[key, peer] = group
            self._means[key, peer] = members if takers >> place & 1 else ()

    def _read(self, pair: tuple[str, ...], key: RoundKey) -> None:
        """Let two peers read each other's contribution by their own."""
        first, second = (self._messages[key, peer] for peer in pair)
        by_first = first.read(second.payload)
        by_second = second.read(first.payload)
        self._readings[key, pair[0]] = (by_first, by_second.bits)
        self._readings[key, pair[1]] = (by_second, by_first.bits)

    def _held(self, me: int, group: tuple[str, ...], key: RoundKey) -> int:
        """Return the places of the members whose contributions member ``me`` accepts, as bits."""
        name = group[me]
        screen = self._screen(name, key)
        own = self._posted[key, name][2]
        held = 1 << me
        for at, peer in enumerate(group):
            if at == me:
                continue
            theirs = self._posted[key, peer][2]
            if (key, name) in self._readings:
                theirs = self._messages[key, name].seen(self._readings[key, name][0])
            if not all(bool(tensor.isfinite().all()) for tensor in theirs):
                continue
            if screen.problem(key, lambda: own, peer, theirs) is None:
                held |= 1 << at
        return held

    def _screen(self, peer: str, key: RoundKey) -> UpdateScreen:
        return TRUSTING if key in self._among else self.screens.get(peer, TRUSTING)

    def _compared(self, group: tuple[str, ...], key: RoundKey) -> dict[str, tuple[float, ...]]:
        takers = [peer for peer in group if self._means[key, peer]]
        states = {peer: self._states.get((key, peer), ()) for peer in takers}
        return states if all(states.values()) else {}

    def _release(self, group: tuple[str, ...], name: str, key: RoundKey) -> None:
        """Delete a round's tensors once the whole group has them: a long run would keep them
        all.
        """
        self._fetched.add((key, name))
        if all((key, peer) in self._fetched for peer in group):
            for peer in group:
                self._posted[key, peer][2].clear()
                self._messages.pop((key, peer), None)


class SimulatedExchange(Exchange):
    """One peer's exchange in a ``Simulation``; also its clock."""

    def __init__(self, simulation: Simulation[Any], peer: str) -> None:
        self.simulation = simulation
        self.peer = peer
        self.compares = simulation.size >= len(simulation.peers)

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass, as computation does."""
        self.simulation._yield(self.peer, self.simulation.now + seconds)

    def start(self, contribution: Contribution) -> _SimulatedHandle:
        """Post the contribution, encoded and decoded by the codec."""
        simulation = self.simulation
        key = contribution.key
        codec = contribution.codec
        tensors = list(contribution.tensors)
        if contribution.members:
            key = replace(key, run=f"{key.run}, states")
            simulation._among[key] = tuple(contribution.members)
        simulation._states[key, self.peer] = tuple(contribution.state)
        simulation._codecs[key, self.peer] = codec
        shapes = [tuple(tensor.shape) for tensor in tensors]
        other, name, theirs = simulation._first.setdefault(key, (self.peer, codec.name, shapes))
        if name != codec.name:
            raise ValueError(
                f"peer {self.peer} sends {codec.name} in fragment {key.fragment} where peer "
                f"{other} sends {name}"
            )
        if theirs != shapes:
            raise ValueError(
                f"peer {self.peer} sends {len(shapes)} tensors in fragment {key.fragment} where "
                f"peer {other} sends {len(theirs)} or other shapes: all must have the same model, "
                "fragments, buffers and method"
            )
        if simulation.size > 2:
            check_no_pair(codec)
        pairs = for_pairs(codec)
        if pairs is None:
            arrived = codec.decode(codec.encode(tensors), shapes)
        else:
            message = pairs[0].post([tensor.clone() for tensor in tensors], pairs[1])
            simulation._messages[key, self.peer] = message
            arrived = message.tensors()
        lost = simulation.faults.drop(self.peer, key)
        at = float("inf") if lost else simulation.now + simulation.faults.delay(self.peer, key)
        simulation._posted[key, self.peer] = (at, contribution.weight, arrived)
        heapq.heappush(simulation._events, at)
        return _SimulatedHandle(
            simulation,
            self.peer,
            key,
            simulation.now + simulation.wait,
            contribution.unweighted_count,
        )


class _SimulatedHandle(Handle):
    def __init__(
        self,
        simulation: Simulation[Any],
        peer: str,
        key: RoundKey,
        until: float,
        unweighted_count: int,
    ) -> None:
        self.simulation = simulation
        self.peer = peer
        self.key = key
        self.until = until
        self.unweighted_count = unweighted_count
        self._mean: Mean | None = None

    def done(self) -> bool:
        simulation = self.simulation
        group = simulation._group(self.peer, self.key)
        if len(group) == 1 or simulation._complete(group, self.key):
            return True
        return simulation.now >= self.until

    def result(self, deadline: float | None = None) -> Mean | None:
        simulation = self.simulation
        key = self.key
        if self._mean is not None:  # its tensors may have been released
            return self._mean
        until = self.until if deadline is None else min(self.until, simulation.now + deadline)
        simulation._yield(self.peer, until, self.done)
        group = simulation._group(self.peer, key)
        if len(group) == 1 or not simulation._complete(group, key):
            # Else the rest would find each other complete.
            simulation._unpartnered.update((key, peer) for peer in group)
            simulation._groups.pop(key, None)
            simulation._posted[key, self.peer][2].clear()
            simulation._messages.pop((key, self.peer), None)
            return None
        if (key, self.peer) not in simulation._decided:
            # A decided group leaves as a whole, so the groups of the others do not change.
            simulation._decide(group, key)
        reading = simulation._readings.pop((key, self.peer), None)
        if reading is not None:
            return self._pair_mean(*reading)
        contributions = []
        for peer in simulation._means[key, self.peer]:
            _, weight, tensors = simulation._posted[key, peer]
            contributions.append((peer, weight, [tensor.clone() for tensor in tensors]))
        simulation._release(group, self.peer, key)
        if contributions:
            screen = simulation._screen(self.peer, key)
            codec = simulation._codecs[key, self.peer]
            mean = mean_of(
                screen, codec, self.peer, key.fragment, contributions, self.unweighted_count
            )
            self._mean = replace(mean, states=simulation._compared(group, key))
        return self._mean

    def _pair_mean(self, read: Reading, refused: bytes) -> Mean | None:
        """Return the mean of two peers that read each other by their own weights, and let the codec
        learn from it.
        """
        simulation = self.simulation
        key = self.key
        me = self.peer
        pair = simulation._means[key, me]
        mine = simulation._messages[key, me]
        pairs = for_pairs(simulation._codecs[key, me])
        if pair and pairs is not None:
            pairs[0].learn(mine, read)
            screen = simulation._screen(me, key)
            other = next(peer for peer in pair if peer != me)
            weights = [simulation._posted[key, peer][1] for peer in (me, other)]
            self._mean = pair_mean(
                screen,
                key.fragment,
                (me, weights[0], mine),
                (other, weights[1], read),
                refused,
                self.unweighted_count,
            )
        simulation._release(simulation._decided[key, me], me, key)
        return self._mean
