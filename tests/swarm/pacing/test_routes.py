"""The choice between the routes to a peer, by what exchanges moved."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.pacing.routes import (
    MAX_PEERS,
    MAX_TRIAL_FACTOR,
    RELAY_ADVANTAGE,
    TRIAL_EXCHANGES,
    Routes,
)

RELAY, PAST = False, True
PEER = "peer"


def run(routes, rates, exchanges, size=1.0):
    """Make exchanges by the way that is chosen; return the seconds that each took, the routes, and
    which were tries.
    """
    took, chosen, tries = [], [], []
    for _ in range(exchanges):
        way = routes.choose(PEER)
        tries.append(routes.is_trial(PEER, way))
        routes.note(PEER, way, rates[way])
        took.append(size / rates[way])
        chosen.append(way)
    return took, chosen, tries


def test_unknown_routes_try_the_relay_first():
    """Nothing known goes past the relay and each route is tried once."""
    routes = Routes()
    assert routes.best(PEER) == PAST
    _, chosen, tries = run(routes, {RELAY: 5e6, PAST: 1e6}, 4)
    assert chosen == [PAST, RELAY, RELAY, RELAY]
    assert tries == [False, True, False, False]
    assert routes.best(PEER) == RELAY
    assert routes.rate() == 5e6


def test_measured_relay_is_kept_if_quicker():
    """A relay that was measured before is kept only if it is quicker."""
    routes = Routes()
    routes.note(PEER, RELAY, 1e6)
    _, chosen, tries = run(routes, {RELAY: 1e6, PAST: 1e6}, TRIAL_EXCHANGES)
    assert set(chosen) == {PAST}
    assert tries == [True] + [False] * (TRIAL_EXCHANGES - 1)


@given(
    st.floats(1e3, 1e9),
    st.floats(1 / MAX_TRIAL_FACTOR, MAX_TRIAL_FACTOR),
    st.integers(2, 5 * TRIAL_EXCHANGES),
)
def test_cost_of_routes_is_bounded(relay, ratio, exchanges):
    """It is slower than the better way by the first try and a part of the time."""
    past = relay * ratio
    took, chosen, _ = run(Routes(), {RELAY: relay, PAST: past}, exchanges)
    best, worst = 1 / max(relay, past), 1 / min(relay, past)
    assert (
        sum(took)
        <= RELAY_ADVANTAGE * exchanges * best * (1 + 1 / TRIAL_EXCHANGES) * (1 + 1e-9) + worst
    )
    if relay <= past:
        assert chosen.count(RELAY) <= 1 + exchanges / TRIAL_EXCHANGES


def test_slower_way_is_retried_rarely():
    """The slower way is tried again so seldom that it costs a part of the time."""
    took, chosen, tries = run(
        Routes(), {RELAY: 4e6, PAST: 1e6}, 2 + 3 * (4 * TRIAL_EXCHANGES + 1), 1e6
    )
    tried = [number for number, way in enumerate(chosen) if way == PAST]
    assert [later - earlier for earlier, later in itertools.pairwise(tried)] == [
        4 * TRIAL_EXCHANGES + 1
    ] * 3
    assert [number for number, one in enumerate(tries) if one] == [1, *tried[1:]]
    assert sum(took[2:]) <= len(took[2:]) / 4 * (1 + 1 / TRIAL_EXCHANGES)


def test_unplanned_slow_way_tries_nothing():
    """Who takes the slower way when it is not due tries nothing."""
    routes = Routes()
    run(routes, {RELAY: 4e6, PAST: 1e6}, 5)
    assert not routes.is_trial(PEER, PAST)


@pytest.mark.parametrize("way", [RELAY, PAST])
def test_improved_way_is_found_again(way):
    """A way that has become the better one is found again."""
    routes = Routes()
    run(routes, {way: 1e6, not way: 1e7}, 10)
    assert routes.best(PEER) != way
    _, chosen, _ = run(routes, {way: 1e8, not way: 1e7}, 10 * TRIAL_EXCHANGES + 10)
    assert chosen[-1] == way


def test_failed_way_yields_and_is_retried_later():
    """One that failed gives way at once and is tried again later."""
    routes, rates = Routes(), {RELAY: 1e6, PAST: 2e6}
    run(routes, rates, 3)
    assert routes.choose(PEER) == PAST
    routes.failed(PEER, PAST)
    assert routes.choose(PEER) == RELAY
    _, chosen, _ = run(routes, rates, 2 * TRIAL_EXCHANGES + 1)
    assert chosen[-1] == PAST


def test_one_that_failed_before_it_carried_anything_gives_way_too():
    routes = Routes()
    routes.failed(PEER, PAST)
    assert routes.choose(PEER) == RELAY
    routes.note(PEER, RELAY, 1.0)
    assert routes.choose(PEER) == RELAY


def test_given_up_exchange_tells_its_rate():
    """An exchange that was given up tells the rate so far."""
    routes = Routes()
    routes.failed(PEER, PAST, 5e5)
    assert routes.rate() == 5e5
    routes.failed(PEER, PAST, 9e5)  # it was not given up for being quick
    assert routes.rate() == 5e5


def test_both_ends_choose_the_same_whoever_calls():
    ends, rates = [Routes(), Routes()], {RELAY: 3e6, PAST: 1e6}
    for number in range(4 * TRIAL_EXCHANGES):
        way = ends[number % 2].choose(PEER)
        assert way == ends[1 - number % 2].choose(PEER)
        for end in ends:
            end.note(PEER, way, rates[way])


def test_what_is_remembered_is_bounded():
    routes = Routes()
    for number in range(2 * MAX_PEERS):
        routes.note(f"{number}", RELAY, 1.0)
        routes.failed(PEER, PAST)
    assert len(routes._known) == MAX_PEERS


def test_rate_is_the_median_of_better_ways():
    """The rate is the median of peers by their better way."""
    routes = Routes()
    assert routes.rate() == 0.0
    for peer, rate in (("a", 1.0), ("b", 2.0), ("c", 9.0)):
        routes.note(peer, RELAY, rate)
    routes.note("a", PAST, 3.0)
    routes.failed("d", RELAY)
    assert routes.rate() == 3.0
