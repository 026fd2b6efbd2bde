"""Neighbours in gossip, on the simulated network: what is passed on, and what becomes of one that
lies.
"""

import contextlib

import pytest

from shoal.swarm.errors import NetworkError
from shoal.swarm.gossip import neighbour_faults
from shoal.swarm.gossip import neighbours as module
from shoal.swarm.gossip.frames import GossipTopics, frame_of, greet
from shoal.swarm.p2p.rate_limit import RateLimit
from shoal.swarm.wire.envelope import MAX_MESSAGE, pack
from shoal.swarm.wire.messages import GOSSIP_PROTOCOL
from tests.sim.gossip import SWARM, GossipPeer, GossipSwarm

JOIN_S = 5.0
LINE = {0: {1}, 1: {0, 2}, 2: {1}}


@pytest.fixture
def start():
    """Make swarms that end with the test."""
    with contextlib.ExitStack() as made:

        def start(*arguments, **options):
            swarm = GossipSwarm(1, *arguments, **options)
            made.callback(swarm.end)
            swarm.run(JOIN_S)
            return swarm

        yield start


def test_a_record_reaches_all_of_thirty_once(start):
    swarm = start(30)
    degrees = [len(each.linked) for each in swarm.all]
    assert max(degrees) < 15
    assert sum(degrees) / 30 <= 6.5, "the graph is sparse"
    before = sum(each.host.traffic.sent for each in swarm.all)
    said = swarm.all[0].publish()
    swarm.run(1.0)
    assert [each.got[said] for each in swarm.all] == [0] + [1] * 29
    envelope = len(swarm.all[0].envelope(1))
    sent = sum(each.host.traffic.sent for each in swarm.all) - before
    assert sent < 6.5 * 30 * (envelope + 8), "to each neighbour once, at most"


def test_gossip_is_counted_as_such_at_both_ends(start):
    """Mutants: the end that opened the stream, or the one that answered, counts it as other bytes;
    what comes in is counted as other bytes.
    """
    swarm = start(3)
    swarm.all[0].publish()
    swarm.run(1.0)
    for each in swarm.all:
        traffic = each.host.traffic
        assert traffic.gossip_sent == traffic.sent > 0
        assert traffic.gossip_received == traffic.received > 0
        assert traffic.beside_gossip() == 0


def test_what_is_forged_is_not_passed_on(start):
    swarm = start(3, views=LINE)
    liar, middle, far = swarm.all
    liar.send(liar.envelope(1, author=far), liar.envelope(2))
    swarm.run(2.0)
    assert middle.rejected("forged") == 1
    assert middle.got == far.got == {(liar.peer, 2): 1}
    assert far.topic.counts["received"] == 1


def test_a_strangers_record_is_not_passed_on(start):
    swarm = start(3, views=LINE)
    liar, middle, far = swarm.all
    nobody = GossipPeer(swarm, "nobody", is_stranger=True)
    liar.send(nobody.envelope(1))
    swarm.run(10.0)
    assert middle.rejected("stranger") == 1
    assert far.topic.counts["received"] == 0


def test_a_newcomers_first_record_waits_for_its_membership(start):
    swarm = start(3, views=LINE)
    first, middle, far = swarm.all
    newcomer = GossipPeer(swarm, "newcomer", is_stranger=True)
    first.send(newcomer.envelope(1))
    swarm.run(0.5)
    assert not middle.got
    swarm.members.add(newcomer.peer)
    swarm.run(5.0)
    assert middle.got == far.got == {(newcomer.peer, 1): 1}


def test_an_author_over_its_quota_is_not_passed_on(start):
    swarm = start(3, views=LINE, quota=RateLimit(messages=20))
    loud, middle, far = swarm.all
    loud.send(*(loud.envelope(number) for number in range(30)))
    swarm.run(1.0)
    assert middle.rejected("quota") == 10
    assert far.topic.counts["received"] == far.topic.counts["accepted"] == 20
    assert loud.peer in middle.linked, "no fault: its view of a quota may differ a little"


def test_a_liar_is_slowed_dropped_and_remembered(start):
    swarm = start(3, views=LINE)
    liar, middle, far = swarm.all
    liar.swallow()
    most = neighbour_faults.FAULTS.messages
    liar.send(*(liar.envelope(number, author=far) for number in range(3 * most)))
    swarm.run(most * module.FAULT_PAUSE_S / 2)
    assert 0 < middle.rejected("forged") < most, "it is slowed"
    swarm.run(60.0)
    assert middle.rejected("forged") == most + 1
    assert liar.peer not in middle.linked
    swarm.run(neighbour_faults.SHUNNED_S)
    assert liar.peer in middle.linked, "not for ever"


def test_what_a_stranger_sends_is_not_read(start):
    swarm = start(3)
    stranger = GossipPeer(swarm, "stranger", is_stranger=True)
    swarm.run(5.0)
    assert stranger.linked, "it may listen"
    said = swarm.all[0].publish()
    stranger.send(*[bytes(60_000)] * 588)
    swarm.run(30.0)
    assert stranger.got[said] == 1
    received = sum(each.host.traffic.received for each in swarm.all)
    assert received < 60_000
    for each in swarm.all:
        assert each.topic.counts["received"] == (each is not swarm.all[0])
        assert each.gossip.refused() == {}


def test_a_stranger_that_becomes_a_member_is_read(start):
    swarm = start(3)
    newcomer = GossipPeer(swarm, "newcomer", is_stranger=True)
    swarm.run(5.0)
    said = newcomer.publish()
    swarm.run(1.0)
    swarm.members.add(newcomer.peer)
    swarm.run(5.0)
    assert [each.got[said] for each in swarm.all] == [1, 1, 1]


BAD = {
    "oversized": bytes(MAX_MESSAGE + 2),
    "no topic of that number": b"",
    "other topics than before": pack(GossipTopics(swarm=SWARM, topics=("other/1",))),
    "another swarm": pack(GossipTopics(swarm="b" * 52, topics=("note/1",))),
}


@pytest.mark.parametrize("frame", BAD.values(), ids=BAD)
def test_a_broken_stream_ends_and_is_remembered(start, frame):
    swarm = start(3, views=LINE)
    liar, middle, far = swarm.all

    async def sent():
        await liar.linked[middle.peer].stream.send(frame, 10.0)

    liar.host.start(sent())
    swarm.run(5.0)
    assert liar.peer not in middle.linked
    said = far.publish()
    swarm.run(1.0)
    assert middle.got[said] == 1


def test_a_record_sent_twice_is_a_fault(start):
    swarm = start(3, views=LINE)
    liar, middle, far = swarm.all
    liar.send(*[liar.envelope(1)] * 4)
    swarm.run(5.0)
    assert middle.rejected("replayed") == 3
    assert far.topic.counts["received"] == 1


def test_a_new_neighbour_gets_what_was_said_lately(start):
    swarm = start(4)
    swarm.hidden = {each.peer: set() for each in swarm.all}
    said = swarm.all[0].publish()
    late = GossipPeer(swarm, "late")
    swarm.run(5.0)
    assert late.got[said] == 1
    assert sum(late.got.values()) == 1


def test_streams_that_cross_lose_no_record(start):
    """The fault: the stream that was given up, unread, had what was said lately; the one that
    stayed did not get it.
    """
    swarm = start(2, views={0: set(), 1: set()})
    first, second = swarm.all
    said = [each.publish() for each in swarm.all]
    swarm.run(1.0)
    swarm.hidden.clear()
    swarm.run(5.0)
    assert first.got == {said[1]: 1}
    assert second.got == {said[0]: 1}


def test_who_calls_again_gets_each_record_once(start):
    swarm = start(2)
    middle, _ = swarm.all
    caller = GossipPeer(swarm, "caller")
    swarm.hidden = {each.peer: {caller.peer} for each in swarm.all}
    caller.gossip.close()
    middle.publish()
    received = []

    async def call():
        for _ in range(3):
            stream = await caller.host.open(middle.peer, GOSSIP_PROTOCOL, timeout=10.0)
            await greet(stream, GossipTopics(swarm=SWARM, topics=("note/1",)))
            while True:
                try:
                    frame = await stream.receive(MAX_MESSAGE, 2.0)
                except NetworkError:
                    break
                if frame[0] == 0:
                    received.append(frame)
            stream.close()

    caller.host.start(call())
    swarm.run(10.0)
    assert len(received) == 1


def test_its_own_record_that_comes_back_is_nothing_new(start):
    swarm = start(3, views=LINE)
    author, middle, _ = swarm.all
    author.publish()
    swarm.run(1.0)
    (envelope,) = author.gossip.neighbours._recent.since_last("nobody", is_drawn=True)

    async def back():
        await middle.linked[author.peer].stream.send(frame_of(0, envelope.data), 10.0)

    middle.host.start(back())
    swarm.run(1.0)
    assert author.topic.counts["received"] == 0
    assert author.topic.counts["rejected"] == {}
    assert middle.linked[author.peer].had[envelope.digest]


def test_members_that_come_and_go_stay_one_graph(start):
    swarm = start(12)
    for number in range(6):
        gone = swarm.all.pop(0)
        swarm.members.discard(gone.peer)
        swarm.network.kill(gone.peer)
        swarm.all.append(GossipPeer(swarm, f"next {number}"))
        swarm.run(3.0)
    swarm.run(5.0)
    said = swarm.all[0].publish()
    swarm.run(2.0)
    assert [each.got[said] for each in swarm.all[1:]] == [1] * 11
    drawn = [sum(one.is_drawn for one in each.linked.values()) for each in swarm.all]
    assert max(drawn) <= module.DRAWN


def test_nobody_is_blamed_for_what_it_could_not_know(start):
    """The fault: an author that packed each record two ways had honest neighbours blame each other
    for replays.
    """
    swarm = start(3, views={0: {1, 2}, 1: {0, 2}, 2: {0, 1}})
    author, middle, far = swarm.all

    async def sent(number):
        for other, encoding in ((middle, "plain"), (far, "zlib")):
            data = author.envelope(number, encoding=encoding)
            await author.linked[other.peer].stream.send(frame_of(0, data), 10.0)

    for number in range(2 * neighbour_faults.FAULTS.messages):
        author.host.start(sent(number))
    swarm.run(10.0)
    assert (
        middle.rejected("replayed")
        == far.rejected("replayed")
        == 2 * neighbour_faults.FAULTS.messages
    )
    assert far.peer in middle.linked
    assert middle.peer in far.linked


def test_one_peer_has_one_place_however_often_it_calls(start):
    swarm = start(3)
    middle, *others = swarm.all
    caller = GossipPeer(swarm, "caller")
    swarm.hidden = {each.peer: {caller.peer} for each in swarm.all}
    caller.gossip.close()
    streams = []

    async def call():
        for _ in range(2 * module.MAX_ACCEPTED):
            stream = await caller.host.open(middle.peer, GOSSIP_PROTOCOL, timeout=10.0)
            await greet(stream, GossipTopics(swarm=SWARM, topics=("note/1",)))
            streams.append(stream)

    caller.host.start(call())
    swarm.run(10.0)
    assert middle.gossip.neighbours.counters.rejected() == {}
    assert middle.gossip.neighbours._accepted.peers[caller.peer] == 1
    assert {each.peer for each in others} < set(middle.linked)


@pytest.mark.parametrize("refused", ["shunned", "silent"])
def test_a_refused_second_stream_leaves_the_first_its_place(start, monkeypatch, refused):
    """The fault: it had freed the place before it was judged, so its peer held one uncounted."""
    swarm = start(1)
    (middle,) = swarm.all
    caller = GossipPeer(swarm, "caller")
    swarm.hidden = {middle.peer: {caller.peer}}
    caller.gossip.close()
    neighbours = middle.gossip.neighbours

    async def call():
        stream = await caller.host.open(middle.peer, GOSSIP_PROTOCOL, timeout=10.0)
        with contextlib.suppress(NetworkError):
            await greet(stream, GossipTopics(swarm=SWARM, topics=("note/1",)))
        await stream.more(10.0)

    caller.host.start(call())
    swarm.run(1.0)
    before = middle.linked[caller.peer]
    assert not before.is_drawn
    if refused == "shunned":
        neighbours._faults.shun(caller.peer)
    else:

        async def fail(*_):
            raise NetworkError("it takes nothing")

        monkeypatch.setattr(module, "send_message", fail)
    caller.host.start(call())
    swarm.run(1.0)
    assert middle.linked[caller.peer] is before
    assert neighbours._accepted.peers[caller.peer] == 1


def test_a_neighbour_may_call_again_where_all_places_are_taken(start):
    """Mutant: its second stream has no place beyond, and is refused for its own first."""
    swarm = start(1)
    (middle,) = swarm.all
    callers = [GossipPeer(swarm, f"caller {number}") for number in range(module.MAX_ACCEPTED + 1)]
    swarm.hidden = {middle.peer: {each.peer for each in callers}}
    for each in callers:
        each.gossip.close()
    *callers, late = callers
    neighbours = middle.gossip.neighbours

    async def call(caller):
        stream = await caller.host.open(middle.peer, GOSSIP_PROTOCOL, timeout=10.0)
        with contextlib.suppress(NetworkError):
            await greet(stream, GossipTopics(swarm=SWARM, topics=("note/1",)))
        await stream.more(10.0)

    for each in callers:
        each.host.start(call(each))
    swarm.run(1.0)
    before = middle.linked[callers[0].peer]
    callers[0].host.start(call(callers[0]))
    swarm.run(1.0)
    assert middle.linked[callers[0].peer] is not before
    assert neighbours.counters.rejected() == {}
    late.host.start(call(late))
    swarm.run(1.0)
    assert neighbours.counters.rejected() == {"crowded": 1}
    assert neighbours._accepted.peers == {each.peer: 1 for each in callers}


def test_members_behind_relays_are_drawn_last(start):
    swarm = start(12)
    direct, relayed = swarm.all[:7], swarm.all[7:]
    swarm.relayed = {each.peer for each in relayed}
    swarm.run(20.0)
    for each in swarm.all:
        drawn = {peer for peer, one in each.linked.items() if one.is_drawn}
        assert not drawn & swarm.relayed
        assert len(drawn) <= module.DRAWN
    said = [relayed[0].publish(), direct[0].publish()]
    swarm.run(2.0)
    for each in swarm.all:
        assert all(each.got[one] == (each.peer != one[0]) for one in said)


def test_members_that_all_have_relays_are_one_graph(start):
    swarm = start(8)
    swarm.relayed = {each.peer for each in swarm.all}
    swarm.run(20.0)
    said = swarm.all[0].publish()
    swarm.run(2.0)
    assert [each.got[said] for each in swarm.all] == [0] + [1] * 7
