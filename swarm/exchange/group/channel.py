"""The channel between a member and its leader: small messages both ways, and heartbeats in between."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from shoal.swarm.errors import NetworkError
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.envelope import M, Message, pack, unpack
from shoal.swarm.wire.group import GroupAlive

if TYPE_CHECKING:
    from shoal.swarm.p2p.stream import Stream


async def stop(*tasks: asyncio.Future[Any]) -> None:
    """Cancel ``tasks`` and wait for their end. What they raise is retrieved, also if this is cancelled too, as asyncio wants."""
    for task in tasks:
        task.add_done_callback(_retrieve)
        task.cancel()
    await asyncio.wait(tasks)


def _retrieve(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()


BEATS = 4  # heartbeats within the time after which silence counts as death


class HeartbeatChannel:
    """A channel that detects a dead peer. ``patience``: seconds of silence after which the other side counts as gone.

    Use it on the host's loop only. A stopped process keeps its streams open, and a slow link may take minutes for a payload: only
    heartbeats, on a stream that carries nothing large, tell them apart.
    """

    def __init__(self, stream: Stream, patience: float) -> None:
        self.stream, self.patience = stream, patience
        self.peer = stream.peer_id
        self._sending = asyncio.Lock()
        self._beat: float | None = None
        """The loop's time by which it sends again. Not of one ``receive``: of messages that come quickly each would put it off."""

    async def send(self, message: Message | bytes) -> None:
        """Send a message, or bytes that are packed already. Raises NetworkError."""
        data = message if isinstance(message, bytes) else pack(message)
        async with self._sending:
            self._beat = asyncio.get_running_loop().time() + self.patience / BEATS
            await self.stream.send(data, self.patience)

    async def receive(self, until: float, *types: type[M]) -> M:
        """Return the next message other than a heartbeat, within the loop's time ``until``; send heartbeats meanwhile.

        Raises NetworkError if the other side is silent or ends the channel, MessageError if it sends a message of another type.
        """
        loop = asyncio.get_running_loop()
        limit = max(GroupAlive.LIMIT, *(kind.LIMIT for kind in types))
        reading: asyncio.Future[bytes] | None = None
        if self._beat is None:
            self._beat = loop.time() + self.patience / BEATS
        try:
            while True:
                now = loop.time()
                if now >= until:
                    raise NetworkError(f"peer {short(self.peer)} did not finish in time.", "timeout")
                if now >= self._beat:
                    await self.send(GroupAlive())
                if reading is None:
                    reading = asyncio.ensure_future(self.stream.receive(limit, self.patience))
                await asyncio.wait({reading}, timeout=min(until, self._beat) - now)
                if reading.done():
                    data, reading = reading.result(), None
                    message: Message = unpack(data, GroupAlive, *types)
                    for kind in types:
                        if isinstance(message, kind):
                            return message
        finally:
            if reading is not None:
                await stop(reading)  # only one may read from a stream

    def close(self) -> None:
        self.stream.close()
