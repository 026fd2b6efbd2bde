"""The plan of a simulation, and the interface of its world to a peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bench.sim.toy_task import ToyTask
from shoal.swarm.manifest import Manifest
from shoal.swarm.settings.outer import OuterSettings
from tests.sim.directory import Board
from tests.sim.network import Links, SimNetwork


@dataclass(frozen=True)
class SimPlan:
    """The plan of a simulation.

    ``churn``, ``naps``: kills, and peers stopped for seconds, a minute; ``minutes``: virtual;
    ``uneven``: deviation of the log of step times.

    ``warm_up``: of the minutes, the first, whose costs do not count.
    """

    peers: int
    links: Links
    outer: OuterSettings
    churn: float = 0.0
    naps: float = 0.0
    minutes: float = 2.0
    seed: int = 0
    steps: int = 0
    """Inner steps of each peer; 0: until the time is over."""
    parameters: int = 2000
    step_seconds: float = 0.1
    uneven: float = 0.2
    bucket: int = 0
    epoch_s: float = 60.0
    warm_up: float = 0.0


class Surroundings(Protocol):
    """The world around all peers of one simulation."""

    plan: SimPlan
    toy: ToyTask
    network: SimNetwork
    board: Board
    manifest: Manifest
    swarm: str

    def on_round(self, waited: float, together: bool) -> None:
        """Count an exchange of a peer: the virtual seconds that it waited, and whether others took
        part.
        """

    def ended(self) -> None:
        """Note that a peer has done all its steps."""
