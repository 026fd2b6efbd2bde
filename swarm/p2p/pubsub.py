"""GossipSub, which runs inside the daemon, by the daemon's control socket: subscribe, publish, and who else listens.

A published message reaches every subscriber once, over a mesh that the daemons form among those who listen. The daemon signs it
with its own key and checks those of others, so the publisher is known; whose *content* it is, is another matter (swarm/gossip.py).
It drops what is larger than about 1 MiB without a word, so we stay far below.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from hivemind.p2p.p2p_daemon_bindings.utils import read_unsigned_varint
from hivemind.proto import p2pd_pb2

from shoal.swarm.errors import NetworkError
from shoal.swarm.identity import b58encode
from shoal.swarm.p2p.daemon_supervisor import DAEMON_GONE, DaemonSupervisor
from shoal.swarm.p2p.rate_limit import BandwidthLimiter
from shoal.swarm.wire.envelope import MAX_MESSAGE

MAX_FRAME = 2 << 20  # bytes of one message as the daemon hands it over; GossipSub itself stops at 1 MiB
MAX_ID = 64  # bytes of a peer id of any kind
CALL_S = 5.0  # seconds for one call to the own daemon


class Published(NamedTuple):
    """One message as GossipSub delivers it; the daemon has checked that ``publisher`` (base58) sent it."""

    publisher: str
    data: bytes


class Subscription:
    """A topic that this node listens to, until the daemon ends or `close` is called."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer  # kept: dropping it would end the subscription

    async def next(self) -> Published:
        """The next message, whenever it comes. Raises NetworkError when the daemon has ended."""
        try:
            size = await read_unsigned_varint(self._reader)
            if size > MAX_FRAME:
                raise NetworkError(f"the daemon announced a message of {size} bytes.")
            message = p2pd_pb2.PSMessage()
            message.ParseFromString(await self._reader.readexactly(size))
        except (*DAEMON_GONE, ValueError) as error:
            raise NetworkError(f"the subscription ended ({error!r}).") from None
        return Published(b58encode(getattr(message, "from")[:MAX_ID]), message.data)

    def close(self) -> None:
        """Listen no longer."""
        self._writer.close()


class PubSub:
    """The daemon's GossipSub, whichever daemon runs at the moment. On the host's loop only; every call may raise NetworkError.

    ``upload``: the budget that messages use up; those that are forwarded for others are the daemon's affair, and do not.
    """

    def __init__(self, supervisor: DaemonSupervisor, upload: BandwidthLimiter | None = None) -> None:
        self._supervisor, self._upload = supervisor, upload

    async def subscribe(self, topic: str) -> Subscription:
        """Listen to ``topic`` from now on."""
        reader, writer, _ = await self._ask(p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.SUBSCRIBE, topic=topic))
        return Subscription(reader, writer)

    async def publish(self, topic: str, data: bytes) -> None:
        """Hand ``data`` (at most 256 KiB, else ValueError) to the mesh. Nobody may be listening; that is not an error."""
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(data)} bytes: at most {MAX_MESSAGE} are allowed")
        request = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.PUBLISH, topic=topic, data=data)
        if self._upload is not None:
            await self._upload.wait()
            self._upload.spend(len(data))
        _, writer, _ = await self._ask(request)
        writer.close()

    async def listeners(self, topic: str) -> tuple[str, ...]:
        """The peers we are connected to, and know to listen to ``topic``."""
        request = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.LIST_PEERS, topic=topic)
        _, writer, answer = await self._ask(request)
        writer.close()
        return tuple(sorted(b58encode(peer[:MAX_ID]) for peer in answer.pubsub.peerIDs))

    async def _ask(self, request: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Any]:
        daemon = self._supervisor.running()

        work = daemon.request(p2pd_pb2.Request(type=p2pd_pb2.Request.PUBSUB, pubsub=request))
        try:
            return await self._supervisor.unless_down(work, CALL_S)
        except asyncio.TimeoutError:
            raise NetworkError(f"the daemon did not answer within {CALL_S:g} s.") from None
        except DAEMON_GONE as error:
            raise NetworkError(f"the daemon did not do what it was asked ({error}).") from None
