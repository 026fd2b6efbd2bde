"""A row of bench/table.py by real nodes behind slow links:
`python bench/spot.py --mbit 100 --delay 50 --json`.

Four processes, each with a session of its own (`shoal.create`, `shoal.join`) in a network namespace
with --mbit each way and --delay milliseconds one way, train the table's model on the table's text,
with the shards, batches, rates and the default method of its row "noloco-overlap, mod4, every 25".
In place of a simulation of equal steps there are real exchanges, with the lag that each node finds,
partners that come late, and what TCP does. "loss": held-out nats a token of the slow weights, the
mean over the nodes, to be held against that row's. Wants root on Linux, and the text of
bench/table.py (kept beside its results, or --cache).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run as a file, its own folder stands there

import shoal
from bench._link import LinkError, Namespaces
from bench._quality_train import backward
from bench._table.methods import DEFAULT
from bench._table.train import SIZES, Place, Spec, held_out, inner_optimizer
from shoal.node.task import Shard

RATE, OUTER = 0.02, {"lr": 1.0, "momentum": 0.3}
"""As the table's runs chose them."""
RESULTS = Path(__file__).resolve().parent / "results"
STARTUP_S, PATIENCE_S = 120.0, 3600.0


def node(index: int, spec: Spec, cache: Path, host: str, folder: Path) -> dict[str, Any]:
    """Train as one of the peers; the first one leaves the link in the folder."""
    torch.set_num_threads(1)
    place = Place(cache)
    task, model = place.task(spec, spec.peers), place.model(spec)
    network = shoal.NetworkOptions(listen=(f"/ip4/{host}/tcp/0",), relay="off")
    file = folder / "link"
    outer: dict[str, Any] = dict(spec.outer)
    if index == 0:
        session = shoal.create(
            state=model,
            every=spec.every,
            start_when=spec.peers,
            codec=spec.codec,
            method="noloco",
            network=network,
            seed=spec.seed,
            **outer,
        )
        (folder / "new").write_text(str(session.link), encoding="utf-8")
        (folder / "new").rename(file)
    else:
        began = time.monotonic()
        while not file.exists():
            if time.monotonic() - began > STARTUP_S:
                raise SystemExit(f"bench: the first node left no link within {STARTUP_S:.0f} s.")
            time.sleep(0.1)
        session = shoal.join(file.read_text(encoding="utf-8"), state=model, network=network)
    met = 0

    def count(info: Any) -> None:
        nonlocal met
        met += len(info.members) > 1

    with session:
        optimizer = session.optimizer(inner_optimizer(task, model, spec), on_round=count)
        scheduler = task.lr_scheduler(optimizer, spec.steps)
        began = time.monotonic()
        for data in islice(task.batches(Shard(index, spec.peers, spec.seed)), spec.steps):
            backward(task, model, place.batch(data))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        wall = time.monotonic() - began
        with optimizer.averaged():
            loss = held_out(task, model, "loss")
        return {
            "loss": loss,
            "met": met,
            "lag": getattr(optimizer, "lag", None),
            "wall_s": round(wall, 1),
        }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=float, default=100, help="of each link, each way")
    parser.add_argument("--delay", type=float, default=50, help="milliseconds one way")
    parser.add_argument("--steps", type=int, default=SIZES["mini"].steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", help="digest of the text; default: the only one in the cache")
    parser.add_argument(
        "--cache",
        type=Path,
        default=RESULTS / "table_text",
        help="where bench/table.py keeps its text",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--node", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    texts = (
        [options.text]
        if options.text
        else sorted(file.stem for file in options.cache.glob("*.safetensors"))
    )
    if len(texts) != 1 or not (options.cache / f"{texts[0]}.safetensors").is_file():
        print(
            f"bench: {len(texts)} texts in {options.cache}: run bench/table.py first, or choose "
            "one by --text.",
            file=sys.stderr,
        )
        return 2
    cell = DEFAULT
    place = (texts[0], "mini", cell.method, cell.inner, cell.codec, cell.peers, cell.every)
    spec = Spec(*place, options.steps, RATE, tuple(OUTER.items()), options.seed)
    if options.node is not None:
        index, host, folder = options.node
        print(json.dumps(node(index, spec, options.cache, host, Path(folder))), flush=True)
        return 0
    try:
        link = Namespaces(spec.peers, options.mbit * 1e6 / 8, options.delay / 1000)
    except LinkError as error:
        print(f"bench: {error}.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        nodes = []
        try:
            for index in range(spec.peers):
                more = ["--node", json.dumps([index, link.ip(index), folder])]
                command = [*link.enter(index), sys.executable, __file__, *sys.argv[1:], *more]
                nodes.append(
                    subprocess.Popen(
                        command,
                        stdout=subprocess.PIPE,
                        text=True,
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                    )
                )
            said = [process.communicate(timeout=PATIENCE_S)[0] for process in nodes]
        finally:
            for process in nodes:
                process.kill()
            sent = link.sent()
            link.close()
    if any(process.returncode for process in nodes):
        print("bench: a node ended early; what it said stands above.", file=sys.stderr)
        return 1
    found = [json.loads(lines.splitlines()[-1]) for lines in said]
    loss = statistics.fmean(each["loss"] for each in found)
    result = {
        "loss": loss,
        "seed": spec.seed,
        "steps": spec.steps,
        "mbit": options.mbit,
        "delay_ms": options.delay,
        "nodes": found,
    }
    result["sent_mb"] = round(sum(sent) / len(sent) / 1e6, 2)
    print(json.dumps(result) if options.json else f"held-out loss {loss:.4f}: {result}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
