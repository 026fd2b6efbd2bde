"""The result of a node's run, as an object and as a file."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.node.json_output import dumps

RESULT = "result.json"


@dataclass
class Result:
    """The result of a node's run; written to ``result.json`` in its folder and printed by --json."""

    name: str
    peer: str
    swarm: str
    method: str
    device: str
    shard: str
    params: int
    steps: int = 0
    rounds: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    loss_local: float | None = None
    """Held-out loss of the same steps on the same shard without any exchange, where it was asked for."""
    exchanges: int = 0
    """Rounds in which a partner's contribution was committed."""
    pairs_none: int = 0
    """Rounds without a partner."""
    suspicious: int = 0
    """Contributions that this node refused for their distance (``shoal.swarm.exchange.robust.DistanceScreen``)."""
    bytes_sent: int = 0
    bytes_received: int = 0
    wait_s: float = 0.0
    wall_s: float = 0.0
    restarts: int = 0
    """Restarts of the network daemon."""
    refused: dict[str, int] = field(default_factory=dict)
    """Refused streams, calls and gossiped records of others, by reason (``Membership.refused``)."""
    task: dict[str, int | float] = field(default_factory=dict)
    """The task's own results (``Task.extra_results``). Text: ``bits_per_byte``, ``loss_last`` in bits for each byte, which can be
    compared where tokenizers differ; a stream also ``skipped``, the number of records that could not be used."""
    interrupted: bool = False
    not_saved: str | None = None
    """The reason if the end of the run could not be saved."""
    rl: dict[str, Any] | None = None
    """The report of ``RolloutSharing``, where the task is reinforcement learning."""
    verify: dict[str, Any] | None = None
    """The report of ``shoal.node.verify.service.Verification``, where nodes verify each other."""


def summary(result: Result, folder: Path, training_loss: float | None) -> list[str]:
    """Return sentences about the end of a run for people: what came of it, where it is, and how to go on."""

    def shown(loss: float | None) -> str:
        return f"{loss:.4f}" if loss is not None and math.isfinite(loss) else "unknown"

    done = f"{result.steps} steps and {result.rounds} rounds, {result.exchanges} of them with others"
    if result.interrupted:
        end = f"stopped after {done}: training loss {shown(training_loss)}"
    else:
        end = f"finished after {done}: held-out loss {shown(result.loss_last)}, {shown(result.loss_first)} at first"
    resume = "the same command with --resume" + ("" if result.interrupted else " and more --steps") + " goes on from there"
    return [end, f"checkpoints, metrics.jsonl and {RESULT} are in {str(folder)!r}; {resume}"]


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write ``value`` as JSON; the file is replaced as a whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(dumps(value), encoding="utf-8")
    os.replace(temporary, path)
