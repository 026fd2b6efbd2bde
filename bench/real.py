"""What a real model gains from a swarm: real nodes fine-tune it together, and each alone with the same steps and data.

    python bench/real.py --model FOLDER --nodes 4 --json                       # all weights
    python bench/real.py --model FOLDER --nodes 4 --lora 8 --json              # an adapter only
    python bench/real.py --model FOLDER --nodes 4 --data a.txt,b.txt,c.txt,d.txt --folder runs/real --json

FOLDER holds a causal language model of transformers, such as SmolLM2-135M. Nodes are processes of `shoal up` and `shoal join` on
this machine, one thread each. Every node trains on its own part of the text (bench/_real_task.py) and all are measured on the same
held-out text. `loss_last`: the mean over the nodes, after the rounds; `loss_alone`: the mean over the same nodes, each with the
same part, seed and number of steps, without any exchange. The nodes alone run --at-once at a time. With --folder what is done is
kept: the same command, called again, goes on where it was cut off.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.node.demo.nodes import LOOK_S, Liveness, Nodes, start_first
from shoal.node.runtime.display import Display, make_display
from shoal.node.runtime.resume import RESULT

TASK = f"{Path(__file__).parent / '_real_task.py'}:RealText"
LOCAL = "/ip4/127.0.0.1/tcp/0"
MIB = 2**20


def flags(chosen: argparse.Namespace, index: int) -> list[str]:
    """Return the flags of one node, whether together or alone."""
    return ["--task", TASK, "--listen", LOCAL, "--shard", f"{index}/{chosen.nodes}", "--threads", "1", *chosen.node]


def swarm(chosen: argparse.Namespace, start_when: int, method: Sequence[str]) -> list[str]:
    """Return the flags of the first node: those of its swarm."""
    options = {
        "base": str(Path(chosen.model).resolve()), "data": chosen.data, "lora": chosen.lora, "context": chosen.context,
        "batch": chosen.batch, "lr": chosen.lr, "held": chosen.held,
    }  # fmt: skip
    train = {"swarm.start_when": start_when, "swarm.shards": chosen.nodes, "train.steps": chosen.steps, "train.seed": chosen.seed}
    given = [f"--option={key}={json.dumps(value)}" for key, value in options.items()]
    return [*(f"--set={key}={value}" for key, value in train.items()), *given, *method]


def results(folder: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return what the nodes with these names have come to."""
    return [json.loads((folder / name / RESULT).read_text(encoding="utf-8")) for name in names]


def run(folder: Path, commands: Sequence[Sequence[str]], display: Display) -> list[dict[str, Any]]:
    """Run nodes until all have ended: the first prints the link that the others get; return their results."""
    names = [f"peer-{index}" for index in range(len(commands))]
    folder.mkdir(parents=True, exist_ok=True)
    liveness = Liveness([folder / name for name in names])
    with Nodes(folder) as nodes:
        link = start_first(nodes, list(commands[0]), display, liveness)
        for name, command in zip(names[1:], commands[1:], strict=True):
            nodes.start(["join", link, *command], name)
        while not nodes.check():
            time.sleep(LOOK_S)
            liveness.look(sum(process.poll() == 0 for process in nodes.processes))
    return results(folder, names)


def together(chosen: argparse.Namespace, folder: Path, display: Display) -> dict[str, Any]:
    """Train all nodes in one swarm."""
    method = ["--method", chosen.method, "--set", f"outer.every={chosen.every}", "--set", "outer.wait_s=60", *chosen.outer]
    first = ["up", *swarm(chosen, chosen.nodes, method), *flags(chosen, 0)]
    began = time.monotonic()
    found = run(folder, [first, *(flags(chosen, index) for index in range(1, chosen.nodes))], display)
    # Of the largest node: the peak of all processes that have ended so far, which are the nodes' and their daemons'.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / MIB
    return {"nodes": found, "peak_mb": peak, "seconds": time.monotonic() - began}


def alone(chosen: argparse.Namespace, folder: Path, indices: Sequence[int], display: Display) -> list[dict[str, Any]]:
    """Train some nodes at once, each in a swarm of its own, without exchange."""
    processes = []
    for index in indices:
        own = folder / f"alone-{index}"
        own.mkdir(parents=True, exist_ok=True)
        command = ["up", *swarm(chosen, 1, ["--method", "none"]), *flags(chosen, index), "--folder", str(own), "--name", own.name]
        log = (own / "log").open("w", encoding="utf-8")
        started = [sys.executable, "-m", "shoal", *command, "--identity", str(own / "key")]
        processes.append((own, log, subprocess.Popen(started, stdout=log, stderr=log)))
    display.message(f"alone: {', '.join(own.name for own, _, _ in processes)}")
    try:
        for own, _, process in processes:
            if process.wait():
                raise SystemExit(f"{own.name} ended with code {process.returncode}: read {own / 'log'}")
    finally:
        for _, log, process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
            log.close()
    return results(folder, [own.name for own, _, _ in processes])


def kept(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the parts that an earlier call with the same settings has finished."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"settings": settings}
    if found["settings"] != settings:
        raise SystemExit(f"{path} is of other settings: name another --folder.")
    return dict(found)


def report(parts: dict[str, Any], chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the figures: losses are means over the nodes, bytes a sum, waits and times means, memory that of the largest node."""
    nodes, single = parts["together"]["nodes"], [parts[f"alone-{index}"] for index in range(chosen.nodes)]

    def mean(key: str) -> float:
        return statistics.fmean(node[key] for node in nodes)

    return {
        "loss_first": mean("loss_first"),
        "loss_last": mean("loss_last"),
        "loss_alone": statistics.fmean(node["loss_last"] for node in single),
        "bytes_sent": sum(node["bytes_sent"] for node in nodes),
        "wait_s": mean("wait_s"),
        "wall_s": mean("wall_s"),
        "peak_mb": parts["together"]["peak_mb"],
        "nodes": len(nodes),
        "params": nodes[0]["params"],
        "steps": nodes[0]["steps"],
        "exchanges": sum(node["exchanges"] for node in nodes),
        "pairs_none": sum(node["pairs_none"] for node in nodes),
        "last": [node["loss_last"] for node in nodes],
        "alone": [node["loss_last"] for node in single],
        "seconds": parts["together"]["seconds"] + parts["alone_s"],
        **{key: value for key, value in vars(chosen).items() if key in ("method", "every", "lora", "lr", "batch", "context")},
    }


def main() -> None:
    """Run what is not done yet, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a causal language model")
    parser.add_argument("--data", default="", help="text files, separated by commas: best as many as nodes")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter, which alone is trained and sent; 0: all weights")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="inner steps in a round")
    parser.add_argument("--method", default="noloco")
    parser.add_argument(
        "--outer", action="append", default=[], help="a further flag of the swarm, such as --outer=--set=outer.lr=1"
    )
    parser.add_argument("--node", action="append", default=[], help="a further flag of each node")
    parser.add_argument("--lr", type=float, help="of AdamW; by default 1e-4, of an adapter 1e-3")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--held", type=int, default=64, help="held-out windows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2, help="nodes that train alone at once")
    parser.add_argument("--folder", type=Path, help="keep what is done here; by default a temporary one")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    chosen.lr = chosen.lr or (1e-3 if chosen.lora else 1e-4)
    chosen.data = ",".join(str(Path(name).resolve()) for name in chosen.data.split(",") if name)
    settings = {key: value for key, value in vars(chosen).items() if key not in ("folder", "json", "at_once")}
    display = make_display()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (chosen.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "parts.json"
        parts = kept(path, settings)

        def keep(more: dict[str, Any]) -> None:
            parts.update(more)
            path.write_text(json.dumps(parts), encoding="utf-8")

        if "together" not in parts:
            keep({"together": together(chosen, folder / "together", display)})
        left = [index for index in range(chosen.nodes) if f"alone-{index}" not in parts]
        while left:
            now, left = left[: chosen.at_once], left[chosen.at_once :]
            began = time.monotonic()
            found = alone(chosen, folder, now, display)
            ended = {f"alone-{index}": result for index, result in zip(now, found, strict=True)}
            keep({**ended, "alone_s": parts.get("alone_s", 0.0) + time.monotonic() - began})
        made = report(parts, chosen)
    if chosen.json:
        print(json.dumps(made))
        return
    for key, value in made.items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
