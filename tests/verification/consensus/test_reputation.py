"""The table: the same for all who have the same records, no ban without a quorum, prices under
which cheating does not pay.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.verification.consensus import reputation
from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.records import Verdict
from shoal.verification.consensus.reputation import (
    ABSENT,
    MOST_ABSENCE,
    ScoreRules,
    Standing,
    Table,
    compute_scores,
)
from shoal.verification.consensus.rulings import quorum
from shoal.verification.consensus.sortition import SETTLED
from tests.support.consensus_stories import BEHAVIOURS, Story

PEERS = tuple(f"p{number:02}" for number in range(12))
ROUNDS = range(4, 24)
BEHAVIOUR = st.sampled_from(BEHAVIOURS)
EVENT = st.tuples(
    st.sampled_from(ROUNDS), st.sampled_from(PEERS), st.tuples(BEHAVIOUR, BEHAVIOUR, BEHAVIOUR)
)
PRICES = ScoreRules()


def table(story, round=30, prices=PRICES):
    return compute_scores(Ledger(story.records), story.electorates, story.rules, prices, round)


def told(events):
    story = Story(PEERS)
    for slot, (round, peer, behaviours) in enumerate(events):
        story.claim(peer, round, slot, behaviours)
    return story


@settings(deadline=None, max_examples=30)
@given(st.lists(EVENT, max_size=10), st.integers(0, 999))
def test_the_same_records_in_any_order_give_the_same_table(events, seed):
    story = told(events)
    before = table(story)
    story.records += story.records[::3]
    random.Random(seed).shuffle(story.records)
    after = table(story)
    assert (after.standings, after.rulings) == (before.standings, before.rulings)
    assert [after.banned_until(peer) for peer in PEERS] == [
        before.banned_until(peer) for peer in PEERS
    ]


@settings(deadline=None, max_examples=30)
@given(st.lists(EVENT, max_size=12), st.sets(st.sampled_from(PEERS), max_size=4))
def test_fewer_than_a_quorum_of_drawn_peers_bans_nobody(events, hostile):
    """Everybody is honest but ``hostile``, who reject all claims, and sit in no draw as a majority;
    or state nothing at all.
    """
    story = Story(PEERS)
    for slot, (round, peer, _) in enumerate(events):
        claim = story.claim(peer, round, slot, ("absent",) * 3, stating=())
        seats = story.verifiers(claim)[0]
        count = sum(seat in hostile for seat in seats)
        if count >= quorum(3):
            continue
        story.vote(
            claim.id, 0, seats, ["invalid" if seat in hostile else "valid" for seat in seats]
        )
        if peer in hostile:
            story.dispute(PEERS[0], claim, None, round=min(round + 2, 39))
    standings = table(story).standings
    assert all(
        standing.until is None for peer, standing in standings.items() if peer not in hostile
    )
    assert all(standing.score >= 0 for peer, standing in standings.items() if peer not in hostile)


@settings(deadline=None, max_examples=20)
@given(st.lists(EVENT, min_size=1, max_size=12))
def test_statements_of_less_than_a_quorum_cost_nobody_anything(events):
    story = Story(PEERS)
    for slot, (round, peer, behaviours) in enumerate(events):
        claim = story.claim(peer, round, slot, behaviours, stating=())
        alone = story.verifiers(claim)[0][0]
        story.records.append(
            Verdict(peer=alone, case=claim.id, attempt=0, marks=("invalid", "absent", "withheld"))
        )
    assert all(standing.score == 0 for standing in table(story).standings.values())


def score_of_seat(behaviour):
    """What the third seat of one valid claim, as the two others see it, gets for its behaviour."""
    story = Story(PEERS)
    claim = story.claim(PEERS[0], behaviours=("valid", "valid", behaviour))
    return table(story, 10).score(story.verifiers(claim)[0][2])


def test_absence_costs_less_than_a_wrong_vote():
    """Staying away costs less than a wrong vote and hiding a vote does not."""
    assert (
        score_of_seat("valid")
        > 0
        == score_of_seat("absent")
        > score_of_seat("invalid")
        >= score_of_seat("withheld")
    )
    assert score_of_seat("unfit") == score_of_seat("twice") == score_of_seat("withheld")


def absence_after(*behaviours):
    """Standings in rounds 5, 6 and 40 of a peer that is drawn for a claim of round 5 for each of
    ``behaviours``, and behaves so.
    """
    story, me, slot = Story(PEERS), None, 0
    for behaviour in behaviours:
        while True:  # a slot for which that peer is drawn
            claim = story.claim(PEERS[0], 5, slot, ("absent",) * 3, stating=())
            seats = story.verifiers(claim)[0]
            me, slot = me or seats[2], slot + 1
            if me in seats:
                break
        story.vote(claim.id, 0, seats, [behaviour if seat == me else "valid" for seat in seats])
    return [table(story, round).standings[me] for round in (5, 6, 40)]


def test_missing_votes_cost_the_seat_only():
    """Votes that do not come take the seat and never the membership."""
    now, later, faded = absence_after(*("absent",) * 20)
    assert (now.score, now.until, now.votes["absent"]) == (0, None, 20)
    assert now.absence == MOST_ABSENCE
    assert later.absence == MOST_ABSENCE * 31 // 32
    assert faded.absence < ABSENT


@pytest.mark.parametrize(
    ("behaviours", "absence"),
    [
        (("absent", "absent"), 1600),
        (("absent", "absent", "absent"), 2400),
        (("absent", "valid", "absent"), 1400),
        (("valid", "invalid", "valid"), 0),
        (("absent", *("valid",) * 5), 0),
        (("absent", "withheld"), 800),
    ],
)
def test_vote_repays_a_quarter_of_an_empty_seat(behaviours, absence):
    """A vote takes back a quarter of what an empty seat adds."""
    assert absence_after(*behaviours)[0].absence == absence


def test_a_claim_on_which_nothing_is_decided_makes_nobody_absent():
    """As of an author who shows its evidence to no verifier."""
    story = Story(PEERS)
    for slot in range(12):
        claim = story.claim(PEERS[0], 5, slot, ("absent", "absent", "valid"), stating=())
        for attempt, seats in enumerate(story.verifiers(claim)):
            story.vote(claim.id, attempt, seats, ("valid", "absent", "absent"), stating=seats)
    found = table(story, 5).standings
    assert all(
        standing.absence == standing.score == standing.votes["absent"] == 0
        for standing in found.values()
    )


def test_a_lie_costs_more_than_can_be_saved_up():
    story = Story(PEERS)
    for slot in range(80):
        story.claim(PEERS[0], 5, slot)
    assert table(story, 5).score(PEERS[0]) == PRICES.ceiling
    story.claim(PEERS[0], 6, 0, ("invalid",) * 3)
    assert table(story, 6).score(PEERS[0]) < 0
    story.claim(PEERS[0], 7, 0, ("invalid",) * 3)
    story.claim(PEERS[0], 8, 0, ("invalid",) * 3)
    assert table(story, 8).is_banned(PEERS[0])


def test_a_ban_ends_and_the_next_is_longer():
    story = Story(PEERS)
    for round in (5, 6, 20, 21):
        story.claim(PEERS[0], round, 0, ("invalid",) * 3)
    prices = ScoreRules(ban=8, longest=12)
    assert not table(story, 5, prices).is_banned(PEERS[0])
    assert table(story, 6, prices).banned_until(PEERS[0]) == 14
    assert table(story, 13, prices).is_banned(PEERS[0])
    assert not table(story, 14, prices).is_banned(PEERS[0])
    # On probation the first lie is one too many, and its length is bounded.
    assert table(story, 20, prices).banned_until(PEERS[0]) == 32
    assert table(story, 21, prices).standings[PEERS[0]].bans == 2


def test_claims_after_a_ban_are_ruled_on():
    """Claims of a ban s last round are nothing and those of the next are ruled on."""
    story = Story(PEERS)
    prices = ScoreRules(ban=8)
    for round in (5, 6):
        story.claim(PEERS[0], round=round, behaviours=("invalid",) * 3)
    until = table(story, 6, prices).banned_until(PEERS[0])
    last, next = (story.claim(PEERS[0], round=round) for round in (until, until + 1))
    assert table(story, until - 1, prices).is_banned(PEERS[0], until)
    assert not table(story, until - 1, prices).is_banned(PEERS[0], until + 1)
    rulings = table(story, until + 1, prices).rulings
    assert last.id not in rulings
    assert rulings[next.id].outcome == "valid"


def test_what_a_banned_peer_claims_is_not_looked_at():
    story = Story(PEERS)
    for round in (5, 6, 7):
        claim = story.claim(PEERS[0], round, 0, ("invalid",) * 3)
    assert claim.id not in table(story).rulings


def test_a_base_keeps_those_who_did_most(monkeypatch):
    monkeypatch.setattr(reputation, "MOST_STANDINGS", 3)
    made = {name: Standing() for name in "abcde"}
    made["a"].bans = 1
    made["c"].claims["valid"] = 2
    made["d"].votes["agreed"] = 1
    base = Table(9, made, {}).base()
    assert list(base.standings) == ["a", "c", "d"]
    assert base.base().digest == base.digest


def test_scores_fade_to_nothing():
    story = Story(PEERS)
    story.claim(PEERS[0], 5, 0, ("invalid",) * 3)
    scores = [table(story, round).score(PEERS[0]) for round in (5, 6, 30, 10_000)]
    assert scores == sorted(scores)
    assert scores[1] == -(6000 * 255 // 256)
    assert scores[-1] == 0


def test_won_dispute_returns_what_was_taken():
    """A dispute gives back what was taken and its loser pays."""
    for vote, change in (
        ("valid", PRICES.upheld + PRICES.won),
        ("invalid", PRICES.rejected + PRICES.lost),
    ):
        story = Story(PEERS)
        claim = story.claim(PEERS[0], behaviours=("invalid", "invalid", "valid"))
        story.dispute(PEERS[0], claim, vote)
        assert table(story, 10).score(PEERS[0]) == change
        seats = story.verifiers(claim)[0]
        good = [
            p
            for p, said in zip(seats, ("invalid", "invalid", "valid"), strict=True)
            if said == vote
        ]
        assert all((table(story, 10).score(p) > 0) == (p in good) for p in seats)


def test_approving_a_planted_claim_costs_most():
    """Who approves a planted claim pays most and its author nothing."""
    story = Story(PEERS)
    slot = story.slots(PEERS[0], planted=True)[0]
    claim = story.claim(PEERS[0], slot=slot, behaviours=("invalid", "invalid", "valid"))
    story.open(claim)
    found = table(story, 10)
    assert found.score(PEERS[0]) == PRICES.upheld
    assert found.score(story.verifiers(claim)[0][2]) == PRICES.missed
    assert found.standings[PEERS[0]].claims["planted"] == 1


def test_author_of_a_right_plant_pays():
    """An author who planted something right pays and those who approved it do not."""
    story = Story(PEERS)
    slot = story.slots(PEERS[0], planted=True)[0]
    claim = story.claim(PEERS[0], slot=slot)
    story.open(claim, "valid")
    found = table(story, 10)
    assert found.score(PEERS[0]) == PRICES.lost
    assert all(found.score(peer) == PRICES.agreed for peer in story.verifiers(claim)[0])


def test_strangers_and_fresh_keys():
    found = table(Story(PEERS))
    assert found.score("stranger") == 0
    assert not found.is_banned("stranger")
    assert found.valid("stranger") == 0
    assert SETTLED > 2


def test_default_prices_reward_work():
    """With the default prices laziness does not pay and work does."""
    caught = (
        0.05 * 0.99**2
    )  # the share of blind approvals that are of a planted claim which the vote rejects
    assert (1 - caught) * PRICES.agreed + caught * PRICES.missed < 0
    slips = 0.01 * (0.95 * PRICES.against + 0.05 * PRICES.missed)
    assert 0.99 * PRICES.agreed + slips > 0


def test_prices_keep_cheating_unprofitable():
    """What the prices must keep to so that cheating does not pay."""
    assert PRICES.ceiling < -PRICES.rejected  # the best record does not pay for one lie
    assert (
        PRICES.withheld <= PRICES.against
    )  # nor is it cheaper to hide a vote than to cast a wrong one
    assert PRICES.missed <= PRICES.against  # or to approve blindly
    assert PRICES.absent > PRICES.present  # and to vote now and then does not keep a seat
    assert PRICES.lost < 0
