"""A swarm of provers and verifiers in one process with a virtual clock, to test the vote and to try
score rules:

    python -m bench.votes_simulation --rounds 30 --honest 5 --lazy 1 --liar 1

Every peer is a `Participant` with its own view: records reach it late, in another order than they
reach others, or not at all. Signatures are toys. `bench._votes_peers.KINDS` lists the kinds of
peers.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from bench._votes_peers import KINDS, Peer, World, is_right
from shoal.verification.consensus.records import Signed

TICK = 1.0  # seconds
START = 4  # the round by Unix time in which a simulation begins; its own count is from 0


class Swarm:
    """Simulated peers with a virtual clock.

    ``kinds``: peer id to one of `bench._votes_peers.KINDS`.
    """

    def __init__(self, kinds: Mapping[str, str], world: World | None = None) -> None:
        self.world, self.kinds, self.names = world or World(), dict(kinds), sorted(kinds)
        self.now, self.sent, self.lost, self.pulled = START * self.world.round_s, 0, 0, 0
        self.round = 0
        self._random = random.Random(self.world.seed)
        self._mail: list[tuple[float, int, Callable[[], None]]] = []
        self.peers: list[Peer] = []

    def peer(self, name: str) -> Peer:
        """Return a peer by name. Raises StopIteration if it has not joined."""
        return next(peer for peer in self.peers if peer.name == name)

    def spread(self, author: Peer, signed: Signed, to: Collection[str] | None = None) -> None:
        """Send ``signed`` to all others, or to those in ``to``, each after another delay, if it is
        not lost.
        """
        for peer in self.peers:
            if peer is author or (to is not None and peer.name not in to):
                continue
            if self._random.random() < self.world.loss:
                self.lost += 1
                continue
            self.post(lambda peer=peer: peer.receive(signed))  # type: ignore[misc]

    def post(self, action: Callable[[], None]) -> None:
        """Do ``action`` after a message's delay."""
        self.sent += 1
        heapq.heappush(
            self._mail, (self.now + self._random.uniform(0, self.world.delay), self.sent, action)
        )

    def run(self, rounds: int, each: Callable[[int], None] = lambda round: None) -> None:
        """Simulate ``rounds`` rounds; ``each`` is called at the end of every one."""
        for _ in range(rounds):
            for name in self.names:
                if self.world.joins.get(name, 0) == self.round:
                    self.peers.append(Peer(name, self.kinds[name], self))
            while self.now < (START + self.round + 1) * self.world.round_s:
                self._deliver()
                for peer in self.peers:
                    peer.work()
                self.now += TICK
            each(self.round)
            self.round += 1

    def _deliver(self) -> None:
        while self._mail and self._mail[0][0] <= self.now:
            heapq.heappop(self._mail)[2]()


def outcomes(swarm: Swarm) -> Counter[tuple[bool, str]]:
    """Count the claims of the first peer by whether they are right, and by outcome."""
    rulings = swarm.peers[0].participant.table.rulings.values()
    return Counter((is_right(ruling.claim), ruling.outcome) for ruling in rulings)


def main() -> None:
    """Run a simulation and print the table of the first peer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loss", type=float, default=0.0)
    for kind in KINDS:
        parser.add_argument(
            f"--{kind}",
            type=int,
            default=5 if kind == "honest" else 1 if kind in ("lazy", "liar") else 0,
        )
    given = vars(parser.parse_args())
    kinds = {f"{kind}-{number}": kind for kind in KINDS for number in range(given[kind])}
    swarm = Swarm(kinds, World(seed=given["seed"], loss=given["loss"]))
    swarm.run(given["rounds"])
    table = swarm.peers[0].participant.table
    for name in swarm.names:
        standing = table.standings.get(name)
        if standing is not None:
            until = table.banned_until(name)
            state = f"banned until round {until}" if until is not None else ""
            print(
                f"{name:12} {standing.score / 1000:8.2f}  claims {standing.claims}  votes "
                f"{standing.votes}  {state}"
            )
    print(
        {
            f"{'right' if right else 'wrong'} {outcome}": count
            for (right, outcome), count in sorted(outcomes(swarm).items())
        }
    )


if __name__ == "__main__":
    main()
