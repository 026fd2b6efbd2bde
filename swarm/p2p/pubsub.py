"""GossipSub, which runs inside the daemon.

A published message reaches every subscriber once, over a mesh that the daemons of the subscribers
form. The daemon signs it with its own key and checks those of others, so the publisher is known;
the author of the *content* is another matter (`shoal.swarm.gossip.gossip`). It drops messages
larger than about 1 MiB without an error, so ours stay far below.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from shoal.swarm.errors import NetworkError
from shoal.swarm.identity import b58encode
from shoal.swarm.p2p.daemon import (
    DAEMON_GONE,
    Daemon,
    messages,
    read_message,
)
from shoal.swarm.p2p.daemon_supervisor import DaemonSupervisor
from shoal.swarm.p2p.multiaddr import MAX_ID_BYTES
from shoal.swarm.pacing.bandwidth import BandwidthLimiter
from shoal.swarm.wire.envelope import MAX_MESSAGE

CALL_S = 5.0  # for one call to the own daemon


class Published(NamedTuple):
    """One message as GossipSub delivers it; the daemon has checked that ``publisher`` (base58) sent
    it.
    """

    publisher: str
    data: bytes


class Subscription:
    """A topic that this node listens to, until the daemon ends or `close` is called."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer  # kept: dropping it would end the subscription

    @classmethod
    async def to(cls, daemon: Daemon, topic: str) -> Subscription:
        """Subscribe to ``topic`` on a daemon that no supervisor restarts.

        Raises one of `daemon.DAEMON_GONE`.
        """
        reader, writer, _ = await daemon.request("PUBSUB", pubsub=_request("SUBSCRIBE", topic))
        return cls(reader, writer)

    async def next(self) -> Published:
        """Wait for the next message. Raises NetworkError when the daemon has ended."""
        try:
            message = await read_message(self._reader, messages().PSMessage())
        except DAEMON_GONE as error:
            raise NetworkError(f"the subscription ended ({error!r}).") from None
        return Published(b58encode(getattr(message, "from")[:MAX_ID_BYTES]), message.data)

    def close(self) -> None:
        self._writer.close()


def _request(kind: str, topic: str, **fields: bytes) -> Any:
    types = messages().PSRequest
    return types(type=types.Type.Value(kind), topic=topic, **fields)


class PubSub:
    """The GossipSub of the daemon that runs at the moment.

    On the host's loop only; every call may raise NetworkError.

    ``upload``: the budget that messages use up; those that the daemon forwards for others do not.
    """

    def __init__(
        self, supervisor: DaemonSupervisor, upload: BandwidthLimiter | None = None
    ) -> None:
        self._supervisor = supervisor
        self._upload = upload
        self.topics: set[str] = set()  # all that this node ever subscribed to

    async def subscribe(self, topic: str) -> Subscription:
        self.topics.add(topic)
        reader, writer, _ = await self._ask("SUBSCRIBE", topic)
        return Subscription(reader, writer)

    async def publish(self, topic: str, data: bytes) -> None:
        """Hand ``data`` (at most 256 KiB, else ValueError) to the mesh.

        It is no error if nobody listens.
        """
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(data)} bytes: at most {MAX_MESSAGE} are allowed")
        if self._upload is not None:
            await self._upload.wait()
            self._upload.spend(len(data))
        _, writer, _ = await self._ask("PUBLISH", topic, data=data)
        writer.close()

    async def listeners(self, topic: str) -> tuple[str, ...]:
        """Return the connected peers that are known to listen to ``topic``."""
        _, writer, answer = await self._ask("LIST_PEERS", topic)
        writer.close()
        return tuple(sorted(b58encode(peer[:MAX_ID_BYTES]) for peer in answer.pubsub.peerIDs))

    async def _ask(
        self, kind: str, topic: str, **fields: bytes
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Any]:
        asked = self._supervisor.running().request("PUBSUB", pubsub=_request(kind, topic, **fields))
        try:
            return await self._supervisor.unless_down(asked, CALL_S)
        except TimeoutError:
            raise NetworkError(f"the daemon did not answer within {CALL_S:g} s.") from None
        except DAEMON_GONE as error:
            raise NetworkError(f"the daemon did not do what it was asked ({error}).") from None
