"""Peers of the simulated vote: honest ones, and cheats of the kinds that a swarm of strangers
meets.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.verification.consensus.log import decode_log, encode
from shoal.verification.consensus.participant import Participant, Slot, Wanted
from shoal.verification.consensus.protocol import Limits
from shoal.verification.consensus.records import (
    Claim,
    Commitment,
    Refused,
    Reveal,
    Sign,
    Signed,
    hide,
)
from shoal.verification.consensus.reputation import ScoreRules
from shoal.verification.consensus.rulings import Rules
from shoal.verification.consensus.voter import Checked

KINDS = (
    "honest",
    "liar",
    "lazy",
    "copier",
    "colluder",
    "absent",
    "thief",
    "withholder",
    "flooder",
    "farmer",
    "replayer",
    "twofaced",
)
"""Liars prove wrongly and verify well, lazy ones approve blindly, copiers wait for a vote to copy,
thieves copy commitments, colluders lie and vote for each other against everybody else, absent ones
never verify, withholders show their votes to half of the others, flooders send 10,000 claims a
minute, farmers are honest for a while and then lie, replayers send what others sent again and claim
what they claimed before, two-faced ones claim different things to different peers.
"""


def digest(*parts: object) -> bytes:
    """Return 32 bytes that follow from ``parts``."""
    return hashlib.sha256(repr(parts).encode()).digest()


def toy_signer(peer: str) -> Sign:
    """Return a toy signer for ``peer``, which anybody could forge."""
    return lambda data: digest("toy key", peer, data)


def toy_verify(peer: str, data: bytes, signature: bytes) -> bool:
    """Check a signature of `toy_signer`."""
    return signature == digest("toy key", peer, data)


def is_right(claim: Claim) -> bool:
    """Return whether the output is what the model gives, in this world, for a prompt of the round
    (else it is a replay).
    """
    return claim.output == digest("output", claim.prompt) and claim.prompt == prompt_of(
        claim.peer, claim.round, claim.slot
    )


def prompt_of(peer: str, round: int, slot: int) -> bytes:
    """Return the prompt to be claimed in a slot."""
    return digest("prompt", peer, round, slot)


@dataclass(frozen=True)
class World:
    """Parameters of a simulation.

    ``delay``: most seconds that a record travels; with a tick it must be below the skew, 4 % of a
    round.

    By peer: ``joins``, the round in which it joins; ``clocks``, the seconds by which its clock is
    ahead.
    """

    rules: Rules = field(default_factory=lambda: Rules(planted=0.2))
    prices: ScoreRules = field(default_factory=ScoreRules)
    limits: Limits = field(default_factory=Limits)
    round_s: float = 90.0
    delay: float = 2.0
    loss: float = 0.0
    """Probability that a record does not reach a peer."""
    joins: Mapping[str, int] = field(default_factory=dict)
    clocks: Mapping[str, float] = field(default_factory=dict)
    defects: int = 12
    """The round in which farmers begin to lie and flooders flood."""
    check_s: float = 0.0
    """Simulated seconds of a check; others continue meanwhile."""
    seed: int = 0


class Place(Protocol):
    """Surroundings of simulated peers: `bench.votes_simulation.Swarm`."""

    world: World
    now: float
    round: int
    pulled: int
    kinds: dict[str, str]
    names: list[str]

    @property
    def peers(self) -> Sequence[Peer]:
        """Peers that have joined."""

    def spread(self, author: Peer, signed: Signed, to: Collection[str] | None = None) -> None:
        """Send ``signed`` to all others, or to those in ``to``."""

    def post(self, action: Callable[[], None]) -> None:
        """Do ``action`` after a message's delay."""


class Peer:
    """Simulated peer."""

    def __init__(self, name: str, kind: str, swarm: Place) -> None:
        self.name, self.kind, self.swarm = name, kind, swarm
        world = swarm.world
        self.random = random.Random(f"{world.seed}:{name}")
        self.offset = world.clocks.get(name, 0.0)
        self._busy_until = 0.0
        self._inbox: list[tuple[float, Signed]] = []
        self._copied: set[tuple[bytes, int]] = set()
        self._pulling = False
        self.participant = Participant(
            name,
            "run",
            operator=name,
            sign=toy_signer(name),
            verify=toy_verify,
            publish=self.publish,
            check=self.check,
            clock=self.clock,
            salt=lambda: self.random.randbytes(32),
            rules=world.rules,
            prices=world.prices,
            round_s=world.round_s,
            limits=world.limits,
        )

    def clock(self) -> float:
        """Return this peer's Unix time; while it checks, ahead of the others."""
        return max(self.swarm.now, self._busy_until) + self.offset

    def publish(self, signed: Signed) -> None:
        """Send a record of the participant to those to whom this kind sends it."""
        half = [name for number, name in enumerate(self.swarm.names) if number % 2]
        if self.kind == "withholder" and isinstance(signed.record, Reveal):
            self.swarm.spread(self, signed, half)
        elif self.kind == "twofaced" and isinstance(signed.record, Claim):
            other = Claim(
                **{**signed.record.model_dump(), "output": digest("other", signed.record.output)}
            )
            self.swarm.spread(self, signed, half)
            self.swarm.spread(
                self, Signed.by(toy_signer(self.name), other), set(self.swarm.names) - set(half)
            )
        else:
            self.swarm.spread(self, signed)

    def receive(self, signed: Signed) -> None:
        """Take a record; it waits while this peer checks."""
        self._inbox.append((self.swarm.now + self.offset, signed))
        if self.swarm.now >= self._busy_until:
            self._read()

    def _read(self) -> None:
        inbox, self._inbox = self._inbox, []
        for at, signed in inbox:
            try:
                self.participant.take(signed, at)
            except Refused:
                continue  # counted by the consensus
            if self.kind == "thief":
                self._steal(signed)
            if self.kind == "replayer":
                self.swarm.spread(self, signed)

    def work(self) -> None:
        """Do the work of a tick."""
        if self.swarm.now < self._busy_until:
            return
        self._read()
        self.participant.tick(0 if self.kind in ("copier", "thief") else 4)
        for slot in self.participant.slots():
            self._claim(slot)
        if self.kind == "copier":
            self._copy()
        if self.kind == "flooder" and self.swarm.round == self.swarm.world.defects:
            self._flood()
        wanted = self.participant.wanted
        if wanted is not None and not self._pulling:
            self._pull(wanted)

    def check(self, claim: Claim) -> Checked | None:
        """Verify ``claim`` as this kind of peer does."""
        self._busy_until = self.swarm.now + self.swarm.world.check_s
        if self.kind == "absent":
            return None
        right = is_right(claim)
        if self.kind == "lazy":
            right = True
        elif self.kind == "colluder":
            right = self.swarm.kinds[claim.peer] == "colluder"
        return Checked("valid" if right else "invalid")

    def _claim(self, slot: Slot) -> None:
        lies = self.kind in ("liar", "colluder") or (
            self.kind == "farmer" and self.swarm.round >= self.swarm.world.defects
        )
        prompt = prompt_of(self.name, slot.round if self.kind != "replayer" else 0, slot.slot)
        claim = Claim(
            peer=self.name,
            run="run",
            round=slot.round,
            slot=slot.slot,
            model=digest("model"),
            prompt=prompt,
            sampling=digest("sampling"),
            seed=slot.slot,
            tokens=64,
            output=digest("wrong" if slot.planted or lies else "output", prompt),
            fingerprint=digest("proof", prompt),
        )
        self.participant.claim(claim)

    def _copy(self) -> None:
        """Publish copies of others' votes: there is nothing to copy until it is too late to
        commit.
        """
        for reveal in [
            record for record in self.participant.consensus.ledger if isinstance(record, Reveal)
        ]:
            place = (reveal.case, reveal.attempt)
            if place not in self._copied and reveal.peer != self.name:
                self._copied.add(place)
                own = Reveal(**{**reveal.model_dump(), "peer": self.name})
                commitment = Commitment(
                    peer=self.name, case=own.case, attempt=own.attempt, digest=hide(own)
                )
                for record in (commitment, own):
                    self.swarm.spread(self, Signed.by(toy_signer(self.name), record))

    def _steal(self, signed: Signed) -> None:
        """Commit with another's digest, in time, and then reveal the other's vote and salt: they
        hide its author's name.
        """
        if isinstance(signed.record, Commitment | Reveal):
            stolen = type(signed.record)(**{**signed.record.model_dump(), "peer": self.name})
            self.swarm.spread(self, Signed.by(toy_signer(self.name), stolen))

    def _flood(self) -> None:
        """Publish 10,000 claims a minute, in all slots, many for each."""
        for _ in range(167):
            junk = Claim(
                peer=self.name,
                run="run",
                round=self.participant.round,
                slot=self.random.randrange(64),
                model=digest("model"),
                prompt=self.random.randbytes(32),
                sampling=digest("sampling"),
                seed=0,
                tokens=64,
                output=self.random.randbytes(32),
                fingerprint=digest("proof"),
            )
            self.swarm.spread(self, Signed.by(toy_signer(self.name), junk))

    def _pull(self, wanted: Wanted) -> None:
        """Ask for a log, with a message's delay each way; it is transferred as bytes, whole or not
        at all.
        """
        self._pulling = True

        def answer() -> None:
            self._pulling = False
            found = [peer for peer in self.swarm.peers if peer.name == wanted.peers[0]]
            if found:
                self.swarm.pulled += 1
                self.participant.learn(decode_log(encode(found[0].participant.log(wanted.since))))

        self.swarm.post(answer)
