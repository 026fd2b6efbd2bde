"""What tests of rulings and reputation are told: claims, and how each drawn verifier behaved."""

import hashlib
from dataclasses import dataclass, field

from shoal.verification.consensus.planting import BEHIND, Chain, must_plant
from shoal.verification.consensus.records import (
    Claim,
    Commitment,
    Dispute,
    Entry,
    Opening,
    Reveal,
    Verdict,
    hide,
)
from shoal.verification.consensus.rulings import Rules, first_draws, second_draw
from shoal.verification.consensus.sortition import Electorate

RULES = Rules(planted=0.25, claims=2**16, life=64)
BEHAVIOURS = ("valid", "invalid", "absent", "withheld", "unfit", "twice")


def digest(*parts):
    return hashlib.sha256(repr(parts).encode()).digest()


def claim_of(peer, round=10, slot=0, **fields):
    given = {
        "model": digest("model"),
        "prompt": digest(peer, round, slot),
        "sampling": digest("sampling"),
        "seed": 1,
        "tokens": 64,
        "output": digest("output"),
        "fingerprint": digest("proof"),
        **fields,
    }
    return Claim(peer=peer, run="run", round=round, slot=slot, **given)


def electorates(peers, rounds):
    """The same peers, each its own operator, in each of ``rounds``."""
    return {
        round: Electorate(round, digest("beacon", round), {peer: peer for peer in peers})
        for round in rounds
    }


def ballots(case, attempt, peer, behaviour):
    """What a drawn ``peer`` publishes, and the mark it deserves."""
    vote = behaviour if behaviour in ("valid", "invalid") else "valid"
    reveal = Reveal(
        peer=peer,
        case=case,
        attempt=attempt,
        vote=vote,
        evidence=b"e",
        salt=digest("salt", case, attempt, peer),
    )
    commitment = Commitment(peer=peer, case=case, attempt=attempt, digest=hide(reveal))
    if behaviour == "absent":
        return [], "absent"
    if behaviour == "withheld":
        return [commitment], "withheld"
    if behaviour == "unfit":
        return [commitment, Reveal(**{**reveal.model_dump(), "vote": "invalid"})], "withheld"
    if behaviour == "twice":
        return [
            commitment,
            reveal,
            Commitment(peer=peer, case=case, attempt=attempt, digest=digest("other")),
        ], "withheld"
    return [commitment, reveal], behaviour


@dataclass
class Story:
    """Records that grow with each event; ``peers`` may be drawn in all rounds."""

    peers: tuple[str, ...]
    rounds: range = range(40)
    rules: Rules = RULES
    records: list = field(default_factory=list)

    def __post_init__(self):
        self.electorates = electorates(self.peers, self.rounds)
        self.chains = {peer: Chain(digest("secret", peer), 0, 64) for peer in self.peers}
        for peer, chain in self.chains.items():
            self.records.append(
                Entry(peer=peer, run="run", round=0, operator=peer, anchor=chain.anchor)
            )

    def vote(self, case, attempt, seats, behaviours, stating=None):
        """The seats behave so; those who are there (or ``stating``) state what all did."""
        marks = []
        for peer, behaviour in zip(seats, behaviours, strict=True):
            records, mark = ballots(case, attempt, peer, behaviour)
            self.records += records
            marks.append(mark)
        there = (
            [peer for peer, mark in zip(seats, marks, strict=True) if mark != "absent"]
            if stating is None
            else stating
        )
        self.records += [
            Verdict(peer=peer, case=case, attempt=attempt, marks=tuple(marks)) for peer in there
        ]

    def claim(self, peer, round=10, slot=0, behaviours=("valid",) * 3, attempt=0, stating=None):
        claim = claim_of(peer, round, slot)
        self.records.append(claim)
        seats = self.verifiers(claim)[attempt]
        self.vote(claim.id, attempt, seats, behaviours, stating)
        return claim

    def verifiers(self, claim):
        return first_draws(claim, self.electorates, self.rules)

    def dispute(self, peer, claim, vote, round=12, attempt=0):
        """All of the second draw vote alike."""
        return self._appeal(
            Dispute(peer=peer, round=round, claim=claim.id, attempt=attempt), claim, vote
        )

    def open(self, claim, vote=None, round=13, attempt=0):
        link = self.chains[claim.peer].link(claim.round)
        return self._appeal(
            Opening(peer=claim.peer, round=round, claim=claim.id, attempt=attempt, link=link),
            claim,
            vote,
        )

    def _appeal(self, appeal, claim, vote):
        self.records.append(appeal)
        if vote is not None:
            seats = second_draw(appeal, claim, self.electorates, self.rules)
            self.vote(appeal.id, 0, seats, (vote,) * len(seats))
        return appeal

    def slots(self, peer, planted, round=10):
        """The slots of a round that the lottery tells the peer to plant, or not."""
        beacon, link = self.electorates[round - BEHIND].beacon, self.chains[peer].link(round)
        return [
            slot
            for slot in range(64)
            if must_plant(link, beacon, slot, self.rules.planted) == planted
        ]
