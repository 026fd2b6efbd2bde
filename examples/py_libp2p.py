"""Peer on another implementation of libp2p than Shoal's daemon: it asks a node for the manifest and
prints what nodes publish.

    make libp2p      # needs no compiler; or see docs/install.md
    python examples/py_libp2p.py 'shoal://LINK'

py-libp2p is Python alone. This file is a start for a client of your own, where no daemon runs. It
also shows that docs/wire.md is enough to write one: it uses streams, framed messages, signed
records and gossip, to which anybody may listen. It prints a line of JSON for the manifest's title
and for each status, until Ctrl-C. It dials the addresses in the link and no others; `shoal watch`
finds further ones. To have hivemind in the same process, import `libp2p.crypto.pb.crypto_pb2` first
and make it `sys.modules["hivemind.proto.crypto_pb2"]`: both register the same names in protobuf.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from shoal.swarm.access.link import Link
from shoal.swarm.errors import MessageError
from shoal.swarm.gossip.envelope import open_body, open_envelope, room_for
from shoal.swarm.gossip.frames import GossipTopics, split_frame, topic_of
from shoal.swarm.manifest import MANIFEST_PROTOCOL, swarm_id, title_of
from shoal.swarm.topics.status import Status
from shoal.swarm.wire.envelope import MAX_MESSAGE, pack, unpack
from shoal.swarm.wire.messages import GOSSIP_PROTOCOL, ManifestReply, ManifestRequest

DIAL_S = ASK_S = 10.0  # seconds to connect, and for one question and its answer


async def main(link: Link) -> None:
    """Connect to the peers of ``link``, then print title and statuses for as long as it runs."""
    host: Any = new_host(key_pair=create_new_key_pair())
    async with host.run(listen_addrs=[]):
        reached = [
            peer for address in link.bootstrap if (peer := await connect(host, address)) is not None
        ]
        if not reached:
            sys.exit("No peer of the link answers: ask for a fresh one.")
        with trio.move_on_after(ASK_S):
            print(json.dumps(await describe(host, reached[0], link.swarm)), flush=True)
        await listen(host, reached[0], link.swarm)


async def listen(host: Any, peer: ID, swarm: str) -> None:
    """Print the statuses that ``peer`` takes and passes on."""
    stream = await host.new_stream(peer, [TProtocol(GOSSIP_PROTOCOL)])
    told = GossipTopics(swarm=swarm, topics=(topic_of(Status),))
    await write(stream, pack(told))
    told = unpack(await read(stream, GossipTopics.LIMIT), GossipTopics)
    while True:
        told, topic, envelope = split_frame(await read(stream, 1 + MAX_MESSAGE), told)
        status = opened(envelope, swarm) if topic == topic_of(Status) else None
        if status is not None:
            shown = status.model_dump_json(include={"name", "peer", "progress", "loss"})
            print(shown, flush=True)


async def connect(host: Any, address: str) -> ID | None:
    """Return the id of the peer at ``address``, or None if it does not answer."""
    peer = ID.from_base58(address.rpartition("/p2p/")[2])
    try:
        with trio.fail_after(DIAL_S):
            await host.connect(PeerInfo(peer, [Multiaddr(address)]))
    except Exception as error:  # the library has no common base for what a dial can raise
        print(f"{address} was not reached: {error!r}"[:300], file=sys.stderr)
        return None
    return peer


async def describe(host: Any, peer: ID, swarm: str) -> dict[str, Any]:
    """Return the title of the manifest, which ``peer`` hands over and which must have the hash that
    the link names.
    """
    stream = await host.new_stream(peer, [TProtocol(MANIFEST_PROTOCOL)])
    await write(stream, pack(ManifestRequest(swarm=swarm)))
    sealed = unpack(await read(stream, ManifestReply.LIMIT), ManifestReply).manifest
    await stream.close()
    if sealed is None or swarm_id(sealed) != swarm:
        raise MessageError("The peer is in another swarm.")
    return title_of(sealed)._asdict()


async def write(stream: Any, message: bytes) -> None:
    """Send a message after its length."""
    await stream.write(len(message).to_bytes(4, "big") + message)


async def read(stream: Any, limit: int) -> bytes:
    """Return the next message of at most ``limit`` bytes."""
    size = int.from_bytes(await exactly(stream, 4), "big")
    if size > limit:
        raise MessageError(f"A message of {size} bytes was refused.", "oversized")
    return await exactly(stream, size)


async def exactly(stream: Any, size: int) -> bytes:
    """Read so many bytes of a stream."""
    data = b""
    while len(data) < size:
        part = await stream.read(size - len(data))
        if not part:
            raise MessageError("An answer was cut short.", "truncated")
        data += part
    return data


def opened(data: bytes, swarm: str) -> Status | None:
    """Return the status in a gossiped message, whose signature is checked, or None if there is
    none.
    """
    try:
        sent = open_envelope(data, swarm, room_for(Status))
        status = open_body(sent.encoding, sent.size, sent.body, Status).message
    except MessageError as error:
        print(error, file=sys.stderr)
        return None
    return status if isinstance(status, Status) and status.swarm == swarm else None


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    trio.run(main, Link.parse(sys.argv[1]))
