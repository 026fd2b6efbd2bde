"""How long a node behind a router is lost after its relay slot was:
`python bench/relay_loss.py [CASE ...]`.

Two nodes, each behind a port-restricted router of `bench._nat`, and a bootstrap node that relays.
Both average a small model by pairs, in rounds of two seconds or so. Then something breaks, and the
seconds count from the moment at which the network is whole again to the next exchange, and to the
moment at which the node that was lost announces its relay again:

    cut        the line of one node loses everything for --down seconds
    address    the router of one node gets another public address, and drops what it knew of the old
               one
    restart    the bootstrap node is ended, and started again after --down seconds, with the same
               key and address
    two        of two bootstrap nodes, both of which relay, the first is ended for good
    late       the bootstrap node starts --down seconds after the two nodes

Needs root on Linux, and about three minutes a case.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # called by its path, Python looks only beside this file

from bench import reach  # noqa: E402
from bench._nat import Internet  # noqa: E402

CASES = ("cut", "address", "restart", "two", "late")
WHOLE_S, WAIT_S = (
    12.0,
    120.0,
)  # seconds of exchanges before something breaks, and that are waited for one after it


def seed(namespace: str, ip: str, key: str, tell: Connection) -> None:
    """Be a bootstrap node that relays; send its addresses."""
    import asyncio

    from shoal.swarm.identity import Identity
    from shoal.swarm.seed.bootstrap_node import Seed

    reach._settle(namespace, reach.Setup())
    asyncio.run(
        Seed(
            Identity.load(key),
            listen=[f"/ip4/{ip}/tcp/{reach.PORT}"],
            relay=True,
            on_ready=tell.send,
        ).run()
    )


def node(namespace: str, bootstrap: list[str], link: str, wait: float, tell: Connection) -> None:
    """Train; send the link, and at each round the moment, how many took part, and whether this node
    announces a relay.
    """
    import torch
    from torch import nn

    from shoal.swarm.membership.membership import NetworkOptions
    from shoal.swarm.training import session_entry

    reach._settle(namespace, reach.Setup())
    torch.manual_seed(0)
    model = nn.Linear(250, 250, bias=False)
    network = NetworkOptions(listen=[f"/ip4/0.0.0.0/tcp/{reach.PORT}"], bootstrap=bootstrap)
    if link:
        place = reach._joined(link, model, network, tell)
    else:
        place = session_entry.create(
            state=model,
            network=network,
            start_when=1,
            method="noloco",
            every=20,
            lag=0,
            wait_s=wait,
        )
        tell.send(("link", place.link))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    partners = [1]
    opt = place.optimizer(inner, on_round=lambda done: partners.__setitem__(0, len(done.members)))
    while True:
        time.sleep(0.1)
        for p in model.parameters():
            p.grad = torch.randn_like(p) * 1e-3
        began = time.time()
        opt.step()
        relayed = any("/p2p-circuit" in address for address in place._membership.host.addresses())
        tell.send(("step", time.time(), partners[0], relayed, time.time() - began))
        partners[0] = 0


class Node:
    """What a node has sent."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.link = ""
        self.exchanges: list[float] = []
        self.relayed: list[tuple[float, bool]] = [(0.0, False)]
        self.stood: list[tuple[float, float]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, *values = self._connection.recv()
                if kind == "link":
                    self.link = values[0]
                elif kind == "step":
                    when, members, relayed, stood = values
                    if members > 1:
                        self.exchanges.append(when)
                    if relayed != self.relayed[-1][1]:
                        self.relayed.append((when, relayed))
                    self.stood.append((when, stood))

    def longest(self, since: float) -> float:
        """The longest that a step has stood still since then."""
        return round(max((stood for when, stood in self.stood if when > since), default=0.0), 1)


def until(condition: Callable[[], Any], seconds: float) -> Any:
    """Wait until ``condition`` holds; return what it gave, or None when time is up."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.1)
    return None


def measured(case: str, down: float, wait: float) -> dict[str, Any]:
    """Measure one case. Raises NatError."""
    from shoal.swarm.identity import Identity

    net = Internet(["port", "port"], 1)
    processes: dict[str, Any] = {}
    folder = tempfile.TemporaryDirectory()

    def start(name: str, work: Any, *args: Any) -> Connection:
        mine, its = reach.fork.Pipe()
        processes[name] = reach.fork.Process(target=work, args=(*args, its), daemon=False)
        processes[name].start()
        its.close()
        return mine

    def end(name: str) -> None:
        processes[name].kill()
        processes[name].join()

    def bootstrap(place: str) -> list[str]:
        key = Path(folder.name) / place
        if not key.exists():
            Identity.load_or_create(key)
        sent = start(place, seed, net.full(place), net.ip(place), str(key))
        return [address for address in reach._received(sent, 30.0) if "127.0.0.1" not in address]

    try:
        places = ["seed", "peer-1"] if case == "two" else ["seed"]
        addresses = [address for place in places for address in bootstrap(place)]
        if case == "late":
            end("seed")
        first = Node(start("home-0", node, net.full("home-0"), addresses, "", wait))
        until(lambda: first.link, 60)
        second = None
        if case != "late":
            second = partner = Node(
                start("home-1", node, net.full("home-1"), addresses, first.link, wait)
            )
            if until(lambda: partner.exchanges, 120) is None:
                return {"case": case, "outcome": "no exchange before anything broke"}
            time.sleep(WHOLE_S)
        broke = time.time()
        if case == "cut":
            net.cut("router-0", True)
            time.sleep(down)
            net.cut("router-0", False)
        elif case == "address":
            net.move("router-0")
        else:
            if case != "late":
                end("seed")
            if case != "two":
                time.sleep(down)
                bootstrap("seed")
        whole = time.time()
        if second is None:
            second = Node(start("home-1", node, net.full("home-1"), addresses, first.link, wait))
        found = until(lambda: [when for when in second.exchanges if when > whole + 0.5], WAIT_S)
        time.sleep(30)
        back = [when for when, relayed in first.relayed if relayed and when > broke]
        return {
            "case": case,
            "down_s": round(whole - broke, 1),
            "exchange_s": round(found[0] - whole, 1) if found else None,
            "relay_s": round(back[0] - whole, 1) if back else None,
            "exchanges_30s": len([when for when in second.exchanges if when > time.time() - 30]),
            "stood_s": second.longest(broke),
            "relayed": [
                [round(when - whole, 1), relayed] for when, relayed in first.relayed if when
            ],
        }
    finally:
        for name in processes:
            end(name)
        time.sleep(1)
        net.close()
        folder.cleanup()


def main() -> None:
    """Measure the cases named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--down", type=float, default=60.0)
    parser.add_argument(
        "--wait", type=float, default=5.0, help="seconds that a round waits for a partner"
    )
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch  # noqa: F401

    import shoal.swarm.training.session  # noqa: F401

    for case in options.cases:
        print(json.dumps(measured(case, options.down, options.wait)), flush=True)


if __name__ == "__main__":
    main()
