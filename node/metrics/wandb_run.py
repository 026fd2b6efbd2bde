"""Sink for Weights & Biases: a run named like the node. The user's WANDB_* variables apply too."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.node.extras import require
from shoal.node.metrics.catalogue import Fields
from shoal.node.metrics.curves import Curves
from shoal.node.metrics.sink import About, MetricsError, one_line

INIT_S = 60.0  # seconds to reach the server at the start
FINISH_S = 25.0  # seconds to upload the rest at the end; less than `Background` waits


class WandbRun:
    """Logger to ``project`` (or ``team/project``); W&B's own files go below ``folder``. MetricsError: the package is missing."""

    name = "Weights & Biases"

    def __init__(self, project: str, node: str, folder: Path) -> None:
        require(MetricsError, "--wandb", "wandb", extra="wandb")
        self._team, _, self._project = project.rpartition("/")
        self._node, self._folder, self._curves = node, folder, Curves()
        self._run: Any = None

    def begin(self, about: About) -> str:
        """Start the run. MetricsError: nobody is logged in, or the server is not reached."""
        import wandb

        # W&B's output would tear the progress bar, and it must not capture that of others.
        quiet = wandb.Settings(console="off", silent=True, init_timeout=INIT_S, finish_timeout=FINISH_S, finish_timeout_raises=True)
        try:
            # Its own variable wins; without it, the folder of the run and not the current one.
            where = None if os.environ.get("WANDB_DIR") else self._folder
            if where is not None:
                where.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=self._project, entity=self._team or None, name=self._node, group=about.swarm, dir=where,
                config=asdict(about), settings=quiet,
            )  # fmt: skip
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except Exception as error:  # W&B has no family of its own for what it raises here
            raise MetricsError(
                f"Weights & Biases cannot be started ({one_line(error)}): run wandb login, or set WANDB_MODE=offline."
            ) from error
        where_to = f"wandb sync {self._run.sync_dir}" if self._run.offline else self._run.url
        return f"curves for Weights & Biases: {where_to}" if where_to else ""  # nowhere with WANDB_MODE=disabled

    def event(self, name: str, time: float, fields: Fields) -> None:
        """Log the points of an event, and at the end the result of the run."""
        step, points = self._curves.points(name, time, fields)
        if points:
            self._run.log({"step": step, **points})
        if name == "end":
            self._run.summary.update({f"end/{key}": value for key, value in fields.items() if not isinstance(value, dict)})

    def close(self) -> None:
        """Upload the rest."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()
