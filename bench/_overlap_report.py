"""The record of bench/overlap.py (bench/results/overlap.jsonl) as tables, and what `shoal plan`
would have said of our methods.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from shoal.optim import codec_named
from shoal.swarm.exchange.cost import Line, Work, forecast

NAMES = {
    "alone": "no exchange at all",
    "ddp": "DDP, gloo",
    "torchft": "torchft DiLoCo",
    "torchft-streaming": "torchft DiLoCo in 4 fragments",
    "hivemind": "hivemind.Optimizer, local updates",
    "noloco": "**ours**, NoLoCo (a pair, overlapped)",
    "streaming": "**ours**, Streaming DiLoCo",
    "co2": "**ours**, CO2",
    "noloco-blocking": "**ours**, NoLoCo, `lag = 0` (all at once)",
    "diloco": "**ours**, DiLoCo (group, all at once)",
}
PAIRS = ("noloco", "noloco-blocking")
FRAGMENTS = ("noloco", "streaming")
SHAPE = (1000, 1000)
"""Of a layer."""


def records(path: Path) -> list[dict[str, Any]]:
    """All runs of the record, the oldest first."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def work(method: str, plan: dict[str, Any]) -> Work | None:
    """What a node did in a round of a method of ours; None for another's."""
    if method not in {*PAIRS, *FRAGMENTS, "diloco", "co2"}:
        return None
    fragments: int = 1
    lag: int | Literal["auto"] = 0
    if method in FRAGMENTS:
        fragments, lag = plan["fragments"], "auto" if plan["lag"] is None else plan["lag"]
    elif method == "co2":
        lag = plan["every"]
    nbytes, parameters = plan["model_bytes"], plan["model_bytes"] // 4
    codec = plan.get("codec")
    if codec is not None:  # the same for all of its equal layers
        nbytes = codec_named(codec).nbytes([SHAPE] * (parameters // (SHAPE[0] * SHAPE[1])))
    group: Literal["pair", "everyone"] = "pair" if method in PAIRS else "everyone"
    sums = codec is None or codec == "float32"
    return Work(
        group,
        nbytes,
        parameters,
        plan["nodes"],
        plan["every"],
        plan["step_s"],
        fragments,
        lag,
        sums=sums,
    )


def predicted(method: str, delay_ms: int, plan: dict[str, Any]) -> float | None:
    """What the formula of `shoal plan` says that the method computes."""
    done = work(method, plan)
    return None if done is None else forecast(done, line(plan, delay_ms)).utilisation


def line(plan: dict[str, Any], delay_ms: int) -> Line:
    """The link of a run; ``delay_ms`` is one way."""
    return Line(plan["mbit"] * 1e6 / 8, 2 * delay_ms / 1000)


def tables(run: dict[str, Any]) -> str:
    """Utilisation of all methods at all delays, then of ours beside the prediction, as markdown."""
    return "\n".join([*_measured(run), "", *_compared(run)])


def _cells(run: dict[str, Any], method: str) -> dict[int, float]:
    return {row["delay_ms"]: row["utilisation"] for row in run["rows"] if row["method"] == method}


def _delays(run: dict[str, Any]) -> list[int]:
    return sorted({row["delay_ms"] for row in run["rows"]})


def _measured(run: dict[str, Any]) -> Iterator[str]:
    delays = _delays(run)
    yield "| method | " + " | ".join(f"{delay} ms" for delay in delays) + " |"
    yield "|---" * (len(delays) + 1) + "|"
    for method, name in NAMES.items():
        found = _cells(run, method)
        if found:
            yield (
                f"| {name} | "
                + " | ".join(f"{found[delay]:.3f}" if delay in found else "-" for delay in delays)
                + " |"
            )


def _compared(run: dict[str, Any]) -> Iterator[str]:
    delays, plan = _delays(run), run["plan"]
    yield "| method, predicted / measured | " + " | ".join(f"{delay} ms" for delay in delays) + " |"
    yield "|---" * (len(delays) + 1) + "|"
    for method, name in NAMES.items():
        found = _cells(run, method)
        if found and work(method, plan) is not None:
            cells = [
                f"{predicted(method, at, plan):.3f} / {found[at]:.3f}" if at in found else "-"
                for at in delays
            ]
            yield f"| {name.removeprefix('**ours**, ')} | " + " | ".join(cells) + " |"
