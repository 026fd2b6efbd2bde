"""What a node is started with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.node.config.settings import Settings
from shoal.node.runtime.display import Display
from shoal.node.runtime.signals import ShutdownSignals
from shoal.swarm.access.link import Link

if TYPE_CHECKING:
    from shoal.node.parallel.ranks import NodeRanks

METRICS = "metrics.jsonl"


def _nothing(link: Link) -> None:
    pass


@dataclass
class RunOptions:
    """Settings of a run, and what it reports to. ``link`` None: it creates a swarm."""

    settings: Settings
    link: Link | None
    display: Display
    shutdown: ShutdownSignals
    on_link: Callable[[Link], None] = _nothing
    """Called with the join link as soon as others can use it."""
    baseline: bool = False
    """Train the same once more without any exchange, to compare."""
    keep_rounds: bool = False
    """Keep the slow weights of every round in files."""
    ranks: NodeRanks | None = None
    """Set if this process is rank 0 of several, which do all that is not training."""

    @property
    def folder(self) -> Path:
        return self.settings.node.run_folder
