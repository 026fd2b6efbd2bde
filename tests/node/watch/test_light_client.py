"""The client of `shoal watch` against a real node, and that node read by another implementation of
libp2p.
"""

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from blake3 import blake3

from shoal.node.watch import source as light_client
from shoal.node.watch.source import LightClient, live
from shoal.swarm.access.link import Link
from shoal.swarm.changes import CHANGE_PROTOCOL, Change, ChangePart, ChangeReply, ChangeRequest
from shoal.swarm.errors import StartupError
from shoal.swarm.gossip.envelope import make_body, make_envelope
from shoal.swarm.gossip.frames import topic_of
from shoal.swarm.gossip.neighbours import Neighbours
from shoal.swarm.manifest import MANIFEST_PROTOCOL, Manifest, swarm_id
from shoal.swarm.membership import manifest_exchange
from shoal.swarm.membership.manifest_exchange import serve_manifest
from shoal.swarm.p2p import daemon, daemon_process
from shoal.swarm.p2p.host import Host
from shoal.swarm.topics.status import Status
from shoal.swarm.wire.envelope import pack, seal, unpack
from shoal.swarm.wire.messages import (
    GOSSIP_PROTOCOL,
    SEED_PROTOCOL,
    ManifestReply,
    ManifestRequest,
    SeedReply,
    SeedRequest,
)

ROOT = Path(__file__).resolve().parents[3]


class Node:
    """A node that hands over its manifest, and publishes what it is told to."""

    def __init__(self, author):
        self.author = author
        manifest = Manifest(
            name="fish", created=0.0, creator=author.peer, task="text", model="0" * 64
        )
        self.sealed = seal(manifest, author.identity)
        self.swarm = swarm_id(self.sealed)
        self.host = Host.start(author.identity, timeout=60)
        serve_manifest(self.host, self.swarm, self.sealed)
        self.change = b""
        self.host.serve(CHANGE_PROTOCOL, self._answer)
        self.neighbours = Neighbours(
            self.host,
            self.swarm,
            self._take,
            members=dict,
            is_member=lambda peer: False,
        )
        self.host.call(self._join(), 10)
        self.link = Link(self.swarm, self.host.addresses())

    async def _answer(self, stream):
        unpack(await stream.receive(ChangeRequest.LIMIT, 5), ChangeRequest)
        await stream.send(pack(ChangeReply(change=self.change)), 5)

    def publish(self, **changes):
        """Publish a status, newer than the one before."""
        status = self.author.status(swarm=self.swarm, issued=time.time(), **changes)
        self.send(make_envelope(self.swarm, make_body(status, self.author.identity)))

    async def _take(self, *parcel):
        raise AssertionError("a watcher sends nothing")

    async def _join(self):
        self.neighbours.join(topic_of(Status))

    def send(self, data):
        async def push():
            self.neighbours.push(topic_of(Status), blake3(data).digest(), data)

        self.host.call(push(), 10)

    def listeners(self):
        async def listening():
            return self.neighbours.listeners(topic_of(Status))

        return self.host.call(listening(), 10)


def heard(node, next_of, **changes):
    """What is heard of a node that publishes every second, as real ones do: the mesh takes up a new
    listener with its heartbeat.
    """
    for _ in range(30):
        node.publish(**changes)
        with suppress(queue.Empty):
            return next_of("status", 1.0)
    raise AssertionError("no status came")


@pytest.fixture
def node(authors):
    made = Node(authors[0])
    yield made
    made.host.close()


@contextmanager
def watching(link):
    """The events of a live watcher of ``link``: a function that waits for the next of a kind."""
    events = queue.Queue()
    source = live(link, events.put)

    def next_of(kind, seconds=30.0):
        while (event := events.get(timeout=seconds)).event != kind:
            pass
        return event

    source.start()
    try:
        yield next_of
    finally:
        source.stop()
        has_ended = source.ended.wait(60)  # `stop` waits no longer than a user should
    assert has_ended
    source.check()


@pytest.mark.ci
def test_dead_daemon_is_started_again(node, monkeypatch):
    """A node is watched through the daemon which is started again when it dies."""
    daemons, launch = [], daemon.Daemon.launch.__func__

    async def launched(cls, *arguments, **options):
        daemons.append(await launch(cls, *arguments, **options))
        return daemons[-1]

    monkeypatch.setattr(daemon.Daemon, "launch", classmethod(launched))
    with watching(node.link) as next_of:
        assert next_of("watching").swarm == node.swarm
        assert next_of("connected").peer == node.host.peer_id
        described = next_of("described")
        assert (described.name, described.task, described.method) == ("fish", "text", "noloco")
        first = heard(node, next_of, name="anna")
        assert (first.peer, first.status.name) == (node.host.peer_id, "anna")
        node.send(b"garbage")
        assert next_of("refused").reason == "malformed"
        os.kill(daemons[0]._child.pid, signal.SIGKILL)
        assert next_of("disconnected").peer == node.host.peer_id
        assert next_of("connected").peer == node.host.peer_id
        assert heard(node, next_of, state="done").status.progress.state == "done"
    assert len(daemons) == 2
    assert not any(made.control.parent.exists() for made in daemons)


@pytest.mark.ci
def test_creators_signed_change_is_seen(node, authors, monkeypatch):
    """A change of the settings is seen if the creator signed it."""
    monkeypatch.setattr(light_client, "CHANGE_S", 0.1)

    def change(author, number):
        parts = (ChangePart(round=number, lr=0.5),)
        made = Change(swarm=node.swarm, creator=author.peer, number=number, parts=parts)
        return seal(made, author.identity)

    node.change = change(authors[1], 9)  # a stranger's
    with watching(node.link) as next_of:
        heard(node, next_of)
        node.change = change(authors[0], 1)
        assert next_of("changed").parts == (ChangePart(round=1, lr=0.5),)
        node.change = change(authors[0], 2)
        assert next_of("changed").parts == (ChangePart(round=2, lr=0.5),)


def test_member_whose_first_answer_fails_is_asked_again(node, monkeypatch):
    """Fault: a member that was busy, or about to leave, was asked once, so the swarm had no name
    and no changes for as long as the command ran.
    """
    monkeypatch.setattr(manifest_exchange, "ASK_AGAIN_S", 0.1)
    asked = []

    async def answer(stream):
        await stream.receive(ManifestRequest.LIMIT, 5)
        asked.append(stream.peer_id)
        if len(asked) == 2:
            await stream.send(pack(ManifestReply(manifest=node.sealed, swarm=node.swarm)), 5)

    node.host.serve(MANIFEST_PROTOCOL, answer)
    with watching(node.link) as next_of:
        assert next_of("described", 15.0).name == "fish"
    assert len(asked) == 2


@pytest.mark.ci
def test_answering_bootstrap_node_is_seen_as_one(node, authors):
    """A node of the link that does not answer so is none, whatever else it does not say."""

    async def answer(stream):
        await stream.receive(SeedRequest.LIMIT, 5)
        await stream.send(pack(SeedReply()), 5)

    with closing(Host.start(authors[1].identity, timeout=60)) as seed:
        seed.serve(SEED_PROTOCOL, answer)
        link = Link(node.swarm, (*node.link.bootstrap, *seed.addresses()))
        with watching(link) as next_of:
            assert next_of("bootstrap").peer == seed.peer_id


def test_failed_daemon_start_ends_the_watch(monkeypatch, authors):
    """A daemon that does not start ends the watch with its sentence."""

    async def launch(*_, **__):
        raise StartupError("the network daemon is missing.")

    monkeypatch.setattr(light_client.Daemon, "launch", launch)
    link = Link("a" * 52, (f"/ip4/127.0.0.1/tcp/1/p2p/{authors[0].peer}",))
    with (
        pytest.raises(StartupError, match="the network daemon is missing"),
        watching(link) as next_of,
    ):
        next_of("watching")


def test_silent_connections_do_not_end_the_daemon(monkeypatch, authors):
    """By default it does so after half a minute, and a watcher keeps none open to it."""
    asked = {}

    async def launch(*_, **options):
        asked.update(options)
        raise StartupError("enough")

    monkeypatch.setattr(light_client.Daemon, "launch", launch)
    with pytest.raises(StartupError, match="enough"):
        asyncio.run(
            LightClient(
                Link("a" * 52, (f"/ip4/127.0.0.1/tcp/1/p2p/{authors[0].peer}",)), lambda event: None
            ).run()
        )
    assert not any(
        "idle" in option for option in daemon_process.options(control="", key=Path("key"), **asked)
    )
    assert any(
        "idle" in option
        for option in daemon_process.options(control="", key=Path("key"), listen=asked["listen"])
    )


def test_known_dead_host_is_not_dialled(authors):
    """A host that failed under other names is not dialled and no news."""
    anna = authors[0].peer
    link, events = Link("a" * 52, (f"/ip4/127.0.0.1/tcp/1/p2p/{anna}",)), []
    client = LightClient(link, events.append)

    class Other:
        async def connect(self, peer, addresses):
            raise daemon.PutOffError("not dialled again yet")

    asyncio.run(client._dial(Other(), anna))
    assert events == []
    assert client._book.due(0.0, ()) == []


class Open:
    """A daemon whose streams stay open, and say nothing."""

    def __init__(self):
        self.opened = 0

    async def open(self, peer, protocol):
        self.opened += protocol == GOSSIP_PROTOCOL
        await asyncio.Event().wait()


def listening(authors):
    anna = authors[0].peer
    client = LightClient(Link("a" * 52, (f"/ip4/127.0.0.1/tcp/1/p2p/{anna}",)), lambda event: None)
    client._tasks = asyncio.TaskGroup()
    return client, anna


async def soon():
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_peer_that_comes_again_is_listened_to_once(authors):
    async def streams():
        client, anna = listening(authors)
        client._described.set()
        node = Open()
        with suppress(asyncio.CancelledError):
            async with client._tasks:
                for _ in range(3):
                    client._note_connections(node, {anna})
                    await soon()
                    client._note_connections(node, set())
                    await soon()
                asyncio.current_task().cancel()
        assert client._listened_to == set()
        return node.opened

    assert asyncio.run(streams()) == 1


def test_no_status_is_heard_before_the_swarm_is_described(authors):
    async def streams():
        client, anna = listening(authors)
        node = Open()
        with suppress(asyncio.CancelledError):
            async with client._tasks:
                client._note_connections(node, {anna})
                await soon()
                early = node.opened
                client._described.set()
                await soon()
                asyncio.current_task().cancel()
        return early, node.opened

    assert asyncio.run(streams()) == (0, 1)


def test_another_implementation_of_libp2p_reads_the_same_node(node, until):
    """A client on py-libp2p, written from docs/wire.md, takes manifest and statuses of a node of
    ours.
    """
    pytest.importorskip("trio", reason="py-libp2p is not installed: make libp2p")
    command = [sys.executable, str(ROOT / "examples" / "py_libp2p.py"), str(node.link)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        timer = threading.Timer(60, process.kill)
        timer.start()
        try:
            assert json.loads(process.stdout.readline()) == {
                "name": "fish",
                "task": "text",
                "method": "noloco",
                "fragments": 1,
            }
            until(node.listeners, 30, "listener")
            node.send(b"garbage")
            node.publish(name="anna", state="waiting")
            status = json.loads(process.stdout.readline())
            assert set(status) == {"name", "peer", "progress", "loss"}
            assert (status["name"], status["peer"]) == ("anna", node.host.peer_id)
            assert (status["progress"]["state"], status["progress"]["round"]) == ("waiting", 0)
            process.send_signal(signal.SIGINT)
            _, refused = process.communicate(timeout=30)
        finally:
            timer.cancel()
            process.kill()
    assert len(refused.splitlines()) == 1


BOTH = """
import sys
import libp2p.crypto.pb.crypto_pb2 as theirs
sys.modules["hivemind.proto.crypto_pb2"] = theirs
import hivemind
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
peer = str(new_host(key_pair=create_new_key_pair()).get_id())
assert PeerID.from_base58(peer).to_base58() == peer
"""


@pytest.mark.ci
def test_it_lives_beside_hivemind_as_the_example_says():
    pytest.importorskip("trio", reason="py-libp2p is not installed: make libp2p")
    ended = subprocess.run(
        [sys.executable, "-c", BOTH], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
