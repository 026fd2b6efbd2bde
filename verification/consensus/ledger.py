"""The records that a peer keeps, and how to find them.

    ledger = Ledger(records)
    ledger.ballots(Reveal, claim.id, 0, "peer")        # more than one: a contradiction
    ledger.newer(before=100, life=11)                  # what is left when old rounds are forgotten

It is a set, whatever the order in which they came.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import TypeVar

from shoal.verification.consensus.records import (
    Claim,
    Commitment,
    Dispute,
    Entry,
    Opening,
    Reveal,
    Verdict,
    VoteRecord,
)

R = TypeVar("R", bound=VoteRecord)
Place = tuple[str, bytes, int, str]
"""Kind, case, attempt and peer of a ballot."""


class Ledger:
    """Set of records, whose signatures were checked: added in any order and any number of times,
    they make the same ledger.

    Of records that should be unique, such as a verifier's vote, it keeps those that differ: they
    prove a contradiction.
    """

    def __init__(self, records: Iterable[VoteRecord] = ()) -> None:
        self._records: dict[bytes, VoteRecord] = {}
        self._ballots: defaultdict[Place, list[VoteRecord]] = defaultdict(list)
        self._appeals: defaultdict[bytes, list[Dispute | Opening]] = defaultdict(list)
        self._entries: defaultdict[str, list[Entry]] = defaultdict(list)
        self._claims: defaultdict[tuple[str, int], list[Claim]] = defaultdict(list)
        for record in records:
            self.add(record)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[VoteRecord]:
        return iter(self._records.values())

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._records

    def get(self, identity: bytes) -> VoteRecord | None:
        return self._records.get(identity)

    def add(self, record: VoteRecord) -> bool:
        """Add ``record``; return False if it was there."""
        if record.id in self._records:
            return False
        self._records[record.id] = record
        if isinstance(record, Commitment | Reveal | Verdict):
            self._ballots[(record.KIND, record.case, record.attempt, record.peer)].append(record)
        elif isinstance(record, Dispute | Opening):
            self._appeals[record.claim].append(record)
        elif isinstance(record, Entry):
            self._entries[record.peer].append(record)
        elif isinstance(record, Claim):
            self._claims[(record.peer, record.round)].append(record)
        return True

    def ballots(self, kind: type[R], case: bytes, attempt: int, peer: str) -> list[R]:
        """Return the commitments, reveals or verdicts of ``peer`` in one draw; more than one is a
        contradiction.
        """
        records = self._ballots.get((kind.KIND, case, attempt, peer), ())
        return [record for record in records if isinstance(record, kind)]

    def appeals(self, claim: bytes) -> list[Dispute | Opening]:
        return sorted(self._appeals.get(claim, ()), key=lambda appeal: (appeal.round, appeal.id))

    def claims(self) -> list[Claim]:
        found = itertools.chain.from_iterable(self._claims.values())
        return sorted(found, key=lambda claim: (claim.round, claim.id))

    def claims_of(self, peer: str, round: int) -> list[Claim]:
        return self._claims.get((peer, round), [])

    def entry(self, peer: str, round: int, life: int | None = None) -> Entry | None:
        """Return the newest entry of ``peer`` in the ``life`` rounds before ``round``; None if
        none, or two of one round.
        """
        least = 0 if life is None else round - life
        earlier = [entry for entry in self._entries.get(peer, ()) if least <= entry.round < round]
        newest = max((entry.round for entry in earlier), default=-1)
        found = [entry for entry in earlier if entry.round == newest]
        return found[0] if len(found) == 1 else None

    def entries_of(self, peer: str) -> list[Entry]:
        return self._entries.get(peer, [])

    def peers(self) -> Collection[str]:
        return self._entries.keys()

    def published(self, round: int) -> list[Claim | Dispute | Opening]:
        """Return the claims and appeals of ``round``, by id."""
        found: list[Claim | Dispute | Opening] = []
        for item in itertools.chain(*self._claims.values(), *self._appeals.values()):
            if item.round == round:
                found.append(item)
        return sorted(found, key=lambda item: item.id)

    def stamp(self, record: VoteRecord) -> int:
        """Return the round to which ``record`` belongs: its own for a claim or an entry, else that
        of the claim which it concerns; -1 if that claim is not known.
        """
        if isinstance(record, Claim | Entry):
            return record.round
        if isinstance(record, Commitment | Reveal | Verdict):
            case = self._records.get(record.case)
            return self.stamp(case) if isinstance(case, Claim | Dispute | Opening) else -1
        claim = self._records.get(record.claim) if isinstance(record, Dispute | Opening) else None
        return claim.round if isinstance(claim, Claim) else -1

    def newer(self, before: int, life: int) -> Ledger:
        """Return the ledger without claims of rounds before ``before``, their records, and entries
        ``life`` rounds older than that.

        Their consequences have to live on in a base (`compute_scores`).
        """
        kept = []
        for record in self:
            oldest = before - life if isinstance(record, Entry) else before
            if self.stamp(record) >= oldest:
                kept.append(record)
        return Ledger(kept)
