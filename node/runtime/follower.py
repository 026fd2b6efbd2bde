"""A rank of a node besides rank 0: it trains as it is told, and has no network, display or files of its own."""

from __future__ import annotations

from shoal.node.config.device import use_threads
from shoal.node.config.settings import Settings
from shoal.node.exit_codes import ExitCode
from shoal.node.parallel.ranks import NodeRanks
from shoal.node.runtime.door import make_task


def follow(ranks: NodeRanks, settings: Settings) -> int:
    """Follow rank 0 until it ends; return the exit code. RankLostError if it ends out of order."""
    use_threads(settings.node.threads, ranks.job.world)
    ranks.follow(make_task)
    return int(ExitCode.OK)
