"""The streams on which the members of a group send each other their contributions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange.group.roster import LivenessView, Roster
from shoal.swarm.exchange.kept_streams import ANSWERED, KeptStreams, answer_all
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.wire.envelope import pack, unpack
from shoal.swarm.wire.messages import GroupHello

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

PAYLOAD_PROTOCOL = "/shoal/group-payload/1"
WINDOW = 256 << 10
"""Bytes that a new stream takes at once. A kept one takes what its window has left, which is more
only after large payloads; for smaller ones nothing is gained by keeping it.
"""
MAX_HELD = 64
"""Callers from groups that this node does not know yet."""


class Accepting(Protocol):
    """What takes the streams of a group: one of its reductions."""

    group: Roster

    async def accept(self, stream: Stream) -> bool:
        """Use a member's stream; return whether it may be used again."""


class PeerStreams:
    """The streams between the members of this host's groups. All coroutines run on the host's
    loop.
    """

    def __init__(
        self,
        host: Host,
        view: LivenessView,
        chunk_timeout: float,
        protocol: str = PAYLOAD_PROTOCOL,
    ) -> None:
        self._host = host
        self._view = view
        self.chunk_timeout = chunk_timeout
        self._protocol = protocol
        self._running: dict[bytes, Accepting] = {}
        self._held: dict[asyncio.Event, bytes] = {}
        self._places = StreamPlaces(MAX_HELD)
        self._kept = KeptStreams(host)
        self._waiting = StreamPlaces(ANSWERED)
        host.serve(protocol, self._serve)

    async def call(
        self, peer: str, nonce: bytes, nbytes: int, use: Callable[[Stream], Awaitable[None]]
    ) -> None:
        """Open a stream to a member, for the group with this nonce, or take one that was kept, and
        ``use`` it for ``nbytes`` each way at most. One whose use ends well is kept if they are more
        than `WINDOW`. Raises what ``use`` does, or NetworkError.
        """
        large = nbytes > WINDOW
        if large and (kept := self._kept.take(peer)) is not None:
            before = kept.received
            try:
                await self._used(kept, nonce, use)
                return self._kept.keep(kept)
            except NetworkError as error:
                # Nothing came, so the member had just ended it: a new stream takes its place.
                if error.reason != "broken" or kept.received > before:
                    raise
        addresses = self._view.addresses(peer)
        stream = await self._host.open(
            peer, self._protocol, addresses=addresses, timeout=self.chunk_timeout
        )
        await self._used(stream, nonce, use)
        if large:
            self._kept.keep(stream)
        else:
            stream.close()

    async def _used(
        self, stream: Stream, nonce: bytes, use: Callable[[Stream], Awaitable[None]]
    ) -> None:
        try:
            await stream.send(pack(GroupHello(nonce=nonce)), self.chunk_timeout)
            await use(stream)
        except BaseException:
            stream.abort()  # so that the other end notices at once
            raise

    def begin(self, reduction: Accepting) -> None:
        """Hand the reduction the streams of its group, also those that came before this node knew
        of the group.
        """
        nonce = reduction.group.nonce
        self._running[nonce] = reduction
        for event, wanted in self._held.items():
            if wanted == nonce:
                event.set()

    def is_running(self, nonce: bytes) -> bool:
        return nonce in self._running

    def end(self, reduction: Accepting) -> None:
        self._running.pop(reduction.group.nonce, None)

    async def _serve(self, stream: Stream) -> None:
        await answer_all(self._host, self._protocol, stream, self._answer, self._waiting)

    async def _answer(self, stream: Stream) -> bool:
        """Hand the stream to the reduction of the group that it names; return whether it may be
        used again.
        """
        hello = unpack(await stream.receive(GroupHello.LIMIT, self.chunk_timeout), GroupHello)
        if hello.nonce not in self._running:
            if not self._places.take(stream):
                return False
            event = asyncio.Event()
            self._held[event] = hello.nonce
            try:
                await asyncio.wait_for(event.wait(), self.chunk_timeout)
            except TimeoutError:
                return False
            finally:
                self._places.free(stream)
                del self._held[event]
        reduction = self._running.get(hello.nonce)
        return (
            reduction is not None
            and stream.peer_id in reduction.group.readies
            and await reduction.accept(stream)
        )
