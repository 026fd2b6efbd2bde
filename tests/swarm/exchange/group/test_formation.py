"""How the groups of a round come about when peers are late, early, gone, many, or see different
memberships.
"""

import asyncio
import re
import threading
import time
from unittest.mock import Mock

import pytest

from shoal.optim import BFLOAT16, RoundKey
from shoal.optim.exchange.base import Contribution
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.group import deadline
from shoal.swarm.exchange.group import leader as group_lead
from shoal.swarm.exchange.group.deadline import GroupDeadline
from shoal.swarm.exchange.group.exchange import GroupExchange
from shoal.swarm.exchange.group.leader import LEADER_PROTOCOL, PendingGroup
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from tests.support.fake_network import group_ready
from tests.support.pair_peers import at_once


def test_several_fragments_are_in_flight_at_once_in_any_order(school):
    three = school.peers(3, fragments=3)
    handles = {}
    for number, peer in enumerate(three):
        for fragment in (0, 1, 2) if number else (2, 0, 1):
            handles[peer.id, fragment] = peer.start(
                fragment, 10.0 * fragment + number, fragment=fragment, shape=(fragment + 2,)
            )
    for fragment in (1, 2, 0):
        assert (
            school.values([handles[peer.id, fragment] for peer in three])
            == [pytest.approx(10.0 * fragment + 1.0)] * 3
        )
    assert [peer.exchange.next_round for peer in three] == [3, 3, 3]


def test_the_patience_in_a_round_is_that_of_its_fragment(school):
    """Of the time from one sending of a fragment to its next, at members and their leader."""
    two = school.peers(2, fragments=3)
    asked = []

    class Recording(GroupDeadline):
        def begin(self, now, fragment=0):
            asked.append(("begin", fragment))
            return super().begin(now, fragment)

        def patience(self, fragment=0):
            asked.append(("patience", fragment))
            return super().patience(fragment)

    for peer in two:
        peer.exchange.time = peer.exchange._leader.time = Recording(peer.exchange.time.timeouts, 3)
    assert school.values([peer.start(2, 1.0, fragment=2) for peer in two]) == [1.0, 1.0]
    assert set(asked) == {("begin", 2), ("patience", 2)}


def test_peers_in_their_own_time_always_find_their_group(school):
    four = school.peers(4, wait=20.0)
    met = {}

    def train(peer):
        for round in range(15):
            met[peer.id, round] = peer.start(round, 1.0).result()

    at_once(train, four)
    everybody = tuple(sorted(peer.id for peer in four))
    assert [mean and mean.members for mean in met.values()] == [everybody] * 60


def not_led(school, peers, place, after):
    """Return a round whose peer at ``place`` does not lead the round ``after`` it: who waited for
    it in vain passes it over.
    """
    ranked = school.ranked
    return next(
        round
        for round in range(1, 100, 3)
        if ranked(peers, round)[place] is not ranked(peers, round + after)[0]
    )


def test_absent_leader_holds_up_nobody(school):
    """A leader that is not there yet does not hold up the others and meets them again."""
    four = school.peers(4, wait=2.0)
    first = not_led(school, four, 0, 1)
    leader, *others = school.ranked(four, first)
    assert school.values([peer.start(first, 3.0) for peer in others]) == [pytest.approx(3.0)] * 3
    late = leader.start(first, 7.0)
    school.until(lambda: leader.exchange.next_round == first + 2)
    assert school.values([*(peer.start(first + 1, 3.0) for peer in others), late]) == [4.0] * 4
    assert leader.exchange.next_round == first + 2


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_nobody_waits_for_members_at_their_end(school, when, place):
    """Fault: `shoal end` came when one member was a fragment ahead of the others, and it waited ten
    seconds for a round that they did not make, at a leader that waited for itself.
    """
    three = school.peers(3, wait=20.0)
    assert school.values([peer.start(0, 3.0) for peer in three]) == [pytest.approx(3.0)] * 3
    ahead = school.ranked(three, 1)[place]
    others = [peer for peer in three if peer is not ahead]
    if when == "meanwhile":
        handle = ahead.start(1, 7.0)
        school.until(lambda: any(peer.waiting(1) for peer in three))
    for peer in others:
        peer.exchange.end()
    if when == "before":
        handle = ahead.start(1, 7.0)
    assert handle.result() is None
    assert ahead.exchange.waited < 10.0
    assert ahead.exchange.stats.report()["failures"] == ()


def test_those_ahead_of_members_at_their_end_meet(school):
    four = school.peers(4, wait=20.0)
    leader, *others = school.ranked(four, 0)
    ahead, ended = others[:2], [leader, others[2]]
    handles = [peer.start(0, value) for peer, value in zip(ahead, (3.0, 5.0), strict=True)]
    school.until(lambda: leader.waiting() == 2)
    for peer in ended:
        peer.exchange.end()
    assert school.values(handles) == [4.0, 4.0]
    assert all(peer.exchange.waited < 10.0 for peer in ahead)


def test_who_waits_at_a_leader_that_ends_meets_who_comes(school):
    """Mutant: the leader takes nobody any more, and keeps the one that waits there."""
    four = school.peers(4, wait=20.0)
    leader, first, second, other = school.ranked(four, 0)
    waits = first.start(0, 3.0)
    school.until(lambda: leader.waiting() == 1)
    for peer in (leader, other):
        peer.exchange.end()
    assert school.values([waits, second.start(0, 5.0)]) == [4.0, 4.0]
    assert first.exchange.waited < 10.0


def test_a_member_at_its_end_sends_nobody_ahead(school):
    """It is in no later round either."""
    three = school.peers(3)
    leader, second, late = school.ranked(three, 0)
    assert school.values([leader.start(0, 1.0), second.start(0, 1.0)]) == [1.0, 1.0]
    for peer in (leader, second):
        peer.exchange.end()
    assert late.start(0, 7.0).result() is None
    assert late.exchange.next_round == 1


def test_strangers_end_no_round_before_others_come(school, monkeypatch):
    """Fault: two free keys formed the rounds to come at every leader, and honest members were sent
    past them.
    """
    three = school.peers(3)
    assert school.values([peer.start(0, 1.0) for peer in three]) == [1.0] * 3
    first, second, _ = three
    leader = first.exchange._leader
    monkeypatch.setattr(group_lead, "GroupCommit", Mock())
    monkeypatch.setattr(leader, "start", Mock())
    leader._form((3, 0), {"one": None, "two": None})
    assert leader._rounds.instead(3, 0) is None
    assert not leader.view.is_absent(second.id)
    leader._form((3, 0), {second.id: None, "two": None})
    assert leader._rounds.instead(3, 0) is not None


@pytest.mark.ci
def test_slow_peer_is_left_out_and_redirected(school):
    """A slow peer is left out after the wait and goes where it is told."""
    four = school.peers(4, wait=4.0, fragments=3)
    first = not_led(school, four, -1, 3)
    *others, slow = school.ranked(four, first)
    assert (
        school.values([peer.start(first, 3.0, fragment=1) for peer in others])
        == [pytest.approx(3.0)] * 3
    )
    for peer in four:
        peer.rounds = {other.id: first + 1 for other in others}
    late = slow.start(first, 7.0, fragment=1)
    school.until(lambda: sum(peer.waiting(first + 3, fragment=1) for peer in four) == 1)
    assert slow.exchange.next_round == first + 4
    assert (
        school.values([*(peer.start(first + 3, 3.0, fragment=1) for peer in others), late])
        == [4.0] * 4
    )


def test_what_belongs_to_its_round_does_not_move(school):
    three = school.peers(3, wait=1.0, follow=False)
    leader, second, late = school.ranked(three)
    assert school.values([leader.start(4, 1.0), second.start(4, 1.0)]) == [1.0, 1.0]
    late.rounds = {peer.id: 5 for peer in three}
    assert late.start(4, 1.0).result() is None
    assert late.exchange.next_round == 5


def test_one_peer_alone_cannot_send_another_far_away(school):
    leader, second, third = school.ranked(school.peers(3, wait=0.5))
    leader.exchange.start(Contribution(RoundKey("a" * 52, 10**6), [])).result(0.01)
    assert second.start(0, 1.0).result(3.0) is None
    assert second.exchange.next_round <= 3
    assert third.looked == 0


def test_newcomer_is_put_into_step(school):
    """A newcomer that counts its fragments otherwise is put into step."""
    four = school.peers(4, fragments=2, wait=5.0)
    old, new = four[:3], four[3]
    for peer in old:
        peer.sees = [other.id for other in old]
    # The others send fragment 0 in even rounds; a newcomer that leads its own odd round has nobody
    # to tell it.
    odd = next(round for round in range(5, 100, 2) if school.ranked(four, round)[0] is not new)
    assert (
        school.values([peer.start(odd - 1, 1.0, fragment=0) for peer in old])
        == [pytest.approx(1.0)] * 3
    )
    for peer in four:
        peer.sees, peer.rounds = None, {other.id: odd for other in old}
    handle = new.start(odd, 5.0, fragment=0)
    school.until(lambda: new.exchange.next_round == odd + 2)
    assert (
        school.values([*(peer.start(odd + 1, 1.0, fragment=0) for peer in old), handle])
        == [2.0] * 4
    )


def test_a_dead_leader_is_passed_over_at_once(school):
    three = school.peers(3, wait=20.0)
    leader, *others = school.ranked(three)
    leader.host.die()
    handles = [peer.start(0, float(number)) for number, peer in enumerate(others)]
    assert [handle.result(60).weight for handle in handles] == [2.0, 2.0]


def test_one_peer_takes_few_places_of_a_leader(school):
    """The fault: a peer may state any round and fragment, and four peers with sixteen streams each
    took all places of a leader.
    """
    one = school.peers(1)[0]
    leader, context = one.exchange._leader, one.exchange._context
    ready = group_ready(context)

    def judged(round, fragment=0):
        found = leader._judge("x", ready.model_copy(update={"round": round, "fragment": fragment}))
        if found.verdict == "noted":
            leader._pending[round, fragment] = PendingGroup({"x": None})
        return found.verdict

    assert [judged(round) for round in (5, 2**53, 7, 8)] == ["noted", "noted", "busy", "busy"]
    assert [judged(5, fragment) for fragment in (1, 2, 2**53)] == ["noted", "refuse", "refuse"]


def test_a_stranger_that_does_not_wait_cuts_no_group_short(school):
    """The fault: with a patience of 0 a free key ended the wait for all others in each round."""
    one = school.peers(1)[0]
    leader, mine = one.exchange._leader, group_ready(one.exchange._context)
    hurried = mine.model_copy(update={"patience": 0.0})
    assert leader._patience("x", hurried) == one.exchange.time.forming(0) > 0
    one.exchange.evidence.met({"x"}, 3)
    assert leader._patience("x", hurried) == 0.0
    assert leader._patience(one.id, hurried) == 0.0


def test_own_contribution_refuses_others_before_it_waits(school):
    """What this node contributed last says what it will, so nobody that differs waits in vain."""
    leader = school.peers(1)[0].exchange._leader
    mine = group_ready(leader.context, round=4)
    other = mine.model_copy(update={"round": 5, "codec": "bfloat16"})
    assert leader._judge("x", other).verdict == "noted"
    leader.expect(mine, asyncio.Event(), asyncio.Event())
    receipt = leader._judge("x", other)
    assert (receipt.verdict, receipt.reason) == (
        "refuse",
        "the codec is float32 here and bfloat16 there",
    )
    assert leader._judge("x", mine.model_copy(update={"round": 5})).verdict == "noted"


def test_dead_peer_is_found_early_and_not_waited_for(school, monkeypatch):
    """The fault: each round in which one died waited a second for it."""
    monkeypatch.setattr(group_lead, "PROBE_S", 1000.0)
    monkeypatch.setattr(deadline, "FORMING_S", 1000.0)
    *others, victim = school.ranked(school.peers(4, wait=60.0))
    victim.host.die()
    handles = [peer.start(0, float(number)) for number, peer in enumerate(others)]
    assert [handle.result(60).weight for handle in handles] == [3.0] * 3


@pytest.mark.parametrize("place", [0, 3], ids=["first", "last"])
def test_node_in_its_first_round_delays_nobody(school, monkeypatch, place):
    """The fault: it came in the middle of a round, and the others waited three seconds for it,
    also where it led.
    """
    monkeypatch.setattr(group_lead, "PROBE_S", 1000.0)
    monkeypatch.setattr(deadline, "FORMING_S", 1000.0)
    others = school.ranked(school.peers(4, wait=500.0), 3)
    newcomer = others.pop(place)
    for peer in others:
        peer.sees = [other.id for other in others]
    assert school.values([peer.start(0, 1.0) for peer in others]) == [1.0] * 3
    for peer in others:
        peer.sees = None
    handles = [peer.start(3, float(number)) for number, peer in enumerate(others)]
    assert [handle.result(60).weight for handle in handles] == [3.0] * 3
    assert newcomer.exchange.next_round == 0
    newcomer.exchange.took_over([3], newcomer=True)
    assert school.values([peer.start(4, 2.0) for peer in (newcomer, *others)]) == [2.0] * 4


def was_asked(peer):
    """Return an event that is set once others have asked ``peer`` where it is, and it answered."""
    answered, answering = threading.Event(), peer.host.handlers[LEADER_PROTOCOL]

    async def answers(stream):
        await answering(stream)
        answered.set()

    peer.host.handlers[LEADER_PROTOCOL] = answers
    return answered


def test_who_is_only_late_opens_and_is_waited_for(school, monkeypatch):
    monkeypatch.setattr(group_lead, "PROBE_S", 0.05)
    leader, second, late = school.ranked(school.peers(3, wait=20.0))
    probed = was_asked(late)
    handles = [leader.start(0, 1.0), second.start(0, 2.0)]
    assert probed.wait(60)
    assert school.values([*handles, late.start(0, 6.0)]) == [pytest.approx(3.0)] * 3


def test_who_is_rounds_ahead_is_not_waited_for_at_all(school, monkeypatch):
    """It waits in a later round, for the others: they would wait for it in each of theirs until
    their patience is over.
    """
    monkeypatch.setattr(group_lead, "PROBE_S", 1000.0)
    *others, ahead = school.ranked(school.peers(4, wait=500.0))
    for peer in others:
        peer.rounds = {ahead.id: 2}
    handles = [peer.start(0, float(number)) for number, peer in enumerate(others)]
    assert [handle.result(60.0).weight for handle in handles] == [3.0] * 3


def test_peer_on_its_way_is_awaited_until_probed(school, monkeypatch):
    """Who began this round and is on its way is waited for until it was probed."""
    monkeypatch.setattr(group_lead, "PROBE_S", 1000.0)
    *others, third = school.ranked(school.peers(3, wait=500.0))
    for peer in others:
        peer.rounds = {third.id: 1}
    asked = was_asked(third)
    handles = [peer.start(0, 1.0) for peer in others]
    assert asked.wait(60)  # early, which only finds the dead
    assert school.values([*handles, third.start(0, 4.0)]) == [2.0] * 3
    monkeypatch.setattr(group_lead, "PROBE_S", 0.05)
    round = next(
        round for round in range(1, 100) if school.ranked([*others, third], round)[0] is others[0]
    )
    for peer in others:
        peer.rounds = {third.id: round + 1}
    assert [
        handle.result(60.0).weight for handle in [peer.start(round, 1.0) for peer in others]
    ] == [2.0] * 2
    assert others[0].looked  # for how far it is


def test_a_leader_that_does_not_answer_is_passed_over(school):
    leader, *others = school.ranked(school.peers(4, wait=6.0))
    leader.host.fall_silent(LEADER_PROTOCOL)
    assert (
        school.values([peer.start(0, float(number)) for number, peer in enumerate(others)])
        == [pytest.approx(1.0)] * 3
    )


def test_a_leader_that_stops_while_it_collects_is_passed_over(school, monkeypatch):
    leader, *others = school.ranked(school.peers(4, wait=20.0))
    handles = [others[0].start(0, 0.0)]
    school.until(lambda: leader.waiting() == 1)
    leader.host.die()
    handles += [peer.start(0, 3.0) for peer in others[1:]]
    assert school.values(handles) == [pytest.approx(2.0)] * 3


def test_dead_peer_waits_for_its_new_record(school):
    """Who died is not waited for until it shows a new record."""
    *others, victim = school.ranked(school.peers(4, wait=30.0))
    for peer in others:
        peer.exchange._view.mark_absent([victim.id])
        assert victim.id not in peer.exchange._view.expected(0)
    handles = [peer.start(0, float(number)) for number, peer in enumerate(others)]
    assert school.values(handles) == [pytest.approx(1.0)] * 3
    for peer in others:
        peer.issued[victim.id] = 2.0
        assert victim.id in peer.exchange._view.expected(0)


def test_sleeper_leads_none_before_it_was_in_a_group(school):
    """Else each round that its rank gives to it would cost the others a part of their patience."""
    leader, *others = school.ranked(school.peers(3, wait=6.0))
    leader.exchange.took_over([0], newcomer=True)
    answering = leader.host.handlers[LEADER_PROTOCOL]
    asked = leader.host.fall_silent(LEADER_PROTOCOL)
    assert school.values([peer.start(0, float(number)) for number, peer in enumerate(others)]) == [
        0.5,
        0.5,
    ]
    asked.clear()
    second = next(
        round for round in range(1, 100) if school.ranked([leader, *others], round)[0] is leader
    )
    assert school.values(
        [peer.start(second, float(number)) for number, peer in enumerate(others)]
    ) == [0.5, 0.5]
    assert asked == []
    leader.host.handlers[LEADER_PROTOCOL] = answering
    for peer in others:
        peer.issued[leader.id] = 2.0
    handle = leader.start(second + 1, 4.0)
    school.until(lambda: any(peer.waiting(second + 1) for peer in others))
    assert school.values([handle, *(peer.start(second + 1, 4.0) for peer in others)]) == [4.0] * 3
    third = next(
        round
        for round in range(second + 2, 200)
        if school.ranked([leader, *others], round)[0] is leader
    )
    handles = [peer.start(third, 1.0) for peer in others]
    school.until(lambda: leader.waiting(third) == 2)
    assert school.values([leader.start(third, 4.0), *handles]) == [2.0] * 3


def test_who_was_late_takes_part_in_the_next_round(school):
    """Its group waits for those of the last one, and takes who is there by then."""
    *others, late = three = school.ranked(school.peers(3, wait=20.0, follow=False))
    for peer in others:
        peer.exchange._view.mark_absent([late.id])
    assert school.values([peer.start(0, float(number)) for number, peer in enumerate(others)]) == [
        0.5,
        0.5,
    ]
    assert (
        late.start(0, 9.0).result() is None
    )  # it is told the next round, and goes there when it has something new
    round = next(
        round for round in range(1, 100) if school.ranked([*others, late], round)[0] is others[0]
    )
    handle = late.start(round, 4.0)
    school.until(lambda: others[0].waiting(round) == 1)
    handles = [peer.start(round, 1.0) for peer in others]
    assert school.values([handle, *handles]) == [2.0] * 3
    handles = [peer.start(round + 1, 1.0) for peer in others]  # and then it is waited for
    school.until(lambda: sum(peer.waiting(round + 1) for peer in three) == 2)
    assert school.values([late.start(round + 1, 4.0), *handles]) == [2.0] * 3


def test_returned_peer_is_awaited_by_all(school):
    """Not by its leader alone: another member leads the next round."""
    *others, late = school.ranked(school.peers(3, wait=20.0))
    for peer in others:
        peer.exchange._view.mark_absent([late.id])
    first = late.start(0, 7.0)
    school.until(lambda: others[0].waiting() == 1)
    assert school.values([*(peer.start(0, 1.0) for peer in others), first]) == [3.0] * 3
    round = next(
        round for round in range(1, 100) if school.ranked([*others, late], round)[0] is others[1]
    )
    handles = [peer.start(round, 1.0) for peer in others]
    school.until(lambda: others[1].waiting(round) == 2 or all(handle.done() for handle in handles))
    assert school.values([late.start(round, 4.0), *handles]) == [2.0] * 3


@pytest.mark.ci
def test_passed_over_leader_asks_before_leading_again(school):
    """Nobody comes to it or tells it in which round they are: it would wait alone in each round
    that its rank gives to it.
    """
    late, *others = three = school.peers(3, wait=2.0)
    for peer in others:
        for round in range(4):  # so it is left out up to round 128
            peer.exchange._view.attendance.missed(late.id, round)
        assert late.id not in peer.exchange._view.order(0, 4, 0)
    led, round, later = [
        round for round in range(4, 128) if school.ranked(three, round)[0] is late
    ][:3]
    other = others[0]
    late.rounds[other.id] = round
    assert late.start(led, 9.0).result() is None
    handle = late.start(round, 4.0)
    second = school.ranked(others, round)[0]
    school.until(lambda: second.waiting(round) == 1)
    assert school.values([handle, *(peer.start(round, 1.0) for peer in others)]) == [2.0] * 3
    other.exchange._view.attendance._misses.clear()
    handle = other.start(later, 1.0)  # it takes it for the leader again, so it is
    school.until(lambda: late.waiting(later) == 1)
    assert school.values([handle, late.start(later, 3.0)]) == [2.0, 2.0]


def test_who_is_turned_away_does_not_wait(school):
    """It would wait for those who come to nobody."""
    missing, *others = three = school.peers(3, wait=500.0)
    for peer in others:
        for round in range(4):  # so it is turned away up to round 128
            peer.exchange._view.attendance.missed(missing.id, round, held=True)
    leads = {round: school.ranked(three, round)[0] is missing for round in range(4, 128)}
    turned_away = next(round for round in leads if not leads[round])
    for round in (
        turned_away,
        next(later for later in leads if leads[later] and later > turned_away),
    ):
        assert missing.start(round, 9.0).result() is None


def test_two_suffice_when_the_wait_is_over(school):
    """Two are enough when the wait is over and the third is then not waited for."""
    three = school.peers(3, wait=2.0)
    third = school.ranked(three)[-1]
    others = [peer for peer in three if peer is not third]
    assert school.values([peer.start(0, 2.0) for peer in others]) == [2.0, 2.0]
    later = next(round for round in range(1, 100) if school.ranked(three, round)[0] is not third)
    for peer in others:
        peer.exchange.time.timeouts = ExchangeTimeouts(60.0, 5.0, 20.0)
    handles = [peer.start(later, 3.0) for peer in others]
    assert [handle.result(60).weight for handle in handles] == [2.0, 2.0]
    assert third.exchange.next_round == 0


def test_nobody_comes(school):
    peer, _ = school.peers(2, wait=0.5)
    began = time.monotonic()
    handle = peer.start()
    assert handle.result() is None
    assert time.monotonic() - began > 0.45
    assert (
        not handle._attempt.commit.closed
    )  # it ended by itself: it was not called off at the exchange's limit
    assert peer.exchange.next_round == 1


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_departed_peer_is_not_awaited_by_the_last(school, monkeypatch, leads, before):
    """It sat out its whole patience, though the record of who left was there to be read (by a look
    in the directory).
    """
    monkeypatch.setattr(group_lead, "PROBE_S", 0.05)
    ranked = school.ranked(school.peers(2, wait=500.0))
    gone, last = ranked if leads else reversed(ranked)
    monkeypatch.setattr(last, "look", lambda: setattr(last, "sees", [last.id]))
    if before:
        gone.host.die()
    handle = last.start()
    if not before:
        school.until(lambda: ranked[0].waiting() == 1)
        gone.host.die()
    assert handle.result(60.0) is None
    assert not handle._attempt.commit.closed  # it ended by itself
    assert last.sees == [last.id]


def test_alone_in_the_swarm(school):
    (peer,) = school.peers(1, wait=60.0)
    assert peer.start().result() is None
    assert peer.exchange.waited < 30.0  # half of the wait


@pytest.mark.parametrize(("count", "sizes"), [(4, [2, 2, 2, 2]), (5, [2, 2, 3, 3, 3])])
def test_crowd_is_dealt_into_equal_groups(school, count, sizes):
    """Too many are dealt into groups of nearly equal size and nobody is left alone."""
    means = [
        handle.result()
        for handle in [
            peer.start(0, float(n)) for n, peer in enumerate(school.peers(count, max_group=2))
        ]
    ]
    assert sorted(len(mean.members) for mean in means) == sizes
    assert sum(mean.tensors[0][0].item() for mean in means) == pytest.approx(sum(range(count)))


def test_peer_that_misses_the_leader_is_redirected(school):
    """A peer that does not see the leader is sent to it."""
    four = school.peers(4, wait=20.0)
    leader, *others = school.ranked(four)
    newcomer = others[-1]
    newcomer.sees = [peer.id for peer in others]
    first = newcomer.start(0, 3.0)
    school.until(lambda: others[0].waiting() == 1)
    assert (
        school.values([first, *(peer.start(0, 1.0) for peer in (others[0], others[1], leader))])
        == [1.5] * 4
    )


def test_last_peer_that_misses_the_leader_is_redirected(school):
    """A peer that does not see the leader is sent to it when it comes last."""
    leader, *others = school.ranked(school.peers(4, wait=20.0))
    others[-1].sees = [peer.id for peer in others]
    handles = [peer.start(0, 1.0) for peer in (others[0], others[1], leader)]
    school.until(lambda: leader.waiting() == 3)
    assert school.values([others[-1].start(0, 5.0), *handles]) == [2.0] * 4


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("offer", "reason"), [
    ({"codec": BFLOAT16}, "the codec is (float32|bfloat16) here and (float32|bfloat16) there"),
    ({"shape": (5,)}, "the parameters have other names, shapes or types"),
    ({"shape": (2, 2)}, "the parameters have other names, shapes or types"),
])  # fmt: skip
def test_refused_contribution_names_the_difference(school, caplog, offer, reason):
    """Contributions that differ are refused by the name of the difference."""
    leader, second, odd = school.ranked(school.peers(3, wait=1.0))
    handles = [leader.start(0, 1.0), second.start(0, 3.0)]
    school.until(lambda: leader.waiting() == 2)
    assert odd.start(0, 9.0, **offer).result() is None
    assert school.values(handles) == [2.0, 2.0]
    said = [
        record.getMessage()
        for record in caplog.records
        if "will not exchange with this node" in record.getMessage()
    ]
    assert any(re.search(reason, sentence) for sentence in said)


def test_mistakes_of_the_caller(school, network):
    (peer,) = school.peers(1)
    with pytest.raises(ValueError):
        peer.exchange.start(Contribution(RoundKey("another", 0), []))
    for wrong in ({"max_group": 1}, {"max_group": 64}, {"fragments": 0}):
        with pytest.raises(ValueError):
            GroupExchange(
                PeerContext(peer.host, peer.host.identity, "a" * 52, "0" * 64, 0, peer.members),
                **wrong,
            )
