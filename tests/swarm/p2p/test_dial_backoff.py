"""Dials that are put off, as made-up members name a victim's address; dials of two peers at one
moment; and how many DHT nodes are asked for a key."""

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.proto.dht_pb2 import NodeInfo, PingResponse

from bench._link import LinkError, Namespaces
from shoal.swarm.identity import Identity
from shoal.swarm.p2p import hivemind_adapter as adapter
from shoal.swarm.p2p.daemon import Daemon, DaemonError, PutOffError, messages
from shoal.swarm.p2p.dial_backoff import (
    FIRST_WAIT_S,
    FORGET_S,
    MAX_HOSTS,
    MAX_MET,
    MAX_PORTS,
    MAX_WAIT_S,
    RELAYED,
    DialBackoff,
)
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.multiaddr import peer_bytes
from shoal.swarm.p2p.resource_manager import ResourceManager
from tests.support.clock import Clock

HOUR = 3600
OWN, OTHER, RELAY = (Identity.ephemeral().peer_id for _ in range(3))
VICTIM = "/ip4/198.51.100.7/tcp/443"


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def backoff(clock):
    return DialBackoff(clock=clock)


def dials(backoff, clock, named, seconds=HOUR, every=1):
    """How often a node dials that wants to each so many seconds; ``named`` gives peer and addresses
    of the next member.
    """
    count = 0
    for _ in range(0, seconds, every):
        peer, addresses = named()
        due = backoff.due(peer, addresses)
        count += len(due)
        if due:
            backoff.fail(due, "i/o timeout")
        clock.now += every
    return count


def test_made_up_address_is_dialled_rarely(backoff, clock):
    """An address that many made up member's name is dialled a few times."""
    ids = itertools.count()
    most = 9 + HOUR / MAX_WAIT_S  # 2, 4, 8, ... seconds, and then every five minutes
    assert 5 <= dials(backoff, clock, lambda: (f"made-up{next(ids)}", [f"{VICTIM}/p2p/x"])) <= most


@pytest.mark.parametrize(
    "pattern",
    [
        "/ip4/198.51.100.7/tcp/{n}",
        "/ip4/198.51.100.7/udp/{n}/quic-v1",
        "/ip6/2001:db8:0:1::{n:x}/tcp/443",
        "/ip6/::ffff:198.51.100.7/tcp/{n}",
        "/dns4/n{n}.example.org/tcp/443",
        f"{VICTIM}/p2p/{RELAY}{{n}}/p2p-circuit",
    ],
    ids=["tcp", "quic", "ip6", "mapped", "dns", "relay"],
)
def test_host_under_many_names_is_dialled_rarely(backoff, clock, pattern):
    """A host that is named under every port and name is dialled a few times."""
    ids = itertools.count()

    def named():
        number = next(ids) % 65_000
        return f"made-up{number}", [f"{pattern.format(n=number)}/p2p/made-up{number}"]

    assert dials(backoff, clock, named) <= (MAX_PORTS + 1) * (9 + HOUR / MAX_WAIT_S)


def test_one_range_does_not_displace_met_peers(backoff):
    """The fault: 4,096 keys that called from one host made a node forget where all others are."""
    backoff.meet("relayed", "")
    backoff.meet("honest", "198.51.100.1")
    for number in range(2 * MAX_MET):
        backoff.meet(f"peer{number}", "203.0.113.1")
    backoff.meet("honest", "198.51.100.2")
    backoff.meet(f"peer{2 * MAX_MET - 1}", "192.0.2.1")
    assert len(backoff.met) == MAX_MET
    assert (backoff.met["relayed"], backoff.met["honest"]) == (RELAYED, "198.51.100.2")
    assert backoff._ranges == {
        "203.0.0.0/16": MAX_MET - 3,
        "192.0.0.0/16": 1,
        "198.51.0.0/16": 1,
        "relayed": 1,
    }


def test_what_is_noted_is_bounded_and_forgotten(backoff, clock):
    for number in range(20_000):
        host = f"/ip4/10.{number >> 16}.{number >> 8 & 255}.{number & 255}/tcp"
        backoff.fail([f"{host}/{port}/p2p/made-up" for port in range(MAX_PORTS + 4)])
        backoff.meet(f"peer{number}", "203.0.113.1")
    assert len(backoff._failed) == MAX_HOSTS
    assert max(map(len, backoff._failed.values())) == MAX_PORTS + 1
    assert len(backoff.met) == MAX_MET
    assert sum(sys.getsizeof(ports) for ports in backoff._failed.values()) < 1 << 20
    assert not backoff.due("other", [f"{host}/1/p2p/other"])
    clock.now += FORGET_S + 1
    backoff.fail([f"{host}/1/p2p/made-up"])
    clock.now += FIRST_WAIT_S
    assert backoff.due("other", [f"{host}/1/p2p/other"])  # it began anew


def test_calling_honest_peer_is_dialled(backoff, clock):
    """An honest peer that calls is dialled and so is one with another address."""
    at = f"{VICTIM}/p2p/{OTHER}"
    for _ in range(20):
        backoff.fail([at])
    assert backoff.due(OTHER, [at]) == []
    elsewhere = f"/ip4/203.0.113.9/tcp/1/p2p/{OTHER}"
    assert backoff.due(OTHER, [at, elsewhere]) == [elsewhere]
    backoff.meet(OTHER, "203.0.113.50")  # it called, but not from there
    assert backoff.due(OTHER, [at]) == []
    backoff.meet(OTHER, "198.51.100.7")
    assert backoff.due(OTHER, [at]) == [at]
    assert backoff.due("made-up", [at]) == []  # only it
    assert backoff.due("x", [f"{VICTIM}/p2p/{OTHER}/p2p-circuit/p2p/x"])  # and those behind it


def test_false_members_do_not_block_an_honest_address(backoff, clock):
    """Made up members that name an honest one do not keep others from it."""
    text = (
        f"all dials failed\n  * [{VICTIM}] peer id mismatch: expected x, but remote key matches "
        f"{OTHER}"
    )
    for _ in range(20):
        backoff.fail([f"{VICTIM}/p2p/made-up"], text)
    assert backoff.due("made-up", [f"{VICTIM}/p2p/made-up"]) == []
    assert backoff.due(OTHER, [f"{VICTIM}/p2p/{OTHER}"])


def test_faults_that_are_not_the_hosts_do_not_count(clock):
    chosen = f"/ip4/192.0.2.1/tcp/1/p2p/{OWN}"
    backoff = DialBackoff([chosen], clock)
    other = f"/ip4/192.0.2.2/tcp/1/p2p/{OTHER}"
    backoff.fail(
        [other],
        "all dials failed\n  * [/ip4/192.0.2.2/tcp/1] connect: network is unreachable",
    )
    assert backoff.due(OTHER, [other])
    both = [other, "/ip6/2001:db8::1/tcp/1/p2p/x"]  # of one line it does not follow for the other
    backoff.fail(
        both,
        "* [/ip6/2001:db8::1/tcp/1] network is unreachable\n* [/ip4/192.0.2.2/tcp/1] i/o timeout",
    )
    assert backoff.due("x", both) == both[1:]
    backoff.fail([chosen])
    assert backoff.due(OWN, [chosen])  # the user gave it


class Silent(Daemon):
    """A daemon none of whose dials is answered."""

    def __init__(self, backoff, path):
        super().__init__(OWN, path)
        self.backoff, self.asked, self.here, self.hangs = backoff, [], [], False

    async def _ask(self, kind, **fields):
        if kind == "LIST_PEERS":
            return messages().Response(
                type=0, peers=[messages().PeerInfo(id=peer_bytes(p), addrs=[]) for p in self.here]
            )
        self.asked.append(len(fields["connect"].addrs))
        if self.hangs:
            await asyncio.Event().wait()
        raise DaemonError("i/o timeout")


@pytest.mark.parametrize("hangs", [False, True])
async def test_postponed_dial_does_not_reach_the_daemon(backoff, clock, tmp_path, hangs):
    """The daemon is not asked for a dial that is put off."""
    daemon, at = Silent(backoff, tmp_path), [f"{VICTIM}/p2p/{OTHER}"]
    daemon.hangs = hangs

    async def dial(peer):
        task = asyncio.create_task(daemon.connect(peer, at))
        while not task.done() and not daemon.asked:
            await asyncio.sleep(0)
        if hangs and not task.done():
            task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError if hangs else DaemonError):
        await dial(OTHER)
    for peer in (OTHER, RELAY, Identity.ephemeral().peer_id):
        with pytest.raises(PutOffError):
            await daemon.connect(peer, at)
    daemon.here = [OTHER]
    await daemon.connect(OTHER, at)  # it is connected: nothing is dialled
    assert daemon.asked == [1]


def test_twice_as_many_near_nodes_are_asked(monkeypatch):
    """The nearest nodes are asked twice as many as hold a record."""
    asked = []

    async def get(self, *arguments, **options):
        asked.append((arguments, options))
        return "found"

    monkeypatch.setattr(adapter.DHTNode, "get", get)
    node = object.__new__(adapter.SwarmNode)
    node.num_replicas = 5  # hivemind's, which no call of ours changes
    assert asyncio.run(node.get("key", latest=True)) == "found"
    assert asyncio.run(node.get("key", latest=True, beam_size=3)) == "found"
    assert asked == [
        (("key",), {"latest": True, "beam_size": 2 * 5}),
        (("key",), {"latest": True, "beam_size": 3}),
    ]


async def test_a_node_id_that_is_none_counts_as_no_answer():
    """hivemind reads it outside of what catches errors: a stranger that is pinged ended a join with
    an AssertionError.
    """
    answers = [bytes(19) + b"\1", b"\1" * 21]

    class Client:
        async def call_unary_handler(self, peer, name, data):
            return PingResponse(peer=NodeInfo(node_id=answers.pop(0))).SerializeToString()

        def close(self):
            pass

    calls = adapter._Calls(OWN, ResourceManager())
    calls._client = Client()
    protocol, noted = object.__new__(DHTProtocol), []

    async def update(node_id, peer, responded):
        noted.append((node_id, responded))

    vars(protocol).update(
        p2p=calls,
        authorizer=None,
        rpc_semaphore=asyncio.Semaphore(1),
        wait_timeout=3.0,
        client_mode=True,
        node_info=NodeInfo(),
        update_routing_table=update,
    )
    for found, responded in ((1, True), (None, False)):
        assert await protocol.call_ping(adapter.PeerID.from_base58(OTHER)) == found
        await asyncio.sleep(0)
        assert noted.pop() == (found, responded)


ROOT = Path(__file__).resolve().parents[3]
DELAY = 0.1  # seconds one way: far longer than the two take to notice that it is time

PEER = """
import json, sys, time
from shoal.swarm.p2p.host import Host
from shoal.swarm.identity import Identity

async def echo(stream):
    await stream.send(await stream.receive(100, 30), 5)

async def ask(host, peer, addresses):
    stream = await host.open(peer, "/test/echo/1", addresses=addresses, timeout=30)
    try:
        await stream.send(b"x", 30)
        return (await stream.receive(10, 30)).decode()
    finally:
        stream.close()

with Host.start(Identity.ephemeral(), listen=[f"/ip4/{sys.argv[1]}/tcp/4001"]) as host:
    host.serve("/test/echo/1", echo)
    print(json.dumps([host.peer_id, host.addresses()]), flush=True)
    peer, addresses, at = json.loads(sys.stdin.readline())
    time.sleep(max(at - time.time(), 0))
    try:
        print(host.call(ask(host, peer, addresses), 20), flush=True)
    except Exception as error:
        print(repr(error), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.ci
def test_peers_that_dial_each_other_at_once_both_get_through():
    try:
        link = Namespaces(2, 12.5e6, DELAY)
    except LinkError as error:
        pytest.skip(f"no link with a delay: {error}")
    peers = []
    try:
        for node in range(2):
            command, env = (
                [*link.enter(node), sys.executable, "-c", PEER, link.ip(node)],
                {**os.environ, "PYTHONPATH": str(ROOT)},
            )
            peers.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=ROOT,
                    env=env,
                )
            )
        places = [json.loads(peer.stdout.readline()) for peer in peers]
        at = time.time() + 0.5
        for peer, place in zip(peers, reversed(places), strict=True):
            peer.stdin.write(json.dumps([*place, at]) + "\n")
            peer.stdin.flush()
        assert [peer.stdout.readline().strip() for peer in peers] == ["x", "x"]
    finally:
        for peer in peers:
            peer.communicate("\n", timeout=20)
        link.close()


def test_listening_port_is_remembered_not_dialled_from():
    """A peer does not dial from the port it listens on and is remembered by that port."""
    with (
        Host.start(Identity.ephemeral()) as a,
        Host.start(Identity.ephemeral(), bootstrap=a.addresses()) as b,
    ):
        (p2pd,) = psutil.Process(b._supervisor.daemon._child.pid).children()
        theirs, ours = (int(host.addresses()[0].split("/")[4]) for host in (a, b))
        used = [
            c.laddr.port for c in p2pd.net_connections("tcp") if c.raddr and c.raddr.port == theirs
        ]
        assert used
        assert ours not in used
        assert a.call(a._supervisor.daemon.where(b.peer_id), 60) == b.addresses()
        assert a.call(a._supervisor.daemon.peers(), 60) == (b.peer_id,)
