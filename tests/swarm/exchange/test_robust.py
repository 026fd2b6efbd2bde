"""An update refused by a node's screen never counts, in pairs and groups; what a partner counts by
what it has shown; and the check of its weights by the loss on data."""

import itertools
import math

import pytest
import torch

from shoal.optim import FLOAT32, RoundKey, weighted_mean
from shoal.optim.codecs.registry import codec_named
from shoal.optim.exchange.base import Contribution
from shoal.optim.exchange.robust_shares import GRID
from shoal.optim.exchange.update_screen import UpdateScreen
from shoal.swarm.exchange.robust import (
    FIRST,
    KNOWN,
    PATIENCE,
    SHOWN,
    TAKEN,
    DistanceScreen,
    LossCheck,
    Newcomers,
)
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from tests.support.fake_network import SWARM, paired
from tests.support.waiting import until


class Choosy:
    """Refuses what begins with ``bad``; its mean is the first one's, plus 100."""

    def __init__(self, bad=None, gathers=False):
        self.bad, self.gathers, self.asked = bad, gathers, []

    def problem(self, key, own, peer, theirs):
        self.asked.append(
            (key.round, peer, own()[0].flatten()[0].item(), theirs[0].flatten()[0].item())
        )
        return "it is bad" if theirs[0].flatten()[0].item() == self.bad else None

    def mean(self, me, fragment, contributions, unweighted_count=0):
        mean = weighted_mean(contributions)
        mean.tensors[0].add_(100.0)
        return mean


@pytest.fixture
def two(network):
    """Exchanges of two hosts, and how to start a round in which the first calls."""
    exchanges = paired(network, 2, ExchangeTimeouts(30.0, 10.0, 30.0))

    def make(*screens):
        for exchange, screen in zip(exchanges, screens, strict=True):
            exchange._screen = screen

        def run(caller, callee, round=0):
            first = exchanges[0].start(
                Contribution(RoundKey(SWARM, round), [torch.full((4,), caller)])
            )
            until(lambda: exchanges[1].held.calls)
            second = exchanges[1].start(
                Contribution(RoundKey(SWARM, round), [torch.full((4,), callee)])
            )
            return [
                None if mean is None else mean.tensors[0][0].item()
                for mean in (first.result(), second.result())
            ]

        return run

    return [exchange._context.me for exchange in exchanges], make


@pytest.mark.parametrize("who", [0, 1])
def test_a_pair_of_which_one_refuses_goes_apart(two, who):
    ids, make = two
    choosy, other = Choosy(bad=5.0), Choosy()
    run = make(*((choosy, other) if who == 0 else (other, choosy)))
    values = (1.0, 5.0) if who == 0 else (5.0, 1.0)
    assert run(*values) == [None, None]
    assert choosy.asked == [(0, ids[1 - who], 1.0, 5.0)]
    assert run(1.0, 3.0, round=1) == [102.0, 102.0]


def test_each_side_applies_its_own_defence(two):
    """Each side of a pair takes what its own defence makes of it."""
    _, make = two
    gentle = Choosy()
    gentle.mean = lambda me, fragment, contributions, unweighted_count=0: weighted_mean(
        contributions
    )
    assert make(gentle, Choosy())(1.0, 3.0) == [2.0, 102.0]


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_a_group_goes_on_without_whom_the_others_refuse(school, count, codec):
    peers = school.peers(count, screen=Choosy(bad=9.0, gathers=True))
    handles = [
        peer.start(0, 9.0 if number == 1 else 2.0, codec_named(codec))
        for number, peer in enumerate(peers)
    ]
    expected = [None if number == 1 else 102.0 for number in range(count)]
    assert [value and round(value, 3) for value in school.values(handles)] == expected
    assert peers[1].id not in handles[0].result().members


def test_one_that_refuses_everybody_puts_only_itself_out(school):
    gathers = UpdateScreen()
    gathers.gathers = True
    peers = school.peers(5, screen=gathers)
    peers[0].exchange._screen = Choosy(bad=2.0)
    assert school.values([peer.start(0, 2.0) for peer in peers]) == [None, 2.0, 2.0, 2.0, 2.0]


def test_full_view_defence_skips_all_reduce(school):
    """Who must see each contribution takes no part in an all reduce."""
    peers = school.ranked(school.peers(4, wait=2.0))
    careful = peers[-1]
    careful.exchange._screen = Choosy(gathers=True)
    handles = [peer.start(0, 2.0, FLOAT32) for peer in peers]
    values = school.values(handles)
    assert values[-1] is None
    assert values[:-1] == [
        2.0,
        2.0,
        2.0,
    ]  # an all-reduce that fails is done once more, by gathering, with those who are left


HALF = GRID // 2


def grown(where=lambda peer: "range"):
    """What a node knows after enough exchanges with a peer that was there from the beginning."""
    known = Newcomers(where)
    known.see(["old"])
    for _ in range(PATIENCE):
        assert known.take("old", HALF) == HALF
    return known


def test_newcomer_counts_half_for_three_rounds():
    """A newcomer counts half as much until three of its contributions counted."""
    turn = itertools.count()
    known = grown(lambda peer: str(next(turn)))  # so that no other newcomer of its range is recent
    shares = [known.take("new", HALF) for _ in range(SHOWN + 2)]
    assert known.take("old", HALF) == HALF
    assert shares == [HALF // 2] * SHOWN + [HALF] * 2


def test_nobody_is_new_to_a_node_that_is_young_itself():
    known = Newcomers()
    assert [known.take(f"peer{number}", HALF) for number in range(PATIENCE)] == [HALF] * PATIENCE
    assert known.take("another", HALF) == HALF // 2


def test_long_seen_peer_is_no_newcomer():
    """A peer that has been in view for long is no newcomer though it was never met."""
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


def test_memory_is_bounded_and_spares_those_in_view():
    """Memory is bounded and who is in view is not forgotten."""
    known = grown()
    for number in range(KNOWN + 10):
        known.see([f"flood{number}"])
        if number % 100 == 0:
            known.see(["old"])
    assert len(known._known) == KNOWN
    assert known.take("old", HALF) == HALF


def test_mean_leans_to_this_node_against_newcomers():
    """The mean of a pair leans to this node where the partner is new."""
    screen = DistanceScreen(robust="clipped-gossip", suspect=0)
    screen.newcomers = grown()

    def mean(peer):
        own, theirs = [torch.zeros(4)], [torch.full((4,), 8.0)]
        assert screen.problem(RoundKey("run", 0), lambda: own, peer, theirs) is None
        return screen.mean("me", 0, [("me", 1.0, own), (peer, 1.0, theirs)]).tensors[0][0].item()

    assert mean("old") == 4.0
    assert mean("new") == 2.0


KEY = RoundKey("run", 0)


class Check(LossCheck):
    """A check of losses that a test gives."""

    losses = (1.0, 1.0, 1.0)

    def __init__(self):
        super().__init__(lambda fragment, own, theirs: self.losses)

    def verdict(self, *losses, fragment=0):
        self.losses = losses
        return self.problem(RoundKey("run", 0, fragment), [], [])


def taught(mean=0.01, alone=0.02):
    """A check that knows what is usual."""
    check = Check()
    for number in range(FIRST):
        sign = (-1) ** number
        assert check.verdict(1.0, 1.0 + sign * mean, 1.0 + sign * alone) is None
    return check


def test_first_partners_may_raise_the_loss_a_little():
    """The first partners may raise the loss by 5 and 10 per cent."""
    assert Check().verdict(2.0, 2.09, 2.19) is None
    assert "2.11" in Check().verdict(2.0, 2.11, 2.0)
    assert "2.21" in Check().verdict(2.0, 2.0, 2.21)


def test_later_bounds_are_multiples_of_the_usual():
    """Then 6 times what is usual with the mean and 8 times with the partner alone."""
    assert taught().verdict(1.0, 1.059, 1.159) is None
    assert taught().verdict(1.0, 1.061, 1.0) is not None
    assert taught().verdict(1.0, 1.0, 1.161) is not None


def test_a_loss_below_0_is_judged_by_its_size():
    """Of a density's negative logarithm: bounds below 0 refused every partner, so that each node
    trained alone.
    """
    check = Check()
    assert check.verdict(-2.0, -1.91, -1.81) is None
    assert check.verdict(-2.0, -1.89, -2.0) is not None
    check = Check()
    for number in range(40):
        change = (-1) ** number * 0.01
        assert check.verdict(-3.0, -3.0 + change, -3.0 + 2 * change) is None
    assert check.verdict(-3.0, -2.8, -3.0) is not None
    for _ in range(40):
        check.verdict(-3.0, -2.8, -2.5)
    assert check.verdict(-3.0, 0.1, -2.5) is not None, "more than the odd one takes"


def test_harmless_partners_leave_small_room():
    """Partners that change nothing leave room of 1 and 2 per cent."""
    check = taught(0.0, 0.0)
    assert check.verdict(1.0, 1.009, 1.019) is None
    assert check.verdict(1.0, 1.011, 1.0) is not None


def test_who_is_better_is_never_refused():
    assert taught().verdict(5.0, 3.0, 1.0) is None


def test_minority_cannot_widen_the_bounds():
    """A minority cannot widen the bounds but a change for all does."""
    check = taught()
    for _ in range(40):  # two honest ones, then a hostile one
        assert check.verdict(1.0, 1.01, 1.02) is None
        assert check.verdict(1.0, 0.99, 0.98) is None
        assert check.verdict(1.0, 1.5, 2.0) is not None
    refused = 0
    while check.verdict(1.0, 1.5, 1.9) is not None:
        refused += 1
        assert refused < 100


def test_non_finite_weights_are_refused_unless_own_are_broken():
    """Weights that are no longer finite are refused and a node whose own are broken takes any."""
    assert "finite" in Check().verdict(1.0, math.nan, 1.0)
    assert "finite" in Check().verdict(1.0, 1.0, math.inf)
    assert Check().verdict(math.nan, 9.0, 9.0) is None


def test_a_loss_that_cannot_be_computed_refuses_nobody():
    check = Check()
    check.losses = None
    assert check.problem(KEY, [], []) is None


def test_fragments_are_known_separately():
    """Fragments are known one by one and all are forgotten with other weights."""
    check = taught(0.001, 0.001)
    assert check.verdict(1.0, 1.04, 1.0) is not None
    assert check.verdict(1.0, 1.04, 1.0, fragment=1) is None
    check.forget()
    assert check.verdict(1.0, 1.04, 1.0) is None


def test_refusal_names_its_setting():
    """The screen tries what is near enough and tells which setting refused it."""
    screen = DistanceScreen(suspect=3.0)
    screen.loss_check = check = Check()
    own = [torch.ones(4)]
    check.losses = (1.0, 2.0, 3.0)
    assert "loss" in screen.problem(KEY, lambda: own, "peer", [torch.ones(4) * 1.01])
    (found,) = screen.rejections()
    assert (found.peer, found.unless) == ("peer", "outer.check_loss=false")
    check.losses = (1.0, 1.0, 1.0)
    assert "far" in screen.problem(KEY, lambda: own, "peer", [-torch.ones(4)])
    assert screen.rejections()[0].unless == "outer.robust=none"
    screen = DistanceScreen(suspect=0)
    screen.loss_check = Check()
    assert screen.problem(KEY, lambda: own, "peer", [-torch.ones(4)]) is None


def odd(mean=1.5, alone=2.0):
    """A check whose node refused six of the last eight."""
    check = taught()
    for _ in range(6):
        assert check.verdict(1.0, mean, alone) is not None
    return check


def test_odd_one_takes_what_resembles_the_others():
    """Who refused six of the last eight is the odd one and takes what is like the others
    until it is fewer.
    """
    check = odd()
    assert [check.verdict(1.0, 1.5, 2.0) for _ in range(3)] == [None] * 3
    for _ in range(3):  # better ones: five bad of the last eight
        assert check.verdict(1.0, 0.9, 0.9) is None
    assert check.verdict(1.0, 1.5, 2.0) is not None


def test_odd_one_refuses_twice_the_recent_raise():
    """As a hostile partner, whom a node that takes everybody would take too."""
    assert odd(mean=1.3).verdict(1.0, 1.59, 90.0) is None
    assert odd(mean=1.3).verdict(1.0, 1.61, 1.61) is not None


def test_odd_ones_loss_doubles_at_most():
    """The odd one s loss is at most doubled in sixteen exchanges."""
    check = odd(mean=3.0, alone=3.0)
    assert check.verdict(1.0, 2.01, 2.01) is not None
    assert check.verdict(1.0, 1.99, 1.99) is None
    for _ in range(6):
        assert check.verdict(1.99, 2.01, 9.0) is None  # as good as its own by now
        assert check.verdict(1.99, 2.9, 9.0) is not None


def test_odd_one_takes_harmless_means():
    """The odd one takes who does not raise its loss in the mean."""
    assert odd(mean=1.0, alone=3.0).verdict(1.0, 1.009, 3.0) is None
    check = odd()
    check.forget()
    assert check.verdict(1.0, 1.5, 2.0) is not None


def test_clipped_gossip_counts_high_loss_as_nothing():
    """With clipped gossip what makes the loss too high counts nothing and the exchange does."""
    screen = DistanceScreen(robust="clipped-gossip", suspect=0)
    screen.loss_check = check = Check()
    own, theirs = [torch.ones(4)], [torch.ones(4) * 1.01]

    def mean(*losses):
        check.losses = losses
        assert screen.problem(KEY, lambda: own, "peer", theirs) is None
        return screen.mean("me", 0, [("me", 1.0, own), ("peer", 1.0, theirs)])

    bad = mean(1.0, 2.0, 3.0)
    assert torch.equal(bad.tensors[0], own[0])
    assert [found.peer for found in screen.rejections()] == ["peer"]
    assert mean(1.0, 1.0, 1.0).tensors[0][0].item() == pytest.approx(1.005)
    assert not screen.rejections()
