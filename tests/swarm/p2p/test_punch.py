"""Connections past a relay: who is asked and answered, which addresses are dialled and how often.

The daemons only pretend."""

import asyncio
import contextlib
import logging
from types import SimpleNamespace

import pytest

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.p2p import punch, punched_members, second_daemon
from shoal.swarm.p2p.daemon import DaemonError
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.listening import beside
from shoal.swarm.p2p.punch import (
    MAX_DIALS_OF_HOST,
    MAX_REQUESTS,
    MAX_REQUESTS_EACH,
    PUNCH_PROTOCOL,
    Punch,
    Puncher,
)
from shoal.swarm.p2p.resource_manager import ResourceManager
from shoal.swarm.p2p.seen_address import Seen, tell_seen, usable
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.wire.envelope import pack, unpack
from tests.sim.memory_stream import stream_pair

FIRST, SECOND = sorted(Identity.ephemeral().peer_id for _ in range(2))
# in the names of tests, which must be the same in all workers
SEED = "12D3KooWQjxpyme8TkkXzPr5BZTMb8TfDP6XtSy1961RU2ktii6W"
OWN = "/ip4/9.9.9.9/udp/4001/quic-v1"
SIX = "/ip6/2606:4700::7/udp/4001/quic-v1"
THERE = "/ip4/8.8.8.8/udp/4001/quic-v1"


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(punched_members, "FIRST_ASK_S", 0.0)


def asked(by, of, side=None, address=THERE, key=None):
    """Return the message of ``by``, whose second daemon has the identity ``side``, for ``of``;
    signed with ``key``.
    """
    side = side or Identity.ephemeral()
    return pack(
        Punch(
            peer=side.peer_id,
            addresses=(address,),
            proof=(key or side).sign(PUNCH_PROTOCOL, f"{by} {of}".encode()),
        )
    )


class FakeDaemon:
    """The second daemon: its dials, who is connected to it, and what it serves."""

    def __init__(self, identity, own):
        self.peer_id, self.own, self.here, self.dialled, self.served = (
            identity.peer_id,
            own,
            {SEED},
            [],
            {},
        )
        self.gone, self.nobody, self.hangs = asyncio.Event(), False, False

    async def peers(self):
        return tuple(self.here)

    async def addresses(self):
        return (
            f"/ip4/192.168.1.2/udp/4001/quic-v1/p2p/{self.peer_id}",
            *(f"{a}/p2p/{self.peer_id}" for a in self.own),
        )

    async def connect(self, peer, addresses, *, seconds):
        if peer == SEED:
            assert addresses == [f"/ip4/203.0.113.9/udp/4001/quic-v1/p2p/{SEED}"]
            return
        self.dialled += addresses
        if self.nobody:
            raise DaemonError("nobody answers")
        self.here.add(peer)

    async def open(self, peer, protocol):
        if self.hangs:
            await asyncio.Event().wait()
        mine, theirs = stream_pair()
        if peer == SEED:
            theirs[1].write(len(told := pack(Seen(address=OWN))).to_bytes(4, "big") + told)
        return mine

    async def serve(self, protocol, incoming):
        self.served[protocol] = incoming

    async def ended(self):
        await self.gone.wait()
        return 1

    def end_by_force(self):
        self.gone.set()

    async def shutdown(self):
        self.gone.set()


class World:
    """A node, ``me``; ``relayed``: the peers that its first daemon is connected to, each with its
    IP address.
    """

    def __init__(self, monkeypatch, me=FIRST, other=SECOND):
        self.me, self.other, self.started, self.origins, self.calls = me, other, [], {other: ""}, []
        self.members, self.own = {other}, ("/ip6/fe80::1/udp/4001/quic-v1", SIX)
        self.resources = ResourceManager()
        self.resources.known = lambda peer: peer in self.members
        self.side = Identity.ephemeral()

        async def launch(identity, **options):
            self.started.append(FakeDaemon(identity, self.own))
            return self.started[-1]

        async def origins():
            return self.origins

        async def opened(peer, protocol):
            self.calls.append((peer, protocol))
            mine, theirs = stream_pair()
            theirs[1].write(len(told := asked(peer, me, self.side)).to_bytes(4, "big") + told)
            return mine

        monkeypatch.setattr(second_daemon.Daemon, "launch", launch)
        self.supervisor = SimpleNamespace(
            running=lambda: SimpleNamespace(origins=origins, open=opened),
            bootstrapper=SimpleNamespace(seeds={SEED: (f"/ip4/203.0.113.9/tcp/4001/p2p/{SEED}",)}),
            known=SimpleNamespace(addresses=list), handlers={}, slots=SimpleNamespace(moves=0),
        )  # fmt: skip
        self.puncher = Puncher(self.supervisor, me, self.resources, TrafficMeter())

    async def asks(self, data, peer=None, origin=""):
        """Have a peer ask; return its answer."""
        mine, theirs = stream_pair()
        mine[1].write(len(data).to_bytes(4, "big") + data)
        await self.puncher.answer(Stream(peer or self.other, *theirs, TrafficMeter(), origin))
        return unpack(await Stream(self.me, *mine, TrafficMeter()).receive(Punch.LIMIT, 5), Punch)


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


@pytest.mark.parametrize(("ways", "told"), [
    (["/ip4/9.9.9.9/tcp/4001", OWN], OWN),
    ([THERE, OWN], OWN),  # it was there before
    ([OWN, THERE], OWN),
    ([OWN.replace("4001", "4002"), OWN], OWN),  # its router took another port since
    ([THERE], ""),
    ([], ""),
])  # fmt: skip
async def test_who_asks_is_told_the_address_from_which_it_asks(ways, told):
    daemon = SimpleNamespace(ways=lambda: asyncio.sleep(0, {FIRST: ways}))
    mine, theirs = stream_pair()
    await tell_seen(daemon, Stream(FIRST, *theirs, TrafficMeter(), "9.9.9.9"))
    assert (
        unpack(await Stream(SEED, *mine, TrafficMeter()).receive(Seen.LIMIT, 5), Seen).address
        == told
    )


@pytest.mark.parametrize(
    ("address", "may"),
    [
        (THERE, True),
        ("/ip6/2606:4700::1111/udp/1024/quic-v1", True),
        ("/ip4/192.168.1.7/udp/4001/quic-v1", False),
        ("/ip4/100.64.0.1/udp/4001/quic-v1", False),
        ("/ip4/224.0.0.251/udp/5353/quic-v1", False),
        ("/ip6/ff0e::1/udp/4001/quic-v1", False),
        ("/ip4/127.0.0.1/udp/4001/quic-v1", False),
        ("/ip6/::ffff:127.0.0.1/udp/4001/quic-v1", False),
        ("/ip6/::ffff:10.0.0.1/udp/4001/quic-v1", False),
        ("/ip6/64:ff9b::a00:1/udp/4001/quic-v1", False),
        ("/ip6/2002:a00:1::1/udp/4001/quic-v1", False),
        ("/ip4/8.8.8.8/udp/1023/quic-v1", False),
        ("/ip4/8.8.8.8/udp/65536/quic-v1", False),
        ("/ip4/8.8.8.8/udp/²/quic-v1", False),
        ("/ip4/8.8.8.8/tcp/4001/quic-v1", False),
        ("/dns4/a.example/udp/4001/quic-v1", False),
        (f"{THERE}/p2p/{SEED}/p2p-circuit", False),
    ],
)
def test_only_public_quic_addresses_are_punched(address, may):
    """Only public addresses by quic and no port of the system."""
    assert usable(address) is may


async def test_a_member_is_answered_and_dialled_at_once(world):
    side = Identity.ephemeral()
    answer = await world.asks(asked(SECOND, FIRST, side))
    (daemon,) = world.started
    assert (answer.peer, answer.addresses) == (daemon.peer_id, (OWN, SIX))
    assert daemon.dialled == [f"{THERE}/p2p/{side.peer_id}"]
    assert world.puncher.reached == {SECOND}
    assert await world.puncher.open(SECOND, "/x/1")
    daemon.here.clear()  # the connection ended
    assert await world.puncher.open(SECOND, "/x/1") is None


@pytest.mark.parametrize(
    ("why", "request_of"),
    [
        ("is no member", lambda: {"data": asked(SECOND, FIRST), "peer": SEED}),
        ("is connected directly", lambda: {"data": asked(SECOND, FIRST), "origin": "8.8.8.8"}),
        ("another's key", lambda: {"data": asked(SECOND, FIRST, key=Identity.ephemeral())}),
        ("another's key", lambda: {"data": asked(SEED, FIRST)}),  # of another member
        ("another's key", lambda: {"data": asked(SECOND, SEED)}),  # for another
        (
            "not public",
            lambda: {"data": asked(SECOND, FIRST, address="/ip4/192.168.1.7/udp/4001/quic-v1")},
        ),
    ],
)
async def test_refusal_starts_no_daemon(world, caplog, why, request_of):
    """What is refused starts no daemon is counted and logged once."""
    for _ in range(3):
        with caplog.at_level(logging.WARNING), pytest.raises(NetworkError, match=why):
            await world.asks(**request_of())
    assert world.started == []
    assert world.resources.refused() == {"punch": 3}
    assert len(caplog.records) == 1


async def test_thousand_requests_are_six(world, caplog):
    """A thousand requests are six and two dials of one host."""
    for number in range(1000):
        with contextlib.suppress(NetworkError):
            await world.asks(
                asked(
                    SECOND, FIRST, address=f"/ip4/8.8.8.{number // 3}/udp/{2000 + number}/quic-v1"
                )
            )
    hosts = [address.split("/")[2] for address in world.started[0].dialled]
    assert hosts == ["8.8.8.0"] * MAX_DIALS_OF_HOST + ["8.8.8.1"] * MAX_DIALS_OF_HOST
    assert len(hosts) + 2 == MAX_REQUESTS_EACH
    assert world.resources.refused() == {"punch": 996}
    assert len(caplog.records) == 2  # the host, and the rate


async def test_all_members_together_are_answered_seldom(world):
    *peers, late = [Identity.ephemeral().peer_id for _ in range(MAX_REQUESTS + 1)]
    world.members |= {*peers, late}
    for number, peer in enumerate(peers):
        await world.asks(asked(peer, FIRST, address=f"/ip4/8.8.8.{number}/udp/4001/quic-v1"), peer)
    with pytest.raises(NetworkError, match="too often"):
        await world.asks(asked(late, FIRST), late)


async def test_no_message_is_a_refusal_of_its_own(world):
    with pytest.raises(MessageError):
        await world.asks(b"x")
    assert world.started == []


async def test_one_of_two_relayed_members_asks_and_not_again_soon(monkeypatch):
    async def look(me, other, **changes):
        world = World(monkeypatch, me, other)
        vars(world).update(changes)
        wanted = await world.puncher._look()
        assert await world.puncher._look() == []
        return wanted

    assert await look(FIRST, SECOND) == [SECOND]
    assert await look(SECOND, FIRST) == []
    assert await look(FIRST, SECOND, members=set()) == []
    assert await look(FIRST, SECOND, origins={SECOND: "8.8.8.8"}) == []


async def test_member_is_asked_after_time_to_learn(world, monkeypatch):
    """A member is asked once it had time to learn of this one."""
    monkeypatch.setattr(punched_members, "FIRST_ASK_S", 1000.0)

    assert await world.puncher._look() == []
    world.puncher.ask_times._due[SECOND] = (0.0, 0)  # that time is over
    assert await world.puncher._look() == [SECOND]


async def test_asking_member_dials_and_is_served(world):
    """The asking member dials and what it serves is served there as to the member."""
    served = []

    async def incoming(peer, origin, reader, writer):
        served.append((peer, origin))

    world.supervisor.handlers["/x/1"] = incoming
    await world.puncher._try(SECOND)
    (daemon,) = world.started
    assert world.calls == [(SECOND, PUNCH_PROTOCOL)]
    assert daemon.dialled == [f"{THERE}/p2p/{world.side.peer_id}"]
    reader, writer = stream_pair()[0]
    await daemon.served["/x/1"](world.side.peer_id, "8.8.8.8", reader, writer)
    await daemon.served["/x/1"](SEED, "8.8.8.8", reader, writer)  # nobody that this node knows
    assert served == [(world.side.peer_id, "8.8.8.8")]
    assert (world.puncher.owner(world.side.peer_id), world.puncher.owner(SEED)) == (SECOND, None)
    assert writer.transport.is_closing()
    await world.puncher.serve("/y/1", incoming)
    assert "/y/1" in daemon.served


async def test_streams_prefer_the_quicker_relay(world):
    """Streams go by the relay where exchanges move more by it."""
    await world.puncher._try(SECOND)
    ways, past = world.puncher._traffic.routes, world.side.peer_id
    stream = await world.puncher.open(SECOND, "/x/1")
    assert (stream.peer_id, stream.daemon_id, world.puncher.punched()) == (SECOND, past, True)
    ways.note(SECOND, True, 1e6)
    ways.note(SECOND, False, 2e6)
    assert await world.puncher.open(SECOND, "/x/1") is None
    assert not world.puncher.punched()


async def test_the_pings_of_bulk_take_its_way(world):
    asked = []

    class First:
        async def is_local(self, way):
            return False

        async def open(self, way, protocol):
            asked.append(way)
            return stream_pair()[0]

    await world.puncher._try(SECOND)
    daemon, past = world.puncher.daemon, world.side.peer_id
    daemon.is_local = First.is_local.__get__(daemon)
    pinged = daemon.open
    daemon.open = lambda way, protocol: asked.append(("second", way)) or pinged(way, protocol)
    host = SimpleNamespace(puncher=world.puncher, _supervisor=SimpleNamespace(running=First))
    for way in (past, SECOND):
        async with Host._echo(host, way) as echo:
            assert echo is not None
    assert asked == [("second", world.side.peer_id), SECOND]


async def test_unanswered_member_stays_relayed(world):
    """Where nobody answers the member stays relayed and is asked again later."""
    await world.puncher.second.start()
    world.started[0].nobody = True
    assert await world.puncher._look() == [SECOND]
    await world.puncher._try(SECOND)
    assert world.started[0].dialled
    assert await world.puncher.open(SECOND, "/x/1") is None
    assert await world.puncher._look() == []


async def test_streamless_connection_yields_to_the_relay(world, monkeypatch):
    """Two streams may be opened at once, as the two of a download are."""
    monkeypatch.setattr(punch, "OPEN_S", 0.01)

    await world.puncher._try(SECOND)
    assert await world.puncher.open(SECOND, "/x/1")
    assert world.puncher.wanted(SECOND)
    world.started[0].hangs = True
    assert await asyncio.gather(*(world.puncher.open(SECOND, "/x/1") for _ in range(2))) == [
        None,
        None,
    ]
    world.started[0].hangs = False
    assert await world.puncher.open(SECOND, "/x/1") is None
    assert SECOND in world.puncher.reached, "still connected, so it is not asked again"
    assert not world.puncher.wanted(SECOND)


async def test_a_second_daemon_that_serves_not_all_is_ended(world, monkeypatch):
    """The next member to be asked had found it up, and what it did not serve had gone by relays as
    long as it lived.
    """

    async def too_slow(daemon, protocol, incoming):
        raise DaemonError("no answer within 10 s")

    served = FakeDaemon.serve
    monkeypatch.setattr(FakeDaemon, "serve", too_slow)
    world.supervisor.handlers["/x/1"] = None
    with pytest.raises(DaemonError):
        await world.puncher._offer(SECOND)
    monkeypatch.setattr(FakeDaemon, "serve", served)
    assert world.started[0].gone.is_set()
    await world.puncher._offer(SECOND)
    assert "/x/1" in world.started[1].served


@pytest.mark.parametrize(
    ("me", "other"), [(FIRST, SECOND), (SECOND, FIRST)], ids=["asks", "answered"]
)
async def test_ended_second_daemon_restarts_with_another_key(monkeypatch, me, other):
    """A second daemon that ended is started again with another key and its members are asked."""
    world = World(monkeypatch, me, other)

    await world.puncher._try(other)
    world.started[0].gone.set()
    await world.puncher.second.watching
    assert (world.puncher.daemon, world.puncher.reached) == (None, frozenset())
    assert await world.puncher.open(other, "/x/1") is None
    assert await world.puncher._look() == [other]
    await world.puncher._try(other)
    assert len({daemon.peer_id for daemon in world.started}) == 2
    await world.puncher.end()
    assert world.started[1].gone.is_set()


async def test_daemon_of_another_network_is_ended(world):
    """Its connections are dead, but each stream over one would wait for seconds before it goes by
    the relay. What was measured before counts no more, here or at the members.
    """
    ways = world.puncher._traffic.routes

    await world.puncher._ask(world.other)
    (before,) = world.started
    ways.note(world.other, False, 9e5)
    await world.puncher._look()
    assert not before.gone.is_set()
    world.supervisor.slots.moves += 1
    await world.puncher._look()
    assert before.gone.is_set()
    await world.puncher.second.watching
    assert world.puncher.daemon is None
    await world.puncher._ask(world.other)
    assert ways.rate() == 0
    for side, left in (
        (world.side.peer_id, 9e5),
        (Identity.ephemeral().peer_id, 0),
    ):  # the second: it has moved
        ways.note(world.other, False, 9e5)
        await world.puncher._dial(world.other, SimpleNamespace(peer=side, addresses=[THERE]))
        assert ways.rate() == left
    await world.puncher._look()
    assert not world.started[1].gone.is_set()
    await world.puncher.end()


async def test_a_second_daemon_that_nobody_needs_any_more_is_ended(world, monkeypatch):
    monkeypatch.setattr(punch, "IDLE_S", 0.0)

    await world.puncher._try(SECOND)
    await world.puncher._look()
    assert world.puncher.daemon is not None
    world.origins = {}
    world.started[0].here.clear()
    await world.puncher._look()
    assert world.puncher.daemon is None
    assert world.started[0].gone.is_set()


async def test_daemon_without_an_address_is_ended(world):
    """A second daemon of which nobody tells the address is ended."""
    world.supervisor.bootstrapper.seeds, world.own = {}, ()
    with pytest.raises(NetworkError):
        await world.asks(asked(SECOND, FIRST))
    assert world.started[0].gone.is_set()
    assert world.puncher.daemon is None


def test_a_bootstrap_node_listens_by_quic_beside_its_tcp_ports():
    assert beside(["/ip4/127.0.0.1/tcp/4001", "/ip4/0.0.0.0/tcp/0"]) == []
    (port,) = [address.split("/")[4] for address in beside(["/ip4/0.0.0.0/tcp/43117"])]
    assert port == "43117"
    assert beside(["/ip4/0.0.0.0/tcp/43117", "/ip4/0.0.0.0/udp/43117/quic-v1"]) == []
