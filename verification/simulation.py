"""A swarm of provers and verifiers in one process, with a clock of its own, for tests and to try prices:

    python -m verification.simulation --rounds 30 --honest 5 --lazy 1 --liar 1

Every peer has its own view: records reach it late and in another order than they reach others. Signatures are a toy.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from verification.cases import Times
from verification.claims import Claim, Commitment, Entry, Opening, Record, Reveal, Sign, Signed, hide
from verification.consensus import Consensus, Refused
from verification.draw import OPENS, SETTLED, Electorate, next_beacon
from verification.member import Checked, Member
from verification.plants import BEHIND, Chain, must_plant
from verification.reputation import Prices, Table, reckon
from verification.rulings import Rules, salts

KINDS = ("honest", "liar", "lazy", "copier", "colluder", "absent")
"""Liars prove wrongly and verify well, lazy ones approve blindly, copiers wait for a vote to copy, colluders lie and vote for each
other against everybody else, absent ones never verify.
"""
TICK = 2.0  # seconds


def digest(*parts: object) -> bytes:
    """32 bytes from what is given."""
    return hashlib.sha256(repr(parts).encode()).digest()


def toy_signer(peer: str) -> Sign:
    """Signs as ``peer``; anybody could, so only for simulations."""
    return lambda data: digest("toy key", peer, data)


def toy_verify(peer: str, data: bytes, signature: bytes) -> bool:
    """Checks what `toy_signer` made."""
    return signature == digest("toy key", peer, data)


def is_right(claim: Claim) -> bool:
    """Whether the output is what the model gives, in this world."""
    return claim.output == digest("output", claim.prompt)


@dataclass(frozen=True)
class World:
    """What is simulated. ``delay``: seconds that a record travels at most; it must be below ``times.skew_s``."""

    rules: Rules = field(default_factory=lambda: Rules(planted=0.2))
    prices: Prices = field(default_factory=Prices)
    times: Times = field(default_factory=lambda: Times(commit_s=12.0, skew_s=4.0, reveal_s=8.0))
    round_s: float = 90.0
    delay: float = 3.0
    claims: int = 1
    seed: int = 0


class Peer:
    """One simulated peer, with its own view of all records."""

    def __init__(self, name: str, kind: str, swarm: Swarm) -> None:
        self.name, self.kind, self.swarm = name, kind, swarm
        world = swarm.world
        self.random = random.Random(f"{world.seed}:{name}")
        self.chain = Chain(digest("chain", world.seed, name), 0, 512)
        self.table = Table(0, {}, {})
        self.consensus = Consensus(
            "run", toy_verify, lambda: swarm.now, rules=world.rules, times=world.times,
            banned=lambda peer: self.table.is_banned(peer, self.consensus.round),
        )  # fmt: skip
        self.member = Member(name, self.consensus, self, toy_signer(name), self.check, lambda: self.random.randbytes(32))
        self.beacons = {-1: digest("first beacon")}
        self.unopened: list[Claim] = []
        self.copied: set[tuple[bytes, int]] = set()

    def publish(self, signed: Signed) -> None:
        """The board of `Member`."""
        self.swarm.spread(self, signed)

    def say(self, record: Record) -> None:
        """Publish, unless the own view refuses it."""
        try:
            self.member.publish(record)
        except Refused:
            self.swarm.refused_own += 1

    def begin(self, round: int) -> None:
        """What happens when a round begins."""
        known, rules = self.consensus, self.swarm.world.rules
        known.advance(round)
        if round == 0:
            self.say(Entry(peer=self.name, run="run", round=0, operator=self.name, anchor=self.chain.anchor))
        if (ready := round - OPENS) >= 0:
            self.beacons[ready] = next_beacon(self.beacons[ready - 1], salts(ready - 1, known.ledger, known.electorates, rules))
            self.table = reckon(known.ledger, known.electorates, rules, self.swarm.world.prices, round - SETTLED)
            voters = {peer: peer for peer in self.swarm.names if not self.table.is_banned(peer, ready)}
            known.open(Electorate(ready, self.beacons[ready], voters))
        self._open_plants(round)
        if round > 0 and not self.table.is_banned(self.name, round):
            for slot in range(self.swarm.world.claims):
                self._claim(round, slot)

    def _claim(self, round: int, slot: int) -> None:
        beacon = self.beacons.get(round - BEHIND)
        planted = beacon is not None and must_plant(self.chain.link(round), beacon, slot, self.swarm.world.rules.planted)
        prompt = digest("prompt", self.name, round, slot)
        wrong = planted or self.kind in ("liar", "colluder")
        claim = Claim(
            peer=self.name, run="run", round=round, slot=slot, model=digest("model"), prompt=prompt, sampling=digest("sampling"),
            seed=slot, tokens=64, output=digest("wrong" if wrong else "output", prompt), fingerprint=digest("proof", prompt),
        )  # fmt: skip
        self.say(claim)
        if planted:
            self.unopened.append(claim)

    def _open_plants(self, round: int) -> None:
        for claim in [claim for claim in self.unopened if round - claim.round == SETTLED - 1]:
            self.unopened.remove(claim)
            ruling = self.consensus.ruling(claim.id)
            if ruling is not None and ruling.outcome != "unverified":
                link = self.chain.link(claim.round)
                self.say(Opening(peer=self.name, round=round, claim=claim.id, attempt=len(ruling.trials) - 1, link=link))

    def check(self, claim: Claim) -> Checked | None:
        """How this kind of peer verifies."""
        if self.kind == "absent":
            return None
        right = is_right(claim)
        if self.kind == "lazy":
            right = True
        elif self.kind == "colluder":
            right = self.swarm.kinds[claim.peer] == "colluder"
        return Checked("valid" if right else "invalid")

    def work(self) -> None:
        """Once a tick."""
        if self.kind == "copier":
            self._copy()
        self.member.work(most=0 if self.kind == "copier" else 64)

    def _copy(self) -> None:
        """Vote as somebody else did: there is nothing to copy until it is too late to commit. Says so to others all the same."""
        for reveal in [record for record in self.consensus.ledger if isinstance(record, Reveal)]:
            place = (reveal.case, reveal.attempt)
            if place not in self.copied:
                self.copied.add(place)
                own = Reveal(**{**reveal.model_dump(), "peer": self.name})
                commitment = Commitment(peer=self.name, case=own.case, attempt=own.attempt, digest=hide(own))
                for record in (commitment, own):
                    self.swarm.spread(self, Signed.by(toy_signer(self.name), record))


class Swarm:
    """All peers and the time. ``kinds``: peer id to one of `KINDS`."""

    def __init__(self, kinds: dict[str, str], world: World | None = None) -> None:
        self.world, self.kinds, self.names = world or World(), kinds, sorted(kinds)
        self.now, self.sent, self.refused_own = 0.0, 0, 0
        self._random = random.Random(self.world.seed)
        self._mail: list[tuple[float, int, Peer, Signed]] = []
        self.peers = [Peer(name, kinds[name], self) for name in self.names]

    def spread(self, author: Peer, signed: Signed) -> None:
        """Give ``signed`` to all others, each after another delay."""
        for peer in self.peers:
            if peer is not author:
                self.sent += 1
                heapq.heappush(self._mail, (self.now + self._random.uniform(0, self.world.delay), self.sent, peer, signed))

    def run(self, rounds: int, each: Callable[[int], None] = lambda round: None) -> None:
        """Simulate so many rounds; ``each`` is called at the end of every one."""
        for round in range(rounds):
            for peer in self.peers:
                peer.begin(round)
            end = self.now + self.world.round_s
            while self.now < end:
                self.now += TICK
                self._deliver()
                for peer in self.peers:
                    peer.work()
            each(round)

    def _deliver(self) -> None:
        while self._mail and self._mail[0][0] <= self.now:
            _, _, peer, signed = heapq.heappop(self._mail)
            try:
                peer.consensus.take(signed)
            except Refused:
                continue  # counted by the consensus


def outcomes(swarm: Swarm) -> Counter[tuple[bool, str]]:
    """How many claims that are (right, decided so) the first peer knows."""
    rulings = swarm.peers[0].table.rulings.values()
    return Counter((is_right(ruling.claim), ruling.outcome) for ruling in rulings)


def main() -> None:
    """Run a simulation and print the table of the first peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=int, default=5 if kind == "honest" else 1 if kind in ("lazy", "liar") else 0)
    given = vars(parser.parse_args())
    kinds = {f"{kind}-{number}": kind for kind in KINDS for number in range(given[kind])}
    swarm = Swarm(kinds, World(seed=given["seed"]))
    swarm.run(given["rounds"])
    table = swarm.peers[0].table
    for name in swarm.names:
        standing = table.standings.get(name)
        if standing is not None:
            until = table.banned_until(name)
            state = f"banned until round {until}" if until is not None else ""
            print(f"{name:12} {standing.score / 1000:8.2f}  claims {standing.claims}  seats {standing.seats}  {state}")
    print({f"{'right' if right else 'wrong'} {outcome}": count for (right, outcome), count in sorted(outcomes(swarm).items())})


if __name__ == "__main__":
    main()
