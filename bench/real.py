"""What a model gains from a swarm: real nodes train it together, and the same is trained without
them, on the same text.

    # fine-tune all weights
    python bench/real.py --model FOLDER --nodes 4 --json
    python bench/real.py --model FOLDER --nodes 4 --lora 8 --json              # an adapter only
    python bench/real.py --model FOLDER --nodes 4 --data a.txt,b.txt,c.txt,d.txt --folder \
        runs/real --json
    python bench/real.py --from-scratch 10m --data a.txt,b.txt --alone 1 --times 4 --ddp --figure \
        curves.svg --folder runs/10m
    python bench/real.py --from-scratch 10m --data a.txt,b.txt --inner muon --only-ddp --json

FOLDER holds a causal language model of transformers, such as SmolLM2-135M. Nodes are processes of
`shoal up` and `shoal join` on this machine, one thread each. Every node trains on its own part of
the text (bench/_real_task.py) and all are measured on the same held-out text: `loss_last` is the
mean over the nodes, after the rounds. Beside it

* `loss_alone`: the mean over the first --alone nodes, each alone with the same part, seed, number
  of steps and method, without partners (rows before 2026-11-28: without an outer optimizer);
* `loss_times`, with --times N: the first node alone, with its part and N times the steps;
* `loss_ddp`, with --ddp: data parallel training of as many nodes, computed in one process, whose
  batch is those of all nodes one after another: the same mathematics. `ddp_bytes` is what a ring
  all-reduce of float32 would send, computed. With --only-ddp nothing else is trained.

All of them have the inner optimizer --inner: the task's own AdamW, or Shoal's Muon or AdamW.
The learning rate has the schedule --schedule over each run's own steps. --kill I@STEP kills node I
with SIGKILL there, and starts it again with --resume; with --late STEP the last node joins when the
first has done so many steps, and leaves when the others have ended: `late_measured` is [steps,
seconds, loss] of what it last measured. `curves`: of each run, every --eval steps, [steps, tokens
of all its nodes, seconds, held-out loss]. Seconds are those of a machine that all nodes share:
together and alone cannot be compared by them. With --folder what is done is kept: the same command,
called again, goes on where it was cut off, in the middle of a run from its checkpoints.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run as a file, its own folder stands there

from bench._real_figure import draw
from bench._real_task import FILE, SIZES, learn
from shoal.node.checkpoint.folder import steps as saved
from shoal.node.demo.liveness import EventReader, Liveness
from shoal.node.demo.nodes import LOOK_S, Nodes, Process, start_first
from shoal.node.runtime.display import Display, make_display
from shoal.node.runtime.result import RESULT
from shoal.node.runtime.run_options import METRICS
from shoal.optim.inner import LR as MUON_LR

TASK = f"{Path(__file__).parent / '_real_task.py'}:"
LOCAL = "/ip4/127.0.0.1/tcp/0"
MIB = 2**20
PATIENCE = 20
"""Times as long as `shoal demo` does a node at low priority may say nothing."""
CHECKPOINT = 50  # inner steps, about
LEAVE_S = 120.0  # for a node to save and leave
Events = list[dict[str, Any]]


def flags(chosen: argparse.Namespace, index: int) -> list[str]:
    """Return the flags of one node, whether together or alone."""
    rounds = max(1, CHECKPOINT // chosen.every)
    own = [
        "--shard",
        f"{index}/{chosen.nodes}",
        "--threads",
        "1",
        "--set",
        f"node.checkpoint_every_rounds={rounds}",
    ]
    own += (
        ["--data", chosen.data] if chosen.data else []
    )  # a path, which no swarm names for its members
    return [
        "--task",
        TASK + ("FreshText" if chosen.from_scratch else "RealText"),
        "--listen",
        LOCAL,
        *own,
        *chosen.node,
    ]


def swarm(
    chosen: argparse.Namespace,
    method: str,
    *,
    start_when: int = 1,
    steps: int = 0,
    ddp: bool = False,
) -> list[str]:
    """Return the flags of the first node: those of its swarm."""
    options = {
        "base": str(Path(chosen.model).resolve()),
        "lora": chosen.lora,
        "context": chosen.context,
        "batch": chosen.batch,
        "lr": chosen.lr,
        "held": chosen.held,
        "parts": chosen.nodes if ddp else 0,
        "most": chosen.most,
    }
    if chosen.from_scratch:
        options |= {"size": chosen.from_scratch, "unlike": chosen.unlike}
    settings = {
        "swarm.start_when": start_when,
        "swarm.shards": chosen.nodes,
        "train.steps": steps or chosen.steps,
        "train.seed": chosen.seed,
        "train.schedule": chosen.schedule,
        "train.eval_every": chosen.eval,
        "outer.every": chosen.every,
    }
    if chosen.schedule != "task":
        settings["train.warmup"] = chosen.warmup
    if chosen.inner != "task":
        settings |= {"train.optimizer": chosen.inner, "train.lr": chosen.lr}
    given = [f"--option={key}={json.dumps(value)}" for key, value in options.items()]
    return [
        "--method",
        method,
        *(f"--set={key}={value}" for key, value in settings.items()),
        *given,
    ]


def resumed(folder: Path) -> list[str]:
    """Return what lets a node go on from its checkpoint, if it has one."""
    return ["--resume"] if saved(folder) else []


def result(folder: Path) -> dict[str, Any]:
    """Return what a node has come to, over all its lives."""
    found: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    own = {
        "loss_last": ended_loss(found),
        "steps": found["progress"]["step"],
        "params": found["setup"]["params"],
    }
    return {**own, **history(EventReader(folder / METRICS).read())}


def ended_loss(result: Mapping[str, Any]) -> float | None:
    """Return the held-out loss at the end of a run; None if it was stopped before."""
    loss: float | None = None if result["interrupted"] else result["loss"]["held_out"]
    return loss


def _of_life(result: Mapping[str, Any]) -> dict[str, float]:
    exchanges = result["exchanges"]
    return {
        "bytes_sent": result["link"]["bytes_sent"],
        "wait_s": exchanges["wait_s"],
        "wall_s": result["wall_s"],
        "pairs_none": exchanges["without_partner"],
        "exchanges": exchanges["with_partner"],
    }


def history(events: Events) -> dict[str, Any]:
    """Return what a node's events say of all its lives.

    ``measured``: [steps, seconds of training, held-out loss]; ``loss_first``; ``bytes_sent``,
    ``wait_s`` (those of a life that was killed by its exchanges alone), ``wall_s``, ``pairs_none``
    and ``exchanges``.
    """
    measured, first = dict[int, tuple[float, float]](), None
    sums = dict.fromkeys(("bytes_sent", "wait_s", "wall_s", "pairs_none", "exchanges"), 0.0)
    lives: list[Events] = []
    for event in events:
        if event["event"] == "start":
            lives.append([])
        if lives:
            lives[-1].append(event)
    for life in lives:
        began = float(life[0]["time"])
        rounds = [event for event in life if event["event"] == "round"]
        own = {
            "bytes_sent": sum(event["bytes_sent"] for event in rounds),
            "wait_s": sum(event["wait_s"] for event in rounds),
            "wall_s": life[-1]["time"] - began,
            "pairs_none": sum(event["partner"] is None for event in rounds),
            "exchanges": sum(event["partner"] is not None for event in rounds),
        }
        before = life[0]["loss"]["held_out_first"]
        if before is not None and not measured:
            first = before
            measured[0] = (0.0, first)
        for event in life:
            if event["event"] == "evaluation":
                step, loss = event["step"], event["held_out"]
            elif event["event"] == "end":
                step, loss = event["progress"]["step"], ended_loss(event)
                own = _of_life(event)
            else:
                continue
            if loss is not None:
                measured[step] = (sums["wall_s"] + event["time"] - began, loss)
        sums = {key: value + own[key] for key, value in sums.items()}
    curve = [[step, *point] for step, point in sorted(measured.items())]
    return {"lives": len(lives), "measured": curve, "loss_first": first, **sums}


def end(process: Process) -> None:
    """Let a process end in good order, or kill it."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(LEAVE_S)
    process.kill()
    process.wait()


def step_of(events: Events) -> int:
    """Return the inner step of a node's last exchange."""
    return max((event["step"] for event in events if event["event"] == "round"), default=0)


def wait(
    nodes: Nodes, liveness: Liveness, chosen: argparse.Namespace, link: str, display: Display
) -> None:
    """Wait until all nodes have ended, and kill one and start one where that was asked for."""
    late, kill = chosen.nodes - 1 if chosen.late else None, chosen.kill
    names = [f"peer-{index}" for index in range(chosen.nodes)]

    def start(index: int) -> Process:
        return nodes.start(
            ["join", link, *flags(chosen, index), *resumed(nodes.folder / names[index])],
            names[index],
        )

    for index in range(1, chosen.nodes):
        if index != late:
            start(index)
    while not nodes.check():
        time.sleep(LOOK_S)
        events = liveness.look(sum(process.poll() == 0 for process in nodes.processes))
        at = [step_of(node) for node in events]
        if kill is not None:
            index, step = kill
            if at[index] >= step and sum(event["event"] == "start" for event in events[index]) == 1:
                display.message(f"{names[index]} is killed after step {at[index]}")
                nodes.processes[index].kill()
                nodes.processes[index].wait()
                start(index)
                nodes.processes[index] = nodes.processes.pop()
                kill = None
        if late is None:
            continue
        if len(nodes.processes) == late and at[0] >= chosen.late:
            display.message(f"{names[late]} joins after step {at[0]}")
            start(late)
        elif all(process.poll() == 0 for process in nodes.processes[:late]):
            for process in nodes.processes[late:]:  # what it would learn alone is not the swarm's
                end(process)
            del nodes.processes[late:]


def together(chosen: argparse.Namespace, folder: Path, display: Display) -> dict[str, Any]:
    """Train all nodes in one swarm."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"peer-{index}" for index in range(chosen.nodes)]
    first = swarm(chosen, chosen.method, start_when=chosen.nodes - bool(chosen.late))
    first += [
        "--set",
        "outer.wait_s=60",
        *chosen.outer,
        *flags(chosen, 0),
        *resumed(folder / names[0]),
    ]
    began = time.monotonic()
    liveness = Liveness([folder / name for name in names], lambda: time.monotonic() / PATIENCE)
    with Nodes(folder) as nodes:
        link = start_first(nodes, ["up", *first], display, liveness)
        wait(nodes, liveness, chosen, link, display)
    # Of the largest node: the peak of all processes that have ended so far, which are the nodes'
    # and their daemons'.
    peak = (
        resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024)
        / MIB
    )
    found = [
        result(folder / name) for name in names if (folder / name / RESULT).exists()
    ]  # the late one may never have begun
    return {"nodes": found, "peak_mb": peak, "seconds": time.monotonic() - began}


def single(
    chosen: argparse.Namespace, folder: Path, parts: Sequence[str], display: Display
) -> dict[str, Any]:
    """Train some of ``alone-I``, ``times`` and ``ddp`` at once, each in a swarm of its own; return
    the result of each.
    """
    processes = []
    for part in parts:
        own = folder / part
        own.mkdir(parents=True, exist_ok=True)
        index = int(part.rpartition("-")[2]) if part.startswith("alone-") else 0
        steps = chosen.steps * (chosen.times if part == "times" else 1)
        # Alone is the same method without partners; all-reduce has no outer optimizer.
        outer = [] if part == "ddp" else chosen.outer
        method = "none" if part == "ddp" else chosen.method
        command = [
            "up",
            *swarm(chosen, method, steps=steps, ddp=part == "ddp"),
            *outer,
            *flags(chosen, index),
            *resumed(own),
        ]
        log = (own / "log").open("a", encoding="utf-8")
        started = [
            sys.executable,
            "-m",
            "shoal",
            *command,
            "--folder",
            str(own),
            "--name",
            part,
            "--identity",
            str(own / "key"),
        ]
        processes.append((own, log, subprocess.Popen(started, stdout=log, stderr=log, text=True)))
    display.message(f"alone: {', '.join(parts)}")
    try:
        for own, _, process in processes:
            if process.wait():
                raise SystemExit(
                    f"{own.name} ended with code {process.returncode}: read {own / 'log'}"
                )
    finally:
        for _, log, process in processes:
            end(process)
            log.close()
    return {part: result(folder / part) for part in parts}


def kept(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the parts that an earlier call with the same settings has finished."""
    found = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"settings": settings}
    )
    if found["settings"] != settings:
        raise SystemExit(f"{path} is of other settings: name another --folder.")
    return dict(found)


def curve(nodes: Sequence[dict[str, Any]], tokens: int) -> list[list[float]]:
    """Return the mean of the nodes' losses where all of them have measured it: [steps, tokens of
    all, seconds, loss].
    """
    each = [{step: (seconds, loss) for step, seconds, loss in node["measured"]} for node in nodes]
    steps = sorted(set.intersection(*map(set, each)))
    return [
        [
            step,
            step * tokens,
            *(statistics.fmean(one[step][number] for one in each) for number in (0, 1)),
        ]
        for step in steps
    ]


def report_together(part: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the nodes that trained in one swarm."""
    nodes = part["nodes"]
    ended = [node for node in nodes if node["loss_last"] is not None]

    def mean(key: str) -> float:
        return statistics.fmean(node[key] for node in ended)

    return {
        "loss_first": mean("loss_first"),
        "loss_last": mean("loss_last"),
        "bytes_sent": sum(node["bytes_sent"] for node in nodes),
        "wait_s": mean("wait_s"),
        "wall_s": mean("wall_s"),
        "peak_mb": part["peak_mb"],
        "nodes": len(nodes),
        "params": nodes[0]["params"],
        "steps": nodes[0]["steps"],
        "exchanges": sum(node["exchanges"] for node in nodes),
        "pairs_none": sum(node["pairs_none"] for node in nodes),
        "last": [node["loss_last"] for node in ended],
        "late_measured": [
            node["measured"][-1] for node in nodes if node["loss_last"] is None and node["measured"]
        ],
    }


def report(parts: dict[str, Any], chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the figures: losses are means over the nodes, bytes a sum, waits and times means,
    memory that of the largest node.
    """
    one = chosen.batch * chosen.context
    made: dict[str, Any] = {"seconds": parts.get("alone_s", 0.0)}
    curves: dict[str, list[list[float]]] = {}
    if "together" in parts:
        of_nodes = report_together(parts["together"])
        made |= {**of_nodes, "seconds": made["seconds"] + parts["together"]["seconds"]}
        ended = [node for node in parts["together"]["nodes"] if node["loss_last"] is not None]
        curves["together"] = curve(ended, one * chosen.nodes)
    single = [parts[name] for index in range(chosen.alone) if (name := f"alone-{index}") in parts]
    if single:
        made |= {"loss_alone": mean_last(single), "alone": [node["loss_last"] for node in single]}
        curves["alone"] = curve(single, one)
    if "times" in parts:
        made |= {"loss_times": parts["times"]["loss_last"], "times": chosen.times}
        curves["times"] = curve([parts["times"]], one)
    if "ddp" in parts:
        params, steps = parts["ddp"]["params"], parts["ddp"]["steps"]
        made |= {"loss_ddp": parts["ddp"]["loss_last"], "params": params, "steps": steps}
        made["ddp_bytes"] = 8 * (chosen.nodes - 1) * params * steps  # a ring's 2 (n - 1) / n each
        curves["ddp"] = curve([parts["ddp"]], one * chosen.nodes)
    shown = (
        "from_scratch",
        "unlike",
        "inner",
        "method",
        "every",
        "lora",
        "lr",
        "schedule",
        "batch",
        "context",
        "seed",
        "outer",
        "node",
        "kill",
        "late",
    )
    return {
        **made,
        "curves": curves,
        **{key: value for key, value in vars(chosen).items() if key in shown},
    }


def mean_last(results: Sequence[dict[str, Any]]) -> float:
    return statistics.fmean(found["loss_last"] for found in results)


def default_lr(chosen: argparse.Namespace) -> float:
    """Return the learning rate of a run that names none."""
    if chosen.inner == "muon":
        return MUON_LR
    if chosen.from_scratch:
        return 3e-3
    return 1e-3 if chosen.lora else 1e-4


def victim(text: str) -> tuple[int, int]:
    """Return node and step of ``I@STEP``."""
    index, _, step = text.partition("@")
    return int(index), int(step)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", help="folder of a causal language model")
    which.add_argument(
        "--from-scratch",
        choices=sorted(SIZES),
        help="our own transformer of this size, with a BPE tokenizer",
    )
    parser.add_argument(
        "--data", default="", help="text files, separated by commas: best as many as nodes"
    )
    parser.add_argument("--most", type=int, default=FILE, help="characters of each file")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument(
        "--lora",
        type=int,
        default=0,
        help="rank of an adapter, which alone is trained and sent; 0: all weights",
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="inner steps in a round")
    parser.add_argument("--method", default="noloco")
    parser.add_argument(
        "--outer",
        action="append",
        default=[],
        help="a further flag of the swarm, such as --outer=--set=outer.lr=1",
    )
    parser.add_argument("--node", action="append", default=[], help="a further flag of each node")
    parser.add_argument(
        "--unlike",
        action="store_true",
        help="from scratch: each node has a part of the text of its own, in the order of the files",
    )
    parser.add_argument(
        "--inner",
        default="task",
        choices=("task", "adamw", "muon"),
        help="inner optimizer of all that is trained; task: the task's own AdamW",
    )
    parser.add_argument(
        "--lr",
        type=float,
        help="of the inner optimizer; by default 1e-4, of an adapter 1e-3, from scratch 3e-3, of "
        "Muon 0.02",
    )
    parser.add_argument(
        "--schedule",
        default="task",
        choices=("task", "constant", "cosine", "wsd"),
        help="task: constant",
    )
    parser.add_argument("--warmup", type=int, default=0, help="steps, with another schedule")
    parser.add_argument(
        "--eval", type=int, default=0, help="steps between two points of the curves; 0: none"
    )
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--held", type=int, default=64, help="held-out windows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill", type=victim, metavar="I@STEP")
    parser.add_argument("--late", type=int, default=0, metavar="STEP")
    parser.add_argument(
        "--alone", type=int, help="nodes that are trained alone too; by default all"
    )
    parser.add_argument(
        "--times",
        type=int,
        default=0,
        help="train the first node alone with so many times the steps",
    )
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--only-ddp", action="store_true", help="train nothing but that")
    parser.add_argument("--at-once", type=int, default=2, help="nodes that train alone at once")
    parser.add_argument(
        "--folder", type=Path, help="keep what is done here; by default a temporary one"
    )
    parser.add_argument("--figure", type=Path, metavar="FILE.svg", help="draw the curves")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    if chosen.kill and not 0 < chosen.kill[0] < chosen.nodes - bool(chosen.late):
        parser.error("--kill: neither the first node, which has made the link, nor the late one")
    chosen.alone = chosen.nodes if chosen.alone is None else chosen.alone
    if chosen.only_ddp:
        chosen.ddp = True
        chosen.alone = chosen.times = 0
    chosen.lr = chosen.lr or default_lr(chosen)
    chosen.data = ",".join(str(Path(name).resolve()) for name in chosen.data.split(",") if name)
    return chosen


def main() -> None:
    """Run what is not done yet, and print the report."""
    chosen = arguments()
    whatever = ("folder", "json", "at_once", "figure", "alone", "times", "ddp", "only_ddp")
    settings = json.loads(
        json.dumps({key: value for key, value in vars(chosen).items() if key not in whatever})
    )
    display = make_display()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (chosen.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "parts.json"
        parts = kept(path, settings)
        if chosen.from_scratch:
            chosen.model = learn(
                folder / "tokenizer", chosen.from_scratch, chosen.data, chosen.most
            )

        def keep(more: dict[str, Any]) -> None:
            parts.update(more)
            path.with_suffix(".part").write_text(json.dumps(parts), encoding="utf-8")
            path.with_suffix(".part").replace(path)

        if "together" not in parts and not chosen.only_ddp:
            keep({"together": together(chosen, folder / "together", display)})
        wanted = [f"alone-{index}" for index in range(chosen.alone)]
        wanted += ["times"] * bool(chosen.times) + ["ddp"] * chosen.ddp
        left = [part for part in wanted if part not in parts]
        while left:
            now, left = left[: chosen.at_once], left[chosen.at_once :]
            began = time.monotonic()
            found = single(chosen, folder, now, display)
            keep({**found, "alone_s": parts.get("alone_s", 0.0) + time.monotonic() - began})
        made = report(parts, chosen)
    if chosen.figure:
        draw([made], chosen.figure)
    if chosen.json:
        print(json.dumps(made))
        return
    for key, value in made.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
