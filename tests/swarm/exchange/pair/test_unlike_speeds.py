"""Who is in the pairs of a node among members of unlike speed."""

import pytest

from shoal.optim.exchange.pairing import partners_of
from shoal.swarm.exchange.pair_rounds import PairRounds
from tests.support.partner_selection import SEED, Directory, selector

ROUNDS = range(40)


def swarm(**speeds):
    here = Directory()
    for peer, speed in speeds.items():
        here.see(peer, steps_per_s=speed)
    return here


def met(me, here):
    """Whom ``me`` meets in these rounds."""
    return [selector(me, here).partners(round) for round in ROUNDS]


def expected(me, peers):
    return [partners_of(SEED, round, me, peers) for round in ROUNDS]


def test_three_quick_peers_leave_a_slow_one_out():
    """They are a chain in each round, and agree; it still counts on them."""
    here = swarm(a=10.0, b=9.0, c=11.0, slow=2.5)
    for me in "abc":
        assert met(me, here) == expected(me, "abc")
    assert met("slow", here) == expected("slow", [*here])


def test_without_a_gap_nobody_is_left_out():
    """Measured against the own speed alone, each would leave out others than the next one does."""
    here = swarm(a=10.0, b=8.0, c=6.0, d=4.5, e=3.0)
    for me in here:
        assert met(me, here) == expected(me, [*here])


def test_all_above_a_gap_leave_the_same_peers_out():
    here = swarm(a=10.0, b=7.0, c=5.0, d=2.9, e=2.0)
    for me in "abc":
        assert met(me, here) == expected(me, "abc")
    assert met("d", here) == expected("d", [*here])


def test_peer_of_half_the_speed_is_left_out():
    assert met("a", swarm(a=2.0, b=2.0, half=1.0)) == [("b",)] * len(ROUNDS)


@pytest.mark.parametrize("speed", [0.6, 1.0, 5.0, 1e9, 0.0])
def test_stated_speeds_keep_no_honest_peer_out(speed):
    """A liar can leave itself out only; 0 is not known."""
    here = swarm(a=1.0, b=1.0, liar=speed)
    assert met("a", here) == expected("a", [*here])
    assert met("b", here) == expected("b", [*here])


def test_slow_peers_are_met_if_there_are_no_others():
    here = swarm(quick=10.0, one=1.0, other=1.0)
    assert met("quick", here) == expected("quick", [*here])
    assert not selector("quick", here).is_too_slow("one", 0)


def test_nobody_is_out_while_the_own_speed_is_unknown():
    here = swarm(a=0.0, b=1.0, c=1.0)
    assert met("a", here) == expected("a", [*here])


def test_only_members_in_no_pair_are_too_slow():
    node = selector("a", swarm(a=10.0, b=10.0, slow=1.0))
    assert [node.is_too_slow(peer, 0) for peer in ("slow", "b", "stranger")] == [True, False, False]


def test_slow_caller_is_sent_a_round_ahead():
    rounds = PairRounds(fragments=4, overlap=True)
    rounds.begin(rounds.hand_in(9), 9, 1)
    assert [rounds.next_of(round, round % 4) for round in (2, 5, 9)] == [10, 13, 13]
    assert [rounds.next_of(round, round % 4) for round in (10, 13, 14)] == [None] * 3


def test_slow_caller_is_expected_by_its_partners_only():
    """One or two in each round, in pairs that all agree on: else it could meet everybody."""
    here = swarm(a=10.0, b=10.0, c=10.0, slow=2.5, slowest=1.0)
    for peer, peers in {"slow": "abc", "slowest": [*here]}.items():
        for round in ROUNDS:
            partners = partners_of(SEED, round, peer, {*peers, peer})
            expecting = {me for me in here if selector(me, here).expects_slower(peer, round)}
            assert expecting == {*partners}
    assert not any(selector("a", here).expects_slower("b", round) for round in ROUNDS)


def test_slow_caller_that_costs_time_is_not_expected():
    node = selector("a", swarm(a=10.0, b=10.0, slow=1.0))
    expecting = [round for round in ROUNDS if node.expects_slower("slow", round)]
    node.passed.missed("slow", expecting[0], over=1)
    assert not node.expects_slower("slow", expecting[0])
    assert node.expects_slower("slow", expecting[-1])
