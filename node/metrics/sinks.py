"""Sinks of a run's events besides the file, opened before the network is used: TensorBoard, W&B,
and `prometheus`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.node.config.node_settings import NodeSettings
from shoal.node.listen_address import MAX_PORT, parse_address
from shoal.node.metrics.log import About, Fields, MetricsError, MetricsSink, Sinks, number, one_line
from shoal.node.packages import require
from shoal.swarm.membership.membership import SHOAL_VERSION, Membership

SUMMARIES = ("start", "end")
"""Events about the whole run, of which only the held-out loss makes a curve."""
PROGRESS_S = 10.0
"""Least seconds between two points of progress: at two a second, a month would fill a disk."""
# Seconds for W&B to reach its server at the start, and to upload the rest at the end.
INIT_S = 60.0
FINISH_S = 25.0


class Curves:
    """Converter of events to points."""

    def __init__(self) -> None:
        self._step = 0
        self._progress = float("-inf")

    def points(self, event: str, time: float, fields: Fields) -> tuple[int, dict[str, float]]:
        """Return the inner step of the points, and their values by name: ``event/field`` for every
        number and list, and of progress ``group/field``.

        A list counts by its length. An event without a step takes that of the one before.
        """
        self._follow(event, fields)
        if event == "progress":
            if time - self._progress < PROGRESS_S:
                return self._step, {}
            self._progress = time
            groups = {name: part for name, part in fields.items() if isinstance(part, Mapping)}
        elif event in SUMMARIES:
            # A run that was stopped did not evaluate its end.
            loss = {} if fields.get("interrupted", True) else _group(fields, "loss")
            groups = {"evaluation": {"held_out": loss.get("held_out")}}
        else:
            groups = {event: fields}
        found = {}
        for group, inside in groups.items():
            for name, value in inside.items():
                point = number(value)
                if point is not None and name not in ("step", "round"):
                    found[f"{group}/{name}"] = point
        return self._step, found

    def _follow(self, event: str, fields: Fields) -> None:
        """Note the inner step of an event; one round of rl is one inner step."""
        if event == "rl":
            step = number(fields.get("round"))
        else:
            step = number(fields.get("step", _group(fields, "progress").get("step")))
        if step is not None:
            self._step = int(step)


class TensorBoardFile:
    """Writer to ``folder``/``node``.

    MetricsError: the package is missing, or the folder cannot be written.

    It does not use the package's own writer, whose thread prints a traceback when a disk is full.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, node: str) -> None:
        require(MetricsError, "--tensorboard", "tensorboard", extra="tensorboard")
        self._folder = folder.absolute() / node
        self._curves = Curves()
        self._records: Any = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> MetricsError:
        return MetricsError(
            f"Cannot write for TensorBoard into {str(self._folder)!r} ({error.strerror}): choose "
            "another folder with --tensorboard."
        )

    def begin(self, about: About) -> str:
        """Open the file, which has the name by which TensorBoard finds it."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        now = time.time()
        host = socket.gethostname().replace("/", "-")
        path = self._folder / f"events.out.tfevents.{now:.6f}.{host}.{os.getpid()}"
        try:
            self._records = RecordWriter(path.open("xb"))
            self._write(Event(wall_time=now, file_version="brain.Event:2"))
        except OSError as error:
            raise self._unwritable(error) from error
        return f"curves for TensorBoard: tensorboard --logdir {self._folder.parent}"

    def event(self, name: str, time: float, fields: Fields) -> None:
        """Append the points of an event, and flush them at once."""
        step, points = self._curves.points(name, time, fields)
        if points:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary

            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in points.items()]
            self._write(Event(wall_time=time, step=step, summary=Summary(value=values)))

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        if self._records is not None:
            self._records.close()


class WandbRun:
    """Logger to ``project`` (or ``team/project``); W&B's own files go below ``folder``.

    MetricsError: the package is missing.
    """

    name = "Weights & Biases"

    def __init__(self, project: str, node: str, folder: Path) -> None:
        require(MetricsError, "--wandb", "wandb", extra="wandb")
        self._team, _, self._project = project.rpartition("/")
        self._node = node
        self._folder = folder
        self._curves = Curves()
        self._run: Any = None

    def begin(self, about: About) -> str:
        """Start the run. MetricsError: nobody is logged in, or the server is not reached."""
        import wandb

        # W&B's output would tear the progress bar, and it must not capture that of others.
        quiet = wandb.Settings(
            console="off",
            silent=True,
            init_timeout=INIT_S,
            finish_timeout=FINISH_S,
            finish_timeout_raises=True,
        )
        try:
            # Its own variable wins; without it, the folder of the run and not the current one.
            where = None if os.environ.get("WANDB_DIR") else self._folder
            if where is not None:
                where.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=self._project,
                entity=self._team or None,
                name=self._node,
                group=about.swarm,
                dir=where,
                config=asdict(about),
                settings=quiet,
            )
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:  # W&B has no family of its own for what it raises here
            raise MetricsError(
                f"Weights & Biases cannot be started ({one_line(error)}): run wandb login, or set "
                "WANDB_MODE=offline."
            ) from error
        where_to = f"wandb sync {self._run.sync_dir}" if self._run.offline else self._run.url
        # Nowhere with WANDB_MODE=disabled.
        return f"curves for Weights & Biases: {where_to}" if where_to else ""

    def event(self, name: str, time: float, fields: Fields) -> None:
        """Log the points of an event, and at the end the result of the run."""
        step, points = self._curves.points(name, time, fields)
        if points:
            self._run.log({"step": step, **points})
        if name == "end":
            self._run.summary.update(_flat(fields))

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()


def _group(fields: Fields, name: str) -> Fields:
    found = fields.get(name)
    return found if isinstance(found, Mapping) else {}


def _flat(fields: Fields) -> dict[str, Any]:
    """Return the fields of the end by ``end/field``, and those of its groups by
    ``end/group/field``.
    """
    found: dict[str, Any] = {}
    for name, value in fields.items():
        inside = value if isinstance(value, dict) else {"": value}
        for field, part in inside.items():
            if not isinstance(part, dict):
                found[f"end/{name}/{field}".rstrip("/")] = part
    return found


def open_sinks(node: NodeSettings, say: Callable[[str], None]) -> Sinks:
    """Open the sinks of a node; ``say`` is given sentences for people.

    Raises:
        MetricsError: a port is taken, a folder cannot be written, or a package is missing; nothing
            is left open.
    """
    sinks: list[MetricsSink] = []
    if node.tensorboard is not None:
        sinks.append(TensorBoardFile(node.tensorboard, node.name))
    if node.wandb is not None:
        sinks.append(WandbRun(node.wandb, node.name, node.run_folder))
    if node.metrics is not None:
        from shoal.node.metrics.prometheus import Endpoint

        # Last, for it alone holds a resource by now.
        sinks.append(Endpoint(parse_address(node.metrics)))
    return Sinks(sinks, say)


def about(node: str, membership: Membership, device: object) -> About:
    """Return the description of the run of the node of that name, for sinks."""
    manifest = membership.manifest
    peer = membership.identity.peer_id
    return About(
        swarm=manifest.name,
        swarm_id=membership.swarm,
        node=node,
        peer=peer,
        method=manifest.outer.method,
        task=manifest.task,
        device=str(device),
        version=SHOAL_VERSION,
    )


def of_demo(node: NodeSettings, number: int) -> NodeSettings:
    """Return the settings of node ``number`` of a demo: ``node`` with a name and a port of its
    own.
    """
    metrics = None if node.metrics is None else str(parse_address(node.metrics).next(number))
    return node.model_copy(update={"name": f"peer-{number}", "metrics": metrics})


def flags_of_demo(node: NodeSettings, number: int) -> list[str]:
    """Return the settings of node ``number`` of a demo as command-line flags."""
    own = of_demo(node, number)
    given = {"--metrics": own.metrics, "--tensorboard": own.tensorboard, "--wandb": own.wandb}
    return [
        word for flag, value in given.items() if value is not None for word in (flag, str(value))
    ]


def check_demo(node: NodeSettings, count: int, say: Callable[[str], None]) -> None:
    """Check once for all nodes of a demo that their sinks are available. Raises MetricsError."""
    if node.metrics is not None and parse_address(node.metrics).next(count - 1).port > MAX_PORT:
        raise MetricsError(
            f"There are no {count} ports from --metrics {node.metrics} on: choose a lower one."
        )
    for index in range(count):
        open_sinks(of_demo(node, index), say).close()
    if node.metrics is not None and (first := parse_address(node.metrics)).port:
        say(
            f"metrics for Prometheus: http://{first}/metrics, of each further node one port "
            "further on"
        )
