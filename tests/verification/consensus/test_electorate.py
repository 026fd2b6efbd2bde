"""Drawn verifiers and planted claims: who may be drawn, nobody chooses, everybody computes the
same.
"""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.verification.consensus.electorate import electorate
from shoal.verification.consensus.ledger import Ledger
from shoal.verification.consensus.planting import Chain, belongs, must_plant
from shoal.verification.consensus.reputation import ABSENT, Standing, Table
from shoal.verification.consensus.rulings import Rules
from shoal.verification.consensus.sortition import (
    LEAST,
    Electorate,
    beacon,
    draw_verifiers,
    is_audited,
)
from tests.support.consensus_stories import Story, digest

PEERS = tuple(f"p{number}" for number in range(6))
RULES = Rules(verifiers=3, life=64)


def drawn(standings, rules=RULES, round=10):
    story = Story(PEERS, rules=rules)
    found = electorate(
        "run", round, Ledger(story.records), story.electorates, rules, Table(round, standings, {})
    )
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
def test_absent_are_drawn_while_too_few_are_there(absent, left):
    """As long as no more than a draw needs are there the absent are drawn too."""
    assert len(drawn({peer: standing(absence=ABSENT) for peer in PEERS[:absent]})) == left


def test_only_the_proven_are_drawn_once_enough():
    """Of those who are there only the proven are drawn once they are enough."""
    proven = {peer: standing(valid=2) for peer in PEERS[:4]}
    assert drawn(proven) == set(PEERS[:4])
    # One of them is absent: three are no more than a draw needs, so all who are there are drawn.
    assert drawn({**proven, "p0": standing(valid=2, absence=ABSENT)}) == set(PEERS[1:])


LOTS_PEERS = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=4),
    st.sampled_from("uvwxyz") | st.text("01", min_size=3),
    max_size=24,
)


@settings(deadline=None)
@given(
    LOTS_PEERS,
    st.sampled_from([3, 5, 7]),
    st.sets(st.sampled_from("uvwxyz"), max_size=2),
    st.integers(0, 99),
)
def test_seats_are_disjoint_of_different_operators_and_never_the_barred(
    operators, size, barred, number
):
    drawn = draw_verifiers(Electorate(1, digest(number), operators), digest("case"), size, barred)
    shuffled = list(operators.items())
    random.Random(number).shuffle(shuffled)
    assert drawn == draw_verifiers(
        Electorate(1, digest(number), dict(shuffled)), digest("case"), size, barred
    )
    sitting = [peer for attempt in drawn for peer in attempt]
    used = [operators[peer] for peer in sitting]
    assert len(set(used)) == len(used)
    assert not set(used) & barred
    free = len({operator for operator in operators.values() if operator not in barred})
    assert bool(drawn) == (free >= LEAST)
    assert {len(attempt) for attempt in drawn} <= {min(size, free - (free % 2 == 0))}


def test_every_peer_is_drawn_as_often():
    electorate = Electorate(1, digest("beacon"), {f"p{i}": f"p{i}" for i in range(10)})
    count = Counter(
        peer for number in range(3000) for peer in draw_verifiers(electorate, digest(number), 3)[0]
    )
    # 900 expected of each; five standard deviations of a binomial count are 126.
    assert all(abs(count[f"p{i}"] - 900) < 126 for i in range(10))


@pytest.mark.parametrize("size", [0, 1, 2, 4, 33])
def test_sizes_that_cannot_vote_are_refused(size):
    with pytest.raises(ValueError, match="odd number"):
        draw_verifiers(Electorate(1, digest(0), {}), digest("case"), size)


def test_a_beacon_has_32_bytes():
    with pytest.raises(ValueError, match="32 bytes"):
        Electorate(1, b"short", {})


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=6), st.randoms())
def test_beacon_depends_on_run_round_and_salts(salts, shuffler):
    """The beacon depends on run round and every salt and not on order or copies."""
    found = beacon("run", 7, salts)
    mixed = salts + salts
    shuffler.shuffle(mixed)
    assert beacon("run", 7, mixed) == found
    assert len({beacon("run", 8, salts), beacon("other", 7, salts), found}) == 3
    if salts:
        fewer = [salt for salt in salts if salt != salts[0]]
        assert beacon("run", 7, fewer) != found


def test_audits_are_a_share():
    drawn = sum(is_audited(digest("beacon"), digest(number), 0.1) for number in range(10_000))
    assert abs(drawn - 1000) < 150  # five standard deviations
    assert is_audited(digest("beacon"), digest(1), 1.0)
    assert not is_audited(digest("beacon"), digest(1), 0.0)


@given(st.integers(0, 1000), st.integers(1, 40), st.data())
def test_links_belong_to_their_round_alone(start, length, data):
    chain = Chain(digest("secret"), start, length)
    round = data.draw(st.integers(start + 1, start + length))
    for steps in range(-1, length + 2):
        assert belongs(chain.link(round), chain.anchor, steps) == (steps == round - start)
    for outside in (start, start + length + 1):
        with pytest.raises(ValueError, match="covers"):
            chain.link(outside)


def test_link_is_not_derived_and_giants_are_not_hashed():
    """A link cannot be made from earlier ones and giants are not hashed."""
    chain = Chain(digest("secret"), 0, 10)
    assert not belongs(chain.link(4), chain.anchor, 5)
    assert not belongs(chain.link(4), chain.anchor, 2**60)
    with pytest.raises(ValueError, match="secret"):
        Chain(b"short", 0)


def test_lottery_depends_on_secret_and_beacon():
    """The lottery plants its share and depends on secret and beacon."""
    chain = Chain(digest("secret"), 0, 100)
    drawn = [
        [
            must_plant(chain.link(round), digest(beacon, round), slot, 0.05)
            for round in range(1, 101)
            for slot in range(100)
        ]
        for beacon in range(2)
    ]
    assert all(abs(sum(each) - 500) < 5 * 22 for each in drawn)
    assert drawn[0] != drawn[1]
