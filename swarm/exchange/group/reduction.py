"""The interface of a group's two reductions, and the streams between its members."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from shoal.optim.exchange.base import Mean
from shoal.swarm.exchange.attempt import ExchangeAttempt
from shoal.swarm.exchange.group.liveness import LivenessView
from shoal.swarm.exchange.group.roster import Roster
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.wire.envelope import pack, unpack
from shoal.swarm.wire.group import GroupHello

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host
    from shoal.swarm.p2p.stream import Stream

PAYLOAD_PROTOCOL = "/shoal/group-payload/1"
MAX_HELD = 64  # callers from groups that this node does not know yet


class Outcome(Protocol):
    """A decided mean, whole and verified."""

    def mean(self) -> Mean:
        """Return the mean. Call it once: it may be computed in place."""
        ...


Attempt = ExchangeAttempt[Outcome]


class Reduction(Protocol):
    """One attempt of one group at one member."""

    @property
    def group(self) -> Roster: ...

    async def run(self) -> None:
        """Exchange with all members; return when everything available is there. Failures are missing from ``places``."""
        ...

    async def accept(self, stream: Stream) -> None:
        """Serve a stream that another member has opened for this; it is closed when this returns."""
        ...

    @property
    def arrived(self) -> Mapping[str, float]:
        """When the last of what other members sent was here, by peer id: the loop's time."""
        ...

    def lose(self, places: int) -> None:
        """Stop waiting for members that have died."""
        ...

    def give_up(self) -> set[str]:
        """Stop waiting for all that is not here; return the members that are still to send."""
        ...

    def places(self) -> int:
        """Return the members whose contributions are held whole, as bits."""
        ...

    def result(self, mean: int) -> Outcome:
        """Return the decided outcome; ``mean`` is a part of ``places``."""
        ...


class PeerStreams:
    """The streams between the members of this host's groups. All coroutines run on the host's loop."""

    def __init__(self, host: Host, view: LivenessView, chunk_timeout: float) -> None:
        self._host, self._view, self.chunk_timeout = host, view, chunk_timeout
        self._running: dict[bytes, Reduction] = {}
        self._held: dict[asyncio.Event, bytes] = {}
        self._places = StreamPlaces(MAX_HELD)
        host.serve(PAYLOAD_PROTOCOL, self._serve)

    async def open(self, peer: str, nonce: bytes) -> Stream:
        """Open a stream to a member, for the group with this nonce. Raises NetworkError."""
        stream = await self._host.open(peer, PAYLOAD_PROTOCOL, addresses=self._view.addresses(peer), timeout=self.chunk_timeout)
        try:
            await stream.send(pack(GroupHello(nonce=nonce)), self.chunk_timeout)
        except BaseException:
            stream.abort()
            raise
        return stream

    def begin(self, reduction: Reduction) -> None:
        """Hand the reduction the streams of its group, also those that came before this node knew of the group."""
        nonce = reduction.group.nonce
        self._running[nonce] = reduction
        for event, wanted in self._held.items():
            if wanted == nonce:
                event.set()

    def end(self, reduction: Reduction) -> None:
        self._running.pop(reduction.group.nonce, None)

    async def _serve(self, stream: Stream) -> None:
        hello = unpack(await stream.receive(GroupHello.LIMIT, self.chunk_timeout), GroupHello)
        if hello.nonce not in self._running:
            if not self._places.take(stream):
                return
            event = asyncio.Event()
            self._held[event] = hello.nonce
            try:
                await asyncio.wait_for(event.wait(), self.chunk_timeout)
            except asyncio.TimeoutError:
                return
            finally:
                self._places.free(stream)
                del self._held[event]
        reduction = self._running.get(hello.nonce)
        if reduction is not None and stream.peer_id in reduction.group.readies:
            await reduction.accept(stream)
