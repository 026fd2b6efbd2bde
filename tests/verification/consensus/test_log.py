"""Logs: bytes from strangers, whole or refused; and what learning from one changes."""

import struct

import msgpack
import pytest
from stories import Story, claim_of, digest, electorates

import shoal.verification.consensus.participant as module
from bench._votes_peers import Peer, toy_signer
from bench.votes_simulation import Swarm, World
from shoal.verification.consensus.participant import Log, decode_log, encode
from shoal.verification.consensus.records import Electorate, Signed
from shoal.verification.consensus.rulings import ScoreRules, Standing, Table, compute_scores

PEERS = tuple(f"p{number:02}" for number in range(8))


def full():
    story = Story(PEERS)
    for slot in range(4):
        story.claim(PEERS[slot], 10, slot, ("valid", "invalid", "valid"))
    table = Table(9, {peer: Standing(score=-5 * at, until=at or None, bans=at) for at, peer in enumerate(PEERS)}, {})
    listed = Electorate(11, digest("beacon"), {"a": "b"}, frozenset(digest(number) for number in range(200)))
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
        frame("standing", "a", 0, None, 0, 4001, *[0] * 11),
        frame("standing", "a", 1, None, -1, *range(11)),
        frame("record", b"no record", bytes(64)),
        frame("record", claim_of("a").encoded, bytes(257)),
        frame("other"),
        frame(),
        struct.pack(">I", 2000) + b"\x91" * 2000,
        bytes(module.MOST_BYTES + 1),
    ],
    ids=range(19),
)
def test_hostile_logs_are_refused(wrong):
    with pytest.raises(ValueError, match="malformed"):
        decode_log(wrong)


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
    before, table, known = len(one.consensus.ledger), one.table.digest, dict(one.consensus.electorates)
    lies = [claim_of("honest-1", one.round - 3, number) for number in range(3)]
    forged = tuple(Signed(claim, bytes(32)) for claim in lies)
    history = tuple(Electorate(round, digest("mine"), {"x": "x"}, frozenset()) for round in known)
    base = Table(-1, {"honest-2": Standing(score=-5000, until=10**6, bans=9)}, {})
    assert one.learn(Log(base, history, forged)) == 0
    assert (len(one.consensus.ledger), one.table.digest, one.consensus.electorates) == (before, table, known)


def test_records_of_a_log_are_learnt_once_and_make_no_duties():
    found = swarm()
    one, other = found.peers[0].participant, found.peers[1].participant
    log = decode_log(encode(other.log(0)))
    assert one.learn(log) == 0  # nothing was lost
    late = Peer("honest-9", "honest", found).participant
    assert late.learn(log) == len(log.records)
    assert not any(late.consensus.duties(peer.name) for peer in found.peers)
    assert late.consensus.counts == {}
    again = compute_scores(
        late.consensus.ledger, {e.round: e for e in log.electorates}, late.rules, ScoreRules(), other.table.round
    )
    assert again.standings == other.table.standings
