"""The choice between the ways to a peer, by what exchanges moved."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.pacing import EVERY, FASTER, MOST, PEERS, Ways

RELAY, PAST = False, True
PEER = "peer"


def run(ways, rates, exchanges, size=1.0):
    """Make exchanges by the way that is chosen; return the seconds that each took, the ways, and
    which were tries.
    """
    took, chosen, tries = [], [], []
    for _ in range(exchanges):
        way = ways.choose(PEER)
        tries.append(ways.tries(PEER, way))
        ways.note(PEER, way, rates[way])
        took.append(size / rates[way])
        chosen.append(way)
    return took, chosen, tries


def test_nothing_known_goes_past_the_relay_and_each_way_is_tried_once():
    ways = Ways()
    assert ways.best(PEER) == PAST
    _, chosen, tries = run(ways, {RELAY: 5e6, PAST: 1e6}, 4)
    assert chosen == [PAST, RELAY, RELAY, RELAY]
    assert tries == [False, True, False, False]
    assert ways.best(PEER) == RELAY
    assert ways.rate() == 5e6


def test_a_relay_that_was_measured_before_is_kept_only_if_it_is_quicker():
    ways = Ways()
    ways.note(PEER, RELAY, 1e6)
    _, chosen, tries = run(ways, {RELAY: 1e6, PAST: 1e6}, EVERY)
    assert set(chosen) == {PAST}
    assert tries == [True] + [False] * (EVERY - 1)


@given(st.floats(1e3, 1e9), st.floats(1 / MOST, MOST), st.integers(2, 5 * EVERY))
def test_it_is_slower_than_the_better_way_by_the_first_try_and_a_part_of_the_time(
    relay, ratio, exchanges
):
    past = relay * ratio
    took, chosen, _ = run(Ways(), {RELAY: relay, PAST: past}, exchanges)
    best, worst = 1 / max(relay, past), 1 / min(relay, past)
    assert sum(took) <= FASTER * exchanges * best * (1 + 1 / EVERY) * (1 + 1e-9) + worst
    if relay <= past:
        assert chosen.count(RELAY) <= 1 + exchanges / EVERY


def test_the_slower_way_is_tried_again_so_seldom_that_it_costs_a_part_of_the_time():
    took, chosen, tries = run(Ways(), {RELAY: 4e6, PAST: 1e6}, 2 + 3 * (4 * EVERY + 1), 1e6)
    tried = [number for number, way in enumerate(chosen) if way == PAST]
    assert [later - earlier for earlier, later in itertools.pairwise(tried)] == [4 * EVERY + 1] * 3
    assert [number for number, one in enumerate(tries) if one] == [1, *tried[1:]]
    assert sum(took[2:]) <= len(took[2:]) / 4 * (1 + 1 / EVERY)


def test_who_takes_the_slower_way_when_it_is_not_due_tries_nothing():
    ways = Ways()
    run(ways, {RELAY: 4e6, PAST: 1e6}, 5)
    assert not ways.tries(PEER, PAST)


@pytest.mark.parametrize("way", [RELAY, PAST])
def test_a_way_that_has_become_the_better_one_is_found_again(way):
    ways = Ways()
    run(ways, {way: 1e6, not way: 1e7}, 10)
    assert ways.best(PEER) != way
    _, chosen, _ = run(ways, {way: 1e8, not way: 1e7}, 10 * EVERY + 10)
    assert chosen[-1] == way


def test_one_that_failed_gives_way_at_once_and_is_tried_again_later():
    ways, rates = Ways(), {RELAY: 1e6, PAST: 2e6}
    run(ways, rates, 3)
    assert ways.choose(PEER) == PAST
    ways.failed(PEER, PAST)
    assert ways.choose(PEER) == RELAY
    _, chosen, _ = run(ways, rates, 2 * EVERY + 1)
    assert chosen[-1] == PAST


def test_one_that_failed_before_it_carried_anything_gives_way_too():
    ways = Ways()
    ways.failed(PEER, PAST)
    assert ways.choose(PEER) == RELAY
    ways.note(PEER, RELAY, 1.0)
    assert ways.choose(PEER) == RELAY


def test_an_exchange_that_was_given_up_tells_the_rate_so_far():
    ways = Ways()
    ways.failed(PEER, PAST, 5e5)
    assert ways.rate() == 5e5
    ways.failed(PEER, PAST, 9e5)  # it was not given up for being quick
    assert ways.rate() == 5e5


def test_both_ends_choose_the_same_whoever_calls():
    ends, rates = [Ways(), Ways()], {RELAY: 3e6, PAST: 1e6}
    for number in range(4 * EVERY):
        way = ends[number % 2].choose(PEER)
        assert way == ends[1 - number % 2].choose(PEER)
        for end in ends:
            end.note(PEER, way, rates[way])


def test_what_is_remembered_is_bounded():
    ways = Ways()
    for number in range(2 * PEERS):
        ways.note(f"{number}", RELAY, 1.0)
        ways.failed(PEER, PAST)
    assert len(ways._known) == PEERS


def test_the_rate_is_the_median_of_peers_by_their_better_way():
    ways = Ways()
    assert ways.rate() == 0.0
    for peer, rate in (("a", 1.0), ("b", 2.0), ("c", 9.0)):
        ways.note(peer, RELAY, rate)
    ways.note("a", PAST, 3.0)
    ways.failed("d", RELAY)
    assert ways.rate() == 3.0
