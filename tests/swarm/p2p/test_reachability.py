"""Asking a peer what it sees of us: the address, the clock, the port, the bandwidth; and what
nobody can make a peer do.
"""

import asyncio
import contextlib
import socket

import pytest

from shoal.swarm.errors import NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.multiaddr import origin
from shoal.swarm.p2p.reachability import (
    DIAL_PROTOCOL,
    LOWEST_PORT,
    MAX_DIALS,
    MAX_DIALS_EACH,
    DialBackView,
    DialRequest,
    ReachabilityProbe,
    ask,
    dialled_port,
    listen_for_dial_back,
    reach_of,
)
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.p2p.throughput import (
    MAX_BYTES,
    MAX_TESTS_EACH,
    SPEED_PROTOCOL,
    SpeedRequest,
    ThroughputProbe,
    measure,
)
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.wire.envelope import pack

PEER = "12D3KooWBfyETpgiRKw6XJTa45zDN3ZkPUhEPb7ur57Rg3FqQQf7"


@pytest.fixture(scope="module")
def pair():
    with (
        Host.start(Identity.ephemeral()) as callee,
        Host.start(Identity.ephemeral(), bootstrap=callee.addresses()) as caller,
    ):
        callee.serve(DIAL_PROTOCOL, ReachabilityProbe(clock=lambda: 1000.0).answer)
        callee.serve(SPEED_PROTOCOL, ThroughputProbe().answer)
        yield caller, callee.peer_id


async def opened(host, peer, protocol, work):
    with contextlib.closing(await host.open(peer, protocol, timeout=30)) as stream:
        return await work(stream)


@contextlib.asynccontextmanager
async def wires(origin, answer):
    """Make a stream whose other end is served as one that comes from ``origin``."""
    mine, theirs = [await asyncio.open_connection(sock=end) for end in socket.socketpair()]
    task = asyncio.ensure_future(answer(Stream(PEER, *theirs, TrafficMeter(), origin)))
    stream = Stream(PEER, *mine, TrafficMeter())
    try:
        yield stream
        await task
    finally:
        task.cancel()
        stream.close()
        theirs[1].close()


def test_node_is_dialled_back_at_its_source(pair):
    """A node is dialled back at the address it comes from."""
    caller, peer = pair

    async def work():
        async with listen_for_dial_back() as (port, token):
            right = await opened(
                caller, peer, DIAL_PROTOCOL, lambda stream: ask(stream, port, token)
            )
            wrong = await opened(
                caller, peer, DIAL_PROTOCOL, lambda stream: ask(stream, port, bytes(16))
            )
        closed = await opened(caller, peer, DIAL_PROTOCOL, lambda stream: ask(stream, port, token))
        return right, wrong, closed

    right, wrong, closed = caller.call(work(), 60)
    assert [seen.outcome for seen in (right, wrong, closed)] == [
        "reached",
        "unreached",
        "unreached",
    ]
    assert {seen.address for seen in (right, wrong, closed)} == {"127.0.0.1"}


def test_the_clock_is_read_with_its_bound(pair, monkeypatch):
    caller, peer = pair
    monkeypatch.setattr("shoal.swarm.p2p.reachability.time.time", lambda: 1060.0)
    seen = caller.call(opened(caller, peer, DIAL_PROTOCOL, ask), 60)
    assert seen.outcome is None
    assert seen.error < 5
    assert seen.skew == pytest.approx(-60 - seen.error, abs=1e-6)


def test_bytes_are_timed_both_ways(pair):
    caller, peer = pair
    speed = caller.call(opened(caller, peer, SPEED_PROTOCOL, measure), 60)
    assert speed.whole
    assert min(speed.down, speed.up) > 0


async def dialled(origin):
    """Return the outcome for a peer that comes from ``origin``, if something always answers with
    zeros there.
    """
    async with wires(origin, ReachabilityProbe().answer) as stream:
        return await ask(stream, 4001, bytes(16))


async def test_nobody_is_dialled_through_a_relay():
    seen = await dialled("")
    assert (seen.address, seen.outcome) == ("", "unseen")


def test_a_port_of_the_system_is_refused():
    with pytest.raises(ValueError):
        DialRequest(port=LOWEST_PORT - 1, token=bytes(16))


@pytest.mark.parametrize(
    ("address", "found", "said"),
    [
        ("8.8.8.8", "refused", "refused"),
        ("8.8.8.8", "other", "other"),
        ("192.168.1.7", "refused", "unreached"),
        ("192.168.1.7", "other", "unreached"),
        ("127.0.0.1", "silent", "unreached"),
        ("192.168.1.7", "reached", "reached"),
    ],
)
async def test_the_finding_in_a_private_network_is_not_reported(monkeypatch, address, found, said):
    async def look(*where):
        assert where == (address, 4001, bytes(16))
        return found

    monkeypatch.setattr("shoal.swarm.p2p.reachability._dial", look)
    assert (await dialled(address)).outcome == said


async def test_dials_are_few(monkeypatch):
    async def look(*where):
        return "reached"

    monkeypatch.setattr("shoal.swarm.p2p.reachability._dial", look)
    server, outcomes = ReachabilityProbe(), []
    for index in range(MAX_DIALS + MAX_DIALS_EACH):
        async with wires(f"8.8.8.{index // (2 * MAX_DIALS_EACH)}", server.answer) as stream:
            outcomes.append((await ask(stream, 4001, bytes(16))).outcome)
    assert (
        outcomes[: 2 * MAX_DIALS_EACH] == ["reached"] * MAX_DIALS_EACH + ["busy"] * MAX_DIALS_EACH
    )
    assert outcomes.count("reached") <= MAX_DIALS


async def test_a_speed_test_is_neither_relayed_nor_repeated_for_ever():
    server, said = ThroughputProbe(), []
    for address in ("", *["8.8.8.8"] * (MAX_TESTS_EACH + 1)):
        async with wires(address, server.answer) as stream:
            try:
                said.append(str(await measure(stream, 1000)).split("(")[0])
            except NetworkError as error:
                said.append(str(error))
    assert "goes through a relay" in said[0]
    assert said[1:-1] == ["Throughput"] * MAX_TESTS_EACH
    assert "asked too often" in said[-1]


def test_a_request_for_much_is_refused():
    with pytest.raises(ValueError):
        SpeedRequest(nbytes=MAX_BYTES + 1)
    assert len(pack(SpeedRequest(nbytes=MAX_BYTES))) < SpeedRequest.LIMIT


@pytest.mark.parametrize(
    ("binary", "found"),
    [
        (b"\x04\x7f\x00\x00\x01\x06\x0f\xa1", "127.0.0.1"),
        (b"\x29" + bytes(15) + b"\x01\x06\x0f\xa1", "::1"),
        (b"\x04\x08\x08\x08\x08\x91\x02\x0f\xa1\xcd\x03", "8.8.8.8"),
        (b"\x04\x08\x08\x08\x08\x06\x0f\xa1\xa5\x03\x01\x00\xa2\x02", ""),  # /p2p/…/p2p-circuit
        (b"\xa2\x02", ""),
        (b"\x04\x08\x08", ""),
        (b"", ""),
    ],
)
def test_the_origin_of_a_direct_connection_is_known(binary, found):
    assert origin(binary) == found


CIRCUIT, LAN = f"/ip4/8.8.4.4/tcp/9/p2p/{PEER}/p2p-circuit/p2p/{PEER}", "/ip4/192.168.1.7/tcp/4001"
HERE = "9.9.9.9"  # as peers see it


@pytest.mark.parametrize(
    ("announced", "seen", "reach"),
    [
        ([LAN], [(HERE, "silent"), (HERE, "other")], "direct"),
        ([LAN, CIRCUIT], [(HERE, "silent"), ("", "unseen")], "unreachable"),
        ([f"/ip4/{HERE}/tcp/4001"], [(HERE, "refused")], "unreachable"),
        (["/ip4/1.1.1.1/tcp/4001"], [(HERE, "silent")], None),  # a tunnel's, which nobody dialled
        (["/dns4/example.org/tcp/4001"], [(HERE, "silent")], None),
        (["/dns4/example.org/tcp/4001"], [(HERE, "reached")], "direct"),
        ([LAN], [("192.168.1.9", "unreached")], "local"),
        ([LAN], [("192.168.1.9", "reached")], "local"),  # that peer is in the same house
        ([LAN], [("192.168.1.9", "reached"), (HERE, "silent")], "unreachable"),
        ([LAN], [(HERE, "busy")], None),
        ([LAN], [("", "unseen")], None),
        ([LAN], [("1:", "other")], "local"),
        ([LAN], [], None),
    ],
)
def test_reachability_is_what_dialling_peers_found(announced, seen, reach):
    """Who can dial a node is what peers found that dialled it."""
    views = [DialBackView(PEER, address, 0.0, 0.1, outcome) for address, outcome in seen]
    assert reach_of(views, [f"{address}/p2p/{PEER}" for address in announced]) == reach


@pytest.mark.parametrize(("announced", "port"), [
    ([LAN], 4001),
    ([LAN, f"/ip4/{HERE}/tcp/40001"], 40001),  # what the router forwards
    ([CIRCUIT, "/ip4/127.0.0.1/tcp/4002"], None), (["/ip4/192.168.1.7/udp/4001/quic-v1"], None),
    (["/ip4/192.168.1.7/tcp/443"], None), (["/dns4/example.org/tcp/4003"], 4003),
])  # fmt: skip
def test_the_port_that_peers_dial(announced, port):
    assert dialled_port(announced) == port
