"""The slots at relays of a node that nobody can dial: kept, lost, asked for again, with daemons
that only pretend; who may be a relay; and the daemon's options about being reached."""

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest

from shoal.swarm.errors import NetworkError, StartupError
from shoal.swarm.identity import Identity
from shoal.swarm.p2p import connections, relay_slots
from shoal.swarm.p2p.daemon import Daemon, DaemonError
from shoal.swarm.p2p.daemon_process import options
from shoal.swarm.p2p.relay_slots import RENEW_S, RESTART_S, STUCK_S, RelaySlots, reserve

ME, SEED, OTHER, THIRD = (Identity.ephemeral().peer_id for _ in range(4))
AT = {
    peer: f"/ip4/203.0.113.{n}/tcp/4001/p2p/{peer}" for n, peer in enumerate((SEED, OTHER, THIRD))
}
GRANTED, FULL = bytes([4, 8, 2, 40, 100]), bytes([5, 8, 2, 40, 201, 1])
CIRCUIT = [f"{AT[SEED]}/p2p-circuit/p2p/{ME}"]


class Writer:
    def write(self, data):
        assert data == relay_slots.RESERVE

    def close(self):
        pass


class FakeDaemon:
    """Connected to ``here``; ``answers``: what each relay says to a request, None: nothing;
    ``refusal``: of a dial.
    """

    def __init__(self):
        self.here, self.asked, self.ended = {SEED, OTHER, THIRD}, [], []
        self.answers = dict.fromkeys(AT, GRANTED)
        self.refusal = ""
        self.announced, self.told = list, []

    async def peers(self):
        return tuple(self.here)

    async def connect(self, peer, addresses):
        if self.refusal:
            raise DaemonError(self.refusal)
        self.here.add(peer)

    async def disconnect(self, peer):
        self.here.discard(peer)
        self.ended.append(peer)
        self.answers[peer] = GRANTED  # a new connection works

    async def open(self, peer, protocol):
        assert protocol == "/libp2p/circuit/relay/0.2.0/hop"
        self.asked.append(peer)
        self.told.append(self.announced())  # during the request
        reader = asyncio.StreamReader()
        if self.answers[peer] is not None:
            reader.feed_data(self.answers[peer])
            reader.feed_eof()
        return reader, Writer()


class World:
    def __init__(self, monkeypatch, bootstrap=(SEED,), needed=False):
        self.now, self.up, self.daemon = 1000.0, set(AT.values()), FakeDaemon()
        self.slots = RelaySlots(ME, [AT[peer] for peer in bootstrap], needed, lambda: self.now)

        self.daemon.announced = self.slots.addresses

        async def answering(addresses):
            return [address for address in addresses if address in self.up]

        monkeypatch.setattr(relay_slots, "answering", answering)
        monkeypatch.setattr(relay_slots, "ASK_S", 0.01)

    def look(self, after=5.0, known=()):
        self.now += after
        return asyncio.run(self.slots.look(self.daemon, known))

    def at(self):
        return [address.split("/")[6] for address in self.slots.addresses()]

    def goes(self, *peers):
        self.up -= {AT[peer] for peer in peers}
        self.daemon.here -= set(peers)


def test_no_relay_is_asked_before_libp2p_says_private(monkeypatch):
    """No relay is asked until libp2p has found that nobody can dial this node."""
    world = World(monkeypatch)
    world.look(known=["/ip4/198.51.100.4/tcp/1/p2p/" + ME])
    assert not world.daemon.asked
    world.look(known=CIRCUIT)
    assert world.slots.addresses() == CIRCUIT


def test_dialled_node_gives_its_slots_up(monkeypatch):
    """A node that libp2p has dialled after all gives its slots up."""
    world = World(monkeypatch)
    hidden, opened = ["/ip4/192.168.0.7/tcp/1/p2p/" + ME], ["/ip4/9.9.9.9/tcp/1/p2p/" + ME]
    for known, slots in (
        (CIRCUIT, CIRCUIT),
        (hidden, CIRCUIT),
        (hidden + CIRCUIT, CIRCUIT),
        (hidden + opened, []),
        (hidden, []),
    ):
        world.look(known=known)
        assert world.slots.addresses() == slots
    world.look(known=CIRCUIT)
    world.slots.ended()  # with the daemon, and what it knew
    world.look(known=opened)
    assert world.slots.addresses() == CIRCUIT


def test_a_node_that_needs_slots_by_its_settings_keeps_them(monkeypatch):
    world = World(monkeypatch, needed=True)
    world.look(known=["/ip4/9.9.9.9/tcp/1/p2p/" + ME])
    assert world.slots.addresses() == CIRCUIT


def test_slot_is_renewed_early_but_not_always(monkeypatch):
    """A slot is asked for again before anybody misses it and not at each look."""
    world = World(monkeypatch, needed=True)
    for _ in range(7):
        world.look()
    assert len(world.daemon.asked) == 3  # in 30 seconds
    assert world.daemon.told == [[], CIRCUIT, CIRCUIT]  # it is not given up while it is renewed
    assert RENEW_S == 15


def test_new_network_asks_for_a_slot_at_once(monkeypatch):
    """From its old address nothing is sent any more, and its daemon would wait half a minute for
    each answer.
    """
    world, there = World(monkeypatch, needed=True), ["192.168.7.2"]
    monkeypatch.setattr(relay_slots, "sends_from", lambda: there[-1])
    monkeypatch.setattr(relay_slots, "is_gone", lambda address: address not in there)
    world.look()
    there.append("10.0.0.4")  # a second network: what goes by the first still arrives
    world.look()
    assert (world.daemon.ended, world.slots.moves) == ([], 0)
    asked = len(world.daemon.asked)
    there[:] = ["10.1.0.9"]
    world.look()
    assert (sorted(world.daemon.ended), world.slots.moves) == (sorted([SEED, OTHER, THIRD]), 1)
    assert (len(world.daemon.asked), world.slots.addresses()) == (asked + 1, CIRCUIT)
    there[:] = [""]  # none: the last one is gone too, once
    for _ in range(3):
        world.look()
    assert world.slots.moves == 2


def test_own_address_is_there_and_another_is_not():
    """The address of this machine is there and another is not."""
    here = relay_slots.sends_from()
    assert not here or not relay_slots.is_gone(here)
    assert relay_slots.is_gone("203.0.113.77")


def test_lost_slot_is_withdrawn_and_asked_for_again(
    monkeypatch,
):
    """A slot that ended with its connection is announced no more and asked for as soon as the
    relay is back.
    """
    world = World(monkeypatch, needed=True)
    world.look()
    world.goes(SEED)
    world.look(after=RENEW_S)
    assert world.at() == []
    world.up.add(AT[SEED])
    world.look()
    assert world.at() == [SEED]


def test_a_connection_on_which_nothing_comes_is_made_anew(monkeypatch):
    world = World(monkeypatch, needed=True)
    world.look()
    world.daemon.answers[SEED] = None
    world.look(after=RENEW_S)
    assert world.daemon.ended == [SEED]
    world.look()
    assert world.at() == [SEED]


def test_next_relay_replaces_an_absent_one(monkeypatch):
    """Where one relay stays away the next one takes its place."""
    world = World(monkeypatch, (SEED, OTHER, THIRD), needed=True)
    world.look()
    assert world.at() == [SEED, OTHER]
    world.goes(SEED)
    world.look(after=RENEW_S)
    assert sorted(world.at()) == sorted([OTHER, THIRD])


def test_stuck_daemon_is_restarted_once(
    monkeypatch,
):
    """A daemon that puts off a relay that answers is restarted but not again and again."""
    world = World(monkeypatch, needed=True)
    world.goes(SEED)
    world.daemon.refusal = "failed to dial: dial backoff"
    assert not any(
        world.look() for _ in range(20)
    )  # it does not answer, so a restart would not help
    world.up.add(AT[SEED])
    looks = [world.look() for _ in range(100)]
    assert [at * 5 for at, restart in enumerate(looks) if restart] == [STUCK_S, STUCK_S + RESTART_S]


def test_full_relay_is_no_reason_for_a_restart(monkeypatch):
    """A relay that has no slot left is no reason for a restart."""
    world = World(monkeypatch, needed=True)
    world.daemon.answers[SEED] = FULL
    assert not any(world.look() for _ in range(100))
    assert world.at() == []
    assert (
        len(world.daemon.asked) == 9
    )  # in 500 seconds: members relay too, but not for who comes over a relay


def test_restart_asks_for_a_slot_at_once(monkeypatch):
    """After a restart of the daemon a slot is asked for at once."""
    world = World(monkeypatch, needed=True)
    world.look()
    world.slots.ended()
    assert world.at() == []
    world.look(after=0.0)
    assert world.at() == [SEED]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x04",
        b"\xff\xff\xff\x7f",
        b"\x02\x08\x02",
        b"\x03\xff\xff\xff",
        b"\x04\x2a\x02\x00\x01",
        FULL,
    ],
)
async def test_relay_answers_give_a_slot_or_an_expected_error(answer):
    """Whatever a relay answers there is a slot or an error that is expected."""
    daemon = FakeDaemon()
    daemon.answers[SEED] = answer
    with pytest.raises((NetworkError, OSError)):
        await reserve(daemon, SEED)


def limited(data, seconds=120):
    """Return a relay's answer: a slot whose connections end after ``data`` bytes, below 2^28, or
    ``seconds``.
    """
    limit = bytes(
        [8, seconds, 16, *(data >> shift & 127 | 128 for shift in (0, 7, 14)), data >> 21]
    )
    answer = bytes([8, 2, 34, len(limit), *limit, 40, 100])
    return bytes([len(answer), *answer])


@pytest.mark.parametrize(
    ("answer", "most"),
    [(GRANTED, float("inf")), (limited(131072), 131072), (limited(200_000_000), 200_000_000)],
)
async def test_a_slot_says_after_how_many_bytes_a_connection_ends(answer, most):
    daemon = FakeDaemon()
    daemon.answers[SEED] = answer
    assert await reserve(daemon, SEED) == most


@pytest.mark.parametrize(
    ("answers", "starts"),
    [([None], 1), ([limited(131072), GRANTED], 2), ([limited(131072)] * 9, 6)],
)
def test_daemon_that_cuts_forwarding_is_restarted(monkeypatch, answers, starts):
    """A daemon that cuts off what it forwards is started anew."""
    launched, ended = [], []

    async def launch(identity, *, relay, **chosen):
        daemon = FakeDaemon()
        daemon.peer_id = SEED
        if relay == "off":  # who asks
            daemon.answers[SEED] = answers[len(launched) - 1]
        else:
            assert chosen["public"]
            launched.append(daemon)

        async def shutdown():
            ended.append(daemon)

        daemon.shutdown = shutdown
        return daemon

    monkeypatch.setattr(relay_slots.Daemon, "launch", launch)
    monkeypatch.setattr(relay_slots, "ASK_S", 0.1)
    listen = ["/ip4/0.0.0.0/tcp/4001"]
    daemon = asyncio.run(
        relay_slots.launch_relay(Identity.ephemeral(), listen=listen, relay="auto")
    )
    assert daemon is launched[-1]
    assert len(launched) == starts
    assert [one for one in ended if one in launched] == launched[:-1]


def test_local_only_peer_is_asked_for_no_slot(monkeypatch):
    """Who is reached on this machine alone is asked for no slot."""

    async def launch(identity, **chosen):
        return chosen["listen"]

    monkeypatch.setattr(relay_slots.Daemon, "launch", launch)
    listen = ["/ip4/127.0.0.1/tcp/0"]
    assert asyncio.run(relay_slots.launch_relay(Identity.ephemeral(), listen=listen)) == listen


@pytest.mark.parametrize(
    ("error", "ended"),
    [(StartupError("no second daemon"), []), (asyncio.CancelledError(), ["ended"])],
)
async def test_unasked_daemon_stays_and_cancelled_start_ends(monkeypatch, error, ended):
    """Where nobody can ask the daemon stays and where the start is called off it ends."""
    found = []

    async def launch(identity, *, relay, **chosen):
        if relay == "off":
            raise error
        daemon = FakeDaemon()

        async def shutdown():
            found.append("ended")

        daemon.shutdown = shutdown
        return daemon

    monkeypatch.setattr(relay_slots.Daemon, "launch", launch)
    starting = relay_slots.launch_relay(
        Identity.ephemeral(), listen=["/ip4/0.0.0.0/tcp/4001"], relay="auto"
    )
    with pytest.raises(asyncio.CancelledError) if ended else contextlib.nullcontext():
        await starting
    assert found == ended


@pytest.mark.parametrize(("relay", "slot"), [("auto", True), ("off", False)])
async def test_a_node_forwards_for_others_unless_relay_is_off(relay, slot):
    """With its option -relay=0 alone p2pd gave slots all the same, and cut what it forwarded off
    after 128 KiB.
    """

    there = await Daemon.launch(
        Identity.ephemeral(), listen=["/ip4/0.0.0.0/tcp/0"], public=True, relay=relay
    )
    here = await Daemon.launch(Identity.ephemeral(), listen=["/ip4/127.0.0.1/tcp/0"])
    try:
        local = [address for address in await there.addresses() if "/127.0.0.1/" in address]
        await here.connect(there.peer_id, local)
        with (
            contextlib.nullcontext()
            if slot
            else pytest.raises(DaemonError, match="protocols not supported")
        ):
            assert await reserve(here, there.peer_id) > 0
    finally:
        await here.shutdown()
        await there.shutdown()


def test_relayed_peer_is_no_relay():
    """A peer behind a relay is no relay and each counts once."""
    bootstrap = [
        f"/ip4/1.2.3.4/tcp/4001/p2p/{SEED}",
        f"/ip4/192.168.1.2/tcp/4001/p2p/{THIRD}",
        f"/ip4/1.2.3.4/tcp/4001/p2p/{SEED}/p2p-circuit/p2p/{THIRD}",
        f"/ip4/127.0.0.1/tcp/4001/p2p/{OTHER}",
        f"/ip4/1.2.3.5/udp/4001/quic-v1/p2p/{OTHER}",
        f"/dns4/example.org/tcp/1/p2p/{OTHER}",
        f"/ip4/1.2.3.5/tcp/4001/p2p/{OTHER}",
    ]
    assert connections.candidates(bootstrap) == [bootstrap[0], bootstrap[5]]


async def test_those_that_answer_are_taken_in_order(monkeypatch):
    monkeypatch.setattr(connections, "is_loopback", lambda address: False)
    with socket.create_server(("127.0.0.1", 0)) as alive, socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        port = alive.getsockname()[1]
        ids = [Identity.ephemeral().peer_id for _ in range(4)]
        bootstrap = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}" for peer in ids]
        bootstrap.insert(0, f"/ip4/127.0.0.1/tcp/{dead.getsockname()[1]}/p2p/{OTHER}")
        assert await connections.answering(bootstrap) == bootstrap[1:3]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"-autoRelay": "0", "-relay": "1"}),
        ({"relays": ["R"]}, {"-autoRelay": "1", "-trustedRelays": "R", "-relay": "1"}),
        (
            {"relays": ["R"], "relay": "only"},
            {"-autoRelay": "1", "-trustedRelays": "R", "-forceReachabilityPrivate": "1"},
        ),
        ({"relays": ["R"], "relay": "off"}, {"-autoRelay": "0", "-relay": "0"}),
        (
            {"relays": ["R"], "public": True},
            {"-autoRelay": "0", "-relay": "1", "-forceReachabilityPublic": "1"},
        ),
    ],
)
def test_options_about_relays(given, expected):
    def of(listen):
        said = options(control="/unix/x", key=Path("k"), listen=[listen], **given)
        return dict(option.split("=", 1) for option in said)

    found = of("/ip4/0.0.0.0/tcp/1")
    about = ("-trustedRelays", "-forceReachabilityPrivate", "-forceReachabilityPublic")
    assert {
        key: value for key, value in found.items() if key in expected or key in about
    } == expected
    # On loopback nobody is private or public.
    assert not {key for key in of("/ip4/127.0.0.1/tcp/1") if key in about}


@pytest.mark.parametrize(
    ("listen", "announce", "expected"),
    [
        (["/ip4/0.0.0.0/tcp/0"], [], "1"),
        (["/ip4/127.0.0.1/tcp/1", "/ip4/0.0.0.0/tcp/1"], [], "1"),
        (["/ip4/192.168.0.7/tcp/1"], [], "0"),  # its own network is meant
        (["/ip4/127.0.0.1/tcp/1"], [], "0"),
        (["/ip4/0.0.0.0/tcp/1"], ["/ip4/9.9.9.9/tcp/1"], "0"),
        (["/ip4/0.0.0.0/udp/0/quic-v1"], [], "0"),  # the second daemon
    ],
)
def test_router_opens_a_port_on_demand(listen, announce, expected):
    """A router opens a port for who wants to be dialled from anywhere and says no more."""
    said = options(control="/unix/x", key=Path("k"), listen=listen, announce=announce)
    assert [option for option in said if "natPortMap" in option] == [f"-natPortMap={expected}"]
