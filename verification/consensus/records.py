"""Signed records about generated outputs: claims, commitments, votes, verdicts and appeals.

    Entry        "I take part from round r on": operator of the key, anchor of its lottery
    Claim        "this model made this output from this prompt", by hashes
    Commitment   a drawn verifier's vote, hidden: else a lazy one would copy the first that it sees
    Reveal       the vote, with the salt that shows that it was the hidden one
    Verdict      what a drawn verifier saw of all verifiers when time was up
    Dispute      "that was decided wrongly": a second, larger draw
    Opening      "that claim of mine was planted": shows the link of the lottery's chain
    View         who can be drawn for a round, and the table, as this peer sees them: digests

Every record has one encoding, to which its signature and id belong. It has at most ``LIMIT`` bytes,
and every field is bounded.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field

LIMIT = 2048
"""Bytes of an encoded record."""
MAX_ROUND = 2**53
"""Largest number of a round, which every JSON reader holds exactly."""
MAX_SEATS = 31
"""Verifiers of a draw, at most."""
ATTEMPTS = 3
"""Draws for one claim: the first, and again with others at most twice."""
MAX_MSGPACK_ITEMS = 64
"""Items of an encoded list, at most: no record has as many."""


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
        own = (self.peer, self.case, self.attempt)
        other = (commitment.peer, commitment.case, commitment.attempt)
        return own == other and commitment.digest == hide(self)


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

    ``root``: digest of the electorate; ``table``: digest of the table at that time.
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
            max_array_len=MAX_MSGPACK_ITEMS,
            max_map_len=0,
            max_ext_len=0,
            strict_map_key=True,
        )
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise ValueError("not a record") from error
    kind = None
    if isinstance(parts, tuple) and parts and isinstance(parts[0], str):
        kind = KINDS.get(parts[0])
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
