"""``shoal demo``: run a swarm of real processes with real daemons on this machine, by the commands
that a user would type.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file

from shoal.node.checkpoint.folder import check_writable
from shoal.node.config.device import resolve_device
from shoal.node.config.settings import Settings, load
from shoal.node.data.task_options import local_flags
from shoal.node.demo.nodes import LOOK_S, Liveness, Nodes, start_first
from shoal.node.metrics.sinks import check_demo, flags_of_demo
from shoal.node.runtime.display import Display, make_display
from shoal.node.runtime.door import task_label
from shoal.node.runtime.resume import RESULT, ROUNDS
from shoal.node.tasks.loader import load_task
from shoal.swarm.figures import amount, duration

Given = Mapping[str, Any]
Events = Sequence[Sequence[Mapping[str, Any]]]


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
    # The nodes share one machine's processors: a late partner is slow, not gone.
    given = {"outer.wait_s": 60.0, "train.steps": rounds * every, "outer.every": every}
    settings = demo_settings(peers, seed, {**given, **more})
    hooks = settings.task.hooks
    options = settings.task.options
    length = settings.outer.every or every
    # Errors of the task and device are raised here at once, and not by every node.
    load_task(hooks, options)
    resolve_device(device)
    began = time.monotonic()
    began_at = time.time()

    common = [*local_flags(hooks, options), "--keep-rounds", "--device", device]
    common += [*(["--baseline"] if compare else []), *(["--verbose"] if verbose else [])]
    flags = [
        ["--shard", f"{index}/{peers}", *common, *(["--task", hooks] if index else [])]
        for index in range(peers)
    ]

    def done(events: Events) -> int:
        return min((_done(node, length) for node in events), default=0)

    def said(events: Events, shown: int, now: int) -> Iterator[str]:
        ended = [_ended(node, now * length, length) for node in events]
        losses = "  ".join("-" if loss is None else f"{loss:.3f}" for loss in map(_loss, ended))
        moved = sum(event["bytes_sent"] for node in ended for event in node)
        failed = sum(bool(event["error"]) for node in ended for event in node)
        single = sum(event["partner"] is None for node in ended for event in node) - failed
        own = f", {failed} ended by an error in a node's own code" if failed else ""
        yield (
            f"round {now} of {rounds}: training loss {losses}, {amount(moved)} sent, {single} "
            f"without a partner{own}"
        )
        if now == rounds and compare:
            yield "now the same again without partners, to compare"

    with run_nodes(settings, keep, f"of {task_label(hooks)!r}", flags, done, said, rounds) as (
        folders,
        results,
        events,
    ):
        distances = consensus_distances([folder / ROUNDS for folder in folders])
        return report(results, distances, _all_began(events) - began_at, time.monotonic() - began)


def demo_settings(peers: int, seed: int, given: Given) -> Settings:
    own = {
        "swarm.name": "demo",
        "swarm.start_when": peers,
        "swarm.shards": peers,
        "train.seed": seed,
    }
    return load(None, {**own, **given})


@contextmanager
def run_nodes(
    settings: Settings,
    keep: Path | None,
    what: str,
    flags: Sequence[Sequence[str]],
    done: Callable[[Events], int],
    said: Callable[[Events, int, int], Iterable[str]],
    rounds: int,
    cheat: int = 0,
) -> Iterator[tuple[list[Path], list[dict[str, Any]], Events]]:
    """Run the nodes of a demo to their end; yield their folders, which may be removed then, their
    results and their events.

    Args:
        what: the nodes in words. flags: of each node, besides those that all demos have.
        done: the rounds that all have done, by their events. said: what to say when they are so
            many more, before and now.
        cheat: how many nodes, the last ones, cheat.

    Raises DemoError, MetricsError or CheckpointError.
    """
    peers = len(flags)
    with stage(keep) as (folder, display):
        check_demo(settings.node, peers, display.message)
        file = folder / "swarm.toml"
        file.write_text(settings_toml(settings), encoding="utf-8")
        usual = ["--listen", "/ip4/127.0.0.1/tcp/0", "--threads", "1", *settings.train.flags()]
        own = [
            [*usual, *given, *flags_of_demo(settings.node, index)]
            for index, given in enumerate(flags)
        ]
        folders = [folder / f"peer-{index}" for index in range(peers)]
        with Nodes(folder) as nodes:
            liveness = Liveness(folders)
            shown = 0
            display.message(f"starting {peers} nodes {what} on this machine")
            link = start_first(nodes, ["up", str(file), *own[0]], display, liveness)
            for index in range(1, peers):
                program = "shoal.node.demo.cheating" if index >= peers - cheat else "shoal"
                nodes.start(["join", link, *own[index]], folders[index].name, program=(program,))
            while not nodes.check():
                time.sleep(LOOK_S)
                events = liveness.look(
                    sum(process.poll() is not None for process in nodes.processes)
                )
                now = done(events)
                if now > shown and (now == rounds or now - shown >= max(rounds // 10, 1)):
                    for line in said(events, shown, now):
                        display.message(line)
                    shown = now
            events = liveness.look(peers)
        display.close()
        yield folders, [json.loads((each / RESULT).read_text()) for each in folders], events


@contextmanager
def stage(keep: Path | None, name: str = "demo") -> Iterator[tuple[Path, Display]]:
    """Yield a folder for the nodes, ``keep`` or a temporary one, and a display.

    Raises CheckpointError if it is not usable.
    """
    if keep is not None:
        check_writable(keep)
    with (
        nullcontext(keep)
        if keep is not None
        else TemporaryDirectory(prefix=f"shoal-{name}-", ignore_cleanup_errors=True) as place
    ):
        yield Path(place).resolve(), make_display()


def _toml(value: Any) -> str:
    """Return a text, a number or a list as TOML has it: JSON, but for characters beyond ASCII and
    DEL.
    """
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def settings_toml(settings: Settings) -> str:
    """Return what was given of the tables that ``shoal up`` needs, as TOML; what was not is left to
    it.
    """
    tables = settings.model_dump(
        mode="json", exclude={"node"}, exclude_none=True, exclude_unset=True
    )
    options = tables.get("task", {}).pop("options", {})
    lines = []
    for name, table in {**tables, "task.options": options}.items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _exchanges(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [event for event in events if event["event"] == "round"]


def _all_began(nodes: Events) -> float:
    """Return the Unix time at which the last of the nodes had done its first inner step."""
    return max(
        float(event["time"]) for events in nodes for event in events if event["event"] == "begun"
    )


def _sent(exchange: Mapping[str, Any]) -> int:
    return int(exchange["step"] - exchange["lag"])


def _done(events: Sequence[Mapping[str, Any]], every: int) -> int:
    """Return the rounds in which all was exchanged, by steps: a method may exchange several times
    in a round.
    """
    sent = [
        (exchange["fragment"], exchange["fragments"], _sent(exchange))
        for exchange in _exchanges(events)
    ]
    latest = {
        fragment: max(step for other, _, step in sent if other == fragment)
        for fragment, _, _ in sent
    }
    if len(latest) > 1:  # not each fragment's is at the end of its round
        fragments = sent[0][1]
        return min(-(-latest.get(fragment, 0) // every) for fragment in range(fragments))
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


def consensus_distances(folders: Sequence[Path]) -> list[float]:
    """Return for each round the RMS distance between the peers' slow weights (over all pairs) over
    their RMS norm.
    """
    # In rounds of seconds a quick node ends sooner, and then has fewer.
    names = sorted(
        set.intersection(
            *({path.name for path in folder.glob("*.safetensors")} for folder in folders)
        )
    )
    return [_distance([load_file(folder / name) for folder in folders]) for name in names]


def _distance(peers: Sequence[Mapping[str, torch.Tensor]]) -> float:
    apart = torch.zeros(len(peers) * (len(peers) - 1) // 2 or 1, device="cpu")
    size = torch.zeros(len(peers), device="cpu")
    for key in peers[0]:  # by tensor, for all of a large model in float64 would need much memory
        flat = torch.stack([tensors[key].double().reshape(-1) for tensors in peers])  # (K, values)
        size = size + flat.square().sum(1)
        if len(peers) > 1:
            apart = apart + torch.pdist(flat).square()
    return float((apart.mean() / size.mean()).sqrt())


def report(
    results: Sequence[dict[str, Any]], distances: list[float], start_s: float, seconds: float
) -> dict[str, Any]:
    """Return the report that ``shoal demo --json`` prints last: means over peers except for counts.

    ``start_s``: seconds until the last of the nodes had done its first inner step; ``seconds``:
    those of the whole demo.
    """

    def mean(key: str) -> float | None:
        values = [result[key] for result in results]
        return None if None in values else sum(map(float, values)) / len(values)

    return {
        "peers": len(results),
        "method": results[0]["method"],
        "rounds": max(result["rounds"] for result in results),
        "fragments": results[0]["fragments"],
        "steps": max(result["steps"] for result in results),
        "loss_first": mean("loss_first"),
        "loss_last": mean("loss_last"),
        "loss_local": mean("loss_local"),
        "ended": _ended_with([result.get("ended") for result in results]),
        # Both members of a committed pair count it.
        "exchanges": sum(result["exchanges"] for result in results) // 2,
        "pairs_none": sum(result["pairs_none"] for result in results),
        "failed": sum(result["failed"] for result in results),
        "internal_errors": internal_errors(results),
        "trained_alone": [result["trained_alone"] for result in results if result["trained_alone"]],
        "bytes_sent": sum(result["bytes_sent"] for result in results),
        "bytes_received": sum(result["bytes_received"] for result in results),
        "wait_s": mean("wait_s"),
        "wall_s": mean("wall_s"),
        "spread": distances,
        "params": results[0]["params"],
        "start_s": start_s,
        "seconds": seconds,
    }


def internal_errors(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the errors of the nodes' own code by place: their ``count``, and the ``first`` line of
    one.
    """
    found: dict[str, dict[str, Any]] = {}
    for result in results:
        for place, known in result["internal_errors"].items():
            of_place = found.setdefault(place, {"count": 0, "first": known["first"]})
            of_place["count"] += known["count"]
    return found


def erring(report: Mapping[str, Any]) -> str:
    """Return a line about the errors of the nodes' own code; nothing if there were none."""
    found = report["internal_errors"]
    if not found:
        return ""
    count = sum(known["count"] for known in found.values())
    first = next(iter(found.values()))["first"]
    return (
        f"\n{count} error{'s' * (count > 1)} in the nodes' own code, and not in the network, ended "
        f"{report['failed']} exchanges ({first}): run again with --keep FOLDER, whose node.log "
        "files have the tracebacks"
    )


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
    before, after, members = (ended[key] for key in ("loss_before", "loss_after", "members"))
    if members < peers:
        return [f"last average: not all of the {peers} nodes are in one mean; result.json has why"]
    losses = ""
    if before is not None and after is not None:
        losses = f": held-out loss {before:.3f} before, each its own, and {after:.3f} after"
    return [f"last average: one model of {members} nodes{losses}"]


def summary(report: dict[str, Any]) -> str:
    first, together, alone = (report[key] for key in ("loss_first", "loss_last", "loss_local"))
    said = "not known, because evaluate() returned no finite number"
    if None not in (first, together) and alone is None:
        said = f"{first:.3f} at first, {together:.3f} together; not compared with training alone"
    if None not in (first, together, alone):
        gain = 100 * (1 - together / alone) if alone else 0.0
        said = (
            f"{first:.3f} at first, {together:.3f} together, {alone:.3f} alone with the same "
            "steps: "
        )
        said += f"{abs(gain):.1f} % {'better' if gain >= 0 else 'worse'} together"
    if report["trained_alone"] and not report["exchanges"] and None not in (first, together):
        said = (
            f"{first:.3f} at first, {together:.3f} in the end; nothing was exchanged, so each "
            "node trained alone"
        )
    most = max(report["spread"], default=0)
    last = report["spread"][-1] if report["spread"] else 0
    end = "".join(f"\n{line}" for line in _end_said(report.get("ended"), report["peers"]))
    return (
        f"{report['peers']} nodes, {report['params']:,} parameters, {report['steps']} steps each "
        f"in {report['rounds']} rounds, {duration(round(report['seconds']))}\n"
        f"held-out loss: {said}\n"
        f"{report['exchanges']} pairs exchanged, {report['pairs_none']} times a node had no "
        f"partner, {amount(report['bytes_sent'])} sent; {duration(report['wait_s'])} of "
        f"{duration(report['wall_s'])} waiting per node\n"
        f"consensus distance of the slow weights: at most {most:.4f}, after the last round "
        f"{last:.4f}{end}{erring(report)}"
    )
