"""What a partner counts by what it has shown."""

import itertools

import pytest
import torch

from shoal.optim.exchange.averaging import GRID
from shoal.optim.exchange.base import RoundKey
from shoal.swarm.exchange.robust import KNOWN, PATIENCE, SHOWN, TAKEN, DistanceScreen, Newcomers

HALF = GRID // 2


def grown(where=lambda peer: "range"):
    """What a node knows after enough exchanges with a peer that was there from the beginning."""
    known = Newcomers(where)
    known.see(["old"])
    for _ in range(PATIENCE):
        assert known.take("old", HALF) == HALF
    return known


def test_a_newcomer_counts_half_as_much_until_three_of_its_contributions_counted():
    turn = itertools.count()
    known = grown(lambda peer: str(next(turn)))  # so that no other newcomer of its range is recent
    shares = [known.take("new", HALF) for _ in range(SHOWN + 2)]
    assert known.take("old", HALF) == HALF
    assert shares == [HALF // 2] * SHOWN + [HALF] * 2


def test_nobody_is_new_to_a_node_that_is_young_itself():
    known = Newcomers()
    assert [known.take(f"peer{number}", HALF) for number in range(PATIENCE)] == [HALF] * PATIENCE
    assert known.take("another", HALF) == HALF // 2


def test_a_peer_that_has_been_in_view_for_long_is_no_newcomer_though_it_was_never_met():
    known = grown()
    known.see(["waiting"])
    for _ in range(PATIENCE):
        known.take("old", HALF)
    assert known.take("waiting", HALF) == HALF
    assert known.take("come now", HALF) == HALF // 2


def test_contributions_that_were_refused_or_clipped_to_nothing_show_nothing():
    known = grown()
    for _ in range(SHOWN):
        assert known.take("new", 0) == 0
    assert known.take("new", HALF) == HALF // 2


def test_a_smaller_share_stays_as_it_is():
    assert grown().take("new", 7) == 7


@pytest.mark.parametrize(("ranges", "first", "long"), [(1, 1.7, 0.5), (4, 4.2, 1.7)])
def test_however_many_keys_come_their_ranges_bound_what_they_count(ranges, first, long):
    known = grown(lambda peer: str(int(peer.removeprefix("key")) % ranges))
    shares = [known.take(f"key{number}", HALF) / HALF for number in range(10 * TAKEN)]
    assert first - 0.1 < sum(shares[:TAKEN]) <= first  # in contributions of known partners
    assert max(sum(shares[at : at + TAKEN]) for at in range(TAKEN, len(shares) - TAKEN)) <= long


def test_newcomers_of_another_range_are_not_crowded_out():
    known = grown(lambda peer: peer[:3])
    for number in range(TAKEN - 1):
        known.take(f"bad{number}", HALF)
    assert known.take("good", HALF) == HALF // 2
    assert known.take("bad again", HALF) == HALF // 2 // TAKEN


def test_memory_is_bounded_and_who_is_in_view_is_not_forgotten():
    known = grown()
    for number in range(KNOWN + 10):
        known.see([f"flood{number}"])
        if number % 100 == 0:
            known.see(["old"])
    assert len(known._known) == KNOWN
    assert known.take("old", HALF) == HALF


def test_the_mean_of_a_pair_leans_to_this_node_where_the_partner_is_new():
    screen = DistanceScreen(robust="clipped-gossip", suspect=0)
    screen.newcomers = grown()

    def mean(peer):
        own, theirs = [torch.zeros(4)], [torch.full((4,), 8.0)]
        assert screen.problem(RoundKey("run", 0), lambda: own, peer, theirs) is None
        return screen.mean("me", 0, [("me", 1.0, own), (peer, 1.0, theirs)]).tensors[0][0].item()

    assert mean("old") == 4.0
    assert mean("new") == 2.0
