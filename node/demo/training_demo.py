"""``shoal demo``: nodes on this machine that train together, and then each alone, to compare."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.node.config.device import resolve_device
from shoal.node.config.setting_types import spec_label
from shoal.node.data.task_options import local_flags
from shoal.node.demo.consensus_distance import consensus_distances
from shoal.node.demo.internal_errors import internal_errors, internal_errors_line
from shoal.node.demo.run_nodes import Events, Given, demo_settings, run_nodes
from shoal.node.runtime.resume import ROUNDS
from shoal.node.tasks.loader import load_task
from shoal.swarm.figures import amount, duration

WAIT_S = 60.0
"""For a partner: the nodes share one machine's processors, so a late one is slow, not gone."""


def run_demo(
    *,
    peers: int,
    rounds: int,
    every: int,
    seed: int,
    device: str,
    keep: Path | None,
    verbose: bool,
    compare: bool,
    more: Given,
) -> dict[str, Any]:
    """Train with ``peers`` nodes for ``rounds`` rounds of ``every`` inner steps; return the
    `report`.

    ``more``: further settings, with dotted keys, such as ``outer.method``. ``compare``: then each
    node trains once more alone.

    Raises:
        ConfigError: a setting cannot be used.
        DemoError: a node failed or made no progress.
    """
    given = {"outer.wait_s": WAIT_S, "train.steps": rounds * every, "outer.every": every}
    settings = demo_settings(peers, seed, {**given, **more})
    hooks = settings.task.hooks
    options = settings.task.options
    # Errors of the task and device are raised here at once, and not by every node.
    load_task(hooks, options)
    resolve_device(device)
    began = time.monotonic()
    began_at = time.time()

    common = [*local_flags(hooks, options), "--keep-rounds", "--device", device]
    if compare:
        common.append("--baseline")
    if verbose:
        common.append("--verbose")
    flags: list[list[str]] = []
    for index in range(peers):
        own = ["--shard", f"{index}/{peers}", *common]
        if index:
            own += ["--task", hooks]
        flags.append(own)

    progress = TrainingProgress(rounds, settings.outer.every or every, compare)
    what = f"of {spec_label(hooks)!r}"
    with run_nodes(settings, keep, what, flags, progress) as (folders, results, events):
        distances = consensus_distances([folder / ROUNDS for folder in folders])
        start_s = _all_began(events) - began_at
        return report(results, events, distances, start_s, time.monotonic() - began)


@dataclass(frozen=True)
class TrainingProgress:
    """How far nodes are that train together, ``every`` steps a round; ``compare``: and then
    alone.
    """

    rounds: int
    every: int
    compare: bool

    def done(self, events: Events) -> int:
        """Return the rounds that all nodes have done."""
        return min((_done(node, self.every) for node in events), default=0)

    def lines(self, events: Events, shown: int, now: int) -> Iterator[str]:
        """Yield the losses of round ``now``, and how its exchanges went."""
        losses: list[str] = []
        bytes_sent = 0
        failed = 0
        single = 0
        for node in events:
            ended = _ended(node, now * self.every, self.every)
            loss = _loss(ended)
            losses.append("-" if loss is None else f"{loss:.3f}")
            for event in ended:
                bytes_sent += event["bytes_sent"]
                failed += bool(event["error"])
                single += event["partner"] is None and not event["error"]
        own = f", {failed} ended by an error in a node's own code" if failed else ""
        yield (
            f"round {now} of {self.rounds}: training loss {'  '.join(losses)}, "
            f"{amount(bytes_sent)} sent, {single} without a partner{own}"
        )
        if now == self.rounds and self.compare:
            yield "now the same again without partners, to compare"


def _exchanges(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [event for event in events if event["event"] == "round"]


def _all_began(nodes: Events) -> float:
    """Return the Unix time at which the last of the nodes had done its first inner step."""
    begun: list[float] = []
    for events in nodes:
        begun += [float(event["time"]) for event in events if event["event"] == "begun"]
    return max(begun)


def _sent(exchange: Mapping[str, Any]) -> int:
    return int(exchange["step"] - exchange["lag_steps"])


def _done(events: Sequence[Mapping[str, Any]], every: int) -> int:
    """Return the rounds in which all was exchanged, by steps: a method may exchange several times
    in a round.
    """
    latest: dict[int, int] = {}
    fragments = 1
    for exchange in _exchanges(events):
        fragment = exchange["fragment"]
        latest[fragment] = max(latest.get(fragment, 0), _sent(exchange))
        fragments = exchange["fragments"]
    # Not each fragment's exchange is at the end of its round.
    if len(latest) > 1:
        return min(math.ceil(latest.get(fragment, 0) / every) for fragment in range(fragments))
    return max(latest.values(), default=0) // every


def _ended(events: Sequence[Mapping[str, Any]], step: int, every: int) -> list[Mapping[str, Any]]:
    """Return the exchanges begun in the ``every`` steps up to ``step``, or the last before: rounds
    need not be steps.
    """
    before = [event for event in _exchanges(events) if _sent(event) <= step]
    last = max(map(_sent, before), default=0)
    return [event for event in before if _sent(event) > step - every or _sent(event) == last]


def _loss(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean of the known losses: between two exchanges at one step there is none."""
    losses = [event["loss"] for event in events if event["loss"] is not None]
    return sum(losses) / len(losses) if losses else None


def pairs_exchanged(nodes: Events) -> int:
    """Return how many pairs of nodes exchanged, each counted once: two in a chain of three."""
    met = 0
    for events in nodes:
        met += sum(max(event["members"] - 1, 0) for event in _exchanges(events))
    return met // 2


def report(
    results: Sequence[dict[str, Any]],
    events: Events,
    distances: list[float],
    start_s: float,
    seconds: float,
) -> dict[str, Any]:
    """Return the report that ``shoal demo --json`` prints last: means over peers except for counts.

    ``start_s``: seconds until the last of the nodes had done its first inner step; ``seconds``:
    those of the whole demo.
    """

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(map(float, known)) / len(results) if len(known) == len(results) else None

    exchanges = [result["exchanges"] for result in results]
    links = [result["link"] for result in results]
    losses = [result["loss"] for result in results]
    setup = results[0]["setup"]
    return {
        "peers": len(results),
        "method": setup["method"],
        "rounds": max(one["rounds"] for one in exchanges),
        "fragments": setup["fragments"],
        "steps": max(result["progress"]["step"] for result in results),
        "loss_first": mean(loss["held_out_first"] for loss in losses),
        "loss_last": mean(loss["held_out"] for loss in losses),
        "loss_local": mean(loss["held_out_alone"] for loss in losses),
        "ended": _ended_with([result.get("last_average") for result in results]),
        "exchanges": pairs_exchanged(events),
        "pairs_none": sum(one["without_partner"] for one in exchanges),
        "failed": sum(one["failed"] for one in exchanges),
        "internal_errors": internal_errors(results),
        "trained_alone": [result["trained_alone"] for result in results if result["trained_alone"]],
        "bytes_sent": sum(link["bytes_sent"] for link in links),
        "gossip_sent": sum(result["gossip_sent"] for result in results),
        "bytes_received": sum(link["bytes_received"] for link in links),
        "wait_s": mean(one["wait_s"] for one in exchanges),
        "wall_s": mean(result["wall_s"] for result in results),
        "spread": distances,
        "params": setup["params"],
        "start_s": start_s,
        "seconds": seconds,
    }


def _ended_with(ends: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return what the last average came to: how many nodes are in the smallest mean, and the mean
    held-out losses around it.
    """
    known = [end for end in ends if end is not None]
    if not known or len(known) < len(ends):
        return None

    def mean(key: str) -> float | None:
        values = [end[key] for end in known]
        return None if None in values else sum(values) / len(values)

    return {
        "members": min(len(end["members"]) for end in known),
        "loss_before": mean("loss_before"),
        "loss_after": mean("loss_after"),
    }


def _end_said(ended: Mapping[str, Any] | None, peers: int) -> list[str]:
    """Return a line about the last average, if the swarm ends with one."""
    if ended is None:
        return []
    before = ended["loss_before"]
    after = ended["loss_after"]
    members = ended["members"]
    if members < peers:
        return [f"last average: not all of the {peers} nodes are in one mean; result.json has why"]
    losses = ""
    if before is not None and after is not None:
        losses = f": held-out loss {before:.3f} before, each its own, and {after:.3f} after"
    return [f"last average: one model of {members} nodes{losses}"]


def summary(report: dict[str, Any]) -> str:
    """Return what the demo came to, for people."""
    most = max(report["spread"], default=0)
    last = report["spread"][-1] if report["spread"] else 0
    end = "".join(f"\n{line}" for line in _end_said(report.get("ended"), report["peers"]))
    return (
        f"{report['peers']} nodes, {report['params']:,} parameters, {report['steps']} steps each "
        f"in {report['rounds']} rounds, {duration(round(report['seconds']))}\n"
        f"held-out loss: {_losses_said(report)}\n"
        f"{report['exchanges']} pairs exchanged, {report['pairs_none']} times a node had no "
        f"partner, {amount(report['bytes_sent'])} sent; {duration(report['wait_s'])} of "
        f"{duration(report['wall_s'])} waiting per node\n"
        f"consensus distance of the slow weights: at most {most:.4f}, after the last round "
        f"{last:.4f}{end}{internal_errors_line(report)}"
    )


def _losses_said(report: Mapping[str, Any]) -> str:
    """Return the held-out losses at first, together and alone."""
    first = report["loss_first"]
    together = report["loss_last"]
    alone = report["loss_local"]
    if first is None or together is None:
        return "not known, because evaluate() returned no finite number"
    if report["trained_alone"] and not report["exchanges"]:
        return (
            f"{first:.3f} at first, {together:.3f} in the end; nothing was exchanged, so each "
            "node trained alone"
        )
    if alone is None:
        return f"{first:.3f} at first, {together:.3f} together; not compared with training alone"
    gain = 100 * (1 - together / alone) if alone else 0.0
    return (
        f"{first:.3f} at first, {together:.3f} together, {alone:.3f} alone with the same steps: "
        f"{abs(gain):.1f} % {'better' if gain >= 0 else 'worse'} together"
    )
