"""Bounds on the streams, calls and bytes of one peer, so that a flooding peer does not keep the
others from a node.
"""

import asyncio
import resource

import pytest
from hivemind.p2p import PeerID

from shoal.swarm.access.policy import AccessPolicy, PeerLists
from shoal.swarm.changes import CHANGE_PROTOCOL
from shoal.swarm.errors import NetworkError
from shoal.swarm.manifest import MANIFEST_PROTOCOL
from shoal.swarm.p2p.rate_limit import HOUR_S, RateLimit, TokenBuckets
from shoal.swarm.p2p.resource_manager import (
    ADMISSION_PROTOCOL,
    FREE,
    MAX_FIRST,
    MAX_HANDLERS,
    MAX_HANDLERS_PER_PEER,
    MAX_STRANGERS,
    REASONS,
    Rates,
    ResourceManager,
)
from shoal.swarm.wire.messages import GOSSIP_PROTOCOL, SEED_PROTOCOL, SEEN_PROTOCOL
from tests.support.clock import Clock
from tests.support.echo_host import ECHO, ask, start
from tests.support.waiting import until

BULK = "/test/bulk/1"
FEW = Rates(streams=20, calls=5, call_bytes=1000)


class Caller:
    """A stream, from the address ``origin``."""

    def __init__(self, peer, origin=""):
        self.peer_id, self.origin, self.aborted = peer, origin, 0

    def abort(self):
        self.aborted += 1


def held(at, peer):
    return next(stream for stream in at._places._streams if stream.peer_id == peer)


def resource_manager(rates=FEW, **options):
    clock = Clock()
    return ResourceManager(rates=rates, clock=clock, **options), clock


def test_peer_and_strangers_have_few_streams():
    """One peer has few streams at a time and strangers few of all."""
    at, _ = resource_manager(Rates())
    members = {f"m{i}" for i in range(MAX_HANDLERS)}
    at.known = members.__contains__
    assert [at.acquire(Caller("m0"), ECHO) for _ in range(MAX_HANDLERS_PER_PEER + 1)] == [
        ""
    ] * MAX_HANDLERS_PER_PEER + ["crowded"]
    said = [at.acquire(Caller(f"s{i}"), ECHO) for i in range(MAX_STRANGERS + 1)]
    assert said == [""] * MAX_STRANGERS + ["crowded"]
    assert at.acquire(Caller("m1"), ECHO) == ""  # strangers cannot keep a member out
    at.release(held(at, "s0"), ECHO, 0)
    assert at.acquire(Caller("s99"), ECHO) == ""
    left = MAX_HANDLERS - MAX_HANDLERS_PER_PEER - MAX_STRANGERS - 1
    assert [at.acquire(Caller(f"m{i + 2}"), ECHO) for i in range(left)] == [""] * left
    assert at.acquire(Caller("m1"), ECHO) == "crowded"
    assert at.refused() == {"crowded": 3}


def test_busy_members_leave_room_for_another():
    """Members that hold all their streams do not keep out one that has none."""
    at, _ = resource_manager(Rates())
    at.known = lambda peer: not peer.startswith("stranger")
    hostile = [f"hostile{number}" for number in range(100)]
    held = [
        peer
        for _ in range(MAX_HANDLERS_PER_PEER)
        for peer in hostile
        if not at.acquire(Caller(peer), ECHO)
    ]
    assert len(held) == MAX_HANDLERS
    assert at.acquire(Caller("honest"), ECHO) == ""
    assert at.acquire(Caller("honest"), ECHO) == "crowded"
    assert at.acquire(Caller("stranger"), ECHO) == "crowded"
    assert (
        sum(not at.acquire(Caller(f"late{number}"), ECHO) for number in range(1000))
        == MAX_FIRST - 1
    )
    assert at._busy.total() == MAX_HANDLERS + MAX_FIRST


def test_who_becomes_a_member_meanwhile_leaves_nothing_behind():
    at, _ = resource_manager()
    at.known = lambda peer: False
    at.acquire(Caller("a"), ECHO)
    at.known = lambda peer: True
    at.acquire(Caller("a"), ECHO)
    at.release(held(at, "a"), ECHO, 0)
    at.release(held(at, "a"), ECHO, 0)
    assert not at._busy
    assert not at._strangers.peers


def test_crowded_range_gives_a_stream_up():
    """The fault: 64 free keys without a record held all that strangers may have, and 512 with one
    all that there is.
    """
    at, _ = resource_manager(Rates())
    at.known = lambda peer: peer.startswith("member")
    crowd = [Caller(f"s{n}", "10.1.0.1") for n in range(MAX_STRANGERS)]
    crowd += [
        Caller(f"member{n}", "10.1.0.1") for n in range(MAX_HANDLERS + MAX_FIRST - MAX_STRANGERS)
    ]
    assert not any(at.acquire(each, ECHO) for each in crowd)
    assert at.acquire(Caller("s", "10.1.0.2"), ECHO) == "crowded"
    assert (
        at.acquire(Caller("s", "10.2.0.1"), ECHO)
        == ""
        != at.acquire(Caller("member", "10.1.0.1"), ECHO)
    )
    assert at.acquire(Caller("member", "10.2.0.1"), ECHO) == ""
    assert [n for n, each in enumerate(crowd) if each.aborted] == [0, 1]
    at.release(crowd[0], ECHO, 0)
    assert at._busy.total() == MAX_HANDLERS + MAX_FIRST
    assert at._strangers.peers.total() == MAX_STRANGERS - 1
    at.partner = "member".__eq__
    assert at.acquire(Caller("member", "10.1.0.1"), ECHO) == ""  # with it this node has exchanged


def test_rate_refusal_takes_nobodys_place():
    """A stream that is refused for its rate takes nobody's place."""
    at, _ = resource_manager(Rates(streams=1))
    crowd = [Caller(f"m{n}", "10.1.0.1") for n in range(MAX_HANDLERS + MAX_FIRST)]
    assert not any(at.acquire(each, ECHO) for each in crowd)
    assert [at.acquire(Caller("other", "10.2.0.1"), ECHO) for _ in range(3)] == ["", "rate", "rate"]
    assert sum(each.aborted for each in crowd) == 1


def test_streams_and_calls_have_a_rate():
    at, clock = resource_manager()

    def burst(peer, count):
        said = []
        for _ in range(count):
            said.append(at.acquire(Caller(peer), ECHO))
            if not said[-1]:
                at.release(held(at, peer), ECHO, 0)
        return said.count("")

    assert burst("a", 30) == 20
    assert burst("b", 30) == 20
    clock.now += 30
    assert burst("a", 30) == 10
    assert [at.calls("a", 100) for _ in range(6)] == [""] * 5 + ["rate"]
    assert at.calls("b", 1001) == "rate"
    assert set(at.refused()) <= set(REASONS)


def test_further_request_counts_as_a_new_stream():
    """Also of a peer that has all the streams that it may have."""
    at, _ = resource_manager(
        Rates(streams=MAX_HANDLERS_PER_PEER + 3), access_policy=AccessPolicy("me")
    )
    streams = [Caller("a") for _ in range(MAX_HANDLERS_PER_PEER)]
    assert {at.acquire(stream, ECHO) for stream in streams} == {""}
    assert [at.renew(streams[0], ECHO) for _ in range(4)] == [True, True, True, False]
    assert at.refused() == {"rate": 1}
    at.access_policy = AccessPolicy("me", lists=PeerLists(deny=frozenset({"a"})))
    assert not at.renew(streams[1], ECHO)


def test_hourly_bytes_to_one_peer_are_bounded():
    """What is handed out to one peer in an hour is bounded."""
    at, clock = resource_manager()
    at.meter(BULK, 1000)
    assert at.acquire(Caller("a"), BULK) == ""
    at.release(held(at, "a"), BULK, 2500)  # what has begun is finished
    assert at.acquire(Caller("a"), BULK) == "spent"
    assert at.acquire(Caller("a"), ECHO) == ""
    assert at.acquire(Caller("b"), BULK) == ""
    clock.now += HOUR_S * 1.4
    assert at.acquire(Caller("a"), BULK) == "spent"
    clock.now += HOUR_S * 0.2
    assert at.acquire(Caller("a"), BULK) == ""


def test_a_debt_is_paid_before_more_is_given():
    clock = Clock()
    quotas = TokenBuckets(RateLimit(messages=10, nbytes=100, senders=2, period=10.0), clock)
    quotas.charge("a", 150)
    assert not quotas.take("a", 1, 1)
    clock.now = 6.0
    assert quotas.take("a", 1, 1)


def test_who_is_denied_gets_nothing():
    at, _ = resource_manager(
        access_policy=AccessPolicy("me", lists=PeerLists(deny=frozenset({"a"})))
    )
    assert at.acquire(Caller("a"), "/shoal/manifest/1") == "denied"
    assert at.calls("a", 1) == "denied"
    picky, _ = resource_manager(
        access_policy=AccessPolicy("me", lists=PeerLists(allow=frozenset({"a"})))
    )
    assert [
        picky.acquire(Caller("b"), "/shoal/manifest/1"),
        picky.acquire(Caller("b"), ECHO),
        picky.calls("b", 1),
    ] == [
        "",
        "denied",
        "",
    ]


def test_what_needs_no_invitation_is_called_so():
    assert {
        ADMISSION_PROTOCOL,
        CHANGE_PROTOCOL,
        GOSSIP_PROTOCOL,
        MANIFEST_PROTOCOL,
        SEED_PROTOCOL,
        SEEN_PROTOCOL,
    } == FREE


# -- real hosts ------------------------------------------------------------------------------------


async def echo(stream):
    await stream.send(await stream.receive(1 << 20, 30), 5)


@pytest.fixture
def three():
    with start() as a, start(bootstrap=a.addresses()) as b, start(bootstrap=a.addresses()) as c:
        a.serve(ECHO, echo)
        yield a, b, c


def test_endless_opener_is_cut_off(three):
    """Who opens streams without end is cut off and the others are served."""
    victim, honest, flooder = three
    victim.resource_manager._streams = TokenBuckets(RateLimit(messages=40, senders=8))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    async def flood():
        served = ended = 0
        for _ in range(25):
            said = await asyncio.gather(
                *(ask(flooder, victim.peer_id) for _ in range(8)), return_exceptions=True
            )
            served += said.count(b"hello")
            ended += sum(isinstance(answer, NetworkError) for answer in said)
        return served, ended

    flooding = flooder.submit(flood())
    assert [honest.call(ask(honest, victim.peer_id), 60) for _ in range(10)] == [b"hello"] * 10
    served, ended = flooding.result(60)
    assert served + ended == 200
    assert served < 200 - 40  # its rate, and what a minute of it brings back meanwhile
    assert victim.resource_manager.refused()["rate"] > 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # KiB


def test_silent_streams_keep_no_member_out(three):
    """Streams that say nothing are bounded and do not keep a member out."""
    victim, honest, slow = three
    victim.resource_manager.known = {honest.peer_id}.__contains__

    async def wait_for_ever(stream):
        await stream.receive(100, 60)

    victim.serve("/test/slow/1", wait_for_ever)

    held = [
        slow.call(slow.open(victim.peer_id, "/test/slow/1", timeout=30), 60)
        for _ in range(MAX_HANDLERS_PER_PEER + 10)
    ]
    until(lambda: victim.resource_manager.refused().get("crowded", 0) >= 10)
    assert honest.call(ask(honest, victim.peer_id), 60) == b"hello"
    assert victim.resource_manager._busy[slow.peer_id] == MAX_HANDLERS_PER_PEER < len(held)


def test_dht_calls_are_bounded_and_deniable(three):
    """Calls to the DHT node are bounded and who is denied makes none."""
    victim, honest, caller = three
    honest.call(honest.store("k", "s", b"v", 60.0), 60)
    victim.resource_manager._calls = TokenBuckets(RateLimit(messages=3, senders=8))

    async def pings():
        node = caller._supervisor.running_dht()
        return [
            await node.protocol.call_ping(PeerID.from_base58(victim.peer_id)) is not None
            for _ in range(6)
        ]

    assert caller.call(pings(), 60) == [True] * 3 + [False] * 3
    assert victim.resource_manager.refused() == {"rate": 3}
    victim.resource_manager._calls = TokenBuckets(RateLimit(messages=1000, senders=8))
    victim.resource_manager.access_policy = AccessPolicy(
        victim.peer_id, lists=PeerLists(deny=frozenset({caller.peer_id}))
    )
    assert caller.call(pings(), 60) == [False] * 6
    assert victim.resource_manager.refused() == {"rate": 3, "denied": 6}
    assert honest.call(ask(honest, victim.peer_id), 60) == b"hello"
