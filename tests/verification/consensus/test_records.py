"""Records: one encoding, bounds on everything, and nothing hostile gets in."""

import msgpack
import pytest
import stories
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.verification.consensus.records import (
    LIMIT,
    MAX_SEATS,
    Claim,
    Commitment,
    Dispute,
    Entry,
    Opening,
    Reveal,
    Verdict,
    View,
    decode,
    hide,
)

HASH = st.binary(min_size=32, max_size=32)
NAME = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=64)
COUNT = st.integers(0, 2**53)
ATTEMPT = st.integers(0, 2)
MARK = st.sampled_from(["valid", "invalid", "absent", "withheld"])
SLOT = st.integers(0, 2**16 - 1)
REVEALS = st.builds(
    Reveal,
    peer=NAME,
    case=HASH,
    attempt=ATTEMPT,
    vote=st.sampled_from(["valid", "invalid"]),
    evidence=st.binary(max_size=512),
    salt=HASH,
)
RECORDS = st.one_of(
    st.builds(Entry, peer=NAME, run=NAME, round=COUNT, operator=NAME, anchor=HASH),
    st.builds(
        Claim, peer=NAME, run=NAME, round=COUNT, slot=SLOT, model=HASH, prompt=HASH, sampling=HASH,
        seed=st.integers(0, 2**63 - 1), tokens=st.integers(1, 2**20), output=HASH, fingerprint=HASH,
    ),
    st.builds(Commitment, peer=NAME, case=HASH, attempt=ATTEMPT, digest=HASH),
    REVEALS,
    st.builds(
        Verdict, peer=NAME, case=HASH, attempt=ATTEMPT, marks=st.lists(MARK, min_size=1, max_size=MAX_SEATS).map(tuple)
    ),
    st.builds(Dispute, peer=NAME, round=COUNT, claim=HASH, attempt=ATTEMPT),
    st.builds(Opening, peer=NAME, round=COUNT, claim=HASH, attempt=ATTEMPT, link=HASH),
    st.builds(View, peer=NAME, run=NAME, round=COUNT, root=HASH, table=HASH),
)  # fmt: skip


@settings(deadline=None)
@given(RECORDS)
def test_round_trip_and_size(record):
    assert decode(record.encoded) == record
    assert decode(record.encoded).id == record.id
    assert len(record.encoded) <= LIMIT


@settings(deadline=None)
@given(RECORDS, RECORDS)
def test_different_records_have_different_ids(one, other):
    assert (one.id == other.id) == (one == other)


def test_another_spelling_of_a_record_is_refused():
    record = stories.claim_of("a")
    parts = msgpack.unpackb(record.encoded)
    spelled = msgpack.packb(parts, use_single_float=True, use_bin_type=True)
    assert spelled == record.encoded
    longer = bytes([0xDC, 0, record.encoded[0] & 0x0F]) + record.encoded[1:]  # array16 for what fits a fixarray
    assert msgpack.unpackb(longer) == parts
    nested, giant = b"\x91" * LIMIT, bytes(LIMIT + 1)
    for wrong in (longer, record.encoded + b"\xc0", record.encoded[:-1], b"", b"\x90", nested, giant):
        with pytest.raises(ValueError, match=r"\w"):
            decode(wrong)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": 0},
        {"tokens": 2**20 + 1},
        {"tokens": True},
        {"tokens": 1.0},
        {"seed": -1},
        {"output": b""},
        {"output": "a" * 32},
    ],
)
def test_bounds_of_a_claim(fields):
    with pytest.raises(ValidationError):
        stories.claim_of("a", **fields)


def test_bounds_of_names_and_rounds():
    for peer, round in (("", 1), ("a" * 65, 1), ("a b", 1), ("a\n", 1), ("a", -1), ("a", 2**53 + 1)):
        with pytest.raises(ValidationError):
            stories.claim_of(peer, round)


@settings(deadline=None)
@given(REVEALS, REVEALS)
def test_a_commitment_fits_one_reveal_of_its_own_author(one, other):
    commitment = Commitment(peer=one.peer, case=one.case, attempt=one.attempt, digest=hide(one))
    assert one.fits(commitment)
    assert other.fits(commitment) == (one == other)
    thief = "x" if one.peer != "x" else "y"
    copied = Commitment(**{**commitment.model_dump(), "peer": thief})
    assert not Reveal(**{**one.model_dump(), "peer": thief}).fits(copied)
