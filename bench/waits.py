"""How often the host waits for the device: in an inner step of a node, in the same step of plain
PyTorch, and in an exchange.

    PYTHONPATH=$PWD:$(make --no-print-directory standin) python bench/waits.py --json

Counted by the stand-in for a GPU (tests/standin), so the numbers are exact, the same everywhere,
and say nothing of seconds. A node trains on it and averages with a partner in the same process, on
the CPU: NoLoCo over real hosts, as nodes do it. All threads count. What waits, and where, is
written to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from shoal.node.batch_contents import to_device
from shoal.node.batches import iterator_of
from shoal.node.task import Shard
from shoal.node.tasks.text import TextTask
from shoal.node.training.inner_optimizer import make_inner
from shoal.node.training.trainer import Trainer
from shoal.optim import Alone, Exchange, OuterOptimizer
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.host import Host
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.training.factories import make_outer
from shoal.swarm.wire.messages import Member

SHAPES = {20_000: (1, 32), 1_000_000: (5, 128), 10_000_000: (6, 372)}
"""Layers and width of a transformer of about so many parameters."""
EVERY, LAG, ROUNDS = 6, 2, 3  # steps; rounds that are counted, after one that is not
SWARM = "a" * 52
WAITS = "standin"


def task_of(params: int, folder: Path) -> TextTask:
    layers, width = SHAPES[params]
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return TextTask(data=str(folder), layers=layers, width=width, heads=4, context=16, batch=2)


def pair(hosts: list[tuple[Host, Identity]]) -> list[Exchange]:
    members = {
        host.peer_id: Member(
            swarm=SWARM,
            peer=host.peer_id,
            name="bench",
            addresses=tuple(host.addresses()),
            round=0,
            step=0,
            loss=None,
            steps_per_s=0.0,
            shard=0,
            shards=1,
            model="0" * 64,
            state="training",
            issued=time.time(),
            version="0",
        )
        for host, _ in hosts
    }
    contexts = [
        PeerContext(host, identity, SWARM, "0" * 64, 0, lambda: members) for host, identity in hosts
    ]
    return [PairExchange(context, ExchangeTimeouts(exchange=120.0)) for context in contexts]


def plain_step(task: TextTask, device: torch.device) -> Counter[str]:
    """The waits of one step of a loop without us, on pinned batches, after one that is not
    counted.
    """
    model = task.model().to(device)
    inner = make_inner(task, TrainSettings(), model)
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0)
    batches = iterator_of(task.batches(Shard(0, 1, 0)), Shard(0, 1, 0))
    every: list[Counter[str]] = []
    for _ in range(2):
        batch = [tensor.contiguous().pin_memory() for tensor in next(batches)]
        with importlib.import_module(WAITS).waits() as found:
            loss: Any = task.loss(model, to_device(batch, device))
            loss.backward()
            inner.step()
            schedule.step()
            inner.zero_grad()
        every.append(found)
    return every[-1]


def measure(task: TextTask, device: torch.device, *, slow_on_device: bool) -> dict[str, Any]:
    """Waits of one inner step, of the plain one, and of one exchange, with where they were."""
    outer = OuterSettings(method="noloco", every=EVERY, lag=LAG, fragments=1)
    trainer = Trainer(
        task, outer, TrainSettings(steps=0), device=device, slow_on_device=slow_on_device
    )
    still = task.model()
    partner = make_outer(
        outer,
        torch.optim.SGD(still.parameters(), lr=1e-6),
        Alone(),
        model=still,
        slow_device=torch.device("cpu"),
    )
    hosts: list[tuple[Host, Identity]] = []
    try:
        for _ in range(2):
            identity = Identity.ephemeral()
            hosts.append(
                (Host.start(identity, bootstrap=hosts[0][0].addresses() if hosts else ()), identity)
            )
        ours, theirs = pair(hosts)
        trainer.connect(ours, SWARM, Shard(0, 1, 0))
        partner.exchange, partner.run = theirs, SWARM
        for parameter in still.parameters():
            parameter.grad = torch.ones_like(parameter)
        return _counted(trainer, partner) | {"plain": plain_step(task, device)}
    finally:
        trainer.close()
        for host, _ in hosts:
            host.close()


def _counted(trainer: Trainer, partner: OuterOptimizer) -> dict[str, Any]:
    members: list[int] = []
    trainer.opt.on_round = lambda info: members.append(len(info.members))
    steps = (ROUNDS + 1) * EVERY + LAG
    together = threading.Barrier(2, timeout=120)

    def follow() -> None:
        for _ in range(steps):
            together.wait()
            partner.step()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    by_step = []
    for _ in range(steps):
        together.wait()
        with importlib.import_module(WAITS).waits() as found:
            trainer.step()
        by_step.append(found)
    thread.join(120)
    if members != [2] * (ROUNDS + 1):
        sys.exit(f"not every round was an exchange: {members} members")
    inner = by_step[EVERY + LAG]  # the first that has no part in a round
    counted = by_step[EVERY + LAG :]
    total: Counter[str] = sum(counted, Counter())
    total.subtract({what: number * len(counted) for what, number in inner.items()})
    return {
        "inner": inner,
        "exchange": {what: number / ROUNDS for what, number in total.items() if number},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--params",
        default="1000000,10000000",
        help=f"comma-separated, of {', '.join(map(str, SHAPES))}",
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if WAITS not in sys.modules:
        sys.exit(
            "Error: only the stand-in for a GPU counts waits: run it with PYTHONPATH=$PWD:$(make "
            "--no-print-directory standin)."
        )
    device, rows = torch.device("cuda", 0), []
    for params in map(int, options.params.split(",")):
        for slow_on_device in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                found = measure(
                    task_of(params, Path(folder)), device, slow_on_device=slow_on_device
                )
            counts = {"inner_step": "inner", "plain_step": "plain", "exchange": "exchange"}
            row = {"params": params, "slow": "device" if slow_on_device else "cpu"}
            rows.append(
                row | {name: round(sum(found[part].values()), 2) for name, part in counts.items()}
            )
            print(rows[-1], file=sys.stderr)
            for name, part in counts.items():
                for what, number in sorted(found[part].items(), key=lambda one: -one[1]):
                    print(f"  {name}: {number:g} x {what}", file=sys.stderr)
    if options.json:
        print(json.dumps({"torch": torch.__version__, "every": EVERY, "lag": LAG, "rows": rows}))


if __name__ == "__main__":
    main()
