"""Pure-Python peer (py-libp2p) that subscribes to a swarm's topic of statuses and publishes nothing.

It needs neither a daemon nor torch. It must not share a process with hivemind: both register the same protobuf names, so whichever
comes second fails to import. It dials the link's addresses first, asks a seed among them for members, and keeps connections to a
few nodes, whose addresses it learns from their statuses; so it continues when the first peers are gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pubsub import Pubsub
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from shoal.node.watch.events import Connected, Described, Disconnected, Event, Heard, MessageRefused, Unreachable, Watching
from shoal.node.watch.peer_addresses import PeerAddresses
from shoal.node.watch.record_filter import RecordFilter
from shoal.swarm.access.link import Link
from shoal.swarm.errors import MessageError
from shoal.swarm.gossip.envelope import topic_of
from shoal.swarm.identity import b58encode
from shoal.swarm.manifest.manifest import MANIFEST_PROTOCOL, swarm_id, title_of
from shoal.swarm.topics.status import Status
from shoal.swarm.wire.envelope import MAX_MESSAGE, pack, unpack, unseal
from shoal.swarm.wire.join import ManifestReply, ManifestRequest
from shoal.swarm.wire.member import Member
from shoal.swarm.wire.seed import SEED_PROTOCOL, SeedReply, SeedRequest

log = logging.getLogger(__name__)

WANTED = 4  # connections to keep
DIAL_S = 5.0  # seconds for one attempt to connect
ASK_S = 5.0  # seconds for one question and its answer
LOOK_S = 0.25  # seconds between two looks at the connections
MAX_RPC = 4 * MAX_MESSAGE  # bytes of one GossipSub frame, which may hold several messages


class LightClient:
    """Watcher of the swarm of ``link``, which passes every event to ``send``, in the thread that runs `run`."""

    def __init__(self, link: Link, send: Callable[[Event], None], clock: Callable[[], float] = time.time) -> None:
        self._link, self._send, self._clock = link, send, clock
        self._gate = RecordFilter(link.swarm, clock)
        self._book = PeerAddresses()
        for address in link.bootstrap:
            peer = address.rpartition("/p2p/")[2]
            self._book.learn(peer, (*self._book.addresses(peer), address))
        self._connected: set[str] = set()
        self._dialling: set[str] = set()
        self._described = False

    async def run(self) -> None:
        """Watch until cancelled."""
        self._send(Watching(time=self._clock(), swarm=self._link.swarm))
        self._host: Any = new_host(key_pair=create_new_key_pair())
        router = GossipSub(
            protocols=[TProtocol("/meshsub/1.1.0")],
            degree=6,
            degree_low=4,
            degree_high=12,
            heartbeat_interval=1,
            spam_protection_enabled=False,  # it counts by forwarder, which brings everybody's; `RecordFilter` counts by publisher
        )
        topic = topic_of(self._link.swarm, Status)
        pubsub = Pubsub(self._host, router, max_inbound_rpc_size=MAX_RPC, allowed_topics={topic})
        async with self._host.run(listen_addrs=[]), background_trio_service(pubsub), background_trio_service(router):
            await pubsub.wait_until_ready()
            subscription = await pubsub.subscribe(topic)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_connected, nursery)
                while True:
                    message = await subscription.get()
                    self._take(b58encode(bytes(message.from_id)[:64]), bytes(message.data))

    def _take(self, publisher: str, data: bytes) -> None:
        try:
            status = self._gate.open(publisher, data)
        except MessageError as error:
            log.debug("%s", error)
            self._send(MessageRefused(time=self._clock(), reason=error.reason))
            return
        if status.state in ("waiting", "training"):
            self._book.learn(status.peer, status.addresses)
        self._send(Heard(time=self._clock(), peer=status.peer, status=status))

    async def _keep_connected(self, nursery: trio.Nursery) -> None:
        while True:
            here = {peer.to_base58() for peer in self._host.get_connected_peers()}
            for peer in self._connected - here:
                self._send(Disconnected(time=self._clock(), peer=peer))
            self._connected &= here
            busy = here | self._dialling
            for peer in self._book.due(trio.current_time(), busy)[: max(WANTED - len(busy), 0)]:
                self._dialling.add(peer)
                nursery.start_soon(self._dial, peer)
            await trio.sleep(LOOK_S)

    async def _dial(self, peer: str) -> None:
        why = f"did not answer within {DIAL_S:g} s"
        reached = False
        try:
            with trio.move_on_after(DIAL_S):
                addresses = [Multiaddr(address) for address in self._book.addresses(peer)]
                await self._host.connect(PeerInfo(ID.from_base58(peer), addresses))
                reached = True
        except Exception:  # the library has no common base for what a dial can raise
            log.debug("dialling %s failed", peer, exc_info=True)
            at = ", ".join(address.rpartition("/p2p/")[0] for address in self._book.addresses(peer))
            why = f"nobody answers as this peer at {at}"
        finally:
            self._dialling.discard(peer)
        self._book.tried(peer, trio.current_time(), reached=reached)
        if not reached:
            self._send(Unreachable(time=self._clock(), peer=peer, reason=why))
            return
        self._connected.add(peer)
        self._send(Connected(time=self._clock(), peer=peer))
        await self._get_to_know(peer)

    async def _get_to_know(self, peer: str) -> None:
        """Ask a node for the manifest, or a seed for members; a peer that knows neither is kept as well."""
        try:
            with trio.move_on_after(ASK_S):
                if not self._described and await self._describe(peer):
                    return
            if peer in self._link_peers():
                with trio.move_on_after(ASK_S):
                    await self._ask_seed(peer)
        except Exception:  # another library's errors again: an unanswered question costs a title and no more
            log.debug("asking %s failed", peer, exc_info=True)

    def _link_peers(self) -> set[str]:
        return {address.rpartition("/p2p/")[2] for address in self._link.bootstrap}

    async def _describe(self, peer: str) -> bool:
        try:
            data = await self._ask(peer, MANIFEST_PROTOCOL, pack(ManifestRequest(swarm=self._link.swarm)), ManifestReply.LIMIT)
        except Exception:
            log.debug("no manifest from %s", peer, exc_info=True)  # a seed has none
            return False
        reply = unpack(data, ManifestReply)
        if reply.manifest is None or swarm_id(reply.manifest) != self._link.swarm:
            return False
        title = title_of(reply.manifest)
        if not self._described:  # another peer may have answered meanwhile
            self._described = True
            self._send(Described(time=self._clock(), **title._asdict()))
        return True

    async def _ask_seed(self, peer: str) -> None:
        reply = unpack(await self._ask(peer, SEED_PROTOCOL, pack(SeedRequest(swarm=self._link.swarm)), SeedReply.LIMIT), SeedReply)
        for sealed in reply.members:
            _, member = unseal(sealed, Member)
            if member.swarm == self._link.swarm:
                self._book.learn(member.peer, member.addresses)

    async def _ask(self, peer: str, protocol: str, question: bytes, limit: int) -> bytes:
        """Send one framed message, and return the answer of at most ``limit`` bytes."""
        stream = await self._host.new_stream(ID.from_base58(peer), [TProtocol(protocol)])
        try:
            await stream.write(len(question).to_bytes(4, "big") + question)
            size = int.from_bytes(await _exactly(stream, 4), "big")
            if size > limit:
                raise MessageError(f"An answer of {size} bytes was refused.", "oversized")
            return await _exactly(stream, size)
        finally:
            with trio.move_on_after(1.0) as scope:
                scope.shield = True
                await stream.close()


async def _exactly(stream: Any, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = await stream.read(size - len(data))
        if not part:
            raise MessageError("An answer was cut short.", "truncated")
        data += part
    return data
