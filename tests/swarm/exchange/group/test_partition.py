"""The arithmetic of groups: dealing, deciding, and which round a latecomer goes to."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim.exchange.base import common
from shoal.swarm.exchange.context import RoundTracker
from shoal.swarm.exchange.group.leader import partition_into_groups


@given(st.sets(st.text(min_size=1), min_size=2, max_size=40), st.integers(2, 9), st.integers(0, 5), st.integers(0, 99))
def test_everybody_is_dealt_into_one_group_of_nearly_equal_size(peers, largest, seed, round):
    groups = partition_into_groups(seed, round, peers, largest)
    assert sorted(itertools.chain(*groups)) == sorted(peers)
    sizes = [len(group) for group in groups]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 2
    assert max(sizes) <= largest + (largest == 2 and len(peers) % 2)
    assert groups == partition_into_groups(seed, round, sorted(peers, reverse=True), largest)


def test_a_largest_group_of_one_is_a_mistake():
    with pytest.raises(ValueError, match="at least two"):
        partition_into_groups(0, 0, "ab", 1)


@given(st.integers(2, 7).flatmap(lambda n: st.dictionaries(st.integers(0, n - 1), st.integers(0, 2**n - 1), max_size=n)))
def test_all_takers_hold_the_whole_mean_and_are_in_it(reports):
    held = {place: places | 1 << place for place, places in reports.items()}
    mean, takers = common(held)
    taking = [place for place in held if takers >> place & 1]
    if not mean:
        assert takers == 0
        return
    assert len(taking) >= 2
    for place in taking:
        assert mean & ~held[place] == 0
        assert mean >> place & 1


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ({0: 0b111, 1: 0b111, 2: 0b111}, (0b111, 0b111)),
        ({0: 0b111, 1: 0b111}, (0b111, 0b11)),  # the third died, but both have what it sent
        ({0: 0b111, 1: 0b011}, (0b011, 0b11)),  # only one has it
        ({0: 0b011, 1: 0b011, 2: 0b111}, (0b011, 0b011)),  # what the third sent was of no use
        ({0: 0b1101, 1: 0b1110, 2: 0b1111, 3: 0b1111}, (0b1110, 0b1110)),  # the first two cannot reach each other
        ({0: 0b1111, 1: 0b1111, 2: 0b0100, 3: 0b1111}, (0b1111, 0b1011)),  # one that says it holds nobody's goes alone
        ({0: 0b0111, 1: 0b0111, 2: 0b0111, 3: 0b1111}, (0b0111, 0b0111)),  # whom all the others refuse is out, alone
        ({0: 0b1101, 1: 0b1111, 2: 0b1111, 3: 0b1111}, (0b1101, 0b1101)),  # one refuses one: the refused is out
        ({0: 0b1}, (0, 0)),
        ({0: 0b01, 1: 0b10}, (0, 0)),
        ({}, (0, 0)),
    ],
)
def test_what_is_decided(held, expected):
    assert common(held) == expected


def test_a_latecomer_is_sent_to_the_next_round_of_its_fragment():
    rounds = RoundTracker(3)
    rounds.begin(4, 1)
    assert rounds.instead(4, 1) is None
    assert rounds.instead(1, 1) == 4
    rounds.end(4, 1)
    assert [rounds.instead(round, 1) for round in (1, 4, 7)] == [7, 7, None]
    rounds.begin(7, 1)
    assert [rounds.instead(round, 1) for round in (4, 6, 7, 8, 10)] == [7, 7, None, 10, None]
    assert rounds.next_round == 8
    assert rounds.instead(5, 3) == 8  # a last average of everything, behind where this node will be


def test_a_node_that_joined_tells_of_no_round_before_its_first():
    rounds = RoundTracker(2)
    rounds.next_round = 5
    assert [rounds.instead(round, 0) for round in (1, 4, 5, 6)] == [5, 6, None, None]


def test_what_a_node_leads_says_nothing_of_its_own_rounds():
    rounds = RoundTracker(1)
    rounds.formed(10**6, 0)
    assert rounds.instead(10**6, 0) == 10**6 + 1
    assert rounds.instead(3, 0) is None


@given(st.integers(1, 5), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_who_moves_stays_in_step_and_within_the_limit(fragments, mine, wanted, limit):
    moved = RoundTracker(fragments).within(wanted, mine, limit)
    assert moved == mine or (mine < moved <= min(wanted, limit) and (wanted - moved) % fragments == 0)
