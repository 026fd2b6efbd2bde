"""Whatever state a node gets into, it can say so: none of its own messages fails for a number out
of bounds, or for its size.
"""

import asyncio
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.node.verify.finding import Finding
from shoal.node.verify.peers import rules_of
from shoal.optim import RoundInfo
from shoal.optim.codecs.floats import FLOAT32
from shoal.optim.exchange.base import Contribution, RoundKey
from shoal.swarm.access.invitation import MAX_USES, admission, entry_of, expiry, issue
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.exchange.contribution import WINDOW, ExchangeStats, encode_contribution
from shoal.swarm.exchange.group.roster import ready_message
from shoal.swarm.exchange.pair.calls import make_offer
from shoal.swarm.exchange.robust import Newcomers
from shoal.swarm.identity import Identity
from shoal.swarm.membership.seed_announcer import SeedAnnouncer
from shoal.swarm.p2p.multiaddr import origin
from shoal.swarm.p2p.reachability import DialSeen
from shoal.swarm.p2p.throughput import SpeedReply
from shoal.swarm.settings.verification import VerifySettings
from shoal.swarm.state.drift import DriftDetector
from shoal.swarm.state.query import LAST_ROUND
from shoal.swarm.state.snapshot import State, encode, make
from shoal.swarm.topics.status import StatusReporter
from shoal.swarm.topics.verification_log import LogReply, LogServer
from shoal.swarm.training.diagnosis import Diagnosis
from shoal.swarm.training.member import TrainingMember, member_fields
from shoal.swarm.training.record_keeper import RoundReport
from shoal.swarm.training.shard import Shard
from shoal.swarm.training.step_rate import Rates
from shoal.swarm.wire.envelope import FAILURES, MAX_COUNT, Message, pack, seal, unpack, unseal
from shoal.swarm.wire.messages import (
    Abort,
    Answer,
    GroupReady,
    GroupReceipt,
    Member,
    Offer,
    SwarmsReply,
)
from shoal.swarm.wire.record import Exchanges, Faults, NodeRecord
from shoal.verification.consensus.log import Log, decode_log
from shoal.verification.consensus.log import encode as encode_log
from shoal.verification.consensus.records import (
    ATTEMPTS,
    MAX_ROUND,
    Commitment,
    Reveal,
    Verdict,
    View,
    hide,
)
from shoal.verification.consensus.records import decode as decode_record
from shoal.verification.consensus.reputation import (
    MOST_ABSENCE,
    MOST_SCORE,
    MOST_UNTIL,
    ROW,
    Standing,
    Table,
)
from tests.support.message_kinds import kinds, largest
from tests.support.records import ABOUT
from tests.support.reporting_member import membership as watched

ME, OTHER = Identity.ephemeral(), Identity.ephemeral()
SWARM = "a" * 52
anything = st.floats() | st.sampled_from([5e-324, 1e-12, 1.7e308, 0.0])
rounds = st.integers(0, 2 * LAST_ROUND)
moments = st.floats(0, 1e12)
"""Of a clock that somebody has set: until the year 33,658."""
bytes_moved = st.integers(0, 2**64)


def recorded(fields, **more):
    """Pack and open the record that a directory makes of these fields."""
    made = Member(swarm=SWARM, peer=ME.peer_id, addresses=(), issued=time.time(), **fields, **more)
    assert unseal(seal(made, ME), Member) == (ME.peer_id, made)
    return made


def member_of(place, projection=(), **changes):
    """A member at ``place`` whose optimizer has been through all that it can be."""
    usual = {"round": 1, "steps": 1, "tokens": 1, "lag": 3, "lag_auto": True, "fragments": 1}
    opt = SimpleNamespace(projection_of=lambda fragment: projection, **{**usual, **changes})
    place.identity = SimpleNamespace(peer_id=ME.peer_id)
    return TrainingMember(
        place,
        opt,
        SimpleNamespace(waited=0.0),
        SimpleNamespace(newcomers=Newcomers()),
        model="0" * 64,
        name="x",
        shard=Shard(0, 1, 0),
    )


@given(
    anything | st.none(), anything, anything, anything | st.none(), rounds, rounds, st.booleans()
)
def test_a_record_holds_whatever_training_comes_to(loss, speed, tokens, mfu, round, step, leaving):
    place = watched()
    member = member_of(place, round=round, steps=step)
    status = member.reporter = StatusReporter(place, "anna")
    member.records.rates = Rates(speed, tokens, mfu)
    member.records.lost(training=loss)
    if leaving:
        member.leave()
    else:
        member.announce("training")
    found = recorded(place.directory.said[0])
    shown = status.status()
    assert unpack(pack(shown), type(shown)) == shown
    assert found.loss in (loss, None)
    assert shown.loss.training in (loss, None)
    for one in (found, shown.progress):
        assert one.steps_per_s in (speed, 0.0)
        assert one.tokens_per_s in (tokens, 0.0)
        assert one.mfu in (mfu, None)


exchanges = st.lists(
    st.tuples(st.sampled_from(FAILURES), st.integers(0, 5)) | st.floats(0, 1e6), max_size=2 * WINDOW
)


@given(exchanges, st.floats(0, 1e6))
def test_a_record_holds_whatever_exchanges_come_to(events, waited):
    stats, peers = ExchangeStats(), [Identity.ephemeral().peer_id for _ in range(6)]
    directory = SimpleNamespace(everyone=dict, departed=dict, belongs=lambda peer: True)
    report = Diagnosis(stats, directory, ME.peer_id)
    report.waited(waited)
    for number, event in enumerate(events):
        key = RoundKey(SWARM, number, 0)
        if isinstance(event, float):
            stats.done(key, peers[:1], event)
        else:
            stats.failed(key, peers[event[1]], event[0])
    record = NodeRecord(exchanges=Exchanges(**report.seconds()), faults=Faults(**report.faults()))
    found = recorded({**ABOUT, **member_fields(record)})
    assert found.recent == min(len(events), WINDOW)


@given(bytes_moved, bytes_moved, st.floats(0, 1e9), anything, st.lists(anything, max_size=20))
def test_a_status_holds_whatever_a_round_comes_to(sent, received, wait_s, loss, projection):
    place = watched(sent=sent, received=received)
    member = member_of(place, projection=tuple(projection))
    reporter = member.reporter = StatusReporter(place, "anna")
    for number in range(9):
        key = RoundKey(SWARM, number, 0)
        info = RoundInfo(key, (ME.peer_id, *(OTHER.peer_id,) * 20), MAX_COUNT, 0)
        report = RoundReport(sent, received, wait_s, rejected=[None] * 3, why="x" * 600)
        member.records.round(info, report)
        member.report_round(info, report, loss)
    reporter.event("rl", reward=loss, own=2, foreign=3, used=[(OTHER.peer_id, loss)] * 3, shared=4)
    reporter.event("verify", banned=[OTHER.peer_id] * 99, votes={OTHER.peer_id: 2}, voted=3)
    member.records.learnt(reward=loss, own=2, foreign=3)
    member.records.bans([OTHER.peer_id] * 99)
    member.records.checked(claims=2**40, checked=2**40, invalid=2**40)
    reporter.progress(member.record())
    status = reporter.status()
    assert unpack(pack(status), type(status)) == status
    receipts = reporter.tally.receipts()
    assert unpack(pack(receipts), type(receipts)) == receipts


weights = st.floats(min_value=0, allow_infinity=False)


@given(st.integers(0, 3), rounds, weights, anything, st.lists(anything, min_size=4, max_size=4))
def test_an_offer_and_a_ready_message_hold_whatever_is_contributed(
    fragment, round, weight, patience, numbers
):
    drift = DriftDetector(ME.peer_id, "0" * 64, 16)
    drift.finished(round, fragment, tuple(numbers))
    tensors = [torch.zeros(3), torch.zeros(0), torch.zeros(())]
    mine = encode_contribution(
        SWARM, Contribution(RoundKey(SWARM, round, fragment), tensors, weight, FLOAT32)
    )
    context = SimpleNamespace(swarm=SWARM, model="0" * 64, identity=ME)
    assert unseal(make_offer(context, mine, bytes(16)), Offer)[1].round == round
    mine = type(mine)(**{**vars(mine), "sketch": drift.newest})
    if patience == patience:  # a time is a number
        assert (
            unseal(seal(ready_message(mine, SWARM, "0" * 64, patience), ME), GroupReady)[1].sketch
            == drift.newest
        )


@given(st.text(max_size=2000), rounds)
def test_a_refusal_holds_whatever_went_wrong(text, round):
    for error in (NetworkError(text), MessageError(text)):
        for made in (
            Answer(verdict="refuse", reason=str(error), round=round),
            Abort(nonce=bytes(16), reason=str(error)),
            GroupReceipt(verdict="refuse", reason=str(error), round=round),
        ):
            assert unpack(pack(made), type(made)) == made


@given(
    st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    moments,
    st.integers(1, MAX_USES),
)
def test_an_invitation_for_however_long_can_be_shown(lives, now, uses):
    text = issue(OTHER, SWARM, lives=lives, uses=uses, now=now)
    shown = admission(text, ME, now=now)
    entry = entry_of(shown, ME.peer_id, SWARM, OTHER.peer_id)
    assert expiry(entry, now) == ""
    assert "expired on" in expiry(entry, MAX_COUNT + 120.0)


@given(st.integers(0, 2**70), st.integers(0, 2**70), st.integers(0, 2**70))
def test_a_model_of_whatever_size_is_announced(params, sent, memory):
    announcer = SeedAnnouncer.__new__(SeedAnnouncer)
    announcer._swarm, announcer._identity = SWARM, ME
    announcer.announce(b"x", params=params, round_bytes=sent, memory=memory, device="cpu")
    assert unseal(seal(announcer._announced, ME), type(announcer._announced))[0] == ME.peer_id


@given(st.integers(0, 2 * LAST_ROUND), st.lists(st.integers(-1, 2 * LAST_ROUND), max_size=9))
def test_a_snapshot_of_whatever_round_is_handed_out(round, applied):
    state = State(round, [torch.zeros(3)], {}, applied)
    header = make(state, encode(state)).header
    assert unpack(pack(header), type(header)) == header


@given(st.binary(min_size=16, max_size=16) | st.binary(min_size=4, max_size=4), moments)
def test_whatever_address_a_caller_has_is_told(host, now):
    address = (b"\x04" if len(host) == 4 else b"\x29") + host + b"\x06\x12\x34"
    seen = DialSeen(address=origin(address), now=now)
    assert unpack(pack(seen), DialSeen) == seen


counts = st.integers(0, MAX_ROUND)
standings = st.tuples(
    st.integers(-MOST_SCORE, MOST_SCORE),
    st.integers(0, MOST_UNTIL) | st.none(),
    counts,
    st.integers(0, MOST_ABSENCE),
    *[counts] * (ROW - 4),
)
sentences = st.text(max_size=2000)


@given(st.lists(standings, max_size=4), rounds, st.integers(0, 3))
def test_a_log_holds_whatever_standings_come_to(rows, round, more):
    """Also after more events of each kind than a count can hold: a table that no other peer reads
    is no table.
    """
    held = {f"p{number}": Standing.of(row) for number, row in enumerate(rows)}
    for standing in held.values():
        for group in (standing.claims, standing.votes, standing.appeals):
            group.update({name: count + more for name, count in group.items()})
    table = Table(round, held, {}).base()
    assert decode_log(encode_log(Log(table))).base == table
    View(peer=ME.peer_id, run=SWARM, round=round, root=bytes(32), table=table.digest)


@given(
    st.booleans(),
    sentences,
    st.dictionaries(sentences, st.floats() | st.floats(1e-300, 1e-290), max_size=30),
)
def test_a_vote_holds_whatever_was_measured(accepted, reason, figures):
    evidence = Finding(accepted, reason, figures).evidence
    vote = Reveal(
        peer=ME.peer_id, case=bytes(32), attempt=0, vote="valid", evidence=evidence, salt=bytes(32)
    )
    assert decode_record(vote.encoded) == vote
    hidden = Commitment(peer=ME.peer_id, case=bytes(32), attempt=0, digest=hide(vote))
    assert decode_record(hidden.encoded) == hidden


def test_a_verdict_holds_whomever_a_swarm_draws():
    rules = rules_of(VerifySettings())
    for seats in (rules.verifiers, rules.appeal):
        verdict = Verdict(
            peer=ME.peer_id, case=bytes(32), attempt=ATTEMPTS - 1, marks=("withheld",) * seats
        )
        assert decode_record(verdict.encoded) == verdict


def test_oversized_log_is_refused():
    """A log that is too large is refused with the reason."""
    table = Table(0, {f"{number:064}": Standing(score=1) for number in range(120_000)}, {})
    made = LogServer(
        SimpleNamespace(serve=lambda *given: None), SWARM, lambda since: encode_log(Log(table))
    )
    log, reason = asyncio.run(made._log(0))
    assert log == b""
    assert "above 8388608" in reason
    assert unpack(pack(LogReply(nbytes=None, reason=reason)), LogReply).reason == reason
    made.close()


NOT_AT_ONCE = {
    "rollout": "a group that no message holds is not shared",
    "claim-material": "a group that no material holds is not claimed",
    "manifest": "its fields are settings, and a swarm of too many is not made",
    "group-receipt": "a reason comes without addresses",
    "speed-reply": "its reasons are two sentences in ASCII",
    "swarms-reply": "its reasons are single words",
}
KINDS = [kind for kind in kinds() if issubclass(kind, Message) and kind.KIND not in NOT_AT_ONCE]


@pytest.mark.parametrize("kind", KINDS, ids=[kind.KIND for kind in KINDS])
def test_longest_message_fits_its_limit(kind):
    """A message fits its limit with all fields as long as they may be."""
    message = largest(kind)
    assert unpack(pack(message), kind) == message


def test_what_never_comes_together_fits_one_by_one():
    longest = largest(GroupReceipt)
    for left_out in ({"reason": ""}, {"addresses": ()}):
        assert len(pack(longest.model_copy(update=left_out))) <= GroupReceipt.LIMIT
    assert len(pack(SpeedReply(reason="x" * 512))) <= SpeedReply.LIMIT
    assert (
        len(pack(largest(SwarmsReply).model_copy(update={"reason": "oversized"})))
        <= SwarmsReply.LIMIT
    )
