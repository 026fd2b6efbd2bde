"""The plan of a chaos run: the same from the same seed, fair, and never the end of the swarm."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.chaos.plan import draw_plan

plans = st.fixed_dictionaries(
    {
        "peers": st.integers(2, 12),
        "seconds": st.floats(10, 1800),
        "kills_per_minute": st.floats(0, 20),
        "stops_per_minute": st.floats(0, 5),
        "seed": st.integers(0, 2**32),
    }
)


@settings(deadline=None)
@given(plans)
def test_a_plan_follows_from_its_seed_and_leaves_half_of_the_nodes_alone(how):
    plan = draw_plan(**how)
    assert plan == draw_plan(**how)
    assert [hit.at_s for hit in plan] == sorted(hit.at_s for hit in plan)
    for number, hit in enumerate(plan):
        assert 0 < hit.at_s < how["seconds"]
        assert 0 <= hit.peer < how["peers"]
        assert hit.seconds > 0
        down = {other.peer for other in plan[:number] if other.at_s + other.seconds > hit.at_s}
        assert hit.peer not in down
        assert len(down) + 1 <= max(how["peers"] // 2, 1)


def test_two_kills_a_minute_are_two_kills_a_minute_and_the_creators_turn_comes():
    for seed in range(50):
        plan = draw_plan(peers=8, seconds=300, kills_per_minute=2, stops_per_minute=0, seed=seed)
        assert [hit.kind for hit in plan] == ["kill"] * 10
        assert {hit.peer for hit in plan[:8]} == set(range(8))
        few = draw_plan(peers=8, seconds=120, kills_per_minute=2, stops_per_minute=1, seed=seed)
        killed = [hit.peer for hit in few if hit.kind == "kill"]
        assert (len(few), len(killed), len(set(killed))) == (6, 4, 4)
        assert 0 in killed


def test_nothing_happens_where_nothing_is_asked_for():
    assert draw_plan(peers=2, seconds=60, kills_per_minute=0, stops_per_minute=0, seed=0) == []


@pytest.mark.parametrize("wrong", [{"peers": 1}, {"seconds": 0}, {"kills_per_minute": -1}, {"stops_per_minute": -1}])
def test_what_makes_no_plan(wrong):
    how = {"peers": 2, "seconds": 60, "kills_per_minute": 1, "stops_per_minute": 1, "seed": 0}
    with pytest.raises(ValueError, match="a plan needs"):
        draw_plan(**{**how, **wrong})
