"""Members that wait at two leaders of one round, because their views differed for a moment, find
each other.
"""

import pytest

from shoal.swarm.exchange.group import leader as group_lead
from shoal.swarm.exchange.group.leader import LEADER_PROTOCOL
from shoal.swarm.wire.envelope import pack
from shoal.swarm.wire.messages import GroupReceipt

LONG_S = 500.0
"""The patience of a round: who waits for its end fails the test."""


@pytest.fixture(autouse=True)
def probes_soon(monkeypatch):
    monkeypatch.setattr(group_lead, "PROBE_S", 0.05)


def in_time(handles):
    """Return the value of the mean of each."""
    means = [handle.result(60.0) for handle in handles]
    return [None if mean is None else mean.tensors[0][0].item() for mean in means]


def answering(peer, receipt):
    """Let a peer answer all that lead with ``receipt``; return who asked."""
    asked = []

    async def answer(stream):
        asked.append(stream.peer_id)
        await stream.receive(4096, 5.0)
        await stream.send(pack(receipt), 5.0)

    peer.host.handlers[LEADER_PROTOCOL] = answer
    return asked


def test_leader_goes_to_one_it_had_not_seen(school):
    """The fault: it waited alone for its whole patience, while the others went on without it."""
    first, second, third = school.ranked(school.peers(3, wait=LONG_S))
    second.sees = [second.id, third.id]  # it does not know the leader yet
    handles = [second.start(0, 1.0)]
    school.until(lambda: second.waiting() == 1)
    handles += [third.start(0, 2.0), first.start(0, 6.0)]
    assert in_time(handles) == [pytest.approx(3.0)] * 3


def test_two_that_lead_themselves_meet(school):
    """The fault: the first did not answer for a moment, so both led and waited for the other."""
    first, second = school.ranked(school.peers(2, wait=LONG_S, chunk_timeout=0.5))
    handler = first.host.handlers[LEADER_PROTOCOL]
    asked = first.host.fall_silent(LEADER_PROTOCOL)
    handles = [second.start(0, 1.0)]
    school.until(lambda: second.waiting() == 1)
    assert asked[0] == second.id
    first.host.handlers[LEADER_PROTOCOL] = handler
    handles.append(first.start(0, 3.0))
    assert in_time(handles) == [2.0, 2.0]


def test_those_who_wait_at_a_leader_follow_it(school):
    first, second, third, late = four = school.ranked(school.peers(4, wait=LONG_S))
    for peer in (second, third):
        peer.sees = [other.id for other in (second, third, late)]
    handles = [peer.start(0, value) for peer, value in ((first, 1.0), (second, 2.0), (third, 3.0))]
    school.until(lambda: second.waiting() == 2)
    second.sees = third.sees = [other.id for other in four]
    school.until(lambda: first.waiting() == 3)
    handles.append(late.start(0, 6.0))
    assert in_time(handles) == [3.0] * 4


@pytest.mark.parametrize("dead", [0, 1])
def test_lone_leader_goes_on_to_the_others_round(school, dead):
    """The faults: it waited for those who had ended the round without it, and for the dead."""
    for peer in school.peers(dead):
        peer.host.die()
    late, *others = school.ranked(school.peers(3, wait=LONG_S))
    for peer in others:
        peer.sees = [other.id for other in others]
    assert in_time([peer.start(0, 1.0) for peer in others]) == [1.0, 1.0]
    for peer in others:
        peer.sees = None
    handles = [late.start(0, 4.0)]
    school.until(lambda: late.exchange.next_round == 2)
    handles += [peer.start(1, 1.0) for peer in others]
    assert in_time(handles) == [2.0] * 3


def test_unknown_leader_takes_no_members_away(school):
    """Nobody but one alone goes to a leader whose record this node has not read."""
    peers = school.peers(4, wait=LONG_S)
    stranger, leader, member, liar = school.ranked(peers)
    known = [leader.id, member.id, liar.id]
    for peer in (leader, member):
        peer.sees = known
    asked = answering(liar, GroupReceipt(verdict="elsewhere", round=0, leader=stranger.id))
    handles = [leader.start(0, 1.0), member.start(0, 3.0)]
    school.until(lambda: len(asked) >= 2)
    assert leader.waiting() == 2
    assert stranger.waiting() == 0
    liar.host.die()
    assert in_time(handles) == [2.0, 2.0]


def test_one_that_has_passed_does_not_send_others_on(school):
    """It is not waited for, and says nothing of those who may still come."""
    leader, member, liar = school.ranked(school.peers(3, wait=LONG_S))
    asked = answering(liar, GroupReceipt(verdict="passed", round=9))
    handles = [leader.start(0, 1.0)]
    school.until(lambda: leader.looked >= 2)
    assert asked == [leader.id]
    assert leader.waiting() == 1
    handles.append(member.start(0, 3.0))
    assert in_time(handles) == [2.0, 2.0]
    assert leader.exchange.next_round == 1
