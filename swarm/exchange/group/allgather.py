"""Reduction by gathering: every member sends its payload to every other, and each computes the same mean from the same bytes.

Costs a node as many payloads as there are other members, in either direction, and works with every codec, because the mean is
of the decoded tensors. Received bytes stay in scratch of exactly the own payload's size until their digest, their form and their
finiteness are checked; then they are held whole, and stay as small as they came.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.optim.codecs.base import buffer
from shoal.optim.exchange.averaging import mean_of
from shoal.optim.exchange.base import Mean
from shoal.optim.exchange.robust import UpdateScreen
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.exchange.contribution import Contribution
from shoal.swarm.exchange.group.reduction import Attempt, PeerStreams
from shoal.swarm.exchange.group.roster import Roster
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.digest import HashList

if TYPE_CHECKING:
    from shoal.swarm.p2p.stream import Stream

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gathered:
    """The whole, verified contributions of a group: peer id -> weight and payload."""

    me: str
    mine: Contribution
    screen: UpdateScreen
    parts: Mapping[str, tuple[float, Tensor | None]]
    """None: this node's own."""

    def mean(self) -> Mean:
        """Average in order of peer ids, so that every member gets the same bits. Call it once: it works in place of the first
        payload.
        """
        mine = self.mine
        held = self.parts.items()
        contributions: list[tuple[str, float, Iterable[Tensor]]] = [
            (peer, weight, mine.tensors() if payload is None else self._tensors(payload)) for peer, (weight, payload) in held
        ]
        return mean_of(self.screen, mine.codec, self.me, mine.key.fragment, contributions, mine.even)

    def _tensors(self, payload: Tensor) -> Iterator[Tensor]:
        yield from self.mine.codec.decode(payload, self.mine.shapes)  # one peer's after the other's, to hold one at a time


class AllGather:
    """The gathering of one group's payloads at this node. All coroutines run on the host's loop."""

    def __init__(self, streams: PeerStreams, group: Roster, me: str, attempt: Attempt, until: float, longest: float) -> None:
        self._streams, self.group, self._me, self._attempt = streams, group, me, attempt
        self._until, self._longest = until, longest
        self._parts: dict[str, tuple[float, Tensor | None]] = {me: (attempt.contribution.weight, None)}
        self._moving: dict[str, asyncio.Future[None]] = {}
        self._called = {peer: asyncio.Event() for peer in group.members if peer != me}
        self.arrived: dict[str, float] = {}

    async def run(self) -> None:
        """Exchange payloads with everybody; returns when each has succeeded or failed."""
        try:
            await asyncio.gather(*(self._with(peer) for peer in self._called))
        finally:
            for moving in self._moving.values():
                moving.cancel()
            if self._moving:
                await asyncio.wait(self._moving.values())  # afterwards nothing refers to the own payload any more

    def places(self) -> int:
        return self.group.places(self._parts)

    def result(self, mean: int) -> Gathered:
        """Return the decided contributions, ready to be averaged."""
        # Not of the attempt, which will hold it: a ring of both would keep every round's payloads until Python looks for rings.
        attempt = self._attempt
        return Gathered(self._me, attempt.contribution, attempt.screen, {peer: self._parts[peer] for peer in self.group.at(mean)})

    def lose(self, places: int) -> None:
        for peer in self.group.at(places):
            if peer in self._called:
                self._called[peer].set()
            if peer in self._moving:
                self._moving[peer].cancel()

    def give_up(self) -> set[str]:
        late = {peer for peer, called in self._called.items() if not called.is_set() or peer in self._moving}
        late = {peer for peer in late if peer not in self._moving or not self._moving[peer].done()}
        for peer in late:
            self._attempt.failed(peer, "timeout")
        self.lose(self.group.places(late))
        return late

    async def _with(self, peer: str) -> None:
        """Exchange with one member: of two the first in order calls."""
        with contextlib.suppress(asyncio.TimeoutError):
            if self._me > peer:
                await asyncio.wait_for(self._called[peer].wait(), self._streams.chunk_timeout)
            elif not self._called[peer].is_set():
                self._moving[peer] = asyncio.ensure_future(self._call(peer))
        if peer in self._moving:
            await asyncio.wait({self._moving[peer]})
        self._called[peer].set()

    async def _call(self, peer: str) -> None:
        try:
            stream = await self._streams.open(peer, self.group.nonce)
            try:
                await self._swap(stream)
            finally:
                stream.close()
        except (NetworkError, MessageError) as error:
            log.info("round %d: nothing from %s: %s", self._attempt.key.round, short(peer), error)
            self._attempt.failed(peer, error)

    async def accept(self, stream: Stream) -> None:
        """Serve a member that has called."""
        peer = stream.peer_id
        if peer not in self._called or self._called[peer].is_set() or self._me < peer:
            return
        self._moving[peer] = asyncio.ensure_future(self._swap(stream))
        self._called[peer].set()
        await asyncio.wait({self._moving[peer]})

    async def _swap(self, stream: Stream) -> None:
        peer, ready = stream.peer_id, self.group.readies[stream.peer_id]
        # The size equals our own payload's (the roster was checked), so a peer cannot make this node allocate more.
        scratch = buffer(ready.nbytes)
        incoming = scratch.numpy().data
        hashes = HashList(incoming)
        try:
            await stream.swap(
                self._attempt.contribution.payload, incoming, chunk_timeout=self._streams.chunk_timeout, deadline=self._until,
                longest=self._longest, on_progress=hashes.advance,
            )  # fmt: skip
            if hashes.digest() != ready.sha256:
                raise MessageError(f"the payload of peer {short(peer)} does not match the digest it announced.", "damaged")
            problem, _ = await asyncio.to_thread(self._attempt.problem, peer, scratch)
            if problem is not None:
                raise MessageError(f"the contribution of peer {short(peer)} was refused: {problem}.", problem.kind)
            self._parts[peer], self.arrived[peer] = (ready.weight, scratch), asyncio.get_running_loop().time()
        except (NetworkError, MessageError) as error:
            log.info("round %d: nothing from %s: %s", self._attempt.key.round, short(peer), error)
            self._attempt.failed(peer, error)
