"""What ``shoal sim`` simulates, and what a simulated peer sees of the world around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shoal.node.sim.toy_task import ToyTask
from shoal.swarm.manifest.manifest import Manifest
from shoal.swarm.manifest.outer import OuterSettings
from shoal.swarm.sim.directory import Board
from shoal.swarm.sim.network import Links, Network


@dataclass(frozen=True)
class Plan:
    """What is simulated. ``churn``: kills a minute; ``minutes``: virtual; ``uneven``: of the logarithm of the peers' paces."""

    peers: int
    links: Links
    outer: OuterSettings
    churn: float = 0.0
    minutes: float = 2.0
    seed: int = 0
    steps: int = 0
    """Inner steps of each peer; 0: until the time is over."""
    parameters: int = 2000
    step_seconds: float = 0.1
    uneven: float = 0.2


class Surroundings(Protocol):
    """Of all peers of one simulation."""

    plan: Plan
    toy: ToyTask
    network: Network
    board: Board
    manifest: Manifest
    swarm: str

    def on_round(self, waited: float, together: bool) -> None:
        """A peer's exchange is over: the virtual seconds for which it stood still, and whether others were in it."""

    def ended(self) -> None:
        """A peer has done all its steps."""
