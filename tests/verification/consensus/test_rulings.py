"""What a set of records settles: majority, quorum, redraws, disputes, plants; in any order, and for
no minority to bend.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.verification.consensus.electorate import electorate
from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.log import EMPTY
from shoal.verification.consensus.records import Commitment, Opening, Reveal, Verdict, hide
from shoal.verification.consensus.rulings import decide, quorum, rule, salts, second_draw, trial
from shoal.verification.consensus.sortition import Electorate, beacon
from tests.support.consensus_stories import BEHAVIOURS, RULES, Story, ballots, claim_of, digest

PEERS = tuple(f"p{number:02}" for number in range(24))
BEHAVIOUR = st.sampled_from(BEHAVIOURS)


def ruled(story, claim, ignored=()):
    return rule(claim, Ledger(story.records), story.electorates, story.rules, ignored)


@pytest.mark.parametrize(
    ("marks", "decision"),
    [
        (("valid", "valid", "invalid"), "valid"),
        (("valid", "invalid", "invalid"), "invalid"),
        (("valid", "valid", "absent"), "valid"),
        (("valid", "invalid", "absent"), None),
        (("valid", "absent", "withheld"), None),
        ((None, None, None), None),
        ((), None),
        (("valid", "valid", "invalid", None, "absent"), "valid"),
        (("invalid",) * 3 + ("absent",) * 4, None),
    ],
)
def test_strict_majority_of_a_quorum(marks, decision):
    assert decide(marks) == decision


@settings(deadline=None)
@given(st.lists(st.sampled_from(["valid", "invalid", "absent", "withheld", None]), max_size=9))
def test_decision_needs_a_quorum_and_no_tie(marks):
    """A decision needs a quorum of votes and a tie decides nothing."""
    votes = {vote: marks.count(vote) for vote in ("valid", "invalid")}
    decision = decide(marks)
    if decision is not None:
        assert sum(votes.values()) >= quorum(len(marks))
        assert votes[decision] > sum(votes.values()) / 2


@settings(deadline=None, max_examples=60)
@given(st.tuples(BEHAVIOUR, BEHAVIOUR, BEHAVIOUR))
def test_one_draw(behaviours):
    story = Story(PEERS)
    claim = story.claim(PEERS[0], behaviours=behaviours)
    ruling = ruled(story, claim)
    expected = [b if b in ("valid", "invalid", "absent") else "withheld" for b in behaviours]
    if expected.count("absent") <= 1:  # a quorum states what it saw
        assert list(ruling.trials[0].marks) == expected
        assert ruling.outcome == (decide(expected) or "unverified")
    else:
        assert ruling.outcome == "unverified"
    assert PEERS[0] not in ruling.trials[0].verifiers


def test_undecided_draws_are_repeated_with_others_and_end_unverified():
    story = Story(PEERS)
    claim = story.claim(PEERS[0], behaviours=("valid", "invalid", "absent"))
    assert ruled(story, claim).outcome == "unverified"
    draws = story.verifiers(claim)
    assert len({peer for seats in draws for peer in seats}) == 9
    story.vote(claim.id, 1, draws[1], ("absent", "absent", "valid"))
    assert ruled(story, claim).outcome == "unverified"
    story.vote(claim.id, 2, draws[2], ("invalid", "invalid", "valid"))
    assert ruled(story, claim).outcome == "invalid"
    assert len(ruled(story, claim).trials) == 3


def test_nobody_puts_a_vote_into_anothers_mouth():
    story = Story(PEERS)
    claim = story.claim(PEERS[0], behaviours=("valid", "valid", "absent"), stating=())
    seats = story.verifiers(claim)[0]
    # Two of three state a vote of the third that it never gave: at most they can leave it out.
    story.records += [
        Verdict(peer=p, case=claim.id, attempt=0, marks=("valid", "valid", "invalid"))
        for p in seats[:2]
    ]
    assert ruled(story, claim).trials[0].marks == ("valid", "valid", None)


def test_a_copied_vote_counts_for_nothing():
    """The copier commits with somebody's digest and reveals the same vote and salt: the digest
    holds its author's name.
    """
    story = Story(PEERS)
    claim = story.claim(PEERS[0], behaviours=("valid", "valid", "absent"), stating=())
    seats = story.verifiers(claim)[0]
    source = next(r for r in story.records if isinstance(r, Reveal) and r.peer == seats[0])
    copy = Reveal(**{**source.model_dump(), "peer": seats[2]})
    story.records += [
        Commitment(peer=seats[2], case=claim.id, attempt=0, digest=hide(source)),
        copy,
    ]
    story.records += [
        Verdict(peer=p, case=claim.id, attempt=0, marks=("valid",) * 3) for p in seats
    ]
    assert ruled(story, claim).trials[0].marks == ("valid", "valid", None)


def test_what_strangers_and_minorities_state_changes_nothing():
    story = Story(PEERS)
    claim = story.claim(PEERS[0], behaviours=("valid", "valid", "invalid"))
    before = ruled(story, claim)
    seats = story.verifiers(claim)[0]
    lie = ("absent", "absent", "invalid")
    story.records += [
        Verdict(peer=p, case=claim.id, attempt=0, marks=lie) for p in PEERS if p not in seats
    ]
    assert ruled(story, claim) == before
    story.records.append(Verdict(peer=seats[2], case=claim.id, attempt=0, marks=lie))
    after = ruled(story, claim)
    assert (after.outcome, after.trials[0].marks) == (before.outcome, before.trials[0].marks)
    assert after.trials[0].contradicted == {seats[2]}


def test_a_decision_cannot_be_taken_back_by_contradicting_oneself():
    story = Story(PEERS)
    claim = story.claim(PEERS[0], behaviours=("invalid", "invalid", "absent"))
    seats = story.verifiers(claim)[0]
    other = Reveal(
        peer=seats[0], case=claim.id, attempt=0, vote="valid", evidence=b"", salt=digest("other")
    )
    story.records += [
        other,
        Commitment(peer=seats[0], case=claim.id, attempt=0, digest=hide(other)),
    ]
    story.records.append(
        Verdict(peer=seats[0], case=claim.id, attempt=0, marks=("valid", "absent", "absent"))
    )
    after = ruled(story, claim)
    assert after.outcome == "invalid"
    assert after.trials[0].contradicted == {seats[0]}


def test_a_dispute_is_decided_by_seven_others():
    story = Story(PEERS)
    claim = story.claim(PEERS[0], behaviours=("invalid", "invalid", "valid"))
    dispute = story.dispute(PEERS[0], claim, "valid")
    ruling = ruled(story, claim)
    assert (ruling.outcome, ruling.overturned, ruling.appeal) == ("valid", True, dispute)
    assert len(ruling.trials[-1].verifiers) == 7
    assert not {PEERS[0], *ruling.trials[0].verifiers} & set(ruling.trials[-1].verifiers)


def test_first_decided_dispute_is_final():
    """An undecided dispute changes nothing and the first decided one is final."""
    story = Story(PEERS)
    claim = story.claim(PEERS[0], behaviours=("invalid", "invalid", "valid"))
    outsiders = [p for p in PEERS if p not in story.verifiers(claim)[0]]
    story.dispute(outsiders[1], claim, None, round=11)
    assert ruled(story, claim).outcome == "invalid"
    first = story.dispute(outsiders[2], claim, "valid", round=12)
    story.dispute(outsiders[3], claim, "invalid", round=13)
    assert ruled(story, claim).appeal == first


@pytest.mark.parametrize(
    ("peer", "round", "attempt"),
    [("stranger", 12, 0), (PEERS[0], 9, 0), (PEERS[0], 39, 0), (PEERS[0], 12, 2)],
)
def test_who_may_dispute_and_until_when(peer, round, attempt):
    story = Story(PEERS[:9])
    claim = story.claim(PEERS[0], behaviours=("invalid", "invalid", "valid"))
    dispute = story.dispute(peer, claim, None, round=round, attempt=attempt)
    assert second_draw(dispute, claim, story.electorates, story.rules) == ()


def test_a_plant_that_was_rejected_is_no_lie():
    story = Story(PEERS)
    slot = story.slots(PEERS[0], planted=True)[0]
    claim = story.claim(PEERS[0], slot=slot, behaviours=("invalid", "invalid", "valid"))
    assert not ruled(story, claim).planted
    story.open(claim)
    assert ruled(story, claim).planted


def test_a_plant_that_was_approved_goes_to_seven_others():
    story = Story(PEERS)
    slot = story.slots(PEERS[0], planted=True)[0]
    claim = story.claim(PEERS[0], slot=slot, behaviours=("valid", "valid", "invalid"))
    story.open(claim)
    assert ruled(story, claim).outcome == "valid"
    assert not ruled(story, claim).planted
    story.records.pop()
    story.open(claim, "invalid")
    assert ruled(story, claim).planted
    assert ruled(story, claim).overturned


def test_planting_excuses_only_its_own_slot():
    """Planting is no excuse for other slots other chains or a slot used twice."""
    story = Story(PEERS)
    peer = PEERS[0]
    lie = story.claim(peer, slot=story.slots(peer, planted=False)[0], behaviours=("invalid",) * 3)
    story.open(lie)
    assert not ruled(story, lie).planted
    planted = story.slots(peer, planted=True)
    forged = story.claim(peer, slot=planted[0], behaviours=("invalid",) * 3)
    link = story.chains[PEERS[1]].link(10)
    story.records.append(Opening(peer=peer, round=13, claim=forged.id, attempt=0, link=link))
    assert not ruled(story, forged).planted
    twice = story.claim(peer, slot=planted[1], behaviours=("invalid",) * 3)
    story.open(twice)
    assert ruled(story, twice).planted
    story.records.append(claim_of(peer, slot=planted[1], output=digest("another")))
    assert not ruled(story, twice).planted


def test_salts_are_those_of_votes_that_count():
    story = Story(PEERS)
    claim = story.claim(PEERS[0], behaviours=("valid", "withheld", "valid"))
    seats = story.verifiers(claim)[0]
    expected = sorted(digest("salt", claim.id, 0, peer) for peer in (seats[0], seats[2]))
    assert salts(10, Ledger(story.records), story.electorates, story.rules) == expected
    assert salts(11, Ledger(story.records), story.electorates, story.rules) == []


def test_draws_after_the_deciding_one_give_no_salts():
    """Who sits in a draw that nobody needed could vote when all other salts are known."""
    story = Story(PEERS)
    claim = story.claim(PEERS[0])
    expected = salts(10, Ledger(story.records), story.electorates, story.rules)
    story.vote(claim.id, 1, story.verifiers(claim)[1], ("valid",) * 3)
    assert salts(10, Ledger(story.records), story.electorates, story.rules) == expected
    undecided = story.claim(PEERS[1], behaviours=("valid", "absent", "absent"))
    story.vote(undecided.id, 1, story.verifiers(undecided)[1], ("valid",) * 3)
    found = salts(10, Ledger(story.records), story.electorates, story.rules)
    assert len(found) == len(expected) + 3


def test_salts_committed_to_late_make_no_beacon():
    story = Story(PEERS)
    claim = story.claim(PEERS[0])
    seats = story.verifiers(claim)[0]
    late = ballots(claim.id, 0, seats[1], "valid")[0][0]
    expected = sorted(digest("salt", claim.id, 0, peer) for peer in (seats[0], seats[2]))
    ledger = Ledger(story.records)
    assert salts(10, ledger, story.electorates, story.rules, {late.id}) == expected
    claims = frozenset({claim.id})
    here = dict(story.electorates)
    here[10] = Electorate(10, here[10].beacon, here[10].operators, claims)
    made = electorate("run", 11, ledger, here, story.rules, EMPTY, {late.id})
    assert made.beacon == beacon("run", 11, expected)


def test_the_salt_of_who_committed_twice_makes_no_beacon():
    """It could reveal the second, made when all who had committed had revealed."""
    story = Story(PEERS)
    claim = story.claim(PEERS[0])
    seats = story.verifiers(claim)[0]
    first = ballots(claim.id, 0, seats[1], "valid")[0][0]
    again = Commitment(**{**first.model_dump(), "digest": digest("another")})
    expected = sorted(digest("salt", claim.id, 0, peer) for peer in (seats[0], seats[2]))
    ledger = Ledger([*story.records, again])
    assert salts(10, ledger, story.electorates, story.rules) == expected


def test_the_salt_of_who_revealed_twice_makes_no_beacon():
    """It could choose between the two when it has seen the others'."""
    story = Story(PEERS)
    claim = story.claim(PEERS[0])
    seats = story.verifiers(claim)[0]
    again = Reveal(
        peer=seats[1],
        case=claim.id,
        attempt=0,
        vote="valid",
        evidence=b"e",
        salt=digest("a better one"),
    )
    for records in ([*story.records, again], [again, *story.records]):
        assert trial(Ledger(records), claim.id, 0, seats).marks == ("valid",) * 3
        expected = sorted(digest("salt", claim.id, 0, peer) for peer in (seats[0], seats[2]))
        assert salts(10, Ledger(records), story.electorates, story.rules) == expected


@pytest.mark.parametrize(
    ("rounds", "counts"), [(RULES.appeal_rounds, True), (RULES.appeal_rounds + 1, False)]
)
def test_appeals_count_within_their_window(rounds, counts):
    """Appeals count to the last round of their window and no longer."""
    story = Story(PEERS)
    claim = story.claim(PEERS[0], behaviours=("invalid", "invalid", "valid"))
    dispute = story.dispute(PEERS[0], claim, "valid" if counts else None, round=10 + rounds)
    assert (second_draw(dispute, claim, story.electorates, story.rules) != ()) == counts
    assert ruled(story, claim).overturned == counts
    planted = story.claim(
        PEERS[1], slot=story.slots(PEERS[1], planted=True)[0], behaviours=("invalid",) * 3
    )
    story.open(planted, round=10 + rounds)
    assert ruled(story, planted).planted == counts


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(BEHAVIOUR, BEHAVIOUR, BEHAVIOUR), min_size=1, max_size=5),
    st.integers(0, 999),
)
def test_rulings_ignore_order_and_copies(cases, seed):
    """Rulings do not depend on the order of records or on copies."""
    story = Story(PEERS)
    claims = [story.claim(PEERS[n], behaviours=behaviours) for n, behaviours in enumerate(cases)]
    story.dispute(PEERS[0], claims[0], "valid")
    before = [ruled(story, claim) for claim in claims]
    story.records += story.records[::2]
    random.Random(seed).shuffle(story.records)
    assert [ruled(story, claim) for claim in claims] == before
