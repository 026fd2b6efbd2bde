"""Set of a peer's signed records. The order of arrival leaves no trace, so equal sets give equal reputations.

Signatures have been checked before. The ledger bounds how much it keeps; of records that should be unique, such as a verifier's
vote, it keeps two that differ, since two prove that their author contradicts itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeVar

from shoal.verification.consensus.records import Claim, Commitment, Dispute, Entry, Opening, Reveal, Verdict, VoteRecord

R = TypeVar("R", bound=VoteRecord)
Place = tuple[str, bytes, int, str]  # kind, case, attempt, peer


class Ledger:
    """Set of records: added in any order and any number of times, the same records make the same ledger."""

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
        """Return the record with this id, or None."""
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
        """Return the commitments, reveals or verdicts of ``peer`` in one draw; more than one is a contradiction."""
        return [record for record in self._ballots.get((kind.KIND, case, attempt, peer), ()) if isinstance(record, kind)]

    def appeals(self, claim: bytes) -> list[Dispute | Opening]:
        """Return the disputes and openings of a claim, by round and id."""
        return sorted(self._appeals.get(claim, ()), key=lambda appeal: (appeal.round, appeal.id))

    def claims(self) -> list[Claim]:
        """Return all claims, by round and id."""
        return sorted((claim for group in self._claims.values() for claim in group), key=lambda claim: (claim.round, claim.id))

    def claims_of(self, peer: str, round: int) -> list[Claim]:
        return self._claims.get((peer, round), [])

    def entry(self, peer: str, round: int, life: int | None = None) -> Entry | None:
        """Return the newest entry of ``peer`` in the ``life`` rounds before ``round``; None if none, or two of one round."""
        least = 0 if life is None else round - life
        earlier = [entry for entry in self._entries.get(peer, ()) if least <= entry.round < round]
        newest = max((entry.round for entry in earlier), default=-1)
        found = [entry for entry in earlier if entry.round == newest]
        return found[0] if len(found) == 1 else None

    def entries_of(self, peer: str) -> list[Entry]:
        """Return all entries of ``peer``, in order of arrival."""
        return self._entries.get(peer, [])

    def peers(self) -> int:
        """Return how many peers have entered."""
        return len(self._entries)

    def entries(self) -> list[Entry]:
        """Return all entries, by round and id."""
        return sorted((entry for group in self._entries.values() for entry in group), key=lambda entry: (entry.round, entry.id))

    def published(self, round: int) -> list[Claim | Dispute | Opening]:
        """Return the claims and appeals of ``round``, by id."""
        found: list[Claim | Dispute | Opening] = [claim for claim in self.claims() if claim.round == round]
        found += [appeal for group in self._appeals.values() for appeal in group if appeal.round == round]
        return sorted(found, key=lambda item: item.id)

    def stamp(self, record: VoteRecord) -> int | None:
        """Return the round to which ``record`` belongs: its own for a claim or an entry, else that of the claim which it concerns;
        None if that claim is not known.
        """
        if isinstance(record, Claim | Entry):
            return record.round
        if isinstance(record, Commitment | Reveal | Verdict):
            case = self._records.get(record.case)
            return self.stamp(case) if isinstance(case, Claim | Dispute | Opening) else None
        claim = self._records.get(record.claim) if isinstance(record, Dispute | Opening) else None
        return claim.round if isinstance(claim, Claim) else None

    def newer(self, before: int, life: int) -> Ledger:
        """Return the ledger without claims of rounds before ``before``, their records, and entries ``life`` rounds older than that.

        Their consequences have to live on in a base (`compute_scores`).
        """
        return Ledger(record for record in self if self._is_newer(record, before, before - life))

    def _is_newer(self, record: VoteRecord, before: int, entered: int) -> bool:
        stamp = self.stamp(record)
        return stamp is not None and stamp >= (entered if isinstance(record, Entry) else before)
