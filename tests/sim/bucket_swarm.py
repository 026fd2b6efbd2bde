"""Directories of a simulated swarm in epoch buckets: no training, peers that come and go, and
several tables as in a partition.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from shoal.swarm.membership.directory import TTL_S
from shoal.swarm.membership.directory_loops import PERIOD_S
from shoal.swarm.membership.room import MAX_IN_VIEW
from shoal.swarm.wire.messages import Member
from tests.sim.clock import VirtualLoop
from tests.sim.directory import EPOCH, Board, Posted, SimDirectory
from tests.sim.memory_stream import NOTHING
from tests.sim.network import Links, SimHost, SimNetwork, Trace
from tests.support.records import SWARM, member_of

BUCKET, EPOCH_S = 16, 30.0
FIRST = EPOCH_S - EPOCH % EPOCH_S  # virtual second at which the second epoch begins


class BucketSwarm:
    """Directories of peers that come and go; ``boards``: tables that know nothing of each other, as
    in a partition.
    """

    def __init__(
        self, boards: int = 1, bucket: int = BUCKET, seed: int = 0, limit: int = MAX_IN_VIEW
    ) -> None:
        self.loop, self.bucket, self.seed, self.limit = VirtualLoop(), bucket, seed, limit
        self.rounds: dict[str, int] = {}
        """The rounds that peers are in, where it is not 0."""
        self.network = SimNetwork(self.loop, seed, Links(0.05, 0.0), Trace())
        self.boards = [Board(self.network, SWARM) for _ in range(boards)]
        self.all: list[tuple[SimHost, SimDirectory]] = []

    def add(
        self, count: int, size: int = 0, board: int = 0, over: float = PERIOD_S
    ) -> list[tuple[SimHost, SimDirectory]]:
        """Let so many peers begin within some seconds; with ``size`` they know that the swarm has
        so many.
        """
        added = []
        for number in range(len(self.all), len(self.all) + count):
            name = f"p{number}"
            host = self.network.host(
                name, self.network.identity(name if not self.seed else f"{self.seed} {name}")
            )
            chance = random.Random(number if not self.seed else f"{self.seed} {number}")
            directory = SimDirectory(
                self.boards[board],
                host,
                self._record(host),
                chance,
                self.limit,
                bucket=self.bucket,
                epoch_s=EPOCH_S,
            )
            if size:
                directory.settle(size)
            added.append((host, directory))
        self.all += added
        for number, (host, directory) in enumerate(added):
            begin = over * number / count
            self.loop.call_later(begin, self._start, host, directory, context=NOTHING)
        return added

    def _start(self, host: SimHost, directory: SimDirectory) -> None:
        if host.process.state != "dead":
            host.start(directory.run())

    def _record(self, host: SimHost) -> Callable[[], Member]:
        return lambda: self.member(host.peer_id, host.name)

    def member(self, peer: str, name: str) -> Member:
        return member_of(
            peer, name=name, round=self.rounds.get(peer, 0), issued=EPOCH + self.loop.time()
        )

    def forge(self, peer: str, prefix: str, until: float) -> None:
        """Put the record of a made-up peer under a key of the first table, and again every few
        seconds up to a virtual time.
        """
        record = self.member(self.all[0][0].peer_id, "forged").model_copy(update={"peer": peer})
        self.boards[0].put(prefix, Posted(record, 300, self.loop.time() + TTL_S))
        if self.loop.time() + PERIOD_S < until:
            self.loop.call_later(PERIOD_S, self.forge, peer, prefix, until, context=NOTHING)

    def run(self, seconds: float) -> None:
        self.loop.call_later(seconds, self.loop.stop, context=NOTHING)
        self.loop.run_forever()

    def until(self, virtual: float) -> None:
        self.run(virtual - self.loop.time())

    def end(self) -> None:
        self.network.end()
        self.loop.close()

    # -- what there is to see ----------------------------------------------------------------------

    def there(self) -> dict[str, SimDirectory]:
        """Return the directories of those that live, by peer."""
        return {
            host.peer_id: directory for host, directory in self.all if host.process.state == "awake"
        }

    def views(self) -> dict[str, set[str]]:
        """Return the living peers that each sees."""
        there = self.there()
        return {peer: set(directory.members()) & there.keys() for peer, directory in there.items()}

    def one_sided(self) -> float:
        """Return the share of sights that are not returned."""
        views = self.views()
        pairs = [(one, other) for one, seen in views.items() for other in seen if other != one]
        return sum(one not in views[other] for one, other in pairs) / max(len(pairs), 1)

    def depths(self) -> Counter[int]:
        """Return how many peers are at each depth."""
        return Counter(directory.index.depth for directory in self.there().values())
