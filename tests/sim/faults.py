"""The faults of a simulation: a plan that follows from the seed, each fault at the n-th event rather than at a time.

Most of the time nothing is in flight. Counted in events, a fault hits the middle of an exchange as often as not.
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


def plan(seed: int, peers: int, events: int, most: int = 4, kinds: Sequence[Kind] = KINDS, *, hostile: bool = False) -> list[Fault]:
    """Return at most ``most`` faults within the first ``events`` events. ``hostile``: and one member that drags the others."""
    chance = random.Random(f"faults {seed}")
    found = []
    for _ in range(chance.randint(0, most)):
        kind = chance.choice(kinds)
        victim = chance.choice([-1, chance.randrange(peers)])
        seconds = chance.choice([0.3, 1.5, 4.0]) * chance.uniform(0.5, 1.5)
        found.append(Fault(chance.randint(10, events), kind, victim, seconds, chance.random()))
    if hostile:
        found.append(Fault(chance.randint(10, events), "drag", chance.randrange(peers), 10.0, chance.random()))
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
        there = [peer for peer in swarm.peers if not peer.gone and peer.host.process.state == "awake"]
        chosen = [peer for peer in there if (peer.name == name if fault.victim < 0 else peer.number == fault.victim)]
        if fault.kind in ("kill", "sleep", "slow", "drag") and not chosen:
            return
        seconds = min(fault.seconds, left)
        trouble = FaultPlan(frozenset(peer.id for peer in chosen[:1]), loop.time(), loop.time() + seconds)
        getattr(self, f"_{fault.kind}")(fault, seconds, chosen, trouble)

    def _note(self, trouble: FaultPlan, peers: frozenset[str] | None = None) -> None:
        self.troubles.append(trouble if peers is None else FaultPlan(peers, trouble.since, trouble.until))

    def _kill(self, fault: Fault, seconds: float, chosen: list[SimPeer], trouble: FaultPlan) -> None:
        victim, swarm = chosen[0], self._swarm
        for_good = fault.dice < 0.5
        if for_good and sum(not peer.gone for peer in swarm.peers) <= 2:
            return
        swarm.network.kill(victim.id)
        victim.gone = True
        self._note(trouble)
        if not for_good:
            swarm.network.loop.call_later(seconds, self._return, victim, context=NOTHING)

    def _return(self, victim: SimPeer) -> None:
        victim.gone = False
        victim.begin()
        self._swarm.network.note(victim.name, "came back")

    def _drag(self, fault: Fault, seconds: float, chosen: list[SimPeer], trouble: FaultPlan) -> None:
        """Let a peer turn hostile; it never comes back."""
        victim, swarm = chosen[0], self._swarm
        if sum(not peer.gone for peer in swarm.peers) <= 2:
            return
        swarm.network.kill(victim.id)
        victim.gone = True
        self._note(trouble)
        Liar(swarm, victim, fault.dice, trouble.until)

    def _sleep(self, fault: Fault, seconds: float, chosen: list[SimPeer], trouble: FaultPlan) -> None:
        network, victim = self._swarm.network, chosen[0]
        network.sleep(victim.id)
        victim.slept += seconds
        self._note(trouble)
        network.loop.call_later(seconds, network.wake, victim.id, context=NOTHING)

    def _part(self, fault: Fault, seconds: float, chosen: list[SimPeer], trouble: FaultPlan) -> None:
        network, peers = self._swarm.network, self._swarm.peers
        sides = random.Random(fault.dice)
        network.part({peer.id: sides.randrange(2) for peer in peers})
        self._note(trouble, frozenset(peer.id for peer in peers))
        network.loop.call_later(seconds, network.part, {}, context=NOTHING)

    def _sever(self, fault: Fault, seconds: float, chosen: list[SimPeer], trouble: FaultPlan) -> None:
        number = self._stream(fault, trouble)
        if number is not None:
            self._swarm.network.sever(number, reset=fault.dice * 1000 % 1 < 0.5)

    def _stall(self, fault: Fault, seconds: float, chosen: list[SimPeer], trouble: FaultPlan) -> None:
        number = self._stream(fault, trouble)
        if number is not None:
            self._swarm.network.stall(number)

    def _stream(self, fault: Fault, trouble: FaultPlan) -> int | None:
        """Return the number of a stream that is open now, if there is one, and note the trouble of its ends."""
        network = self._swarm.network
        open_now = sorted(network.wires)
        if not open_now:
            return None
        number = open_now[int(fault.dice * len(open_now))]
        self._note(trouble, frozenset(host.peer_id for host in network.wires[number].hosts))
        return number

    def _slow(self, fault: Fault, seconds: float, chosen: list[SimPeer], trouble: FaultPlan) -> None:
        victim = chosen[0]
        victim.host.slow = 0.1 + 1.5 * fault.dice
        self._swarm.network.note(victim.name, f"is slow by {victim.host.slow:.3f}")
        self._note(trouble)
        self._swarm.network.loop.call_later(seconds, self._quick, victim, context=NOTHING)

    def _quick(self, victim: SimPeer) -> None:
        victim.host.slow = 0.0
        self._swarm.network.note(victim.name, "is slow no more")
