"""Active and passive view: bounded, filled by peers that answered, one range before another, and by
nobody who only pushes.
"""

import random
from collections import Counter

import pytest

from shoal.swarm.membership.peer_views import (
    ACTIVE_PEERS,
    MAX_HINTS,
    MAX_OF_SOURCE,
    OFFERED_OF_ACTIVE,
    PASSIVE_PEERS,
    Contact,
    PeerViews,
)


def contact(name, where="", source="", issued=0.0):
    return Contact(
        name,
        (f"/{name}",),
        source or name,
        where or f"range of {name}",
        f"record of {name}".encode(),
        issued,
    )


def views(seed=0):
    return PeerViews("me", random.Random(seed))


def crowd(count, name="p", **fields):
    return [contact(f"{name}{number}", **fields) for number in range(count)]


def meet(view, contacts):
    for each in contacts:
        view.met(each)


def test_the_views_are_as_large_as_hyparview_has_them():
    assert (ACTIVE_PEERS, PASSIVE_PEERS) == (5, 30)


def test_few_peers_are_kept_and_many_fill_the_view():
    """Few peers are all kept and many fill about thirty places."""
    few = views()
    meet(few, crowd(3))
    assert few.passive.keys() == {"p0", "p1", "p2"}
    many = views()
    meet(many, crowd(2000))
    assert 25 <= len(many.passive) <= PASSIVE_PEERS


def test_this_node_is_in_no_view_of_its_own():
    view = views()
    view.met(contact("me"))
    assert not view.hint(contact("me"))
    assert (view.passive, view.hints) == ({}, {})


def test_few_ranges_get_few_places():
    """40 honest peers, each in a range of its own, and 120 hostile ones in four ranges that turn up
    twice each.
    """
    places = Counter()
    for seed in range(12):
        view = views(seed)
        meet(view, crowd(40, "honest"))
        for _ in range(2):
            meet(view, [contact(f"hostile{n}", where=f"range {n % 4}") for n in range(120)])
        places.update(name.startswith("hostile") for name in view.passive)
    # Each place is of one of 44 ranges, with equal chances: 4 / 44 = 9 %. With one chance a key it
    # would be 120 / 160.
    assert places[True] / places.total() == pytest.approx(4 / 44, abs=0.05)


def test_within_a_range_all_peers_have_the_same_chance():
    found = Counter()
    for seed in range(80):
        view = views(seed)
        meet(view, crowd(40, where="a network"))
        found.update(list(view.passive))
    assert len(found) == 40
    assert max(found.values()) / min(found.values()) < 2.5


def test_nobody_can_work_out_which_peers_get_places():
    one, other = views(1), views(2)
    for view in (one, other):
        meet(view, crowd(500))
    assert len(one.passive.keys() & other.passive.keys()) < PASSIVE_PEERS / 2


def test_what_one_partner_names_fills_only_a_part():
    view = views()
    taken = [view.hint(each) for each in crowd(3 * MAX_OF_SOURCE, "named", source="partner")]
    assert sum(taken) == len(view.hints) == MAX_OF_SOURCE
    meet(view, list(view.hints.values()))
    assert not view.hints
    assert not any(
        view.hint(each) for each in crowd(100, "more", source="partner")
    )  # its share of the view is used up
    assert any(view.hint(each) for each in crowd(100, "more", source="another"))
    assert MAX_OF_SOURCE <= PASSIVE_PEERS / 4


def test_answering_peer_counts_for_its_namer():
    """A peer that answers itself still counts for the partner that named it."""
    view = views()
    view.hint(contact("p", source="partner"))
    view.met(contact("p"))
    assert view.passive["p"].source == "partner"


def test_hints_are_bounded():
    view = views()
    for number in range(10 * MAX_HINTS):
        view.hint(contact(f"p{number}", source=f"partner {number}"))
        assert len(view.hints) <= MAX_HINTS
    assert len(view.hints) == MAX_HINTS


def test_placeless_peer_is_not_dialled():
    """A peer that would get no place is not worth a dial."""
    view = views()
    meet(view, crowd(3000))
    worth = sum(view.hint(contact(f"new{number}", source=f"{number}")) for number in range(1000))
    # Of 4,000 peers the last thousand have a fourth of the 30 places when all were tried, so as few
    # as that matter.
    assert worth < 3 * PASSIVE_PEERS
    for name in list(view.hints):
        view.met(contact(name))
        assert name not in view.hints


def test_a_peer_is_in_one_view_at_a_time():
    view = views()
    meet(view, crowd(8))
    view.promote("p0")
    view.met(contact("p0", issued=7.0))
    assert "p0" not in view.passive
    assert view.active["p0"].issued == 7.0
    assert not view.hint(contact("p0"))
    view.drop("p0")
    assert not view.knows("p0")


def test_the_active_view_has_five_places_and_only_met_peers():
    view = views()
    view.hint(contact("hint"))
    view.promote("hint")
    assert view.active == {}
    meet(view, crowd(20))
    while (replacement := view.replacement()) is not None and len(view.active) < ACTIVE_PEERS:
        view.promote(replacement.peer)
    view.promote(next(iter(view.passive)))
    assert len(view.active) == ACTIVE_PEERS


def test_the_peer_that_was_active_longest_makes_room_for_another():
    view = views()
    meet(view, crowd(8))
    for number in range(ACTIVE_PEERS):
        view.promote(f"p{number}")
    view.met(contact("p0", issued=9.0))  # a newer record is no newer place
    view.promote("p6")
    assert list(view.active) == ["p1", "p2", "p3", "p4", "p6"]
    assert view.passive.keys() == {"p0", "p5", "p7"}
    view.promote("unknown")
    assert len(view.active) == ACTIVE_PEERS


@pytest.mark.parametrize("seed", range(10))
def test_second_of_a_range_comes_after_one_of_each(seed):
    """A second peer of a range becomes active after one of each."""
    view = views(seed)
    meet(view, [*crowd(20, "near", where="one"), contact("far", where="another")])
    for _ in range(2):
        view.promote(view.replacement().peer)
    assert "far" in view.active


def test_sample_is_fresh_and_without_its_partner():
    """A sample is of both views fresh and without its partner."""
    view = views()
    meet(view, crowd(20, issued=100.0))
    meet(view, crowd(5, "old", issued=10.0))
    for name in [name for name in view.passive if name.startswith("p")][:4]:
        view.promote(name)
    partner = next(iter(view.active))
    for _ in range(20):
        sample = view.sample(7, partner, since=50.0)
        assert len(set(sample)) == len(sample) == 7
        names = {record.decode().rpartition(" ")[2] for record in sample}
        assert partner not in names
        assert not any(name.startswith("old") for name in names)
        assert len(names & view.active.keys()) == OFFERED_OF_ACTIVE
    assert len(view.sample(2, partner, since=50.0)) == 2
    assert view.sample(0, partner, since=50.0) == ()


def test_next_partner_is_passive_while_any_is():
    """The next partner is any of the passive view and active only if all are."""
    view = views()
    meet(
        view,
        [
            contact("a", issued=3.0),
            contact("b", issued=1.0),
            contact("c", issued=2.0),
            contact("d", issued=0.0),
        ],
    )
    view.promote("d")
    # Not that of the oldest record: hostile peers that the directory shows are never asked, and so
    # have the oldest.
    found = Counter(view.partner().peer for _ in range(300))
    assert found.keys() == {"a", "b", "c"}
    assert min(found.values()) > 60
    for name in "abc":
        view.promote(name)
    assert view.partner().peer in "abcd"
    assert views().partner() is None


def test_a_dropped_peer_leaves_its_place_to_others():
    view = views()
    meet(view, crowd(3))
    view.promote("p0")
    view.hint(contact("p9"))
    for name in ("p0", "p1", "p9", "unknown"):
        view.drop(name)
    assert (view.active, set(view.passive), view.hints) == ({}, {"p2"}, {})
    assert any(view.hint(each) for each in crowd(30, "new"))
