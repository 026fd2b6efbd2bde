"""Honest peers cut off by hostile identities, with and without peer exchange; everything but the
DHT is a node's own code.

    # 100 peers, 10 and 30 % hostile, 3 seeds: five minutes
    python bench/eclipse.py
    python bench/eclipse.py --hostile .3 --seeds 0 --json
    python bench/eclipse.py --resume bench/results/eclipse.jsonl --into bench/results/tables.md

Each honest peer is in an address range of its own and knows a few peers at the start, any of which
may be hostile. The DHT of the captured ones is hostile: they read the records of hostile peers
alone, and their own reach nobody. Hostile peers answer a shuffle with their own record and those of
other hostile peers, and call an honest peer every ten seconds to offer the same. They are in a few
ranges (``few``), or each in one of its own (``many``), and with ``unlimited`` a node counts all
ranges as one. Nobody forges here, so nothing is signed, which would take most of the time.

A peer is cut off if no honest peer is in its view. ``parts``: honest peers outside the largest part
that the views connect.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import Any, cast
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench._page import put_into
from shoal.swarm import identity
from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.membership import peer_exchange
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.peer_exchange import (
    MAX_OFFERED,
    SHUFFLE_PROTOCOL,
    PeerExchange,
    Shuffle,
    ShuffleReply,
)
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.wire import envelope
from shoal.swarm.wire.envelope import pack, seal, unpack
from shoal.swarm.wire.messages import Member
from tests.sim.clock import VirtualLoop
from tests.sim.directory import EPOCH, Board, SimDirectory
from tests.sim.isolation import isolated
from tests.sim.memory_stream import NOTHING
from tests.sim.network import Links, SimHost, SimNetwork, Trace

SWARM, MODEL = "a" * 52, "0" * 64
BEGIN, END = "<!-- eclipse: begin -->\n", "<!-- eclipse: end -->"
CALL_S = 10.0  # seconds between two calls of a hostile peer
SETTING = ("peers", "captured", "entries", "ranges", "minutes")
Row = dict[str, Any]


class Meeting(SimHost):
    """A host that knows where it met others; ``at``: the IP address at which they meet it.

    There is no DHT to meet others by.
    """

    def __init__(self, network: SimNetwork, name: str, identity: identity.Identity) -> None:
        super().__init__(network, name, identity)
        network.hosts[self.peer_id] = self
        network.every.append(self)
        self.at, self.met, self.kept = "", dict[str, str](), dict[str, None]()

    def remember(self, addresses: Iterable[str]) -> None:
        """Keep addresses, like ``Host.remember``."""
        self.kept.update(dict.fromkeys(addresses))

    def known(self) -> list[str]:
        """Return the addresses that were kept."""
        return list(self.kept)

    async def meet(self, addresses: Sequence[str]) -> None:
        """Do nothing."""

    async def open(
        self, peer_id: str, protocol: str, *, addresses: Sequence[str] = (), timeout: float
    ) -> Stream:
        """Open a stream, like ``Host.open``."""
        stream = await super().open(peer_id, protocol, addresses=addresses, timeout=timeout)
        other = self.network.hosts[peer_id]
        assert isinstance(other, Meeting)
        self.met[peer_id], other.met[self.peer_id] = other.at, self.at
        return stream


class Heard(SimDirectory):
    """A directory that also takes records from their authors' own hands."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer.world.board, peer.host, peer.record, peer.chance)
        self.own, self.access_policy = peer.record, AccessPolicy()

    def hear(self, member: Member) -> bool:
        """Take a record."""
        if member.peer not in self._seen or member.issued > self._seen[member.peer].issued:
            self._seen[member.peer], self._stale = member, 0.0
        return True


class Deceived(Heard):
    """The directory of a captured peer: it reads nothing but hostile records, and stores none."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(peer)
        self.world = peer.world

    async def read(self) -> None:
        """Read all hostile records."""
        for record in self.world.hostile_records():
            self.hear(record)

    def _store(self, prefix: str) -> None:
        """Store nothing."""
        self._prefix = prefix
        self._note(self._record())


class Peer:
    """An honest peer."""

    KIND = Heard

    def __init__(self, world: World, number: int, where: str) -> None:
        self.world = world
        name = f"p{number}"
        self.host = Meeting(world.network, name, world.network.identity(f"{world.seed} {name}"))
        self.host.at, self.peer_id = where, self.host.peer_id
        self.address = f"/ip4/{where}/tcp/4001/p2p/{self.peer_id}"
        self.chance = random.Random(f"{world.seed} {number}")
        self.directory = self.KIND(self)

    def record(self) -> Member:
        """Return its record as of now."""
        return Member(
            swarm=SWARM,
            peer=self.peer_id,
            name=self.host.name,
            addresses=(self.address,),
            round=0,
            step=0,
            loss=None,
            steps_per_s=1.0,
            shard=0,
            shards=1,
            model=MODEL,
            state="training",
            issued=self.world.now(),
            version="0",
        )

    def start(self, exchange: bool) -> None:
        """Begin; ``exchange``: with peer exchange."""
        self.host.start(self.directory.run())
        self.exchange = (
            PeerExchange(
                cast(Host, self.host),
                cast(Directory, self.directory),
                self.host.identity,
                SWARM,
                self.world.now,
                self.chance,
            )
            if exchange
            else None
        )


class Captured(Peer):
    """An honest peer whose part of the DHT is hostile."""

    KIND = Deceived


class Hostile(Peer):
    """A hostile peer: it is in the DHT, answers, and knows no honest peer when it is asked."""

    def start(self, exchange: bool) -> None:
        """Begin."""
        self.host.start(self.directory.run())
        if exchange:
            self.host.serve(SHUFFLE_PROTOCOL, self.answer)
            self.host.start(self.call())

    def offered(self) -> tuple[bytes, ...]:
        """Return records of other hostile peers."""
        others = self.chance.sample(self.world.hostile, min(MAX_OFFERED, len(self.world.hostile)))
        return tuple(other.sealed() for other in others if other is not self)

    def sealed(self) -> bytes:
        """Return its record."""
        return seal(self.record(), self.host.identity)

    async def answer(self, stream: Stream) -> None:
        """Answer a shuffle."""
        unpack(await stream.receive(Shuffle.LIMIT, 5.0), Shuffle)
        await stream.send(pack(ShuffleReply(record=self.sealed(), offered=self.offered())), 5.0)

    async def call(self) -> None:
        """Call honest peers, for ever."""
        while True:
            await asyncio.sleep(CALL_S * self.chance.uniform(0.8, 1.2))
            victim = self.chance.choice(self.world.honest)
            try:
                stream = await self.host.open(victim.peer_id, SHUFFLE_PROTOCOL, timeout=5.0)
                await stream.send(
                    pack(Shuffle(swarm=SWARM, record=self.sealed(), offered=self.offered())), 5.0
                )
                await stream.receive(ShuffleReply.LIMIT, 5.0)
                stream.close()
            except (NetworkError, MessageError):
                continue


class World:
    """A swarm with a share of hostile peers."""

    def __init__(
        self, loop: VirtualLoop, options: argparse.Namespace, hostile: float, where: str, seed: int
    ) -> None:
        self.loop, self.seed, self._made, self._records = loop, seed, 0.0, list[Member]()
        self.network = SimNetwork(loop, seed, Links(), Trace())
        self.board = Board(self.network)
        chance = random.Random(f"eclipse {seed}")
        bad = round(hostile * options.peers)
        ranges = chance.sample(
            range(1 << 13), options.peers + options.ranges
        )  # 11.0/16 and on: one for each honest peer
        at = [f"{11 + number // 256}.{number % 256}.0.1" for number in ranges]
        spread = len(at) if where == "many" else options.ranges
        self.hostile = [
            Hostile(self, number, _in(at[-1 - number % spread], number)) for number in range(bad)
        ]
        good = options.peers - bad
        taken = round(options.captured * good)
        self.honest = [
            (Captured if number < taken else Peer)(self, bad + number, at[number])
            for number in range(good)
        ]
        everybody = [*self.hostile, *self.honest]
        for peer in self.honest:
            peer.host.remember(
                other.address
                for other in chance.sample(everybody, options.entries)
                if other is not peer
            )

    def now(self) -> float:
        """Return Unix time."""
        return EPOCH + self.loop.time()

    def hostile_records(self) -> Sequence[Member]:
        """Return the records of the hostile peers, at most two seconds old."""
        if self.now() - self._made > 2.0:
            self._made, self._records = self.now(), [peer.record() for peer in self.hostile]
        return self._records

    def run(self, exchange: bool, minutes: float) -> None:
        """Let it run."""
        for peer in (*self.hostile, *self.honest):
            if not isinstance(peer, Captured):
                peer.directory.settle()
            peer.start(exchange)
        self.loop.call_later(60 * minutes, self.loop.stop, context=NOTHING)
        self.loop.run_forever()

    def cut_off(self) -> float:
        """Return the share of the honest peers in whose view is no honest peer."""
        return mean(not seen for seen in self._views().values())

    def parted(self) -> float:
        """Return the share of the honest peers that are outside the largest part that their views
        connect.
        """
        near: dict[str, set[str]] = {peer: set(seen) for peer, seen in self._views().items()}
        for peer, seen in self._views().items():
            for other in seen:
                near[other].add(peer)
        largest, left = 0, set(near)
        while left:
            part, edge = set[str](), {left.pop()}
            while edge:
                part |= edge
                edge = {other for peer in edge for other in near[peer]} - part
            left -= part
            largest = max(largest, len(part))
        return 1 - largest / len(near)

    def shares(self) -> tuple[float | None, float | None]:
        """Return the share of hostile peers in the active and in the passive views."""
        bad = {peer.peer_id for peer in self.hostile}
        views = [peer.exchange.views for peer in self.honest if peer.exchange is not None]
        active = [peer in bad for view in views for peer in view.active]
        passive = [peer in bad for view in views for peer in view.passive]
        return mean(active) if active else None, mean(passive) if passive else None

    def rate(self, minutes: float) -> float:
        """Return bytes a second that an honest peer sends in shuffles."""
        return mean(peer.host.traffic.sent for peer in self.honest) / (60 * minutes)

    def _views(self) -> Mapping[str, set[str]]:
        good = {peer.peer_id for peer in self.honest}
        return {
            peer.peer_id: (peer.directory.members().keys() & good) - {peer.peer_id}
            for peer in self.honest
        }


def _in(where: str, number: int) -> str:
    """Return an address of the same /16."""
    first, second, *_ = where.split(".")
    return f"{first}.{second}.{number // 250}.{number % 250 + 1}"


def _rules(limited: bool) -> ExitStack:
    """Let nodes distinguish address ranges, or not; take signatures as they are; and decode each
    peer id once.
    """
    stack = ExitStack()
    if not limited:
        stack.enter_context(patch.object(peer_exchange, "range_of", lambda host: ""))
    stack.enter_context(patch.object(envelope, "verify", lambda *arguments: True))
    stack.enter_context(patch.object(identity.Identity, "sign", lambda *arguments: bytes(64)))
    stack.enter_context(patch.object(identity, "b58decode", lru_cache(identity.b58decode)))
    return stack


def run(hostile: float, case: str, seed: int, options: argparse.Namespace) -> Row:
    """One swarm. ``case``: none (no peer exchange), few, many or unlimited."""
    began, loop = time.perf_counter(), VirtualLoop()
    with isolated(loop) as errors, _rules(case != "unlimited"):
        world = World(loop, options, hostile, "many" if case == "many" else "few", seed)
        world.run(case != "none", options.minutes)
        active, passive = world.shares()
        row = {
            "hostile": hostile,
            "case": case,
            "seed": seed,
            "cut_off": world.cut_off(),
            "parts": world.parted(),
            "hostile_active": active,
            "hostile_passive": passive,
            "bytes_per_s": round(world.rate(options.minutes)),
            "seconds": round(time.perf_counter() - began, 1),
            "setting": {name: getattr(options, name) for name in SETTING},
        }
        world.network.end()
        if errors.found or world.network.errors:
            raise RuntimeError(f"a peer failed: {[*errors.found, *world.network.errors][0]}")
    return row


CASES = {
    "none": "no peer exchange",
    "few": "in a few ranges",
    "unlimited": "in a few ranges, no limits",
    "many": "in a range each",
}


def table(found: Sequence[Row]) -> str:
    """Markdown: a line for each share and case, means over the seeds, of the cut-off ones the worst
    seed too.
    """
    heads = (
        "hostile|peer exchange, attackers|cut off (worst seed)|outside the largest part|hostile: "
        "active|passive|bytes/s|seeds"
    )
    lines = [f"| {heads.replace('|', ' | ')} |", "|---" * (heads.count("|") + 1) + "|"]
    for hostile in sorted({row["hostile"] for row in found}):
        for case, words in CASES.items():
            rows = [row for row in found if (row["hostile"], row["case"]) == (hostile, case)]
            if rows:
                cut = [row["cut_off"] for row in rows]
                active, passive = (
                    _mean(rows, f"hostile_{view}", ".0%") for view in ("active", "passive")
                )
                lines.append(
                    f"| {hostile:.0%} | {words} | {mean(cut):.1%} ({max(cut):.1%}) | "
                    f"{_mean(rows, 'parts', '.1%')} | {active} | {passive} | "
                    f"{_mean(rows, 'bytes_per_s', '.0f')} | {len(rows)} |"
                )
    return "\n".join(lines).replace("%", " %") + "\n"


def _mean(rows: Sequence[Row], key: str, form: str) -> str:
    return "" if rows[0][key] is None else format(mean(row[key] for row in rows), form)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hostile", nargs="+", type=float, default=[0.1, 0.3], help="shares of the identities"
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--peers", type=int, default=100)
    parser.add_argument(
        "--captured", type=float, default=0.5, help="share of the honest peers whose DHT is hostile"
    )
    parser.add_argument("--entries", type=int, default=3, help="peers that each knows at the start")
    parser.add_argument(
        "--ranges", type=int, default=4, help="ranges of the hostile peers where they are few"
    )
    parser.add_argument("--minutes", type=float, default=6.0, help="of the swarm's time")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="a line for each run; those that are there are not run again",
    )
    parser.add_argument(
        "--into", type=Path, metavar="PAGE", help="write the table between two comments of a page"
    )
    parser.add_argument("--json", action="store_true", help="print the runs as one JSON object")
    options = parser.parse_args(arguments)
    if not all(0 < share < 1 for share in options.hostile) or not 0 <= options.captured <= 1:
        parser.error("shares are between 0 and 1")
    if (
        options.peers < 10
        or options.peers + options.ranges > 1 << 13
        or not 1 <= options.entries < options.peers
    ):
        parser.error(
            f"there are 10 to {(1 << 13) - options.ranges} peers, and each knows some others at "
            "the start"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The program."""
    options = _options(arguments)
    setting = {name: getattr(options, name) for name in SETTING}
    there = (
        options.resume.read_text(encoding="utf-8").splitlines()
        if options.resume and options.resume.exists()
        else []
    )
    found = [row for row in map(json.loads, there) if row["setting"] == setting]
    done = {(row["hostile"], row["case"], row["seed"]) for row in found}
    for cell in (
        (share, case, seed)
        for seed in options.seeds
        for share in options.hostile
        for case in options.cases
    ):
        if cell in done:
            continue
        row = run(*cell, options)
        found.append(row)
        print(f"{cell}: {row}", file=sys.stderr)
        if options.resume is not None:
            with options.resume.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    if options.into is not None:
        put_into(options.into, table(found), BEGIN, END)
    print(json.dumps({"setting": setting, "runs": found}) if options.json else table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
