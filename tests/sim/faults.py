"""The faults of a simulation: a plan that follows from the seed, each fault at the n-th event
rather than at a time.

Most of the time nothing is in flight. Counted in events, a fault hits the middle of an exchange as
often as not.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tests.sim.hostile import Liar
from tests.sim.memory_stream import NOTHING
from tests.sim.peers import SimPeer, SimSwarm

Kind = Literal["kill", "sleep", "part", "sever", "stall", "slow", "drag"]
KINDS: tuple[Kind, ...] = ("kill", "sleep", "part", "sever", "sever", "stall", "slow")


@dataclass(frozen=True)
class Fault:
    """One fault, at the event ``after``."""

    after: int
    kind: Kind
    victim: int
    """The number of a peer, or -1: whoever that event is of."""
    seconds: float
    """After which a killed peer comes back, one that sleeps wakes, and so on."""
    dice: float
    """In [0, 1): whatever else there is to choose."""


@dataclass
class FaultPlan:
    """A fault that occurred: the peers that it touched, and its time."""

    peers: frozenset[str]
    since: float
    until: float


def plan(
    seed: int,
    peers: int,
    events: int,
    most: int = 4,
    kinds: Sequence[Kind] = KINDS,
    *,
    hostile: bool = False,
) -> list[Fault]:
    """Return at most ``most`` faults within the first ``events`` events.

    ``hostile``: and one member that drags the others.
    """
    chance = random.Random(f"faults {seed}")
    found = []
    for _ in range(chance.randint(0, most)):
        kind = chance.choice(kinds)
        victim = chance.choice([-1, chance.randrange(peers)])
        seconds = chance.choice([0.3, 1.5, 4.0]) * chance.uniform(0.5, 1.5)
        found.append(Fault(chance.randint(10, events), kind, victim, seconds, chance.random()))
    if hostile:
        found.append(
            Fault(
                chance.randint(10, events), "drag", chance.randrange(peers), 10.0, chance.random()
            )
        )
    return sorted(found, key=lambda fault: fault.after)


class FaultInjector:
    """Injects the faults of a plan, up to the time at which the swarm is left in peace."""

    def __init__(self, swarm: SimSwarm, faults: Sequence[Fault]) -> None:
        self._swarm, self._left = swarm, list(faults)
        self.troubles: list[FaultPlan] = []
        self.hostile = any(fault.kind == "drag" for fault in faults)

    def look(self, name: str) -> None:
        """Inject what is due; called with every event and the name of its peer."""
        events = self._swarm.network.trace.events
        while self._left and events >= self._left[0].after:
            fault = self._left.pop(0)
            self._swarm.network.loop.call_soon(self._do, fault, name, context=NOTHING)

    def _do(self, fault: Fault, name: str) -> None:
        swarm, loop = self._swarm, self._swarm.network.loop
        left = swarm.setting.calm - loop.time()
        if left <= 0:
            return
        there = [
            peer for peer in swarm.peers if not peer.gone and peer.host.process.state == "awake"
        ]
        chosen = [
            peer
            for peer in there
            if (peer.name == name if fault.victim < 0 else peer.number == fault.victim)
        ]
        if fault.kind in ("kill", "sleep", "slow", "drag") and not chosen:
            return
        seconds, since = min(fault.seconds, left), loop.time()
        touched = {peer.id for peer in chosen[:1]}
        if fault.kind == "part":
            touched = self._part(fault, seconds)
        elif fault.kind in ("sever", "stall"):
            touched = self._stream(fault)
        elif fault.kind in ("kill", "drag") and not self._kill(fault, seconds, chosen[0]):
            return
        elif fault.kind == "sleep":
            self._sleep(seconds, chosen[0])
        elif fault.kind == "slow":
            self._slow(fault, seconds, chosen[0])
        self.troubles.append(FaultPlan(frozenset(touched), since, since + seconds))

    def _kill(self, fault: Fault, seconds: float, victim: SimPeer) -> bool:
        """Kill a peer for some time or, unless only two are left, for good; one that drags the
        others turns hostile.
        """
        swarm, hostile = self._swarm, fault.kind == "drag"
        for_good = hostile or fault.dice < 0.5
        if for_good and sum(not peer.gone for peer in swarm.peers) <= 2:
            return False
        swarm.network.kill(victim.id)
        victim.gone = True
        if hostile:
            Liar(swarm, victim, fault.dice, swarm.network.loop.time() + seconds)
        elif not for_good:
            swarm.network.loop.call_later(seconds, self._return, victim, context=NOTHING)
        return True

    def _return(self, victim: SimPeer) -> None:
        victim.gone = False
        victim.begin()
        self._swarm.network.note(victim.name, "came back")

    def _sleep(self, seconds: float, victim: SimPeer) -> None:
        network = self._swarm.network
        network.sleep(victim.id)
        victim.slept += seconds
        network.loop.call_later(seconds, network.wake, victim.id, context=NOTHING)

    def _part(self, fault: Fault, seconds: float) -> set[str]:
        network, sides = self._swarm.network, random.Random(fault.dice)
        parts = {peer.id: sides.randrange(2) for peer in self._swarm.peers}
        network.part(parts)
        network.loop.call_later(seconds, network.part, {}, context=NOTHING)
        return {*parts}

    def _stream(self, fault: Fault) -> set[str]:
        """Sever or stall a stream that is open now, if there is one; return its ends."""
        network = self._swarm.network
        open_now = sorted(network.wires)
        if not open_now:
            return set()
        number = open_now[int(fault.dice * len(open_now))]
        ends = {host.peer_id for host in network.wires[number].hosts}
        if fault.kind == "stall":
            network.stall(number)
        else:
            network.sever(number, reset=fault.dice * 1000 % 1 < 0.5)
        return ends

    def _slow(self, fault: Fault, seconds: float, victim: SimPeer) -> None:
        victim.host.slow = 0.1 + 1.5 * fault.dice
        self._swarm.network.note(victim.name, f"is slow by {victim.host.slow:.3f}")
        self._swarm.network.loop.call_later(seconds, self._quick, victim, context=NOTHING)

    def _quick(self, victim: SimPeer) -> None:
        victim.host.slow = 0.0
        self._swarm.network.note(victim.name, "is slow no more")
