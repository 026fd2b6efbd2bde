"""Directory and gossip alone: peers that train nothing, many in a process, over real libp2p daemons
and DHT nodes.

    # as root on Linux: in a network namespace
    python bench/light.py --peers 32 --into bench/results/light.jsonl
    # ten peers to a daemon: 200 daemons need 19 GB
    python bench/light.py --peers 200 --share 10 --period 14

Each peer publishes its record in its bucket and reads that every --period seconds, and in a second
phase sends its status by gossip as well. Reported are

    found_s         seconds from a newcomer's announcement until a stranger, who reads the keys at
                    which its bucket can be, finds it
    listed          of those in its bucket by the hash, the share that a peer lists
    record_bytes    of records read and stored, a peer and second, and ``model_bytes``, the same by
                    bench.sim
    link_bytes      all that went over the loopback interface, a peer and second: DHT routing,
                    replicas, encryption, TCP
    gossip_bytes    what it was more in the second phase, and ``statuses``: those that were sent, a
                    second, in all of the swarm

A peer has a key, a record and a reading of its own, whatever it shares. Of those who share a daemon
one sends statuses, and the DHT has as many nodes as there are daemons: a key takes log2 of those,
not of the peers.

Without the namespace other programs' loopback traffic is counted too. The processes import no
model; hivemind's DHT is all of it that they need, and ``torch`` says whether that brought PyTorch
along.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench._own_network import INSIDE, run_inside

SWARM, MODEL = "a" * 52, "0" * 64
ATTEMPTS = 5  # to start a peer
ABOUT: dict[str, Any] = {
    "name": "light",
    "round": 0,
    "step": 0,
    "loss": None,
    "steps_per_s": 1.0,
    "shard": 0,
    "shards": 1,
    "model": MODEL,
    "state": "training",
    "version": "0",
}


class Daemon:
    """A host with its daemon, which counts the keys and the bytes of records of all peers that
    share it.

    ``bootstrap``: addresses; none for the first.
    """

    def __init__(self, bootstrap: tuple[str, ...]) -> None:
        from shoal.swarm.errors import StartupError
        from shoal.swarm.identity import Identity
        from shoal.swarm.membership.records import MemberValidator
        from shoal.swarm.p2p.host import Host

        self.identity, self.nbytes, self.keys = Identity.ephemeral(), 0, 0
        for left in reversed(range(ATTEMPTS)):
            try:
                self.host = Host.start(
                    self.identity,
                    bootstrap=bootstrap,
                    validator=MemberValidator(SWARM),
                    must_join=bool(bootstrap),
                    relay="off",
                    swarm=SWARM,
                    timeout=120.0,
                )
                break
            except StartupError:  # with all starting on one core, one may be too busy to answer
                if not left:
                    raise
        get, store = self.host.get, self.host.store

        async def counted_get(key: str) -> dict[str, bytes]:
            found = await get(key)
            self.keys, self.nbytes = self.keys + 1, self.nbytes + sum(map(len, found.values()))
            return found

        async def counted_store(key: str, subkey: str, value: bytes, ttl: float) -> bool:
            self.keys, self.nbytes = self.keys + 1, self.nbytes + len(value)
            return await store(key, subkey, value, ttl)

        self.host.get, self.host.store = counted_get, counted_store  # type: ignore[method-assign]


class LightPeer:
    """One peer: its key and directory, and later its gossip.

    ``size``: of the swarm, if it is known, as to those there before.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        daemon: Daemon,
        size: int | None = None,
        *,
        first: bool = True,
    ) -> None:
        from shoal.swarm.identity import Identity
        from shoal.swarm.membership.directory import Directory

        self.daemon, self.host, self.sent, self.first = daemon, daemon.host, 0, first
        self.identity = daemon.identity if first else Identity.ephemeral()
        self.directory = Directory(
            self.host,
            self.identity,
            SWARM,
            period=options.period,
            bucket=options.bucket,
            epoch_s=options.epoch_s,
        )
        if size is not None:
            self.directory._index.begin(size)
        self.announced = time.time()
        self.directory.announce(**ABOUT)

    def talk(self) -> None:
        """Begin to send statuses, as the first of a daemon."""
        if not self.first:
            return
        from shoal.swarm.gossip.gossip import Gossip
        from shoal.swarm.topics.status import RecordPublisher, Status
        from shoal.swarm.wire.record import Progress

        def status() -> Status:
            self.sent += 1
            return Status(
                swarm=SWARM,
                peer=self.identity.peer_id,
                name="light",
                addresses=(),
                progress=Progress(state="training", steps_per_s=1.0),
                issued=time.time(),
                version="0",
            )

        self.publisher = RecordPublisher(
            Gossip(
                self.host,
                self.identity,
                SWARM,
                members=self.directory.reachable,
                is_member=self.directory.vouches,
            ),
            Status,
            status,
            self.directory.size,
        )

    def sight(self, everyone: list[str]) -> tuple[int, int, int]:
        """Return how many of its bucket it lists, how many there are, and the bucket's depth."""
        there = {peer for peer in everyone if self.directory.belongs(peer)}
        return len(there & set(self.directory.members())), len(there), self.directory._index.depth


def serve(
    pipe: Connection, options: argparse.Namespace, bootstrap: tuple[str, ...], count: int
) -> None:
    """One process of ``count`` peers, which answers what its parent asks until that says end."""
    peers: list[LightPeer] = []
    daemons: list[Daemon] = []
    for number in range(count):
        first = number % options.share == 0
        if first:
            daemons.append(Daemon(bootstrap))
        peers.append(LightPeer(options, daemons[-1], options.peers, first=first))
        bootstrap = bootstrap or tuple(daemons[0].host.addresses()[:1])
    met = tuple(address for daemon in daemons[:4] for address in daemon.host.addresses()[:1])
    pipe.send((met, [peer.identity.peer_id for peer in peers], "torch" in sys.modules))
    while True:
        asked, given = pipe.recv()
        if asked == "end":
            for peer in peers:
                peer.directory.close()
            for daemon in daemons:
                daemon.host.close()
            return
        if asked == "talk":
            for peer in peers:
                peer.talk()
        if asked == "sight":
            pipe.send([peer.sight(given) for peer in peers])
        else:
            kept = [sum(getattr(daemon, what) for daemon in daemons) for what in ("nbytes", "keys")]
            pipe.send([*kept, sum(peer.sent for peer in peers)])


def loopback() -> int:
    """Return the bytes that this namespace's loopback interface has carried."""
    line = next(
        line
        for line in Path("/proc/net/dev").read_text().splitlines()
        if line.strip().startswith("lo:")
    )
    return int(line.split(":")[1].split()[0])


def resident(pids: set[int]) -> float:
    """Return MB of memory that processes hold, without what they share (proportional)."""
    total = 0
    for pid in pids:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += next(
            int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")
        )
    return total / 1024


def below(pid: int) -> set[int]:
    """Return the processes below one, itself included."""
    found, parents = {pid}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int(
                    (folder / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except OSError:
                continue
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Run it and return what was measured."""
    context, pipes, processes, everyone = multiprocessing.get_context("spawn"), [], [], []
    bootstrap: tuple[str, ...] = ()
    shares = [
        len(range(number, options.peers, options.processes)) for number in range(options.processes)
    ]
    began = time.monotonic()
    try:
        for count in shares:
            here, there = context.Pipe()
            process = context.Process(
                target=serve, args=(there, options, bootstrap, count), daemon=False
            )
            process.start()
            pipes.append(here)
            processes.append(process)
            met, names, torch = here.recv()  # one after the other, for all share the processors
            everyone += names
            bootstrap = bootstrap or met  # the others join peers of the first process
        started = time.monotonic() - began

        def ask(what: str, given: Any = None) -> list[Any]:
            for here in pipes:
                here.send((what, given))
            return [here.recv() for here in pipes]

        def window() -> dict[str, float]:
            before, link, at = ask("counts"), loopback(), time.monotonic()
            time.sleep(options.seconds)
            after, more, took = ask("counts"), loopback() - link, time.monotonic() - at
            nbytes, keys, sent = (
                sum(a[i] for a in after) - sum(b[i] for b in before) for i in range(3)
            )
            return {
                "record_bytes": nbytes / options.peers / took,
                "keys_per_minute": 60 * keys / options.peers / took,
                "link_bytes": more / options.peers / took,
                "statuses": sent / took,
            }

        time.sleep(2 * options.period)
        quiet = window()
        sights = [sight for found in ask("sight", everyone) for sight in found]
        memory = resident(below(os.getpid()))
        found = newcomers(options, bootstrap)
        ask("talk")
        time.sleep(options.period)
        loud = window()
        for here in pipes:
            here.send(("end", None))
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
    listed = [seen / there for seen, there, _ in sights if there]
    return {
        "peers": options.peers,
        "processes": options.processes,
        "share": options.share,
        "bucket": options.bucket,
        "epoch_s": options.epoch_s,
        "period_s": options.period,
        "seconds": options.seconds,
        "torch": torch,
        "started_s": started,
        "memory_mb": memory,
        "depths": sorted({depth for *_, depth in sights}),
        "in_bucket": statistics.mean(there for _, there, _ in sights),
        "listed": statistics.mean(listed),
        "listed_least": min(listed),
        **quiet,
        "found_s": found,
        "gossip_bytes": loud["link_bytes"] - quiet["link_bytes"],
        "statuses": loud["statuses"],
        **model(options),
    }


def newcomers(options: argparse.Namespace, bootstrap: tuple[str, ...]) -> list[float]:
    """Return the seconds until a stranger finds each of some newcomers; infinity for one that it
    does not within a minute.
    """
    from shoal.swarm.membership.bucket_index import is_in_its_bucket

    stranger, found = LightPeer(options, Daemon(bootstrap)), []
    for _ in range(options.newcomers):
        new = LightPeer(options, Daemon(bootstrap))
        took = float("inf")
        while time.time() - new.announced < 60:
            epoch = int(time.time() // options.epoch_s)
            search = is_in_its_bucket(stranger.host.get, SWARM, new.identity.peer_id, epoch)
            if stranger.host.call(search, 30.0):
                took = time.time() - new.announced
                break
            time.sleep(0.1)
        found.append(took)
        new.directory.close()
        new.host.close()
    stranger.directory.close()
    stranger.host.close()
    return found


def model(options: argparse.Namespace) -> dict[str, float]:
    """Return what the simulator says of as many peers, at the period of its own, per reading at
    this one's.
    """
    from bench.sim.report import run_sim
    from shoal.swarm.membership.directory_loops import PERIOD_S

    overrides = {
        "swarm.bucket": options.bucket,
        "swarm.epoch_s": options.epoch_s,
        "outer.method": "noloco",
        "outer.every": 1000,
    }
    found = run_sim(None, peers=options.peers, minutes=1.0, parameters=64, overrides=overrides)
    slower = PERIOD_S / options.period
    return {
        "model_bytes": found["directory_bytes_per_peer_second"] * slower,
        "model_keys_per_minute": found["directory_calls_per_peer_minute"] * slower,
        "model_requests_per_minute": found["directory_requests_per_peer_minute"] * slower,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=32)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--share", type=int, default=1, help="peers to a daemon")
    parser.add_argument("--bucket", type=int, default=16)
    parser.add_argument("--epoch-s", type=float, default=3600.0)
    parser.add_argument(
        "--period",
        type=float,
        default=15.0,
        help="seconds between two readings of a peer, below 30",
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the two phases")
    parser.add_argument("--newcomers", type=int, default=5)
    parser.add_argument(
        "--into", type=Path, help="append the result, one line of JSON, to this file"
    )
    options = parser.parse_args(arguments)
    if options.peers < 2 or not 1 <= options.processes <= options.peers:
        parser.error("there must be two peers, and no more processes than peers")
    if options.share < 1:
        parser.error("--share must be 1 or more")
    if not 0 < options.period < 30:
        parser.error("a record lives for 30 s, so --period must be below")
    if os.geteuid() == 0 and INSIDE not in os.environ:
        return run_inside(__file__, sys.argv[1:] if arguments is None else arguments)
    found = measured(options)
    line = json.dumps(found)
    if options.into:
        with options.into.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
