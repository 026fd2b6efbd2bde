"""Sinks that the settings name, opened before the network is used, for one node or all of a demo."""

from __future__ import annotations

from collections.abc import Callable

from shoal.node.config.endpoint import MAX_PORT, parse_address
from shoal.node.config.settings import NodeSettings, Settings
from shoal.node.metrics.sink import About, MetricsError, MetricsSink, Sinks
from shoal.swarm.membership.membership import SHOAL_VERSION, Membership


def open_sinks(node: NodeSettings, say: Callable[[str], None]) -> Sinks:
    """Open the sinks of a node; ``say`` is given sentences for people.

    Raises:
        MetricsError: a port is taken, a folder cannot be written, or a package is missing; nothing is left open.
    """
    sinks: list[MetricsSink] = []
    if node.tensorboard is not None or node.wandb is not None:
        from shoal.node.metrics.background import Background

        if node.tensorboard is not None:
            from shoal.node.metrics.tensorboard_file import TensorBoardFile

            sinks.append(Background(TensorBoardFile(node.tensorboard, node.name)))
        if node.wandb is not None:
            from shoal.node.metrics.wandb_run import WandbRun

            sinks.append(Background(WandbRun(node.wandb, node.name, node.run_folder)))
    if node.metrics is not None:
        from shoal.node.metrics.endpoint import Endpoint

        sinks.append(Endpoint(parse_address(node.metrics)))  # last, for it alone holds a resource by now
    return Sinks(sinks, say)


def about(settings: Settings, membership: Membership, device: object) -> About:
    """Return the description of the run for sinks."""
    manifest = membership.manifest
    return About(
        swarm=manifest.name,
        swarm_id=membership.swarm,
        node=settings.node.name,
        peer=membership.host.peer_id,
        method=settings.outer.method,
        task=manifest.task,
        device=str(device),
        version=SHOAL_VERSION,
    )


def of_demo(node: NodeSettings, number: int) -> NodeSettings:
    """Return the settings of node ``number`` of a demo: ``node`` with a name and a port of its own."""
    metrics = None if node.metrics is None else str(parse_address(node.metrics).next(number))
    return node.model_copy(update={"name": f"peer-{number}", "metrics": metrics})


def flags_of_demo(node: NodeSettings, number: int) -> list[str]:
    """Return the settings of node ``number`` of a demo as command-line flags."""
    own = of_demo(node, number)
    given = {"--metrics": own.metrics, "--tensorboard": own.tensorboard, "--wandb": own.wandb}
    return [word for flag, value in given.items() if value is not None for word in (flag, str(value))]


def check_demo(node: NodeSettings, count: int, say: Callable[[str], None]) -> None:
    """Check once for all nodes of a demo that their sinks are available. Raises MetricsError."""
    if node.metrics is not None and parse_address(node.metrics).next(count - 1).port > MAX_PORT:
        raise MetricsError(f"There are no {count} ports from --metrics {node.metrics} on: choose a lower one.")
    for number in range(count):
        open_sinks(of_demo(node, number), say).close()
    if node.metrics is not None and (first := parse_address(node.metrics)).port:
        say(f"metrics for Prometheus: http://{first}/metrics, of each further node one port further on")
