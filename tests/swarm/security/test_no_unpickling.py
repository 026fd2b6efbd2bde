"""Nothing that a peer sends is unpickled: a pickle that would make a file is sent to all that a
node serves, and no file appears.

That the source holds no call that could is tests/test_house.py's affair; this is the proof for what
it calls, hivemind too.
"""

import asyncio
import contextlib
import importlib.util
import io
import os
import pickle
import re
import sys
import threading
import zlib
from pathlib import Path

import msgpack
import pytest
import torch
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import get_dht_time

from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.group.exchange import GroupExchange
from shoal.swarm.exchange.pair.exchange import PairExchange
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.gossip import neighbour_faults
from shoal.swarm.gossip.envelope import GossipEnvelope
from shoal.swarm.gossip.frames import GossipTopics, frame_of, greet
from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.identity import Identity
from shoal.swarm.membership.admission import AdmissionHandshake
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.manifest_exchange import serve_manifest
from shoal.swarm.membership.records import MemberValidator, key_of
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.rate_limit import RateLimit
from shoal.swarm.state.state_server import StateServer
from shoal.swarm.topics.attestation import Attestations
from shoal.swarm.topics.evidence import EvidenceStore
from shoal.swarm.topics.rollout_pool import RolloutPool
from shoal.swarm.topics.verification_log import LogServer
from shoal.swarm.wire.envelope import pack
from shoal.swarm.wire.messages import GOSSIP_PROTOCOL, StateRequest
from tests.support.waiting import until

SWARM, MODEL = "a" * 52, "0" * 64
UNPICKLING = ("pickle.find_class", "marshal.loads", "marshal.load")
heard: list[str] = []
listening = threading.Event()


def importing():
    """Return whether it is Python that loads a module: it keeps them as marshalled code."""
    return sys._getframe(2).f_code.co_filename == "<frozen importlib._bootstrap_external>"


def listen(event, arguments):
    """CPython tells of every class that any unpickler looks up, the one in C too; a hook cannot be
    taken away again.
    """
    if event in UNPICKLING and listening.is_set() and not importing():
        heard.append(event)


sys.addaudithook(listen)


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def in_torch(bomb):
    file = io.BytesIO()
    torch.save(bomb, file)
    return file.getvalue()


@pytest.fixture
def victim(monkeypatch):
    """Yield a node's host with all handlers that a node has, whatever its method. It goes on with a
    neighbour that sends it nothing but pickles.
    """
    monkeypatch.setattr(neighbour_faults, "FAULTS", RateLimit())
    monkeypatch.setattr(neighbour_faults, "FAULTS_OF_RANGE", RateLimit())
    monkeypatch.setattr(neighbour_faults.NeighbourFaults, "shun", lambda *_: None)
    identity = Identity.ephemeral()
    with Host.start(identity, timeout=60, validator=MemberValidator(SWARM)) as host:
        directory = Directory(host, identity, SWARM)
        AdmissionHandshake(host, AccessPolicy())
        serve_manifest(host, SWARM, b"manifest")
        StateServer(host, SWARM, MODEL, [(4,)])
        context, timeouts = (
            PeerContext(host, identity, SWARM, MODEL, 0, directory.members),
            ExchangeTimeouts(1.0, 1.0, 2.0),
        )
        PairExchange(context, timeouts)
        GroupExchange(context, timeouts)
        gossip = Gossip(host, identity, SWARM, members=dict)
        topics = [
            RolloutPool(gossip, lambda *env: True).topic,
            Attestations(gossip, lambda *record: None).topic,
        ]
        EvidenceStore(host, SWARM)
        logs = LogServer(host, SWARM, lambda since: b"log")
        yield host, topics
        logs.close()
        directory.close()


@pytest.fixture
def bombs(tmp_path):
    """Pickles of several kinds, and the folders that they would make.

    That they go off is seen first.
    """
    folder = tmp_path / "went off"
    kinds = [pickle.dumps(Bomb(folder), protocol) for protocol in (0, 2, 5)] + [
        in_torch(Bomb(folder))
    ]
    listening.set()
    for bomb in kinds:
        torch.load(io.BytesIO(bomb), weights_only=False) if bomb is kinds[-1] else pickle.loads(
            bomb
        )
        folder.rmdir()
    assert heard
    heard.clear()
    yield kinds, folder
    listening.clear()


def wrapped(bomb):
    """Wrap a bomb: as it is, framed, as a message, in its fields, behind a valid message,
    compressed.
    """
    length = len(bomb).to_bytes(4, "big")
    message = msgpack.packb(["offer", 1, bomb])
    fields = msgpack.packb(["state-request", 1, {"swarm": bomb, "model": bomb}])
    sealed = msgpack.packb(["x", bomb, bomb])
    extension = msgpack.packb(msgpack.ExtType(0x50, bomb))
    valid = pack(StateRequest(swarm=SWARM, model=MODEL))
    for data in (bomb, message, fields, sealed, extension, zlib.compress(bomb), valid):
        yield len(data).to_bytes(4, "big") + data + (length + bomb if data is valid else b"")
    yield bomb


async def throw(host, peer, protocol, data):
    try:
        stream = await host.open(peer, protocol, timeout=30)
    except NetworkError:
        return
    stream._writer.write(data)
    stream._writer.write_eof()
    with contextlib.suppress(OSError, EOFError):
        while await stream._reader.read(
            1 << 16
        ):  # until the other side ends the stream: by then it has read what it wants
            pass
    stream.close()


def test_what_is_sent_to_a_node_is_never_unpickled(victim, bombs, monkeypatch):
    host, topics = victim
    kinds, folder = bombs
    monkeypatch.setattr("shoal.swarm.membership.manifest_exchange.MESSAGE_S", 0.5)
    monkeypatch.setattr(
        "shoal.swarm.p2p.resource_manager.MAX_HANDLERS_PER_PEER", 256
    )  # all must reach their handlers
    monkeypatch.setattr(
        "shoal.swarm.state.offers.MAKE_S", 0.1
    )  # a minute, for the valid request that no snapshot answers
    served = sorted(host._supervisor.handlers)
    assert len(served) >= 10
    with Host.start(Identity.ephemeral(), bootstrap=host.addresses(), timeout=60) as attacker:

        async def at_streams():
            for protocol in served:
                throws = [
                    throw(attacker, host.peer_id, protocol, data)
                    for bomb in kinds
                    for data in wrapped(bomb)
                ]
                for start in range(0, len(throws), 8):
                    await asyncio.gather(*throws[start : start + 8])
                    while (
                        host.resource_manager._busy
                    ):  # else those that follow would be refused unread
                        await asyncio.sleep(0.005)

        attacker.call(at_streams(), 240)
        assert host.resource_manager.refused() == {}

        async def at_the_dht():
            protocol, peer = (
                attacker._supervisor.running_dht().protocol,
                PeerID.from_base58(host.peer_id),
            )
            later = get_dht_time() + 60
            for bomb in kinds:
                key = DHTID.generate(source=key_of(SWARM, ""))
                values = [
                    bomb,
                    msgpack.packb(bomb),
                    *(msgpack.packb(msgpack.ExtType(code, bomb)) for code in (0x40, 0x50)),
                ]
                for value in values:
                    for subkey in (None, protocol.IS_DICTIONARY, bomb):
                        await protocol.call_store(peer, [key], [value], [later], [subkey])

        attacker.call(at_the_dht(), 60)

        async def as_a_neighbour(name, data):
            stream = await attacker.open(host.peer_id, GOSSIP_PROTOCOL, timeout=30)
            await greet(stream, GossipTopics(swarm=SWARM, topics=(name,)))
            await stream.send(frame_of(0, data), 10)
            return stream

        for topic in topics:
            for bomb in kinds:
                body = zlib.compress(bomb)
                envelopes = [
                    GossipEnvelope(swarm=SWARM, encoding="zlib", size=len(bomb), body=body)
                ]
                envelopes += [
                    GossipEnvelope(swarm=SWARM, encoding="plain", size=len(bomb), body=bomb)
                ]
                for data in (bomb, *map(pack, envelopes)):
                    before = sum(topic.counters.rejected().values())
                    stream = attacker.call(as_a_neighbour(topic.name, data), 60)
                    until(lambda: sum(topic.counters.rejected().values()) > before)  # noqa: B023
                    stream.close()
    assert heard == []
    assert not folder.exists()


def test_hivemind_unpickles_nothing_either():
    """Check all of it that meets the network: the DHT node's three calls, over the daemon's socket,
    and its serializer.
    """
    root = Path(importlib.util.find_spec("hivemind").origin).parent
    for file in (
        *(root / "dht").glob("*.py"),
        *(root / "p2p").rglob("*.py"),
        root / "utils" / "serializer.py",
    ):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"pickle|marshal|torch\.load|\b(eval|exec)\(", text), file
    # What its serializer makes of extension types: a dictionary of the DHT, and a tensor's shape
    # and type without any content.
    assert {kind.__name__ for kind in MSGPackSerializer._ext_types} <= {
        "DictionaryDHTValue",
        "BatchTensorDescriptor",
    }
