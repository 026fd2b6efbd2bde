"""Who may be drawn: those who entered, are not banned, have shown that they work, and cast their votes."""

import pytest
from stories import Story

from shoal.verification.consensus.participant import electorate
from shoal.verification.consensus.records import Ledger
from shoal.verification.consensus.rulings import ABSENT, Rules, Standing, Table

PEERS = tuple(f"p{number}" for number in range(6))
RULES = Rules(verifiers=3, life=64)


def drawn(standings, rules=RULES, round=10):
    story = Story(PEERS, rules=rules)
    found = electorate("run", round, Ledger(story.records), story.electorates, rules, Table(round, standings, {}))
    return set(found.operators)


def standing(valid=0, absence=0):
    made = Standing(absence=absence)
    made.claims["valid"] = valid
    return made


def test_all_who_entered_are_drawn_at_first():
    assert drawn({}) == set(PEERS)


@pytest.mark.parametrize(("absence", "is_drawn"), [(ABSENT - 1, True), (ABSENT, False)])
def test_a_peer_that_misses_its_votes_is_not_drawn(absence, is_drawn):
    assert ("p0" in drawn({"p0": standing(absence=absence)})) == is_drawn


@pytest.mark.parametrize(("absent", "left"), [(2, 4), (3, 6), (6, 6)])
def test_as_long_as_no_more_than_a_draw_needs_are_there_the_absent_are_drawn_too(absent, left):
    assert len(drawn({peer: standing(absence=ABSENT) for peer in PEERS[:absent]})) == left


def test_of_those_who_are_there_only_the_proven_are_drawn_once_they_are_enough():
    proven = {peer: standing(valid=2) for peer in PEERS[:4]}
    assert drawn(proven) == set(PEERS[:4])
    # One of them is absent: three are no more than a draw needs, so all who are there are drawn.
    assert drawn({**proven, "p0": standing(valid=2, absence=ABSENT)}) == set(PEERS[1:])
