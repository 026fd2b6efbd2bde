"""One node from start to end: its folder, key and metrics, the way into the swarm, and then its
training.

Importing torch and all that trains takes longer than anything else up to the first step, so this
module loads none of it: a node that joins has its network started first, and imports the rest while
the daemon starts and dials.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from shoal.node.checkpoint import folder as checkpoints
from shoal.node.config.device import resolve_device, use_threads
from shoal.node.exit_code import ExitCode
from shoal.node.logs import log_to_file
from shoal.node.metrics.log import Metrics
from shoal.node.metrics.sinks import open_sinks
from shoal.node.packages import uncollected
from shoal.node.runtime.display import Activity
from shoal.node.runtime.run_options import LOG, METRICS, RunOptions, network
from shoal.swarm.identity import Identity
from shoal.swarm.membership.membership import join

if TYPE_CHECKING:
    from shoal.node.config.settings import Settings
    from shoal.node.parallel.node_ranks import NodeRanks
    from shoal.node.runtime.result import Result


class NodeRun(RunOptions):
    """One node's run."""

    def run(self) -> Result:
        """Join the swarm, train and leave.

        ShoalError for what the user can mend; nothing is left running.
        """
        with checkpoints.lock(self.folder):
            node = self.settings.node
            link = self.link
            saved = None
            if node.resume or node.resume_from is not None or checkpoints.steps(self.folder):
                from shoal.node.runtime import resume

                saved = resume.find(node)
            identity = Identity.load_or_create(node.identity_path)
            # the host holds it from its start on; this is to learn of another node before the model
            # is made
            with identity.lock():
                pass
            log = self.display.message
            path = self.folder / METRICS
            with (
                log_to_file(self.folder / LOG, log),
                closing(open_sinks(node, log)) as sinks,
                closing(Metrics(path, log, sinks)) as metrics,
                Activity(metrics, self.display) as activity,
            ):
                membership = None
                if link is None:
                    self._prepare()
                else:
                    sealed = (
                        saved.sealed if saved is not None and saved.swarm == link.swarm else None
                    )
                    with activity.doing("joining the swarm", bounded=True):
                        membership = join(
                            identity, link, network(self.settings), sealed, self._prepare
                        )
                from shoal.node.runtime.training_node import TrainingNode

                training = TrainingNode(self, saved, metrics, activity)
                return training.run(membership, identity)

    def _prepare(self) -> None:
        """Import what trains, and set torch's threads.

        Raises ConfigError if there is no such device.
        """
        with uncollected():  # for what follows
            import shoal.node.runtime.training_node
            import shoal.swarm.p2p.hivemind_adapter  # noqa: F401

        if self.ranks is None:
            resolve_device(self.settings.node.device)
        use_threads(self.settings.node.threads, 1 if self.ranks is None else self.ranks.job.world)


def follow(ranks: NodeRanks, settings: Settings) -> int:
    """Follow rank 0 until it ends, with no network, display or files of its own; return the exit
    code.

    Raises RankLostError if rank 0 ends out of order.
    """
    from shoal.node.runtime.task_setup import make_task

    use_threads(settings.node.threads, ranks.job.world)
    ranks.follow(make_task)
    return int(ExitCode.OK)
