"""Peers that this node has banned: nobody is paired with them, in pairs or groups, whether they
know it or not.
"""

import pytest

from shoal.optim.exchange.pairing import partner_of, partners_of
from shoal.swarm.exchange.pair.state import Step
from tests.support.pair_peers import Peer, value


def values(handles):
    return [value(handle.result()) for handle in handles]


def refusals(caplog):
    return [
        text
        for text in (record.getMessage() for record in caplog.records)
        if "has banned its caller" in text
    ]


def test_banned_caller_is_refused_at_once(network, caplog):
    """A banned caller is refused at once and not held nor looked up."""
    a, b = Peer(network, wait=20.0), Peer(network)
    a.banned.add(b.id)
    assert values([b.start()]) == [None]  # long before its minute is over
    assert len(refusals(caplog)) == 1
    assert a.looked == 0
    assert not a.exchange.held.calls
    assert values([a.start(), b.start(1)]) == [None, None]


def test_pairs_ignore_the_banned_peer(network):
    """The others pair as if the banned one were not there."""
    a, b, c, bad = peers = [Peer(network, wait=20.0) for _ in range(4)]
    good = [a, b, c]
    for peer in good:
        peer.banned.add(bad.id)
    for round in range(6):
        handles = {peer.id: peer.start(round, 1.0) for peer in peers}
        met = {peer.id: handles[peer.id].result() for peer in peers}
        ids = [peer.id for peer in good]
        for peer in good:
            expected = tuple(sorted((peer.id, *partners_of(0, round, peer.id, ids))))
            assert met[peer.id].members == expected
        assert met[bad.id] is None


def test_left_over_peer_takes_no_banned_caller(network, school, caplog):
    """Who is left over and listens does not take a banned caller."""
    a, b, bad = (Peer(network, wait=10.0) for _ in range(3))
    a.banned.add(bad.id)
    b.host.die()  # so a has nobody to call, and takes whoever calls, but not this one
    round = next(
        round for round in range(1000) if partner_of(0, round, bad.id, [a.id, b.id, bad.id]) == a.id
    )
    listener = a.start(round)
    meetings = a.exchange.state.under_way
    school.until(lambda: 0 in meetings and meetings[0].phase.step == Step.LISTENING)
    caller = bad.start(round)
    school.until(lambda: refusals(caplog))
    assert values([listener, caller]) == [None, None]


def a_round(school, peers, wanted):
    """A round in which ``wanted`` holds of the order of the peers."""
    return next(round for round in range(1000) if wanted(school.ranked(peers, round)))


def test_group_forms_without_the_banned_peer(school, caplog):
    """A group is made without the banned one whoever would lead."""
    four = school.peers(4, wait=20.0)
    bad = four[-1]
    good = four[:-1]
    for peer in good:
        peer.banned.add(bad.id)
    its_own = a_round(school, four, lambda order: order[0] is bad)
    anothers = a_round(school, four, lambda order: order[0] is not bad)
    for round in sorted((its_own, anothers)):
        handles = [peer.start(round, float(number)) for number, peer in enumerate(good)]
        assert school.values(handles) == [pytest.approx(1.0)] * 3
    assert not refusals(caplog)
    later = next(round for round in range(1001, 2000) if school.ranked(four, round)[0] is not bad)
    alone = bad.start(later, 9.0)
    school.until(lambda: refusals(caplog))
    assert alone.result(0.0) is None
    assert all(peer.looked == 0 for peer in good)


def test_ban_during_the_wait_sends_away(school):
    """Who is banned while it waits for its group is sent away."""
    # In round 0: in a later one a leader that has just come does not wait for itself.
    leader, *others, bad = school.ranked(school.peers(4, wait=20.0))
    waiting = bad.start(0, 9.0)
    handles = [peer.start(0, 1.0) for peer in others]
    school.until(lambda: leader.waiting(0) == 3)
    for peer in (leader, *others):
        peer.banned.add(bad.id)
    school.until(lambda: leader.waiting(0) == 2)
    assert school.values([leader.start(0, 4.0), *handles]) == [2.0] * 3
    assert waiting.result(0.0) is None


def test_group_with_a_banned_peer_is_refused(school):
    """The leader does not know of the ban, or does not care. The others meet without it."""
    four = school.peers(4, wait=20.0)
    leader, *rest = school.ranked(four)
    bad, *good = rest
    for peer in good:
        peer.banned.add(bad.id)
    handles = [peer.start(0, 2.0 * number) for number, peer in enumerate(good)]
    astray = [leader.start(0, 5.0), bad.start(0, 7.0)]
    assert school.values(handles) == [1.0, 1.0]
    assert school.values(astray) == [6.0, 6.0]
    assert {handle.result().members for handle in handles} == {
        tuple(sorted(peer.id for peer in good))
    }


@pytest.mark.ci
def test_nobody_is_sent_on_to_a_banned_leader(school):
    """One of them waits at a leader that this node has banned, and says so to who comes to it."""
    bad, second, mine = school.ranked(school.peers(3, wait=3.0))
    mine.banned.add(bad.id)
    waiting = second.start(0, 1.0)
    school.until(lambda: bad.waiting() == 1)
    assert mine.start(0, 2.0).result() is None
    assert (mine.id, bad.id) not in {(caller, called) for caller, called, _ in mine.network.opened}
    waiting.result(0.0)
