"""How many rounds two nodes pair behind slow uplinks with a deep buffer:
`python bench/uplink.py --mbit 1 --method noloco`.

Each node is a process in a network namespace of its own, and a `tc tbf` shapes what it sends:
--mbit, and a buffer of --buffer seconds that fills before anything is dropped, as in a home modem.
Computing is a timed wait. Both train --mb of weights; the time of a round is --busy of it spent
sending: .8 means that the exchanges take 80 % of the link. Each node's buffer is looked at twice a
second: bytes in it delay every message. One line of JSON: the rounds with a partner among all, the
seconds of computing and waiting, and for each node which rounds went alone. Needs root on Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # called by its path, Python looks only beside this file

STEPS = 40  # inner steps of a round
NET = "10.98.0."
JOIN_S = 120.0  # seconds that a node may take to start, or to join


def node(setup: dict[str, Any]) -> None:
    """Train by a session; report each round as a line of JSON on stdout."""
    import torch
    from torch import nn

    from shoal.swarm.membership.membership import NetworkOptions
    from shoal.swarm.training import session_entry

    logging.basicConfig(
        level=logging.INFO if setup["verbose"] else logging.WARNING,
        format=f"%(asctime)s {setup['ip'][-1]} %(name)s %(message)s",
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(250, 250, bias=False) for _ in range(setup["layers"])))
    network = NetworkOptions(listen=[f"/ip4/{setup['ip']}/tcp/0"], upload=setup["upload"])
    if setup["link"]:
        place = session_entry.join(setup["link"], state=model, network=network)
    else:
        place = session_entry.create(state=model, network=network, start_when=2, **setup["outer"])
        print(json.dumps({"link": place.link}), flush=True)
    began = time.monotonic()

    def on_round(info: Any) -> None:
        took = time.monotonic() - began
        print(
            json.dumps(
                {"round": info.key.round, "members": len(info.members), "at": round(took, 1)}
            ),
            flush=True,
        )

    inner = torch.optim.SGD(model.parameters(), lr=1e-4)
    opt = place.optimizer(inner, on_round=on_round)
    while opt.round < setup["rounds"]:
        time.sleep(setup["step_s"])
        for p in model.parameters():
            p.grad = torch.randn_like(p) * 1e-3
        opt.step()
    opt.finish(average=False)  # the last exchanges count too
    place.close()


def call(*command: str) -> None:
    """Run a command of iproute2. Raises CalledProcessError."""
    subprocess.run(command, check=True, timeout=20)


def make(names: list[str], mbit: float, buffer: float) -> None:
    """Join two namespaces by a cable whose ends are shaped."""
    for name in names:
        call("ip", "netns", "add", name)
        call("ip", "-n", name, "link", "set", "lo", "up")
    call(
        "ip",
        "-n",
        names[0],
        "link",
        "add",
        "up0",
        "type",
        "veth",
        "peer",
        "name",
        "up0",
        "netns",
        names[1],
    )
    for number, name in enumerate(names):
        call("ip", "-n", name, "addr", "add", f"{NET}{number + 1}/24", "dev", "up0")
        call("ip", "-n", name, "link", "set", "up0", "up")
        depth = max(round(mbit * 125_000 * buffer), 30_000)
        call(
            "tc",
            "-n",
            name,
            "qdisc",
            "add",
            "dev",
            "up0",
            "root",
            "handle",
            "1:",
            "tbf",
            "rate",
            f"{round(mbit * 1e6)}bit",
            "burst",
            "16kb",
            "limit",
            str(depth),
        )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run both nodes to their last round."""
    layers = max(round(options.mb * 1e6 / 250_000), 1)
    sends = options.mb * 8 / options.mbit  # seconds of a round's bytes
    # Where training waits for the exchange, it computes for the rest of the time.
    overlaps = options.method == "streaming" or bool(options.lag)
    round_s = (
        sends / options.busy
        if overlaps or options.method == "diloco"
        else sends / options.busy - sends
    )
    outer: dict[str, Any] = {"method": options.method, "every": STEPS}
    if overlaps:
        lag = options.lag or str(STEPS // options.fragments - 1)
        outer |= {"fragments": options.fragments, "lag": int(lag) if lag.isdigit() else lag}
    elif options.method == "noloco":
        outer["lag"] = 0
    setup = {
        "layers": layers,
        "outer": outer,
        "step_s": round_s / STEPS,
        "rounds": options.rounds,
        "upload": options.upload,
        "verbose": options.verbose,
    }
    names = [f"uplink-{os.getpid()}-{number}" for number in range(2)]
    nodes: list[subprocess.Popen[str]] = []
    lines: list[list[dict[str, Any]]] = [[], []]
    queues: list[float] = []
    began = time.monotonic()
    try:
        make(names, options.mbit, options.buffer)
        link = ""
        readers = []
        for number, name in enumerate(names):
            own = json.dumps({**setup, "ip": f"{NET}{number + 1}", "link": link})
            command = ["ip", "netns", "exec", name, sys.executable, __file__, "--node", own]
            nodes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
            output = nodes[-1].stdout
            assert output is not None
            if not link:
                link = json.loads(output.readline())["link"]
            readers.append(
                threading.Thread(
                    target=_read, args=(output, lines[number], options.verbose, number), daemon=True
                )
            )
            readers[-1].start()
        watch = threading.Thread(
            target=_watch, args=(names, nodes, options.mbit, queues), daemon=True
        )
        watch.start()
        for process in nodes:
            process.wait(JOIN_S + options.rounds * 4 * (round_s + sends))
        for reader in readers:
            reader.join(5)
    finally:
        for process in nodes:
            process.kill()
            process.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)
    counted = [line for line in lines[0] if "round" in line]
    return {
        "method": options.method,
        "mbit": options.mbit,
        "mb": options.mb,
        "busy": options.busy,
        "upload": options.upload,
        "paired": sum(line["members"] > 1 for line in counted),
        "rounds": len(counted),
        "alone": [[line["round"] for line in seen if line.get("members", 2) < 2] for seen in lines],
        "lag": options.lag,
        "queue_s": {
            name: round(_at(queues, part), 3) for name, part in (("median", 0.5), ("p99", 0.99))
        },
        "seconds": round(time.monotonic() - began, 1),
    }


def _watch(
    names: list[str], nodes: list[subprocess.Popen[str]], mbit: float, queues: list[float]
) -> None:
    """Note for how long a packet would wait in each modem's buffer, until a node ends."""
    while all(process.poll() is None for process in nodes):
        for name in names:
            shown = subprocess.run(
                ["tc", "-n", name, "-s", "-j", "qdisc", "show", "dev", "up0"],
                capture_output=True,
                check=False,
            )
            with contextlib.suppress(ValueError, IndexError, KeyError):
                queues.append(json.loads(shown.stdout)[0]["backlog"] / (mbit * 125_000))
        time.sleep(0.5)


def _at(values: list[float], part: float) -> float:
    return sorted(values)[int(part * (len(values) - 1))] if values else 0.0


def _read(output: Any, lines: list[dict[str, Any]], verbose: bool, number: int) -> None:
    for line in output:
        lines.append(json.loads(line))
        if verbose:
            print(number, line, end="", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Count the rounds that two nodes pair behind slow uplinks."
    )
    parser.add_argument(
        "--mbit", type=float, default=1.0, help="megabits a second up, of each node"
    )
    parser.add_argument(
        "--buffer", type=float, default=1.0, help="seconds of bytes that the modem holds"
    )
    parser.add_argument("--mb", type=float, default=3.0, help="megabytes of weights")
    parser.add_argument("--method", choices=["noloco", "diloco", "streaming"], default="streaming")
    parser.add_argument(
        "--fragments",
        type=int,
        default=2,
        help="streaming, and noloco with a lag: parts of the model",
    )
    parser.add_argument(
        "--lag", default="", help="inner steps, or auto; noloco without it waits for each exchange"
    )
    parser.add_argument(
        "--busy", type=float, default=0.8, help="part of the time that the link is to be in use"
    )
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument(
        "--upload", type=float, default=0.0, help="limit of both nodes, Mbit/s; 0: none"
    )
    parser.add_argument("--verbose", action="store_true", help="show rounds as they end")
    parser.add_argument("--node", help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.node:
        node(json.loads(options.node))
        return 0
    if os.geteuid() != 0:
        print("bench: network namespaces need root", file=sys.stderr)
        return 1
    print(json.dumps(measure(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
