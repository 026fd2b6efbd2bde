"""Deadlines follow what a round moves and how long it takes; the settings are the least."""

import pytest

from shoal.optim.codecs.floats import FLOAT32
from shoal.swarm.exchange.group.commit import moved
from shoal.swarm.exchange.round_time import LONGEST_S, RoundTime
from shoal.swarm.exchange.timeouts import LARGEST_S, LEAST_RATE, ExchangeTimeouts
from shoal.swarm.pacing.progress import MAX_EXTENSION_S, SLOWEST_BYTES_PER_S
from shoal.swarm.state.offers import MAKE_S, making_s
from shoal.swarm.state.progress import FETCH_S
from shoal.swarm.state.query import ATTEMPTS, StateQuery
from shoal.swarm.state.sync import _grace_s
from shoal.swarm.wire.messages import StateRequest

TIMEOUTS = ExchangeTimeouts(10.0, 5.0, 120.0)
SMALL, REAL = 2_000_000, 538_060_032  # bytes: of a toy, and of 135 million parameters in float32


def test_the_setting_is_the_least_and_bytes_give_more():
    assert TIMEOUTS.moving(SMALL) == 120.0
    assert TIMEOUTS.moving(REAL) == pytest.approx(REAL / LEAST_RATE)
    assert TIMEOUTS.moving(2**60) == LARGEST_S


def test_a_round_has_time_for_its_parts():
    quick, slow = rounds_at(), rounds_at(0.0, 300.0, 600.0)
    assert quick.limit(SMALL, 0) == 10.0 + SMALL / SLOWEST_BYTES_PER_S + 8 * 5.0
    assert slow.limit(REAL, 0) == 60.0 + MAX_EXTENSION_S + 8 * 5.0


@pytest.mark.parametrize(("members", "times"), [(2, 2), (3, 2), (4, 3), (16, 15)])
def test_in_a_group_everybody_gets_what_all_others_send(members, times):
    assert moved(100, members) == 100 * times


def rounds_at(*times):
    found = RoundTime(TIMEOUTS, 1)
    for now in times:
        found.begin(now)
    return found


@pytest.mark.parametrize(
    ("rounds", "patience"),
    [
        ((0.0, 500.0, 1000.0), 100.0),
        ((0.0, 86_400.0, 2 * 86_400.0), LONGEST_S),
        ((), 10.0),
        ((0.0,), 10.0),
        ((0.0, 500.0), 10.0),
        ((0.0, 2.0, 4.0), 10.0),
        ((0.0, 2.0, 30_000.0), 10.0),
        ((0.0, 30_000.0, 30_002.0), 10.0),  # one long pause is no measure
    ],
)
def test_waits_follow_the_length_of_rounds(rounds, patience):
    """Long rounds wait for a fifth of their time and quick ones and the first two as long as
    is set.
    """
    assert rounds_at(*rounds).patience() == patience


def test_newcomer_waits_for_a_large_exchange():
    """A newcomer waits for a source that exchanges a large model."""
    assert making_s(SMALL) == pytest.approx(MAKE_S, rel=0.05)
    assert making_s(REAL) > TIMEOUTS.moving(REAL)


def test_a_very_large_state_may_travel_for_hours_whatever_comes():
    request = StateRequest(swarm="a" * 52, model="0" * 64)
    assert _grace_s(StateQuery(request, [(10, 10)], {"momentum": [(10, 10)]})) == FETCH_S
    shapes = [(70_000, 100_000)]  # seven billion values, and as many of momentum
    large = StateQuery(request, shapes, {"momentum": shapes})
    assert _grace_s(large) == ATTEMPTS * 2 * FLOAT32.nbytes(shapes) / LEAST_RATE
