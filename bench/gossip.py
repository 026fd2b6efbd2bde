"""How long a gossiped record takes until all nodes have it, and what it costs:

    # as root on Linux: in a network namespace, where no other traffic is counted
    python bench/gossip.py --nodes 4,8,16,24 --json --into bench/results/gossip.jsonl
    python bench/gossip.py --nodes 4 --attack noise --json
    python bench/gossip.py --nodes 4 --attack streams --json

Real nodes, with a daemon each, in as many processes as there are processors; all know each other.
One record is published at a time, in turn by each node. Of a status, and of rollouts of some 4 kB
and of 1 MB (which is announced and fetched), a row says

    median_s, p99_s     seconds from `publish` until the last node has it, over the records
    node_bytes          bytes that went over the loopback interface, a node and record, less what
                        goes over it without; None where no namespace could be made
    lost                records that had not reached all within 30 s

The file also runs on the commit before gossip had streams of its own; ``gossip`` in a row says what
it found. Copy it there:

    git worktree add ../before 61e9d48c~1 && cp bench/gossip.py ../before/bench/
    cp tests/security/gossip_attack.py ../before/tests/security/
    cd ../before && PYTHONPATH=$PWD python bench/gossip.py --json

With --attack each node trains a small model, one step after another, and a stranger attacks the
first: with 588 messages of 60 kB of noise on streams of gossip ("noise", not for the commit
before), or with requests on new streams as fast as it can ("streams"). Reported are processor
seconds of a step, process and daemon together, as a multiple of those without the attack, at the
one node that it is aimed at and at the others (the worst), and by how many MB their memory grew.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import inspect
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench._own_network import INSIDE, run_inside  # noqa: E402

SWARM = "a" * 52
WITHIN_S = 30.0  # after which a record counts as lost
SETTLE_S = 4.0  # for the nodes to choose their neighbours
QUIET_S = 10.0  # in which nothing is published
WARM_UP = 3  # records that do not count
TEXT_BYTES = 24_000  # of one completion at most; base64 of 18 kB
KINDS = {"status": 0, "rollout 4 kB": 4_000, "rollout 1 MB": 1_000_000}
"""What is published -> its random bytes."""
LARGE_ONE_IN = 5  # as many of the largest as of the others
ATTACK_S = 10.0
START_S = 120.0  # for the attacker to begin, on a busy machine
MANIFEST_BYTES = 4000  # what strangers may ask for
WIDTH, BATCH = 256, 64  # of the model of --attack


class Node:
    """A host with its daemon and gossip, and the moments at which records arrived."""

    def __init__(self, bootstrap: tuple[str, ...]) -> None:
        from shoal.swarm.gossip.gossip import Gossip
        from shoal.swarm.identity import Identity
        from shoal.swarm.membership.manifest_exchange import serve_manifest
        from shoal.swarm.p2p.host import Host
        from shoal.swarm.topics.rollout import Rollout
        from shoal.swarm.topics.status import Status

        self.identity = Identity.ephemeral()
        self.host = Host.start(self.identity, bootstrap=bootstrap, relay="off", timeout=120.0)
        serve_manifest(self.host, SWARM, bytes(MANIFEST_BYTES))
        self.addresses: dict[str, tuple[str, ...]] = {}
        self.arrived: dict[float, float] = {}
        """Moment that names a record -> that of its arrival."""
        self.changed = threading.Condition()
        self.steps = 0
        self.steps_end = threading.Event()
        options: dict[str, Any] = {
            "members": lambda: self.addresses,
            "is_member": lambda peer: peer in self.addresses,
            "addresses": lambda peer: self.addresses.get(peer, ()),
        }
        accepted = inspect.signature(Gossip).parameters
        self.gossip = Gossip(
            self.host,
            self.identity,
            SWARM,
            **{name: value for name, value in options.items() if name in accepted},
        )
        self.topics: dict[type, Any] = {
            kind: self.gossip.join(kind, self._take) for kind in (Status, Rollout)
        }

    def _take(self, author: str, record: Any) -> None:
        now = time.monotonic()
        with self.changed:
            self.arrived[record.issued] = now
            self.changed.notify_all()

    def meet(self, addresses: dict[str, tuple[str, ...]]) -> None:
        """Connect to all others."""
        others = {peer: at for peer, at in addresses.items() if peer != self.identity.peer_id}
        self.host.resource_manager.known = others.__contains__
        self.host.call(self.host.locate(others.items(), WITHIN_S), 2 * WITHIN_S)
        self.addresses = others

    def publish(self, name: float, nbytes: int) -> float:
        """Publish a record with this name, a status if ``nbytes`` is 0; return the moment."""
        record = self._rollout(name, nbytes) if nbytes else self._status(name)
        now = time.monotonic()
        self.arrived[name] = now
        self.topics[type(record)].publish(record)
        return now

    def _status(self, name: float) -> Any:
        from shoal.swarm.topics.status import Status
        from shoal.swarm.wire.record import Progress

        return Status(
            swarm=SWARM,
            peer=self.identity.peer_id,
            name="gossip",
            addresses=(),
            progress=Progress(state="training", steps_per_s=1.0),
            issued=name,
            version="0",
        )

    def _rollout(self, name: float, nbytes: int) -> Any:
        from shoal.swarm.topics.rollout import Finish, Rollout

        finish: Finish = "stop"
        text = base64.b64encode(os.urandom(nbytes)).decode()
        texts = [text[at : at + TEXT_BYTES] for at in range(0, len(text), TEXT_BYTES)]
        texts = texts if len(texts) > 1 else [text[: len(text) // 2], text[len(text) // 2 :]]
        return Rollout(
            swarm=SWARM,
            peer=self.identity.peer_id,
            env="add",
            env_version="1",
            env_config=b"\x80",
            seed=1,
            index=2,
            completions=tuple(texts),
            finish=(finish,) * len(texts),
            policy_version=3,
            temperature=1.0,
            round=10,
            nonce=os.urandom(16),
            issued=name,
        )

    def wait_for(self, name: float) -> float | None:
        """Return when a record arrived; None: not in time."""
        with self.changed:
            self.changed.wait_for(lambda: name in self.arrived, WITHIN_S)
            return self.arrived.get(name)

    def train(self) -> None:
        """Make steps without end, in a thread."""
        import torch

        torch.set_num_threads(1)
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
        batch = torch.randn(BATCH, WIDTH)
        while not self.steps_end.is_set():
            model(batch).square().mean().backward()
            self.steps += 1

    def used(self) -> tuple[float, int, int]:
        """Return processor seconds of process and daemon, steps, and the bytes that they hold."""
        guard = psutil.Process(self.host._supervisor.daemon._child.pid)  # type: ignore[union-attr]
        processes = [psutil.Process(), guard, *guard.children()]
        seconds = 0.0
        held = 0
        for process in processes:
            times = process.cpu_times()
            seconds += times.user + times.system
            held += process.memory_info().rss
        return seconds, self.steps, held

    def close(self) -> None:
        self.steps_end.set()
        self.gossip.close()
        self.host.close()


def serve(pipe: Connection, count: int, bootstrap: tuple[str, ...]) -> None:
    """One process of ``count`` nodes, which does what its parent asks until that says end."""
    nodes: list[Node] = []
    for _ in range(count):
        nodes.append(Node(bootstrap))
        bootstrap = bootstrap or nodes[0].host.addresses()
    pipe.send({node.identity.peer_id: node.host.addresses() for node in nodes})
    while True:
        asked, *given = pipe.recv()
        if asked == "end":
            for node in nodes:
                node.close()
            return
        if asked == "publish":
            number, name, nbytes = given
            pipe.send(nodes[number].publish(name, nbytes))
        elif asked == "train":
            for node in nodes:
                threading.Thread(target=node.train, daemon=True).start()
            pipe.send(None)
        else:
            pipe.send([getattr(node, asked)(*given) for node in nodes])


class Nodes:
    """So many nodes in ``processes`` processes."""

    def __init__(self, count: int, processes: int) -> None:
        self.count = count
        self.pipes: list[Connection] = []
        self.places: list[tuple[int, int]] = []
        """Node -> its process, and its number there."""
        self.addresses: dict[str, tuple[str, ...]] = {}
        self._processes: list[Any] = []
        context = multiprocessing.get_context("spawn")
        bootstrap: tuple[str, ...] = ()
        for process in range(min(processes, count)):
            here, there = context.Pipe()
            share = len(range(process, count, min(processes, count)))
            child = context.Process(target=serve, args=(there, share, bootstrap))
            child.start()
            self._processes.append(child)
            self.pipes.append(here)
            self.addresses |= here.recv()
            self.places += [(process, number) for number in range(share)]
            bootstrap = bootstrap or next(iter(self.addresses.values()))

    def ask(self, *asked: Any) -> list[Any]:
        """Have all nodes do something; return what each answers."""
        for pipe in self.pipes:
            pipe.send(asked)
        return [answer for pipe in self.pipes for answer in pipe.recv() or ()]

    def publish(self, node: int, nbytes: int) -> float | None:
        """Publish a record of a node; return after how long the last of the others had it."""
        process, number = self.places[node]
        name = time.time()
        self.pipes[process].send(("publish", number, name, nbytes))
        begun = self.pipes[process].recv()
        arrivals = self.ask("wait_for", name)
        return None if None in arrivals else max(arrivals) - begun

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(("end",))
        for process in self._processes:
            process.join(30)
            if process.is_alive():
                process.terminate()


@contextlib.contextmanager
def started(count: int, processes: int) -> Iterator[Nodes]:
    nodes = Nodes(count, processes)
    try:
        nodes.ask("meet", nodes.addresses)
        time.sleep(SETTLE_S)
        yield nodes
    finally:
        nodes.close()


def way() -> str:
    """Return how records go in this commit."""
    from shoal.swarm.gossip.gossip import Gossip

    return "streams" if "members" in inspect.signature(Gossip).parameters else "gossipsub"


def loopback() -> int:
    """Return the bytes that this namespace's loopback interface has carried."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


def measured(count: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of record."""
    with started(count, options.processes) as nodes:
        before = loopback()
        time.sleep(QUIET_S)
        quiet = (loopback() - before) / QUIET_S
        for kind, nbytes in KINDS.items():
            records = options.records
            if nbytes == max(KINDS.values()):
                records = -(-records // LARGE_ONE_IN)
            authors = itertools.cycle(range(count))
            for _ in range(WARM_UP):
                nodes.publish(next(authors), nbytes)
            before = loopback()
            began = time.monotonic()
            found = [nodes.publish(next(authors), nbytes) for _ in range(records)]
            carried = loopback() - before - quiet * (time.monotonic() - began)
            took = sorted(seconds for seconds in found if seconds is not None)
            yield {
                "gossip": way(),
                "nodes": count,
                "record": kind,
                "records": records,
                "median_s": round(statistics.median(took), 4) if took else None,
                "p99_s": round(took[-(-99 * len(took) // 100) - 1], 4) if took else None,
                "node_bytes": round(carried / records / count) if INSIDE in os.environ else None,
                "lost": found.count(None),
            }


def attacked(count: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row of what an attack costs; each node has a process of its own."""
    with started(count, count) as nodes:
        nodes.ask("train")
        time.sleep(SETTLE_S)
        quiet, _ = _window(nodes, lambda: time.sleep(options.seconds))
        target = next(iter(nodes.addresses.values()))[0]
        attack = [sys.executable, "-m", "tests.security.gossip_attack", options.attack, target]

        def wait() -> None:
            command = [*attack, SWARM, str(options.seconds)]
            limit_s = 10 * options.seconds + START_S
            subprocess.run(command, cwd=ROOT, check=True, timeout=limit_s)

        loud, grown = _window(nodes, wait)
        ratios = [after / before for before, after in zip(quiet, loud, strict=True)]
        yield {
            "gossip": way(),
            "nodes": count,
            "attack": options.attack,
            "step_ms": round(1e3 * quiet[0], 3),
            "aimed_at": round(ratios[0], 3),
            "others": round(max(ratios[1:]), 3),
            "grown_mb": round(grown[0] / 1e6, 1),
            "others_grown_mb": round(max(grown[1:]) / 1e6, 1),
        }


def _window(nodes: Nodes, wait: Callable[[], None]) -> tuple[list[float], list[int]]:
    """Return processor seconds of a step of each node while ``wait`` lasts, and by how many bytes
    each grew.
    """
    before = nodes.ask("used")
    wait()
    after = nodes.ask("used")
    pairs = list(zip(before, after, strict=True))
    steps = [(b[0] - a[0]) / max(b[1] - a[1], 1) for a, b in pairs]
    return steps, [b[2] - a[2] for a, b in pairs]


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", default="4,8,16,24", help="numbers of nodes, by commas")
    parser.add_argument("--records", type=int, default=100, help="of each kind; of the largest 20")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--attack", choices=("noise", "streams"))
    parser.add_argument("--seconds", type=float, default=ATTACK_S, help="of an attack")
    parser.add_argument("--json", action="store_true", help="print rows as lines of JSON")
    parser.add_argument("--into", type=Path, help="append the rows to this file")
    options = parser.parse_args(arguments)
    try:
        counts = [int(count) for count in options.nodes.split(",")]
    except ValueError:
        parser.error("--nodes takes numbers, as 4,8")
    if min(counts) < 2 or options.records < 1 or options.processes < 1 or options.seconds <= 0:
        parser.error("there must be two nodes, a record, a process and some time, or more")
    if os.geteuid() == 0 and INSIDE not in os.environ:
        return run_inside(__file__, sys.argv[1:] if arguments is None else arguments)
    rows = []
    for count in counts:
        for row in attacked(count, options) if options.attack else measured(count, options):
            rows.append(row)
            if options.json:
                print(json.dumps(row), flush=True)
            if options.into:
                with options.into.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    if not options.json:
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
