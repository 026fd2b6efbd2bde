"""A partner's weights are tried on data: what raises the loss more than is usual is refused."""

import math

import pytest
import torch

from shoal.optim.exchange.base import RoundKey
from shoal.swarm.exchange.robust import FIRST, DistanceScreen, LossCheck

KEY = RoundKey("run", 0)


class Given:
    """Losses that a test gives."""

    def __init__(self):
        self.losses = (1.0, 1.0, 1.0)

    def __call__(self, fragment, own, theirs):
        return self.losses


@pytest.fixture
def given():
    return Given()


def verdict(check, given, mine, mean, alone, fragment=0):
    given.losses = (mine, mean, alone)
    return check.problem(RoundKey("run", 0, fragment), [], [])


def taught(given, mean=0.01, alone=0.02):
    """A check that knows what is usual."""
    check = LossCheck(given)
    for number in range(FIRST):
        sign = (-1) ** number
        assert verdict(check, given, 1.0, 1.0 + sign * mean, 1.0 + sign * alone) is None
    return check


def test_the_first_partners_may_raise_the_loss_by_5_and_10_per_cent(given):
    assert verdict(LossCheck(given), given, 2.0, 2.09, 2.19) is None
    assert "2.11" in verdict(LossCheck(given), given, 2.0, 2.11, 2.0)
    assert "2.21" in verdict(LossCheck(given), given, 2.0, 2.0, 2.21)


def test_then_6_times_what_is_usual_with_the_mean_and_8_times_with_the_partner_alone(given):
    assert verdict(taught(given), given, 1.0, 1.059, 1.159) is None
    assert verdict(taught(given), given, 1.0, 1.061, 1.0) is not None
    assert verdict(taught(given), given, 1.0, 1.0, 1.161) is not None


def test_partners_that_change_nothing_leave_room_of_1_and_2_per_cent(given):
    check = taught(given, 0.0, 0.0)
    assert verdict(check, given, 1.0, 1.009, 1.019) is None
    assert verdict(check, given, 1.0, 1.011, 1.0) is not None


def test_who_is_better_is_never_refused(given):
    assert verdict(taught(given), given, 5.0, 3.0, 1.0) is None


def test_a_minority_cannot_widen_the_bounds_but_a_change_for_all_does(given):
    check = taught(given)
    for _ in range(40):  # two honest ones, then a hostile one
        assert verdict(check, given, 1.0, 1.01, 1.02) is None
        assert verdict(check, given, 1.0, 0.99, 0.98) is None
        assert verdict(check, given, 1.0, 1.5, 2.0) is not None
    refused = 0
    while verdict(check, given, 1.0, 1.5, 1.9) is not None:
        refused += 1
        assert refused < 100


def test_weights_that_are_no_longer_finite_are_refused_and_a_node_whose_own_are_broken_takes_any(given):
    assert "finite" in verdict(LossCheck(given), given, 1.0, math.nan, 1.0)
    assert "finite" in verdict(LossCheck(given), given, 1.0, 1.0, math.inf)
    assert verdict(LossCheck(given), given, math.nan, 9.0, 9.0) is None


def test_a_loss_that_cannot_be_computed_refuses_nobody(given):
    given.losses = None
    assert LossCheck(given).problem(KEY, [], []) is None


def test_fragments_are_known_one_by_one_and_all_are_forgotten_with_other_weights(given):
    check = taught(given, 0.001, 0.001)
    assert verdict(check, given, 1.0, 1.04, 1.0) is not None
    assert verdict(check, given, 1.0, 1.04, 1.0, fragment=1) is None
    check.forget()
    assert verdict(check, given, 1.0, 1.04, 1.0) is None


def test_the_screen_tries_what_is_near_enough_and_tells_which_setting_refused_it(given):
    screen = DistanceScreen(suspect=3.0)
    screen.loss_check = LossCheck(given)
    own = [torch.ones(4)]
    given.losses = (1.0, 2.0, 3.0)
    assert "loss" in screen.problem(KEY, lambda: own, "peer", [torch.ones(4) * 1.01])
    (found,) = screen.rejections()
    assert (found.peer, found.unless) == ("peer", "outer.check_loss=false")
    given.losses = (1.0, 1.0, 1.0)
    assert "far" in screen.problem(KEY, lambda: own, "peer", [-torch.ones(4)])
    assert screen.rejections()[0].unless == "outer.robust=none"
    screen = DistanceScreen(suspect=0)
    screen.loss_check = LossCheck(given)
    assert screen.problem(KEY, lambda: own, "peer", [-torch.ones(4)]) is None


def odd(given, mean=1.5, alone=2.0):
    """A check whose node refused six of the last eight."""
    check = taught(given)
    for _ in range(6):
        assert verdict(check, given, 1.0, mean, alone) is not None
    return check


def test_who_refused_six_of_the_last_eight_is_the_odd_one_and_takes_what_is_like_the_others_until_it_is_fewer(given):
    check = odd(given)
    assert [verdict(check, given, 1.0, 1.5, 2.0) for _ in range(3)] == [None] * 3
    for _ in range(3):  # better ones: five bad of the last eight
        assert verdict(check, given, 1.0, 0.9, 0.9) is None
    assert verdict(check, given, 1.0, 1.5, 2.0) is not None


def test_the_odd_one_refuses_who_raises_its_loss_by_more_than_twice_what_the_last_eight_did(given):
    """As a hostile partner, whom a node that takes everybody would take too."""
    assert verdict(odd(given, mean=1.3), given, 1.0, 1.59, 90.0) is None
    assert verdict(odd(given, mean=1.3), given, 1.0, 1.61, 1.61) is not None


def test_the_odd_one_s_loss_is_at_most_doubled_in_sixteen_exchanges(given):
    check = odd(given, mean=3.0, alone=3.0)
    assert verdict(check, given, 1.0, 2.01, 2.01) is not None
    assert verdict(check, given, 1.0, 1.99, 1.99) is None
    for _ in range(6):
        assert verdict(check, given, 1.99, 2.01, 9.0) is None  # as good as its own by now
        assert verdict(check, given, 1.99, 2.9, 9.0) is not None


def test_the_odd_one_takes_who_does_not_raise_its_loss_in_the_mean(given):
    assert verdict(odd(given, mean=1.0, alone=3.0), given, 1.0, 1.009, 3.0) is None
    check = odd(given)
    check.forget()
    assert verdict(check, given, 1.0, 1.5, 2.0) is not None


def test_with_clipped_gossip_what_makes_the_loss_too_high_counts_nothing_and_the_exchange_does(given):
    screen = DistanceScreen(robust="clipped-gossip", suspect=0)
    screen.loss_check = LossCheck(given)
    own, theirs = [torch.ones(4)], [torch.ones(4) * 1.01]

    def mean(*losses):
        given.losses = losses
        assert screen.problem(KEY, lambda: own, "peer", theirs) is None
        return screen.mean("me", 0, [("me", 1.0, own), ("peer", 1.0, theirs)])

    bad = mean(1.0, 2.0, 3.0)
    assert torch.equal(bad.tensors[0], own[0])
    assert [found.peer for found in screen.rejections()] == ["peer"]
    assert mean(1.0, 1.0, 1.0).tensors[0][0].item() == pytest.approx(1.005)
    assert not screen.rejections()
