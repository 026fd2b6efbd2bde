"""Records and logs: one encoding, bounds on everything, whole or refused, and nothing hostile gets
in.
"""

import struct
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import shoal.verification.consensus.log as module
import shoal.verification.consensus.participant as participant_module
from bench._votes_peers import Peer, toy_signer
from bench.votes_simulation import START, Swarm, World
from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.log import Log, decode_log, encode, is_stale, pairs_to_draw
from shoal.verification.consensus.participant import Participant
from shoal.verification.consensus.records import (
    LIMIT,
    MAX_SEATS,
    Claim,
    Commitment,
    Dispute,
    Entry,
    Opening,
    Reveal,
    Signed,
    Verdict,
    View,
    decode,
    hide,
)
from shoal.verification.consensus.reputation import ScoreRules, Standing, Table, compute_scores
from shoal.verification.consensus.rulings import Rules
from shoal.verification.consensus.sortition import SETTLED, Electorate
from tests.support import consensus_stories as stories
from tests.support.consensus_stories import Story, claim_of, digest, electorates

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
        Claim,
        peer=NAME,
        run=NAME,
        round=COUNT,
        slot=SLOT,
        model=HASH,
        prompt=HASH,
        sampling=HASH,
        seed=st.integers(0, 2**63 - 1),
        tokens=st.integers(1, 2**20),
        output=HASH,
        fingerprint=HASH,
    ),
    st.builds(Commitment, peer=NAME, case=HASH, attempt=ATTEMPT, digest=HASH),
    REVEALS,
    st.builds(
        Verdict,
        peer=NAME,
        case=HASH,
        attempt=ATTEMPT,
        marks=st.lists(MARK, min_size=1, max_size=MAX_SEATS).map(tuple),
    ),
    st.builds(Dispute, peer=NAME, round=COUNT, claim=HASH, attempt=ATTEMPT),
    st.builds(Opening, peer=NAME, round=COUNT, claim=HASH, attempt=ATTEMPT, link=HASH),
    st.builds(View, peer=NAME, run=NAME, round=COUNT, root=HASH, table=HASH),
)


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
    longer = (
        bytes([0xDC, 0, record.encoded[0] & 0x0F]) + record.encoded[1:]
    )  # array16 for what fits a fixarray
    assert msgpack.unpackb(longer) == parts
    nested, giant = b"\x91" * LIMIT, bytes(LIMIT + 1)
    for wrong in (
        longer,
        record.encoded + b"\xc0",
        record.encoded[:-1],
        b"",
        b"\x90",
        nested,
        giant,
    ):
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
    for peer, round in (
        ("", 1),
        ("a" * 65, 1),
        ("a b", 1),
        ("a\n", 1),
        ("a", -1),
        ("a", 2**53 + 1),
    ):
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


PEERS = tuple(f"p{number:02}" for number in range(8))


def full():
    story = Story(PEERS)
    for slot in range(4):
        story.claim(PEERS[slot], 10, slot, ("valid", "invalid", "valid"))
    table = Table(
        9,
        {peer: Standing(score=-5 * at, until=at or None, bans=at) for at, peer in enumerate(PEERS)},
        {},
    )
    listed = Electorate(
        11, digest("beacon"), {"a": "b"}, frozenset(digest(number) for number in range(200))
    )
    signed = tuple(Signed.by(toy_signer(record.peer), record) for record in story.records)
    return Log(table, (*electorates(PEERS, range(9, 11)).values(), listed), signed)


def test_round_trip():
    log = full()
    assert decode_log(encode(log)) == log
    assert decode_log(encode(Log())) == Log()
    assert decode_log(b"") == Log()


DATA = encode(full())


def frame(*parts):
    packed = msgpack.packb(parts)
    return struct.pack(">I", len(packed)) + packed


@pytest.mark.parametrize(
    "wrong",
    [
        DATA[:-1],
        struct.pack(">I", 2**31),
        frame("voter", "a", "b"),
        frame("claims", bytes(32)),
        frame("electorate", 1, bytes(31), False),
        frame("electorate", -1, bytes(32), False),
        frame("electorate", 1, bytes(32), False) + frame("claims", bytes(33)),
        frame("electorate", 1, bytes(32), False) + frame("voter", "a" * 65, "b"),
        frame("base", 2**60),
        frame("standing", "a", *range(13)),
        frame("standing", "a", 2**15 + 1, None, *[0] * 13),
        frame("standing", "a", 0, 2**53, *[0] * 13),  # no clock shows when such a ban ends
        frame("standing", "a", 0, None, 0, 4001, *[0] * 11),
        frame("standing", "a", 1, None, -1, *range(11)),
        frame("record", b"no record", bytes(64)),
        frame("record", claim_of("a").encoded, bytes(257)),
        frame("other"),
        frame(),
        struct.pack(">I", 2000) + b"\x91" * 2000,
        bytes(module.MOST_BYTES + 1),
    ],
    ids=range(20),
)
def test_hostile_logs_are_refused(wrong):
    with pytest.raises(ValueError, match="malformed"):
        decode_log(wrong)


def test_a_log_of_too_many_peers_is_refused():
    def voters(count):
        listed = b"".join(frame("voter", f"p{number}", "o") for number in range(count))
        return frame("electorate", 10, bytes(32), True) + listed

    def standings(count):
        row = Standing().row
        return b"".join(frame("standing", f"p{number}", *row) for number in range(count))

    assert len(decode_log(voters(16_384)).electorates[0].operators) == 16_384
    assert len(decode_log(standings(16_384)).base.standings) == 16_384
    for wrong in (voters(16_385), standings(16_385)):
        with pytest.raises(ValueError, match="more than 16384 peers"):
            decode_log(wrong)


def test_pairs_are_voters_times_cases():
    story = Story(tuple(f"p{number:02}" for number in range(12)))
    claims = [story.claim(f"p{number:02}", slot=number) for number in range(3)]
    story.dispute("p00", claims[0], None, round=12)
    ledger = Ledger(story.records)
    known = story.electorates
    assert pairs_to_draw(known.values(), ledger) == 3 * 12 + 2 * 12
    admitted = replace(known[10], claims=frozenset({claims[0].id}))
    assert pairs_to_draw([admitted, known[12]], ledger) == 12 + 2 * 12
    assert pairs_to_draw([known[9]], ledger) == 0


@pytest.mark.parametrize(("age", "stale"), [(48, False), (49, True)])
def test_an_old_base_is_stale_if_it_says_anything(age, stale):
    rules = Rules()
    assert 2 * rules.kept_rounds == 48
    round = 1000
    assert is_stale(Table(round - age, {"a": Standing()}, {}), round, rules) == stale
    assert not is_stale(Table(round - age, {}, {}), round, rules)


def test_what_does_not_fit_is_left_out_from_the_end(monkeypatch):
    log = full()
    monkeypatch.setattr(module, "MOST_BYTES", len(DATA) - 1)
    assert decode_log(encode(log)).records == log.records[:-1]
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="above"):
        encode(log)


def swarm(rounds=12):
    found = Swarm({f"honest-{number}": "honest" for number in range(5)}, World(seed=5))
    found.run(rounds)
    return found


def test_a_forged_log_changes_nothing():
    one = swarm().peers[0].participant
    before, table, known = (
        len(one.consensus.ledger),
        one.table.digest,
        dict(one.consensus.electorates),
    )
    lies = [claim_of("honest-1", one.round - 3, number) for number in range(3)]
    forged = tuple(Signed(claim, bytes(32)) for claim in lies)
    history = tuple(Electorate(round, digest("mine"), {"x": "x"}, frozenset()) for round in known)
    base = Table(-1, {"honest-2": Standing(score=-5000, until=10**6, bans=9)}, {})
    assert one.learn(Log(base, history, forged)) == 0
    assert (len(one.consensus.ledger), one.table.digest, one.consensus.electorates) == (
        before,
        table,
        known,
    )


def restarted(forge):
    """One of five peers that is started again and learns what ``forge`` makes of another's log."""
    found = swarm()
    known = found.peers[0].participant
    found.peers[-1] = Peer("honest-4", "honest", found)
    log = Participant.log

    def forged(participant, since):
        made = log(participant, since)
        return made if participant.peer == "honest-4" else forge(participant, made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Participant, "log", forged)
        found.run(1)
    one = found.peers[-1].participant
    assert one.table.digest == known.table.digest
    return one, known


def test_a_restarted_peer_knows_the_lottery_of_its_round():
    one, known = restarted(lambda other, log: log)
    assert one.consensus.electorates.items() <= known.consensus.electorates.items()
    assert len(one.consensus.electorates) == len(known.consensus.electorates)


def test_unsettled_electorates_of_a_log_change_nothing():
    """The table that the others state does not depend on them yet."""

    def forge(other, log):
        newest = other.round - SETTLED + 1
        lie = Electorate(newest, digest("mine"), {"x": "x"}, frozenset())
        return replace(log, electorates=(*log.electorates, lie))

    one, known = restarted(forge)
    assert one.consensus.electorates.items() <= known.consensus.electorates.items()
    assert one.consensus.electorates


def test_electorates_known_before_are_not_replaced():
    found = swarm()
    one = found.peers[0].participant
    other = found.peers[1].participant.log(0)
    before = dict(one.consensus.electorates)
    # Before the first claims nothing depends on an electorate.
    early = Electorate(START, digest("mine"), {"x": "x"}, frozenset())
    missing = START + 4
    one.consensus.electorates.pop(missing)
    one.learn(replace(other, electorates=(*other.electorates, early)))
    assert one.consensus.electorates == before


@pytest.mark.parametrize(("most", "adopts"), [(None, True), (10, False)])
def test_electorates_that_take_long_to_draw_are_not_tried(monkeypatch, most, adopts):
    found = swarm()
    one = found.peers[0].participant
    if most is not None:
        monkeypatch.setattr(participant_module, "MOST_PAIRS", most)
    one.consensus.electorates.pop(START + 4)
    one.learn(found.peers[1].participant.log(0))
    assert (START + 4 in one.consensus.electorates) == adopts


def test_log_records_are_learnt_once():
    """Records of a log are learnt once and make no duties."""
    found = swarm()
    one, other = found.peers[0].participant, found.peers[1].participant
    log = decode_log(encode(other.log(0)))
    assert one.learn(log) == 0  # nothing was lost
    late = Peer("honest-9", "honest", found).participant
    assert late.learn(log) == len(log.records)
    assert not any(late.consensus.duties(peer.name) for peer in found.peers)
    assert late.consensus.counts == {}
    again = compute_scores(
        late.consensus.ledger,
        {e.round: e for e in log.electorates},
        late.rules,
        ScoreRules(),
        other.table.round,
    )
    assert again.standings == other.table.standings
