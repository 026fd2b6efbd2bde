"""Signed records about generated outputs: claims, commitments, votes, verdicts and appeals.

    Entry        "I take part from round r on": the operator behind the key, and the anchor of the
                 lottery for planted claims
    Claim        "this model made this output from this prompt", by hashes; output and proof are
                 asked for by those who check
    Commitment   a drawn verifier's vote, hidden: without this step a lazy one would copy the first
                 vote it sees
    Reveal       the vote, with the salt that shows that it was the hidden one
    Verdict      what a drawn verifier saw of all verifiers when time was up: a quorum attests
                 lateness, not each reader's clock
    Dispute      "that was decided wrongly": a second, larger draw
    Opening      "that claim of mine was planted": shows the link of the lottery's chain
    View         who can be drawn for a round and for which claims, and the table, as this peer sees
                 them: digests to agree on

Every record has one encoding, so that a signature and an id belong to a record and not to one
spelling of it. A record is immutable, of at most ``LIMIT`` bytes, and every field is bounded.

Sortition: verifiers of a claim are drawn by rank of HMAC(beacon, case, peer), from a seed that
nobody controls alone.

A prover must not know who will check a claim while it can still try others, so the beacon of a
round is made of salts that are revealed when no claim of the round is taken any more:

    round r        claims of r are published
    round r + 1    the votes on claims of r - 1 are hidden and revealed; their salts make the beacon
                   of r
    round r + 2    begins with views (`quorum`) and `Consensus.open`: verifiers are drawn for the
                   claims of r, and check them
    round r + 3    authors open what they planted in r, if it is decided
    round r + 4    the reputation of r can be computed; later it changes by disputes only

A salt is fixed by its commitment before any other is seen; the last one to reveal can only withhold
its own, which chooses between two beacons and costs as much as a wrong vote. Beacons are not
chained: that of r follows from the records of r - 1 alone, so a newcomer needs no history. A round
whose claims got no vote gives a beacon that could be known beforehand.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, Field

LIMIT = 2048  # bytes of an encoded record
MAX_ROUND = 2**53
MAX_SEATS = 31
ATTEMPTS = 3  # a draw, and again with others at most twice

Peer = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\x21-\x7e]+$")]
Round = Annotated[int, Field(ge=0, le=MAX_ROUND)]
Hash = Annotated[bytes, Field(min_length=32, max_length=32)]
Attempt = Annotated[int, Field(ge=0, lt=ATTEMPTS)]
Vote = Literal["valid", "invalid"]
Mark = Literal["valid", "invalid", "absent", "withheld"]
"""A verifier's vote; ``absent`` without a commitment in time; ``withheld`` with one, but without
the vote that fits it.
"""

Sign = Callable[[bytes], bytes]
Verify = Callable[[str, bytes, bytes], bool]
"""Maps (peer, encoded record, signature) to whether that peer signed it; must not raise, whatever
it is given.
"""


class VoteRecord(BaseModel):
    """Base of all records.

    Raises pydantic's ValidationError, a ValueError, for a field out of bounds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    KIND: ClassVar[str]
    peer: Peer

    @functools.cached_property
    def encoded(self) -> bytes:
        fields = (getattr(self, name) for name in type(self).model_fields)
        return bytes(msgpack.packb([f"shoal/verification/1/{self.KIND}", *fields]))

    @functools.cached_property
    def id(self) -> bytes:
        return hashlib.sha256(self.encoded).digest()


class Entry(VoteRecord):
    """Entry of a peer.

    ``operator`` runs it; peers of one operator are never drawn together. ``anchor``: see `Chain`.
    """

    KIND = "entry"
    run: Peer
    round: Round
    operator: Peer
    anchor: Hash


class Claim(VoteRecord):
    """Claim of an output.

    ``slot`` counts a peer's claims of a round from 0; hashes are SHA-256, ``sampling`` of the
    parameters.
    """

    KIND = "claim"
    run: Peer
    round: Round
    slot: Annotated[int, Field(ge=0, lt=2**16)]
    model: Hash
    prompt: Hash
    sampling: Hash
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    tokens: Annotated[int, Field(ge=1, le=2**20)]
    output: Hash
    fingerprint: Hash


class Commitment(VoteRecord):
    """Hidden vote.

    ``case``: the id of the claim, or of the dispute or opening that made a second draw. ``digest``:
    of `hide`.
    """

    KIND = "commitment"
    case: Hash
    attempt: Attempt
    digest: Hash


class Reveal(VoteRecord):
    """Revealed vote. ``evidence``: what the verifier measured, opaque here."""

    KIND = "reveal"
    case: Hash
    attempt: Attempt
    vote: Vote
    evidence: Annotated[bytes, Field(max_length=512)]
    salt: Hash

    def fits(self, commitment: Commitment) -> bool:
        same = (self.peer, self.case, self.attempt) == (
            commitment.peer,
            commitment.case,
            commitment.attempt,
        )
        return same and commitment.digest == hide(self)


class Verdict(VoteRecord):
    """Statement of a verifier.

    ``marks``: of every verifier, in the order of the draw, as this peer saw them at the end.
    """

    KIND = "verdict"
    case: Hash
    attempt: Attempt
    marks: Annotated[tuple[Mark, ...], Field(min_length=1, max_length=MAX_SEATS)]


class Dispute(VoteRecord):
    """Appeal against the decision of draw number ``attempt`` about ``claim``."""

    KIND = "dispute"
    round: Round
    claim: Hash
    attempt: Attempt


class Opening(VoteRecord):
    """Proof by the author of ``claim`` that it had to plant it.

    If draw ``attempt`` approved it, that is a dispute too.
    """

    KIND = "opening"
    round: Round
    claim: Hash
    attempt: Attempt
    link: Hash


class View(VoteRecord):
    """View of ``round``.

    ``root``: of the electorate, see `electorate.root`; ``table``: digest of the table at that time.
    """

    KIND = "view"
    run: Peer
    round: Round
    root: Hash
    table: Hash


KINDS: dict[str, type[VoteRecord]] = {
    f"shoal/verification/1/{kind.KIND}": kind
    for kind in (Entry, Claim, Commitment, Reveal, Verdict, Dispute, Opening, View)
}


@dataclass(frozen=True)
class Signed:
    """Record with its author's signature over ``record.encoded``, not yet checked."""

    record: VoteRecord
    signature: bytes

    @classmethod
    def by(cls, sign: Sign, record: VoteRecord) -> Signed:
        return cls(record, sign(record.encoded))


def hide(reveal: Reveal) -> bytes:
    """Return the digest that commits to ``reveal``; it covers the author, so another peer's
    commitment is of no use to a copier.
    """
    return hashlib.sha256(b"shoal/verification/1/hidden\x00" + reveal.encoded).digest()


def decode(data: bytes) -> VoteRecord:
    """Decode a record.

    Raises ValueError if ``data`` is too large, malformed, or another spelling of a record.
    """
    if len(data) > LIMIT:
        raise ValueError(f"a record of {len(data)} bytes is above {LIMIT}")
    try:
        parts = msgpack.unpackb(
            data,
            use_list=False,
            max_array_len=64,
            max_map_len=0,
            max_ext_len=0,
            strict_map_key=True,
        )
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise ValueError("not a record") from error
    kind = (
        KINDS.get(parts[0])
        if isinstance(parts, tuple) and parts and isinstance(parts[0], str)
        else None
    )
    if kind is None:
        raise ValueError("not a known kind of record")
    if len(parts) - 1 != len(kind.model_fields):
        raise ValueError(f"a {kind.KIND} has {len(kind.model_fields)} fields")
    record = kind(**dict(zip(kind.model_fields, parts[1:], strict=True)))
    if record.encoded != data:
        raise ValueError("not the encoding of this record")
    return record


class Refused(ValueError):
    """Refusal of a record; ``reason`` is one of `REASONS`."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class Limits:
    """Bounds on what a peer keeps."""

    claims: int = 256
    """Claims of one author in one round."""
    waiting: int = 16_384
    """Claims and appeals whose verifiers are not drawn yet."""
    strangers: int = 4096
    """Waiting claims and appeals of authors who could not be drawn themselves: fresh keys cost
    nothing.
    """
    peers: int = 16_384
    """Peers that have entered."""
    cases: int = 16_384
    """Claims and appeals at a time; the oldest that are decided or over make room."""


@dataclass(frozen=True)
class Duty:
    """Duty of a verifier: ``check`` (fetch, verify, commit), ``reveal`` the vote, or ``state`` the
    ``marks`` as a verdict.
    """

    what: Literal["check", "reveal", "state"]
    case: bytes
    attempt: int
    claim: Claim
    marks: tuple[Mark, ...] = ()
    until: float = math.inf
    """Time at which a commitment comes too late."""


R = TypeVar("R", bound=VoteRecord)
Place = tuple[str, bytes, int, str]  # kind, case, attempt, peer


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
        return [
            record
            for record in self._ballots.get((kind.KIND, case, attempt, peer), ())
            if isinstance(record, kind)
        ]

    def appeals(self, claim: bytes) -> list[Dispute | Opening]:
        return sorted(self._appeals.get(claim, ()), key=lambda appeal: (appeal.round, appeal.id))

    def claims(self) -> list[Claim]:
        return sorted(
            (claim for group in self._claims.values() for claim in group),
            key=lambda claim: (claim.round, claim.id),
        )

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
        found: list[Claim | Dispute | Opening] = [
            claim for claim in self.claims() if claim.round == round
        ]
        found += [
            appeal for group in self._appeals.values() for appeal in group if appeal.round == round
        ]
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
        return Ledger(
            r for r in self if self.stamp(r) >= (before - life if isinstance(r, Entry) else before)
        )


# Lottery of planted claims: known wrong ones that look like others, so that voting without checking
# does not pay.
#
# Each peer has a secret chain of hashes, link(r) = H(link(r + 1)), whose end, the anchor, it
# publishes `BEHIND` rounds before its first round or earlier. The link of a round and the beacon of
# `BEHIND` rounds before decide which slots of the round the peer has to fill with a wrong claim.
# Others learn that only when the peer opens the claim by showing the link, which it should do when
# all its claims of the round are settled. The peer cannot choose: the chain was fixed before the
# beacon was known. So "that one was planted" is no excuse for a lie, except in the slots that the
# lottery set aside, whose outputs are for no use.
#
# Known right claims need no lottery: every honest claim is one, and whoever rejects blindly is
# outvoted on it.

BEHIND = 3  # rounds: the newest beacon that is known when a round begins (see `sortition.OPENS`)
MAX_LENGTH = 2**14  # rounds of a chain; checking a link takes as many hashes at most (about 10 ms)


def _hash(link: bytes) -> bytes:
    return hashlib.sha256(b"shoal/verification/1/chain\x00" + link).digest()


class Chain:
    """Hash chain with a peer's links for the ``length`` rounds after ``start``, from 32 secret
    bytes. ValueError out of bounds.
    """

    def __init__(self, secret: bytes, start: int, length: int = MAX_LENGTH) -> None:
        if len(secret) != 32 or not 1 <= length <= MAX_LENGTH:
            raise ValueError(f"a chain needs 32 secret bytes and a length from 1 to {MAX_LENGTH}")
        self.start, self._links = start, [secret]
        for _ in range(length):
            self._links.append(_hash(self._links[-1]))

    @property
    def anchor(self) -> bytes:
        return self._links[-1]

    def link(self, round: int) -> bytes:
        """Return the link of ``round``; showing it reveals those of all earlier rounds.

        Raises ValueError outside the chain.
        """
        if not self.start < round < self.start + len(self._links):
            raise ValueError(
                f"the chain covers rounds {self.start + 1} to {self.start + len(self._links) - 1}, "
                f"not {round}"
            )
        return self._links[-1 - (round - self.start)]


def belongs(link: bytes, anchor: bytes, steps: int) -> bool:
    """Return whether ``link`` is the one of ``steps`` rounds after the anchor's."""
    if not 0 < steps <= MAX_LENGTH:
        return False
    for _ in range(steps):
        link = _hash(link)
    return link == anchor


def must_plant(link: bytes, beacon: bytes, slot: int, share: float) -> bool:
    """Return whether the claim in ``slot`` of the link's round is planted; ``beacon``: of `BEHIND`
    rounds before.
    """
    drawn = hmac.new(link, b"plant\x00" + beacon + slot.to_bytes(4, "big"), hashlib.sha256).digest()
    return int.from_bytes(drawn[:8], "big") < share * 2**64


OPENS = 2  # rounds after its own in which a round's verifiers are drawn
# rounds after its own in which a round's claims are decided, and the planted ones opened: its
# scores are settled
SETTLED = 4
LEAST = 3  # verifiers: with fewer a single peer would decide


@dataclass(frozen=True)
class Electorate:
    """Peers that may be drawn for what was published in ``round``.

    All must use the same electorate: another leads to another draw,
    whose votes count for nobody else.
    """

    round: int
    beacon: bytes
    """32 bytes."""
    operators: Mapping[str, str]
    """Peer id to operator, of the peers that may be drawn (see `electorate`)."""
    claims: frozenset[bytes] | None = None
    """Ids of the claims that are verified. None: of all claims, the share that `is_audited`."""

    def __post_init__(self) -> None:
        if len(self.beacon) != 32:
            raise ValueError(f"a beacon has 32 bytes, got {len(self.beacon)}")


def beacon(run: str, round: int, salts: Iterable[bytes]) -> bytes:
    """Make the beacon of ``round`` from the salts of votes that count on claims of the round
    before, in any order, once each.
    """
    place = len(run).to_bytes(4, "big") + run.encode() + round.to_bytes(8, "big")
    mixed = hashlib.sha256(b"shoal/verification/1/beacon\x00" + place)
    for salt in sorted(set(salts)):
        mixed.update(hashlib.sha256(salt).digest())
    return mixed.digest()


def rank(beacon: bytes, case: bytes, peer: str) -> bytes:
    """Return the 32 bytes that rank ``peer`` for ``case``."""
    return hmac.new(beacon, b"draw\x00" + case + peer.encode(), hashlib.sha256).digest()


def is_audited(beacon: bytes, claim: bytes, rate: float) -> bool:
    """Return whether the claim is among the share ``rate`` (0 to 1) that is checked; its author
    cannot know beforehand.
    """
    drawn = hmac.new(beacon, b"audit\x00" + claim, hashlib.sha256).digest()
    return int.from_bytes(drawn[:8], "big") < rate * 2**64


def draw_verifiers(
    electorate: Electorate, case: bytes, size: int, without: Collection[str] = ()
) -> tuple[tuple[str, ...], ...]:
    """Draw the verifiers of each attempt at ``case``: disjoint, ``size`` peers of different
    operators, none of ``without``'s.

    ``without``: operators. If there are too few peers an attempt has the largest odd number there
    is, if that is at least `LEAST`; later attempts have as many verifiers as the first, or do not
    exist. Raises ValueError for an even size, or one beyond 31.
    """
    if size % 2 == 0 or not LEAST <= size <= MAX_SEATS:
        raise ValueError(
            f"a draw has an odd number of verifiers from {LEAST} to {MAX_SEATS}, got {size}"
        )
    used, drawn = set(without), []
    for peer in sorted(electorate.operators, key=lambda peer: rank(electorate.beacon, case, peer)):
        if (operator := electorate.operators[peer]) not in used:
            used.add(operator)
            drawn.append(peer)
            if len(drawn) == size * ATTEMPTS:
                break
    size = min(size, len(drawn) - (len(drawn) % 2 == 0))
    if size < LEAST:
        return ()
    return tuple(
        tuple(drawn[start : start + size]) for start in range(0, len(drawn) - size + 1, size)
    )[:ATTEMPTS]
