"""The result of a node's run, as an object and as a file."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.node.checkpoint.folder import steps
from shoal.node.json_output import dumps
from shoal.node.runtime.display import lag_words, per_second
from shoal.node.training.throughput import Throughput

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
    """Rounds in which each part of the model was exchanged, and the last average."""
    fragments: int = 1
    """Parts of the model that are exchanged one after another, each once a round."""
    loss_first: float | None = None
    """Held-out loss before the first step; None at a newcomer to a swarm under way, which does not wait for an evaluation."""
    loss_last: float | None = None
    loss_local: float | None = None
    """Held-out loss of the same steps on the same shard without any exchange, where it was asked for."""
    tried: int = 0
    """Exchanges that ended: one for each fragment in a round."""
    exchanges: int = 0
    """Exchanges in which a partner's contribution was committed."""
    pairs_none: int = 0
    """Exchanges without a partner."""
    suspicious: int = 0
    """Contributions that this node refused for their distance (``shoal.swarm.exchange.robust.DistanceScreen``)."""
    bytes_sent: int = 0
    bytes_received: int = 0
    wait_s: float = 0.0
    wall_s: float = 0.0
    lag: int = 0
    """Inner steps for which the last exchange was to go on beside training; 0: training waited for each."""
    lag_auto: bool = False
    """True if this node chose its lag itself."""
    late: int = 0
    """Exchanges that came after their lag."""
    tokens: int = 0
    """Tokens of this run, from its own first step on."""
    tokens_per_s: float = 0.0
    """In inner steps: without waiting for others, evaluating and saving."""
    tokens_per_s_with_waiting: float = 0.0
    """In all of ``wall_s``."""
    mfu: float | None = None
    """Model FLOPs utilisation in inner steps, of 1; None where the device's peak is not known."""
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

    def note_lag(self, *, lag: int, lag_auto: bool, late: int) -> None:
        """Set the account of this node's lag (``LagReport.details``)."""
        self.lag, self.lag_auto, self.late = lag, lag_auto, late

    def note_rates(self, throughput: Throughput) -> None:
        """Set the tokens and their rates, once ``wall_s`` is known."""
        rates = throughput.mean()
        self.tokens, self.tokens_per_s, self.mfu = throughput.tokens, rates.tokens_per_s, rates.mfu
        self.tokens_per_s_with_waiting = self.tokens / self.wall_s if self.wall_s else 0.0


def summary(result: Result, folder: Path, training_loss: float | None) -> list[str]:
    """Return sentences about the end of a run for people: what came of it, where it is, and how to go on."""

    def shown(loss: float | None) -> str:
        return f"{loss:.4f}" if loss is not None and math.isfinite(loss) else "unknown"

    done = f"{result.steps} steps and {result.rounds} rounds, {result.exchanges} of {result.tried} exchanges with others"
    if result.interrupted:
        end = f"stopped after {done}: training loss {shown(training_loss)}"
    else:
        first = "" if result.loss_first is None else f", {shown(result.loss_first)} at first"
        end = f"finished after {done}: held-out loss {shown(result.loss_last)}{first}"
    resume = "the same command with --resume" + ("" if result.interrupted else " and more --steps") + " goes on from there"
    files = f"checkpoints, metrics.jsonl and {RESULT} are in {str(folder)!r}"
    if result.not_saved is not None:
        older = next(iter(steps(folder)), None)
        left = "no checkpoint is there" if older is None else f"--resume goes on from step {older}, the newest that is saved"
        files, resume = f"metrics.jsonl and {RESULT} are in {str(folder)!r}, but not the end of this run", left
    speed = [
        f"{per_second(result.tokens_per_s, result.mfu)} in inner steps, {result.tokens_per_s_with_waiting:,.0f} with waiting for "
        "others, evaluating and saving"
    ]
    overlapped = [
        f"training went on for {lag_words(result.lag, result.lag_auto)} during an exchange; {result.late} of {result.tried} came "
        f"later, and training waited {result.wait_s:.1f} s for the network"
    ]
    return [
        end,
        *(speed if result.tokens else []),
        *(overlapped if result.lag else []),
        f"{files}; {resume}",
    ]


def save(result: Result, folder: Path, say: Callable[[str], None]) -> None:
    """Write ``result`` into ``folder``; a sentence to ``say`` if that fails."""
    try:
        write_json(folder / RESULT, asdict(result))
    except OSError as error:
        say(f"Cannot write {str(folder / RESULT)!r} ({error.strerror}): free some space.")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write ``value`` as JSON; the file is replaced as a whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(dumps(value), encoding="utf-8")
    os.replace(temporary, path)
