import hashlib
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.optim.rollout_selection import REASONS, Candidate, has_spread, select

CANDIDATES = st.lists(
    st.builds(
        Candidate, key=st.sampled_from([f"group-{number}" for number in range(20)]),
        sender=st.sampled_from(["anna", "bert", "cleo"]), round=st.integers(3, 8),
        rewards=st.lists(st.sampled_from([0.0, 0.01, 1.0]), max_size=4).map(tuple),
    ),
    max_size=25,
)  # fmt: skip
OPTIONS = st.fixed_dictionaries(
    {
        "count": st.integers(0, 8), "seed": st.integers(0, 2**64), "max_age": st.integers(0, 4),
        "per_sender": st.none() | st.integers(1, 4),
    }
)  # fmt: skip


def crowd(size, senders=1):
    return [Candidate(str(number), str(number % senders), 0, (0.0, 1.0)) for number in range(size)]


@given(CANDIDATES, OPTIONS)
def test_every_candidate_is_accounted_for(candidates, options):
    """What is picked is fit and everything else is accounted for."""
    picked = select(candidates, round=7, **options)
    chosen = [candidates[place] for place in picked.indices]
    assert all(has_spread(one.rewards) and one.round >= 7 - options["max_age"] for one in chosen)
    assert len({one.key for one in chosen}) == len(chosen) <= options["count"]
    assert max(Counter(one.sender for one in chosen).values(), default=0) <= (
        options["per_sender"] or 99
    )
    assert tuple(picked.left_out) == REASONS
    assert sum(picked.left_out.values()) + len(chosen) == len(candidates)
    assert picked.left_out["duplicate"] == len(candidates) - len({one.key for one in candidates})
    if picked.left_out["not_drawn"]:
        assert len(chosen) == options["count"]


@given(CANDIDATES, OPTIONS, st.randoms())
def test_the_order_in_which_groups_came_does_not_matter(candidates, options, random):
    first, shuffled = (
        select(candidates, round=7, **options),
        random.sample(candidates, len(candidates)),
    )
    second = select(shuffled, round=7, **options)
    assert [candidates[place] for place in first.indices] == [
        shuffled[place] for place in second.indices
    ]
    assert first.left_out == second.left_out


@given(CANDIDATES, OPTIONS)
def test_a_group_without_spread_changes_nothing_but_its_count(candidates, options):
    dull = [Candidate(f"dull-{number}", "anna", 7, (1.0,) * number) for number in range(4)]
    without, with_them = (
        select(candidates, round=7, **options),
        select(candidates + dull, round=7, **options),
    )
    assert with_them.indices == without.indices
    before = without.left_out
    assert with_them.left_out == {**before, "no_spread": before["no_spread"] + 4}


def test_reasons():
    good = Candidate("good", "anna", 7, (0.0, 1.0))
    candidates = [
        good,
        replace(good, sender="zora", round=9),  # sent again by someone else
        replace(good, key="stale", round=4),
        replace(
            good, key="early", round=9, sender="bert"
        ),  # from before this node went back to a checkpoint
        replace(good, key="dull", rewards=(0.5, 0.5)),
        replace(good, key="empty", rewards=()),
        replace(good, key="more"),
    ]
    picked = select(candidates, 5, seed=0, round=7, max_age=2, per_sender=1)
    assert picked.left_out == {
        "duplicate": 1,
        "stale": 1,
        "off_policy": 0,
        "no_spread": 2,
        "over_quota": 1,
        "not_drawn": 0,
    }
    assert {candidates[place].sender for place in picked.indices} == {"anna", "bert"}


def test_a_group_does_not_grow_young_by_being_sent_again():
    old = Candidate("group", "bert", 1, (0.0, 1.0))
    for copies in (
        [old, replace(old, sender="anna", round=7)],
        [replace(old, sender="anna", round=7), old],
    ):
        assert select(copies, 1, seed=0, round=7, max_age=2).left_out["stale"] == 1


def test_the_draw_is_uniform_and_fresh_each_round():
    candidates, rounds, count = crowd(10), 3000, 3
    met = Counter()
    together = Counter()
    for round in range(rounds):
        places = select(candidates, count, seed=5, round=round, max_age=rounds).indices
        met.update(places)
        together.update([tuple(sorted(places))])
    expected = rounds * count / 10
    # Draws without replacement vary less than independent ones: by (1 - count / 10).
    chi_square = (
        sum((met[place] - expected) ** 2 / expected for place in range(10))
        / (1 - count / 10)
        * 9
        / 10
    )
    assert chi_square < 27.9  # 9 degrees of freedom: one in a thousand is above
    assert len(together) == 120


def test_large_sender_is_sampled():
    """Of a sender with many groups some are drawn and others get their share."""
    flood = [Candidate(f"flood-{number}", "flood", 0, (0.0, 1.0)) for number in range(1000)]
    few = [Candidate(f"few-{number}", f"peer-{number}", 0, (0.0, 1.0)) for number in range(3)]
    picked = [
        select(flood + few, 4, seed=1, round=round, max_age=200, per_sender=2)
        for round in range(200)
    ]
    assert all(one.left_out["over_quota"] == 998 for one in picked)
    assert all(one.left_out["not_drawn"] == 1 for one in picked)
    drawn = [one.indices for one in picked]
    from_flood = [[place for place in places if place < 1000] for places in drawn]
    assert all(len(places) <= 2 for places in from_flood)
    assert (
        len({place for places in from_flood for place in places}) > 250
    )  # not always the same ones


def test_the_order_is_by_the_documented_hash():
    ordered = sorted(
        range(6),
        key=lambda place: hashlib.sha256(f"shoal/rollouts/1:7:3:{place}".encode()).digest(),
    )
    assert select(crowd(6), 4, seed=7, round=3, max_age=3).indices == tuple(ordered[:4])


@pytest.mark.parametrize("wrong", [{"count": -1}, {"max_age": -1}, {"per_sender": 0}])
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="must be at least 0"):
        select([], **{"count": 1, "seed": 0, "round": 0, "max_age": 0, **wrong})


def test_max_behind_leaves_out_what_an_older_policy_wrote():
    candidates = [Candidate(str(behind), "peer", 0, (0.0, 1.0), behind) for behind in range(5)]
    picked = select(candidates, 9, seed=1, round=0, max_age=0, max_behind=2)
    assert sorted(candidates[place].behind for place in picked.indices) == [0, 1, 2]
    assert picked.left_out["off_policy"] == 2
    assert len(select(candidates, 9, seed=1, round=0, max_age=0).indices) == 5
    with pytest.raises(ValueError, match="max_behind"):
        select(candidates, 9, seed=1, round=0, max_age=0, max_behind=-1)
