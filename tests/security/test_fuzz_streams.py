"""Swarms in the simulator in which a third of the peers send messages with other values in them,
signed as they should be.

Every message of every protocol that such a swarm speaks goes through this, as a question and as an
answer. No peer fails, and the others go on to meet. The small protocols beside exchanges, and the
pages over HTTP, get such questions one by one.
"""

import ast
import asyncio
import contextlib
import logging
import queue
import random
import re
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.sim.plan import SimPlan
from bench.sim.world import World
from shoal.node.config.settings import load
from shoal.node.listen_address import Address
from shoal.node.metrics.prometheus import Endpoint
from shoal.node.watch import web
from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.errors import MessageError, NetworkError, ShoalError
from shoal.swarm.gossip.bodies import BodyRequest, BodyStore
from shoal.swarm.identity import Identity
from shoal.swarm.membership import admission, manifest_exchange, peer_exchange
from shoal.swarm.membership.peer_exchange import Shuffle
from shoal.swarm.p2p.punch import Punch, Puncher
from shoal.swarm.p2p.reachability import DialRequest, ReachabilityProbe
from shoal.swarm.p2p.resource_manager import ResourceManager
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.p2p.throughput import SpeedRequest, ThroughputProbe
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.seed.bootstrap_node import Seed
from shoal.swarm.topics.verification_log import LogRequest, LogServer
from shoal.swarm.wire.envelope import pack
from shoal.swarm.wire.messages import ManifestRequest, SeedRequest, SwarmsRequest
from tests.security.hostile import CANNOT, MSGPACK, ODD, SIGNERS, WHOLE, at, near, places, put
from tests.sim.memory_stream import stream_pair
from tests.sim.network import Links
from tests.support.message_kinds import good

ROOT = Path(__file__).resolve().parents[2]
SWARM, ME, STRANGER = "a" * 52, Identity.ephemeral(), Identity.ephemeral()
SIGNERS[STRANGER.peer_id] = STRANGER


def changed(data, chance):
    """Return a message with another value in one place, or cut, or other bytes; signed anew by
    those in `SIGNERS`.
    """
    way = chance.random()
    if way < 0.1:
        return data[: chance.randrange(len(data))]
    if way < 0.2:
        return chance.choice(WHOLE)[:1000]
    try:
        tree = MSGPACK.open(data)
    except Exception:  # values, and no message
        return chance.randbytes(len(data))
    path = chance.choice(list(places(tree)))
    with contextlib.suppress(*CANNOT):
        return MSGPACK.make(put(tree, path, chance.choice([*ODD, *near(at(tree, path))])))
    return data


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("noloco", {"outer.fragments": 2}),
        ("noloco", {"outer.lag": 0}),
        ("diloco", {}),
        ("sparseloco", {}),
    ],
)
def test_a_third_of_a_swarm_sends_other_values(method, more):
    settings = load(None, {"outer.method": method, "outer.every": 10, **more})
    world = World(
        SimPlan(
            6, Links(), settings.outer.resolved(), churn=2.0, minutes=0.75, seed=1, parameters=64
        )
    )
    chance, bent, liars = random.Random(method), [], set()
    hosts, usual = world.network.host, world.network.stream

    def host(name, identity):
        made = hosts(name, identity)
        if int(name.removeprefix("p")) % 3 == 0:
            liars.add(made.traffic)
            SIGNERS[identity.peer_id] = identity
        return made

    class Bent(usual):
        async def send(self, data, timeout):
            if self._traffic in liars and chance.random() < 0.3:
                bent.append(data)
                data = changed(data, chance)
            await super().send(data, timeout)

    world.network.host, world.network.stream = host, Bent
    result = world.run()  # raises what no protocol expected
    assert len(bent) > 50
    assert result.counts.waits
    assert result.counts.alone < len(result.counts.waits) * 0.8


# -- the small protocols, one question at a time ---------------------------------------------------


class Host:
    """What serves protocols, each with one handler."""

    def __init__(self):
        self.handlers, self.peer_id, self.met = {}, ME.peer_id, {}

    def serve(self, protocol, handler):
        self.handlers[protocol] = handler

    def submit(self, coroutine):
        coroutine.close()
        return SimpleNamespace(cancel=lambda: None)


def served(host):
    """Return each handler, with a good question."""
    directory = SimpleNamespace(
        own=lambda: None,
        everyone=dict,
        members=dict,
        departed=dict,
        is_barred=lambda peer: False,
        hear=print,
    )
    manifest_exchange.serve_manifest(host, SWARM, b"x")
    admission.AdmissionHandshake(host, AccessPolicy())
    peer_exchange.PeerExchange(host, directory, ME, SWARM)
    BodyStore(host, SWARM)
    LogServer(host, SWARM, lambda since: b"x")

    async def punch(stream):
        stream.origin = ""  # relayed
        await Puncher(SimpleNamespace(), ME.peer_id, ResourceManager(), TrafficMeter()).answer(
            stream
        )

    reachability, speed, seed = ReachabilityProbe(), ThroughputProbe(), Seed(ME, listen=())
    others = {
        "dial": reachability.answer,
        "speed": speed.answer,
        "seed": seed._answer,
        "swarms": seed._list,
        "dial at a seed": seed._reachability.answer,
        "punch": punch,
    }
    questions = {
        "manifest": ManifestRequest,
        "admission": None,
        "shuffle": Shuffle,
        "body": BodyRequest,
        "verification-log": LogRequest,
        "dial": DialRequest,
        "speed": SpeedRequest,
        "seed": SeedRequest,
        "swarms": SwarmsRequest,
        "dial at a seed": DialRequest,
        "punch": Punch,
    }
    names = {
        protocol.split("/")[2]: handler for protocol, handler in host.handlers.items()
    } | others
    assert names.keys() == questions.keys()
    for name, handler in names.items():
        yield name, handler, b"x" * 40 if questions[name] is None else pack(good(questions[name]))


HANDLERS = list(served(Host()))


@pytest.mark.parametrize(
    ("name", "handler", "question"), HANDLERS, ids=[name for name, _, _ in HANDLERS]
)
def test_a_handler_answers_or_refuses_whatever_is_asked(name, handler, question, monkeypatch):
    async def no_dial(*arguments):
        return "silent"

    monkeypatch.setattr("shoal.swarm.p2p.reachability._dial", no_dial)
    chance = random.Random(name)

    async def ask(data):
        mine, theirs = stream_pair()
        served = Stream(STRANGER.peer_id, *theirs, TrafficMeter(), "203.0.113.5")
        mine[1].write(data)
        mine[1].close()  # it reads no answer
        with contextlib.suppress(ShoalError):
            await asyncio.wait_for(handler(served), 20)
        served.abort()

    async def main():
        for number in range(150):
            data = question if name == "admission" else changed(question, chance)
            if name == "admission":
                data = chance.randbytes(chance.randrange(400))
            head = len(data).to_bytes(4, "big") if number % 10 else chance.randbytes(4)
            await ask(head + data)

    asyncio.run(main())


@pytest.mark.parametrize("limit", [0, 100])
def test_a_frame_is_no_longer_than_its_limit(limit):
    async def main():
        for size in (0, 1, limit, limit + 1, 2**31, 2**32 - 1):
            mine, theirs = stream_pair()
            mine[1].write(size.to_bytes(4, "big") + bytes(min(size, 200)))
            mine[1].close()
            stream = Stream(STRANGER.peer_id, *theirs, TrafficMeter())
            try:
                assert len(await stream.receive(limit, 5)) == size <= limit
            except MessageError:
                assert size > limit
            except NetworkError:
                assert size > 200

    asyncio.run(main())


def test_every_protocol_is_asked():
    """By a swarm in the simulator, by the handlers above, or by a test of its own."""
    found = set()
    for top in ("node", "swarm"):
        for file in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.Call)
                    and getattr(node.func, "attr", "") == "serve"
                    and len(node.args) == 2
                ):
                    found.add(ast.unparse(node.args[0]))
    swarms = {
        "EXCHANGE_PROTOCOL", "OUTCOME_PROTOCOL", "CHUNKS_PROTOCOL", "STATE_PROTOCOL",
        "protocols.leader",
    }  # fmt: skip
    asked = {
        "MANIFEST_PROTOCOL",
        "GOSSIP_PROTOCOL",
        "CHANGE_PROTOCOL",
        "ADMISSION_PROTOCOL",
        "SHUFFLE_PROTOCOL",
        "LOG_PROTOCOL",
        "DIAL_PROTOCOL",
        "SPEED_PROTOCOL",
        "SEEN_PROTOCOL",
        "PUNCH_PROTOCOL",
        "SEED_PROTOCOL",
        "SWARMS_PROTOCOL",
    }
    assert found == swarms | asked | {"protocol"}, (
        "protocol: of a store of bodies, of a group's streams, and of the host itself"
    )


# -- pages -----------------------------------------------------------------------------------------

GET = "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{more}\r\n"
HOSTS = (
    "127.0.0.1",
    "127.0.0.1:9",
    "localhost",
    "",
    "[::1]",
    "[::1",
    "]",
    "a]b",
    "[",
    "::",
    "\x00",
    "é",
    "a b",
    "x" * 9000,
    "127.0.0.1:99999999",
    "%",
    "user@127.0.0.1",
    "[v1.x]",
)
PATHS = (
    "/",
    "/events/",
    "/metrics",
    "/metrics?name[]=x",
    "/at?time=1",
    "/at?time=nan",
    "/at?time=inf",
    "/at?time=-1e400",
    "/at?time=1e308",
    "/at?time=",
    "/at?time=" + "9" * 400,
    "/at?time=1&time=2",
    "/at?time=%00",
    "/at?time=%ff",
    "//x",
    "/../../etc/passwd",
    "/%2e%2e/x",
    "*",
    "http://x/",
    "http://[::1/",
    "/" + "x" * 9000,
    "/%",
    "/?" + "a=b&" * 3000,
    "x",
    "/\x00",
    "/é",
)
MORE = (
    "",
    "Content-Length: -1\r\n",
    "Content-Length: 99999999999\r\n",
    "Transfer-Encoding: chunked\r\n",
    "Expect: x\r\n",
    "Range: bytes=9-1\r\n",
    "Accept-Encoding: x\r\n",
    "Accept: " + "a," * 2000 + "\r\n",
    "Upgrade: websocket\r\n",
    ": x\r\n",
    "X" * 70_000 + ": y\r\n",
)
RAW = (
    b"",
    b"\r\n\r\n",
    b"\x00" * 100,
    b"\xff" * 100 + b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)


def requests():
    yield from RAW
    for path in PATHS:
        yield GET.format(path=path, host="127.0.0.1", more="").encode("latin-1")
    for host in HOSTS:
        yield GET.format(path="/", host=host, more="").encode("latin-1")
        yield GET.format(path="/metrics", host=host, more="").encode("latin-1")
    for more in MORE:
        yield GET.format(path="/", host="127.0.0.1", more=more).encode("latin-1")
    good, chance = (
        GET.format(path="/at?time=1", host="127.0.0.1", more="").encode(),
        random.Random(3),
    )
    for _ in range(60):
        bad = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            bad[chance.randrange(len(bad))] = chance.randrange(256)
        yield bytes(bad)


def status(port, data):
    """Return the status that answers a request; None if the server hangs up."""
    with socket.create_connection(("127.0.0.1", port), 20) as link:
        with contextlib.suppress(OSError):  # it hung up already
            link.sendall(data)
        if b"\r\n\r\n" not in data:
            return None  # the rest is waited for: `test_half_requests`
        with contextlib.suppress(ConnectionError):
            found = re.match(rb"HTTP/1.[01] (\d+)", link.makefile("rb").readline())
            return int(found[1]) if found else None


def judge(port, log):
    codes = [status(port, data) for data in requests()]
    assert {code for code in codes if code is not None and code >= 500} <= {501, 505}
    assert [
        record.getMessage() for record in log.records if record.levelno >= logging.WARNING
    ] == []
    assert 200 in codes


def test_the_page_of_watch_answers_whatever_is_asked(caplog, monkeypatch):
    monkeypatch.setattr(web, "HEADERS_S", 1.0)
    source = SimpleNamespace(ended=threading.Event())
    said = queue.Queue()
    timeline = SimpleNamespace(span=(0.0, 2.0), view_at=lambda time_s: (web.SwarmView(), False))
    page = web.Page(queue.Queue(), source, live=True, timeline=timeline)
    thread = threading.Thread(
        target=web.serve, args=(page, web.Address(web.HERE, 0), 120, said.put), daemon=True
    )
    thread.start()
    judge(int(said.get(timeout=60).rstrip("/").rpartition(":")[2]), caplog)
    source.ended.set()
    thread.join(60)
    assert not thread.is_alive()


def test_the_page_of_metrics_answers_whatever_is_asked(caplog, monkeypatch):
    failed = []
    monkeypatch.setattr(
        "shoal.node.metrics.prometheus._Server.handle_error",
        lambda *arguments: failed.append(repr(sys.exc_info()[1])),
    )
    page = Endpoint(Address("127.0.0.1", 0))
    try:
        judge(page.address.port, caplog)
    finally:
        page.close()
    assert [
        text
        for text in failed
        if not text.startswith(
            ("ConnectionResetError", "BrokenPipeError", "ValueError('Invalid IPv6 URL')")
        )
    ] == []
