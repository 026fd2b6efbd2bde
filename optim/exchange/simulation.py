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
from shoal.optim.exchange.averaging import TRUSTING, UpdateScreen, mean_of, pair_mean
from shoal.optim.exchange.base import Contribution, Exchange, Handle, Mean, RoundKey, common, groups

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
        self.peers, self.seed, self.size, self.redrawn, self.wait = (
            list(peers),
            seed,
            size,
            redrawn,
            wait,
        )
        self.faults, self.screens = faults or Faults(), dict(screens or {})
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
        self._events = sorted(
            self.faults.kill.values()
        )  # heap of the times at which a peer may become ready sooner
        # By round, while valid: the number of deaths by then, and each peer's group.
        self._groups: dict[RoundKey, tuple[int, dict[str, tuple[str, ...]]]] = {}

    def run(self, peer: Callable[[SimulatedExchange], T]) -> dict[str, T]:
        """Run ``peer(exchange)`` for every peer and return the results; killed peers have no entry.

        Raises a peer's exception.

        A simulation runs once only (RuntimeError), since its clock and its rounds are used up then.
        """
        if any(p.over for p in self._peers.values()):
            raise RuntimeError("this simulation has run: make a new one")
        threads = [
            threading.Thread(
                target=self._thread, args=(p, peer), name=f"peer-{p.name}", daemon=True
            )
            for p in self._peers.values()
        ]
        for thread in threads:
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
        peer.wake, peer.ready = until, ready
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
            among = self._among.get(key)
            available = [
                p
                for p in among or self.peers
                if self._alive(p)
                and not (self._peers[p].over and (key, p) not in self._posted)
                and (key, p) not in self._unpartnered
                and (key, p) not in self._decided
            ]
            drawn = (
                [tuple(available)]
                if among
                else groups(self.seed, key.round // self.redrawn, available, self.size)
            )
            self._groups[key] = (deaths, {p: group for group in drawn for p in group})
        return self._groups[key][1][name]

    def _complete(self, group: tuple[str, ...], key: RoundKey) -> bool:
        return all(
            (key, peer) in self._posted and self._posted[key, peer][0] <= self.now for peer in group
        )

    def _decide(self, group: tuple[str, ...], key: RoundKey) -> None:
        """Fix the group's mean.

        The first member to see the group complete decides; every other then gets this mean, or
        dies.
        """
        if (key, group[0]) in self._messages:
            self._read(group, key)
        held = {place: self._held(place, group, key) for place in range(len(group))}
        mean, takers = common(held)
        for place, peer in enumerate(group):
            self._decided[key, peer] = group
            self._means[key, peer] = (
                tuple(p for at, p in enumerate(group) if mean >> at & 1)
                if takers >> place & 1
                else ()
            )

    def _read(self, pair: tuple[str, ...], key: RoundKey) -> None:
        """Let two peers read each other's contribution by their own."""
        messages = [self._messages[key, peer] for peer in pair]
        one, other = (
            mine.read(theirs.payload)
            for mine, theirs in zip(messages, reversed(messages), strict=True)
        )
        self._readings |= {(key, pair[0]): (one, other.bits), (key, pair[1]): (other, one.bits)}

    def _held(self, me: int, group: tuple[str, ...], key: RoundKey) -> int:
        """Return the places of the members whose contributions member ``me`` accepts, as bits."""
        screen, own = self._screen(group[me], key), self._posted[key, group[me]][2]
        held = 1 << me
        for at, peer in enumerate(group):
            theirs = self._posted[key, peer][2]
            if at != me and (key, group[me]) in self._readings:
                theirs = self._messages[key, group[me]].seen(self._readings[key, group[me]][0])
            if at != me and all(bool(tensor.isfinite().all()) for tensor in theirs):
                held |= (screen.problem(key, lambda: own, peer, theirs) is None) << at
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
        self.simulation, self.peer = simulation, peer
        self.compares = simulation.size >= len(simulation.peers)

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass, as computation does."""
        self.simulation._yield(self.peer, self.simulation.now + seconds)

    def start(self, contribution: Contribution) -> _SimulatedHandle:
        """Post the contribution, encoded and decoded by the codec."""
        simulation, key, codec, tensors = (
            self.simulation,
            contribution.key,
            contribution.codec,
            list(contribution.tensors),
        )
        if contribution.members:
            key = replace(key, run=f"{key.run}, states")
            simulation._among[key] = tuple(contribution.members)
        simulation._states[key, self.peer], simulation._codecs[key, self.peer] = (
            tuple(contribution.state),
            codec,
        )
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
                f"peer {other} sends {len(theirs)} "
                "or other shapes: all must have the same model, fragments, buffers and method"
            )
        if simulation.size > 2:
            check_no_pair(codec)
        if (pairs := for_pairs(codec)) is None:
            arrived = codec.decode(codec.encode(tensors), shapes)
        else:
            simulation._messages[key, self.peer] = message = pairs[0].post(
                [tensor.clone() for tensor in tensors], pairs[1]
            )
            arrived = message.tensors()
        lost = simulation.faults.drop(self.peer, key)
        at = float("inf") if lost else simulation.now + simulation.faults.delay(self.peer, key)
        simulation._posted[key, self.peer] = (at, contribution.weight, arrived)
        heapq.heappush(simulation._events, at)
        return _SimulatedHandle(
            simulation, self.peer, key, simulation.now + simulation.wait, contribution.even
        )


class _SimulatedHandle(Handle):
    def __init__(
        self, simulation: Simulation[Any], peer: str, key: RoundKey, until: float, even: int
    ) -> None:
        self.simulation, self.peer, self.key, self.until, self.even = (
            simulation,
            peer,
            key,
            until,
            even,
        )
        self._mean: Mean | None = None

    def done(self) -> bool:
        simulation = self.simulation
        group = simulation._group(self.peer, self.key)
        return (
            len(group) == 1 or simulation._complete(group, self.key) or simulation.now >= self.until
        )

    def result(self, deadline: float | None = None) -> Mean | None:
        simulation, key = self.simulation, self.key
        if self._mean is not None:  # its tensors may have been released
            return self._mean
        until = self.until if deadline is None else min(self.until, simulation.now + deadline)
        simulation._yield(self.peer, until, self.done)
        group = simulation._group(self.peer, key)
        if len(group) == 1 or not simulation._complete(group, key):
            simulation._unpartnered.update(
                (key, peer) for peer in group
            )  # else the rest would find each other complete
            simulation._groups.pop(key, None)
            simulation._posted[key, self.peer][2].clear()
            simulation._messages.pop((key, self.peer), None)
            return None
        if (key, self.peer) not in simulation._decided:
            # A decided group leaves as a whole, so the groups of the others do not change.
            simulation._decide(group, key)
        if (reading := simulation._readings.pop((key, self.peer), None)) is not None:
            return self._pair_mean(*reading)
        contributions = []
        for peer in simulation._means[key, self.peer]:
            _, weight, tensors = simulation._posted[key, peer]
            contributions.append((peer, weight, [tensor.clone() for tensor in tensors]))
        simulation._release(group, self.peer, key)
        if contributions:
            screen, codec = simulation._screen(self.peer, key), simulation._codecs[key, self.peer]
            mean = mean_of(screen, codec, self.peer, key.fragment, contributions, self.even)
            self._mean = replace(mean, states=simulation._compared(group, key))
        return self._mean

    def _pair_mean(self, read: Reading, refused: bytes) -> Mean | None:
        """Return the mean of two peers that read each other by their own weights, and let the codec
        learn from it.
        """
        simulation, key, me = self.simulation, self.key, self.peer
        pair, mine = simulation._means[key, me], simulation._messages[key, me]
        pairs = for_pairs(simulation._codecs[key, me])
        if pair and pairs is not None:
            pairs[0].learn(mine, read)
            screen, other = simulation._screen(me, key), next(peer for peer in pair if peer != me)
            weights = [simulation._posted[key, peer][1] for peer in (me, other)]
            self._mean = pair_mean(
                screen,
                key.fragment,
                (me, weights[0], mine),
                (other, weights[1], read),
                refused,
                self.even,
            )
        simulation._release(simulation._decided[key, me], me, key)
        return self._mean
