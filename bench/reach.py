"""Which pairs of home routers let two nodes meet: `python bench/reach.py`.

For each pair of `bench._nat.KINDS`: a bootstrap node with a relay on a public machine, and one node
behind each router, each in a network namespace. The first creates a swarm, the second joins by its
link, and both average a small model by pairs, as in any training. A pair is `direct` if a
connection of its own joins it at the end, `punched` if one of their second daemons does, `relayed`
if one through the relay does, and else `failed`; with it the seconds until the first exchange and,
where there was one, until the direct connection, the exchanges in the 15 s after, and the megabytes
that reached the bootstrap node in that time. --listen quic adds a QUIC address to those that all
listen on, by which libp2p can punch holes. --seeds has that many bootstrap nodes, each at its own
address, of which the first relays: libp2p learns its own address from four others. --reuse: TCP is
dialled from the port that is listened on. --dials is no swarm: two daemons that know each other's
public address and port dial each other by QUIC, the second 0.3 s after the first.

--delay (milliseconds one way) and --loss (percent) are those of each home's line; --mb is the size
of the model. Then a row also has the megabytes a second that exchanges moved by each way in
--seconds, how many took which way, and which is chosen at the end. --no-punch: by the relay alone.

A row is appended to --results as soon as it is measured, and not measured again. Needs root on
Linux, and about 30 seconds a pair.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # called by its path, Python looks only beside this file

from bench._nat import KINDS, Internet, NatError, Uplink, enter_here  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "reach.jsonl"
PORT = 4001
DEADLINE_S = 240.0  # seconds for a pair to make its first exchange
CARRIED_S = 15.0
AFTER_S = 20.0  # seconds that it then has to connect directly
EVERY, STEP_S = 10, 0.05
PUNCHED = "punched"
RATE = 12.5e6  # bytes a second each way, of a home's line with a delay or loss
LATE_S = 0.3  # seconds between two dials that are meant to be at the same moment

fork = mp.get_context(
    "fork"
)  # a node takes over what is imported: the import of torch costs more than all the rest of a pair


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all pairs of a run have in common: the transports that nodes listen on, and the number
    of bootstrap nodes.
    """

    listen: str = "tcp"
    seeds: int = 1
    reuse: bool = False
    relay: str = "auto"
    same_lan: bool = False
    dials: bool = False
    delay: float = 0.0
    loss: float = 0.0
    mb: float = 0.0
    punch: bool = True
    seconds: float = CARRIED_S

    def addresses(self, ip: str) -> list[str]:
        quic = [f"/ip4/{ip}/udp/{PORT}/quic-v1"] if self.listen == "quic" else []
        return [f"/ip4/{ip}/tcp/{PORT}", *quic]


def seed(setup: Setup, namespace: str, ip: str, relay: bool, tell: Connection) -> None:
    """Be a bootstrap node; send its addresses."""
    from shoal.swarm.identity import Identity
    from shoal.swarm.seed.bootstrap_node import Seed

    _settle(namespace, setup)
    asyncio.run(
        Seed(
            Identity.ephemeral(), listen=setup.addresses(ip), relay=relay, on_ready=tell.send
        ).run()
    )


def node(setup: Setup, namespace: str, bootstrap: list[str], link: str, tell: Connection) -> None:
    """Train without computing; send the link, the number of each exchange with the partner, and how
    the partner is connected.
    """
    import torch
    from torch import nn

    from shoal.swarm.membership.membership import NetworkOptions
    from shoal.swarm.training import session_entry

    _settle(namespace, setup)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(250, 250, bias=False) for _ in range(max(round(setup.mb * 4), 1)))
    )
    network = NetworkOptions(
        listen=setup.addresses("0.0.0.0"),
        bootstrap=bootstrap,
        relay=setup.relay,  # type: ignore[arg-type]
    )
    if link:
        place = _joined(link, model, network, tell)
    else:
        place = session_entry.create(
            state=model,
            network=network,
            start_when=2,
            method="noloco",
            every=EVERY,
            lag=0,
            wait_s=5.0,
        )
        tell.send(("link", place.link))
    exchanges, host = 0, place._membership.host
    if not setup.punch:
        host.puncher._look = _nobody

    def on_round(done: Any) -> None:
        nonlocal exchanges
        exchanges += len(done.members) > 1
        tell.send(("round", exchanges, _connections(place), _rates(host)))

    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = place.optimizer(inner, on_round=on_round)
    while True:
        time.sleep(STEP_S)
        for p in model.parameters():
            p.grad = torch.randn_like(p) * 1e-3
        opt.step()


async def _nobody() -> list[str]:
    """Ask no member for a connection past its relay."""
    return []


def _rates(host: Any) -> dict[str, Any]:
    """What exchanges with the one partner moved by each way, in MB/s, the way of the last one and
    the one chosen.
    """
    found: dict[str, Any] = {}
    for peer, known in list(host.traffic.routes._known.items()):
        names = {False: "relayed", True: PUNCHED}
        found |= {names[past]: round(rate / 1e6, 3) for past, (rate, _) in known.items()}
        found["last"] = next((names[past] for past, (_, since) in known.items() if not since), "")
        found["chosen"] = names[
            host.traffic.routes.best(peer) and bool(host.puncher.members.daemon_of(peer))
        ]
    return found


def dialler(
    setup: Setup, namespace: str, own: str, other: str, address: str, late: float, tell: Connection
) -> None:
    """Be a daemon that dials another when told; send the seconds that it took, and the addresses of
    the connections 2 s later.
    """
    from shoal.swarm.identity import Identity
    from shoal.swarm.p2p.daemon import DAEMON_GONE, Daemon
    from shoal.swarm.p2p.multiaddr import to_text

    async def dial() -> None:
        daemon = await Daemon.launch(
            Identity.load(own), listen=setup.addresses("0.0.0.0"), relay="off", idle=""
        )
        tell.send("up")
        await asyncio.to_thread(tell.recv)
        await asyncio.sleep(late)
        began = time.monotonic()
        with contextlib.suppress(*DAEMON_GONE):
            await daemon.connect(other, [f"{address}/p2p/{other}"])
        took = time.monotonic() - began
        await asyncio.sleep(2)
        _, writer, found = await daemon.request("LIST_PEERS")
        writer.close()
        tell.send((round(took, 1), [to_text(way) for peer in found.peers for way in peer.addrs]))
        await asyncio.to_thread(tell.recv)

    _settle(namespace, setup)
    asyncio.run(dial())


def _joined(link: str, model: Any, network: Any, tell: Connection) -> Any:
    """Join, and again, as a user would, when no member was reached: one that cannot be dialled
    needs time to get a relay.
    """
    from shoal.swarm.errors import StartupError
    from shoal.swarm.training import session_entry

    while True:
        try:
            return session_entry.join(link, state=model, network=network)
        except StartupError as error:
            tell.send(("refused", str(error)))


def _connections(place: Any) -> list[str]:
    """The remote addresses of the connections to the other members."""
    membership = place._membership
    host, members = (
        membership.host,
        set(membership.directory.members()) - {membership.identity.peer_id},
    )
    ways = host.call(host._supervisor.running().ways(), 5.0)
    past = [PUNCHED for peer in members if peer in host.puncher.reached]
    return past + [way for peer in members for way in ways.get(peer, [])]


def _settle(namespace: str, setup: Setup) -> None:
    """Make this process, forked from the benchmark, a machine's: its network, its own signals,
    quiet.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    enter_here(namespace)
    os.environ["LIBP2P_TCP_REUSEPORT"] = str(setup.reuse).lower()
    level = logging.DEBUG if os.environ.get("REACH_DEBUG") else logging.ERROR
    logging.basicConfig(level=level, format=f"%(asctime)s {namespace} %(name)s %(message)s")


def pair(setup: Setup, first: str, second: str) -> dict[str, Any]:
    """Measure one pair of routers. Raises NatError."""
    uplink = (
        Uplink(setup.delay / 1000, RATE, RATE, loss=setup.loss / 100)
        if setup.delay or setup.loss
        else None
    )
    net = Internet([first, second], setup.seeds - 1, same_lan=setup.same_lan, uplinks=[uplink] * 2)
    processes: list[Any] = []

    def start(work: Any, place: str, *args: Any) -> Connection:
        mine, its = fork.Pipe()
        processes.append(
            fork.Process(target=work, args=(setup, net.full(place), *args, its), daemon=False)
        )
        processes[-1].start()
        its.close()
        return mine

    try:
        if setup.dials:
            return _dialled(net, start)
        places = ["seed", *(f"peer-{number + 1}" for number in range(setup.seeds - 1))]
        seeds = [start(seed, place, net.ip(place), place == "seed") for place in places]
        bootstrap = [
            address
            for each in seeds
            for address in _received(each, 30.0)
            if "127.0.0.1" not in address
        ]
        began = time.monotonic()
        nodes = [start(node, "home-0", bootstrap, "")]
        link = _received(nodes[0], 60.0)[1]
        nodes.append(start(node, "home-1", bootstrap, link))
        return _watched(nodes, began) | _carried(nodes, net, setup)
    except (EOFError, TimeoutError) as error:
        return {"outcome": "failed", "why": str(error) or "a node ended"}
    finally:
        for process in processes:
            process.kill()  # its daemon's guard sees that and ends the daemon
        for process in processes:
            process.join()
        net.close()


def _carried(nodes: list[Connection], net: Internet, setup: Setup) -> dict[str, Any]:
    """Count what a pair exchanges from now on, and by which way, and what reaches the bootstrap
    node meanwhile.
    """
    before, end = net.received("seed"), time.monotonic() + setup.seconds
    made, ways, rates, seen = 0, Counter[str](), dict[str, Any](), dict[Connection, int]()
    while (left := end - time.monotonic()) > 0:
        for each in wait(nodes, left):
            assert isinstance(each, Connection)
            kind, *values = each.recv()
            if kind == "round":
                made += values[0] - seen.get(each, values[0])
                rates |= values[2]
                ways[rates.pop("last", "")] += values[0] > seen.get(each, values[0])
                seen[each] = values[0]
    carried = {"rates": rates, "by_way": dict(ways)} if setup.mb else {}
    return {
        "rounds_then": made / len(nodes),
        "seed_mb_then": round((net.received("seed") - before) / 1e6, 3),
        **carried,
    }


def _dialled(net: Internet, start: Callable[..., Connection]) -> dict[str, Any]:
    """Have two daemons dial each other."""
    from shoal.swarm.identity import Identity

    homes = ("home-0", "home-1")
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"{folder}/{home}.key" for home in homes]
        peers = [Identity.create(key).peer_id for key in keys]
        ends = []
        for number, home in enumerate(homes):
            other = f"/ip4/{net.ip(homes[1 - number])}/udp/{PORT}/quic-v1"
            ends.append(
                start(dialler, home, keys[number], peers[1 - number], other, number * LATE_S)
            )
        for end in ends:
            _received(end, 60.0)
        for end in ends:
            end.send("go")
        took, ways = zip(*(_received(end, 60.0) for end in ends), strict=True)
    outcome = "direct" if all(ways) else "failed"
    return {
        "outcome": outcome,
        "direct_s": max(took) if outcome == "direct" else None,
        "ways": ways,
    }


def _received(connection: Connection, seconds: float) -> Any:
    if not connection.poll(seconds):
        raise TimeoutError(f"nothing was heard of a node for {seconds:g} s")
    return connection.recv()


def _watched(nodes: list[Connection], began: float) -> dict[str, Any]:
    """Follow both nodes until they are connected directly, or long enough."""
    exchanges, ways, refused = [0, 0], [[""], [""]], 0
    met = direct = None
    while True:
        now = time.monotonic() - began
        if (met is None and now > DEADLINE_S) or (met is not None and now > met + AFTER_S):
            break
        for each in wait(nodes, 1.0):
            assert isinstance(each, Connection)
            number = nodes.index(each)
            kind, *values = each.recv()
            if kind == "refused":
                refused += 1
            else:
                exchanges[number], ways[number] = values[:2]
        now = round(time.monotonic() - began, 1)
        if met is None and min(exchanges) > 0:
            met, counted = now, list(exchanges)
        own = all(any(way and "p2p-circuit" not in way for way in each) for each in ways)
        direct = (direct or now) if own else None
        if (
            met is not None
            and direct is not None
            and all(a > b + 2 for a, b in zip(exchanges, counted, strict=True))
        ):
            break
    past = any(PUNCHED in each for each in ways)
    outcome = (
        "failed"
        if met is None
        else "relayed"
        if direct is None
        else "punched"
        if past
        else "direct"
    )
    return {
        "outcome": outcome,
        "met_s": met,
        "direct_s": direct,
        "refused": refused,
        "exchanges": exchanges,
        "ways": ways,
    }


def run(setup: Setup, kinds: list[str], results: Path | None) -> list[dict[str, Any]]:
    """Measure all pairs that the results lack; return all rows of this setup."""
    known: dict[str, dict[str, Any]] = {}
    if results is not None and results.exists():
        known = {_key(row): row for row in map(json.loads, results.read_text().splitlines())}
    rows = []
    for first, second in itertools.combinations_with_replacement(kinds, 2):
        row: dict[str, Any] = {**dataclasses.asdict(setup), "first": first, "second": second}
        if (before := known.get(_key(row))) is not None:
            rows.append(before)
            continue
        row |= pair(setup, first, second)
        rows.append(row)
        if results is not None:
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(f"{first:>10} {second:<10} {row['outcome']}", file=sys.stderr)
    return rows


def _key(row: dict[str, Any]) -> str:
    plain = dataclasses.asdict(Setup())
    return json.dumps([row.get(name, plain.get(name)) for name in (*plain, "first", "second")])


def table(rows: list[dict[str, Any]], kinds: list[str]) -> str:
    """Pairs of routers as a table in Markdown."""
    cells = {frozenset((row["first"], row["second"])): row for row in rows}
    lines = ["| | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for first in kinds:
        found = [cells.get(frozenset((first, second))) for second in kinds]
        lines.append(
            f"| {first} | " + " | ".join(row["outcome"] if row else "" for row in found) + " |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="See which pairs of home routers let two nodes meet."
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="of routers, by commas")
    parser.add_argument(
        "--listen", choices=["tcp", "quic"], default="tcp", help="quic: TCP and QUIC"
    )
    parser.add_argument(
        "--seeds", type=int, default=1, help="bootstrap nodes, each at an address of its own"
    )
    parser.add_argument(
        "--reuse", action="store_true", help="dial TCP from the port that is listened on"
    )
    parser.add_argument("--relay", choices=["auto", "only"], default="auto")
    parser.add_argument(
        "--same-lan", action="store_true", help="both homes use the same private addresses"
    )
    parser.add_argument(
        "--dials",
        action="store_true",
        help="no swarm: two daemons dial each other by QUIC at the same moment",
    )
    parser.add_argument(
        "--delay", type=float, default=0.0, help="of each home's line, milliseconds one way"
    )
    parser.add_argument("--loss", type=float, default=0.0, help="on each home's line, percent")
    parser.add_argument(
        "--mb", type=float, default=0.0, help="megabytes of the model; without it a quarter"
    )
    parser.add_argument(
        "--seconds", type=float, default=CARRIED_S, help="for which exchanges are then counted"
    )
    parser.add_argument("--no-punch", action="store_true", help="the relay alone")
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        help="rows, appended; measured rows are not measured again",
    )
    parser.add_argument("--json", action="store_true", help="print the rows instead of the table")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    _load()
    kinds = options.kinds.split(",")
    listen = "quic" if options.dials else options.listen
    setup = Setup(
        listen,
        options.seeds,
        options.reuse,
        options.relay,
        options.same_lan,
        options.dials,
        options.delay,
        options.loss,
        options.mb,
        not options.no_punch,
        options.seconds,
    )
    try:
        rows = run(setup, kinds, options.results)
    except NatError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print(json.dumps(rows) if options.json else table(rows, kinds))
    return 0


def _load() -> None:
    """Import what nodes need before they are forked."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from shoal.swarm.p2p import hivemind_adapter  # noqa: F401
    from shoal.swarm.seed import bootstrap_node  # noqa: F401
    from shoal.swarm.training import session_entry  # noqa: F401


if __name__ == "__main__":
    sys.exit(main())
