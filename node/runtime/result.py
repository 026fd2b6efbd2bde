"""The result of a node's run: an object, ``result.json`` in its folder, what --json prints, and
sentences for people.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from shoal.node.checkpoint.folder import steps
from shoal.node.console import dumps
from shoal.node.runtime.display import lag_words, per_second
from shoal.node.runtime.run_options import LOG
from shoal.optim.methods import ALONE
from shoal.swarm.errors import write_remedy
from shoal.swarm.figures import duration
from shoal.swarm.file_lock import replace_file
from shoal.swarm.wire.record import Group, NodeRecord

RESULT = "result.json"


class Setup(Group):
    """What a node trained, where, and how."""

    method: str
    device: str
    shard: str
    params: int
    fragments: int = 1
    """Parts of the model that are exchanged one after another, each once a round."""


class Result(NodeRecord):
    """A node's record at the end of its run, and what only the end knows.

    Rates are of the whole run. ``loss.held_out`` is of its end, and None if the run was stopped.
    """

    model_config = ConfigDict(frozen=False)
    name: str
    peer: str
    swarm: str
    setup: Setup
    began_at: int = 0
    """``progress.step`` at which this run began: more than 0 if it was resumed. Rounds, exchanges,
    bytes, rates and the first losses are those of the steps since."""
    wall_s: float = 0.0
    """Seconds from the first step to the last."""
    tokens_per_s_with_waiting: float = 0.0
    """In all of ``wall_s``."""
    internal_errors: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Errors of this node's own code that it survived, by place: ``count``, the newest's ``first``
    line and ``newest_at`` (Unix seconds). Their tracebacks are in node.log."""
    trained_alone: str = ""
    """The reason in a sentence, if nothing was ever exchanged though others were there."""
    gossip_sent: int = 0
    """Bytes of ``link.bytes_sent`` on streams of gossip: statuses, receipts, rollouts. A status is
    sent as time passes, however long an exchange takes."""
    refused: dict[str, int] = Field(default_factory=dict)
    """Refused streams, calls and gossiped records of others, by reason (``Membership.refused``)."""
    task: dict[str, int | float] = Field(default_factory=dict)
    """The task's own results (``Task.extra_results``).

    Text: ``bits_per_byte``, the held-out loss in bits for each byte, which can be compared where
    tokenizers differ; a stream also ``skipped``, the number of records that could not be used."""
    last_average: dict[str, Any] | None = None
    """What the last average came to (`shoal.swarm.training.last_average.EndReport`), where the
    swarm ends with one.
    """
    interrupted: bool = False
    not_saved: str | None = None
    """The reason if the end of the run could not be saved."""
    rl: dict[str, Any] | None = None
    """The report of ``RolloutSharing``, where the task is reinforcement learning."""
    verify: dict[str, Any] | None = None
    """The report of ``shoal.node.verify.service.Verification``, where nodes verify each other."""

    def take(self, record: NodeRecord) -> None:
        """Hold ``record`` from now on."""
        for name in NodeRecord.model_fields:
            setattr(self, name, getattr(record, name))


def summary(result: Result, folder: Path) -> list[str]:
    """Return sentences about the end of a run for people: what came of it, where it is, and how to
    go on.
    """
    lines = [_end(result)]
    if result.trained_alone:
        lines.append(result.trained_alone)
    own = sum(known["count"] for known in result.internal_errors.values())
    if own:
        lines.append(
            f"{own} error{'s' * (own > 1)} of this node's own code: their tracebacks are in "
            f"{str(folder / LOG)!r}"
        )
    progress = result.progress
    if progress.tokens:
        lines.append(
            f"{per_second(progress.tokens_per_s, progress.mfu)} in inner steps, "
            f"{result.tokens_per_s_with_waiting:,.0f} with waiting for others, evaluating and "
            "saving"
        )
    exchanges = result.exchanges
    if exchanges.lag_steps:
        waited = f"{duration(exchanges.wait_s)} for the network"
        if result.last_average is not None:
            waited += f", and {duration(result.last_average['wait_s'])} for the last average"
        lines.append(
            f"training went on for {lag_words(exchanges.lag_steps, exchanges.lag_auto)} during an "
            f"exchange; {exchanges.late} of {exchanges.ended} came later, and training waited "
            f"{waited}"
        )
    return [*lines, _left(result, folder)]


def _end(result: Result) -> str:
    exchanges = result.exchanges
    loss = result.loss
    done = f"{result.progress.step - result.began_at} steps and {exchanges.rounds} rounds"
    if result.began_at:
        done += f" since step {result.began_at}"
    if result.setup.method != ALONE:
        done += f", {exchanges.with_partner} of {exchanges.ended} exchanges with others"
    if result.interrupted:
        return f"stopped after {done}: training loss {_shown(loss.training)}"
    first = ""
    if loss.held_out_first is not None:
        first = f", {_shown(loss.held_out_first)} at first"
    return f"finished after {done}: held-out loss {_shown(loss.held_out)}{first}"


def _shown(loss: float | None) -> str:
    return f"{loss:.4f}" if loss is not None else "unknown"


def _left(result: Result, folder: Path) -> str:
    """Return what is in the folder, and how to go on from it."""
    if result.not_saved is None:
        more = "" if result.interrupted else " and more --steps"
        return (
            f"checkpoints, metrics.jsonl and {RESULT} are in {str(folder)!r}; the same command "
            f"with --resume{more} goes on from there"
        )
    older = next(iter(steps(folder)), None)
    left = "no checkpoint is there"
    if older is not None:
        left = f"--resume goes on from step {older}, the newest that is saved"
    return f"metrics.jsonl and {RESULT} are in {str(folder)!r}, but not the end of this run; {left}"


def save(result: Result, folder: Path, say: Callable[[str], None]) -> None:
    """Write ``result`` into ``folder``; a sentence to ``say`` if that fails."""
    try:
        write_json(folder / RESULT, result.model_dump(mode="json"))
    except OSError as error:
        say(f"Cannot write {str(folder / RESULT)!r} ({error.strerror}): {write_remedy(error)}.")


def ended_at(folder: Path) -> int:
    """Return the step at which the last run of the node in ``folder`` came to its end; 0 if it was
    stopped, or there is no result to read.
    """
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        return 0 if result["interrupted"] else int(result["progress"]["step"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return 0


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write ``value`` as JSON; the file is replaced as a whole or not at all."""
    replace_file(path, dumps(value))
