"""A group's reductions: how the contributions of its members become one mean.

    AllGather   every member sends its payload to every other, and each computes the same mean from
                the same bytes; for every codec
    AllReduce   every member averages one share of the values for all; for plain floats and
                `ALL_REDUCED` members or more, all or nothing
    Butterfly   the same for encoded contributions, with encoded averages (`butterfly`)

`GroupExchange` runs any: ``run`` moves the bytes, ``places`` returns whose contributions are held
whole, a bit each, and ``result`` the mean that the leader decided on. What they cost, and why all
members end with the same bits: docs/internals.md, "Gathering and all-reduce".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.optim.codecs.base import all_finite
from shoal.optim.codecs.floats import FLOAT_CODECS, FloatCodec
from shoal.optim.codecs.memory import buffer
from shoal.optim.exchange.averaging import mean_of
from shoal.optim.exchange.base import Mean
from shoal.optim.exchange.update_screen import UpdateScreen
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.exchange.contribution import EncodedContribution, ExchangeAttempt
from shoal.swarm.exchange.cost import ALL_REDUCED
from shoal.swarm.exchange.group.roster import Roster
from shoal.swarm.exchange.group.streams import PeerStreams
from shoal.swarm.exchange.mean_once import MeanOnce
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.p2p.tasks import running, stop
from shoal.swarm.wire.envelope import HashList

log = logging.getLogger(__name__)

Outcome = Callable[[], Mean]
"""Returns a decided mean, whole and verified; the first call may compute it."""
Attempt = ExchangeAttempt[Outcome]


@dataclass(frozen=True)
class Gathered:
    """The whole, verified contributions of a group: peer id -> weight and payload. For any
    thread.
    """

    me: str
    mine: EncodedContribution
    screen: UpdateScreen
    parts: dict[str, tuple[float, Tensor | None]]
    """None: this node's own. Empty once the mean is there."""
    _mean: MeanOnce = field(default_factory=MeanOnce)

    def mean(self) -> Mean:
        """Average in order of peer ids, so that every member gets the same bits.

        It is computed once, in the first payload. Raises as `MeanOnce` does.
        """
        return self._mean.of(self._computed)

    def _computed(self) -> Mean:
        mine = self.mine
        contributions: list[tuple[str, float, Iterable[Tensor]]] = [
            (peer, weight, mine.payload.tensors() if payload is None else self._tensors(payload))
            for peer, (weight, payload) in self.parts.items()
        ]
        self.parts.clear()
        return mean_of(
            self.screen,
            mine.codec,
            self.me,
            mine.key.fragment,
            contributions,
            mine.unweighted_count,
        )

    def _tensors(self, payload: Tensor) -> Iterator[Tensor]:
        # One peer's after the other's, to hold one at a time.
        yield from self.mine.codec.decode(payload, self.mine.shapes)


class AllGather:
    """The gathering of one group's payloads at this node. All coroutines run on the host's loop."""

    averages = b""
    """What a report says of averages: nothing."""

    def __init__(
        self,
        streams: PeerStreams,
        group: Roster,
        me: str,
        attempt: Attempt,
        until: float,
        longest: float,
    ) -> None:
        self._streams, self.group, self._me, self._attempt = streams, group, me, attempt
        self._until, self._longest = until, longest
        self._parts: dict[str, tuple[float, Tensor | None]] = {
            me: (attempt.contribution.weight, None)
        }
        self._moving: dict[str, asyncio.Future[None]] = {}
        self._called = {peer: asyncio.Event() for peer in group.members if peer != me}
        self.arrived: dict[str, float] = {}
        """When the last of what other members sent was here, by peer id: the loop's time."""

    async def run(self) -> None:
        """Exchange payloads with everybody; returns when each has succeeded or failed.

        Failures are missing from ``places``.
        """
        try:
            await asyncio.gather(*(self._with(peer) for peer in self._called))
        finally:
            for moving in self._moving.values():
                moving.cancel()
            if self._moving:
                # Afterwards nothing refers to the own payload any more.
                await asyncio.wait(self._moving.values())

    def places(self) -> int:
        """Return the members whose contributions are held whole, as bits."""
        return self.group.places(self._parts)

    def result(self, mean: int) -> Outcome:
        """Return what averages the decided contributions; ``mean`` is a part of ``places``."""
        # Not of the attempt, which will hold it: a ring of both would keep every round's payloads
        # until Python looks for rings.
        attempt = self._attempt
        parts = {peer: self._parts[peer] for peer in self.group.at(mean)}
        return Gathered(self._me, attempt.contribution, attempt.screen, parts).mean

    def lose(self, places: int) -> None:
        """Stop waiting for members that have died."""
        for peer in self.group.at(places):
            if peer in self._called:
                self._called[peer].set()
            if peer in self._moving:
                self._moving[peer].cancel()

    def give_up(self) -> set[str]:
        """Stop waiting for all that is not here; return the members that are still to send."""
        late = {
            peer
            for peer, called in self._called.items()
            if not called.is_set() or peer in self._moving
        }
        late = {peer for peer in late if peer not in self._moving or not self._moving[peer].done()}
        for peer in late:
            self._attempt.failed(peer, "timeout")
        self.lose(self.group.places(late))
        return late

    def _calls(self, peer: str) -> bool:
        """Return whether this node calls the member: of two the leader, which knows of the group
        first; else the first in order.
        """
        leader = self.group.leader
        return self._me == leader or (peer != leader and self._me < peer)

    async def _with(self, peer: str) -> None:
        with contextlib.suppress(TimeoutError):
            if not self._calls(peer):
                await asyncio.wait_for(self._called[peer].wait(), self._streams.chunk_timeout)
            elif not self._called[peer].is_set():
                nbytes = self._attempt.contribution.payload.nbytes
                call = self._streams.call(peer, self.group.nonce, nbytes, self._swap)
                self._moving[peer] = asyncio.ensure_future(self._tried(peer, call))
        if peer in self._moving:
            await asyncio.wait({self._moving[peer]})
        self._called[peer].set()

    async def accept(self, stream: Stream) -> bool:
        """Serve a member that has called; return whether that ended well."""
        peer = stream.peer_id
        if peer not in self._called or self._called[peer].is_set() or self._calls(peer):
            return False
        self._moving[peer] = asyncio.ensure_future(self._tried(peer, self._swap(stream)))
        self._called[peer].set()
        await asyncio.wait({self._moving[peer]})
        return peer in self._parts

    async def _tried(self, peer: str, work: Awaitable[None]) -> None:
        try:
            await work
        except (NetworkError, MessageError) as error:
            log.info("round %d: nothing from %s: %s", self._attempt.key.round, short(peer), error)
            self._attempt.failed(peer, error)
        except Exception as error:  # this node's own, which nobody else would see
            self._attempt.caught("exchange", error)

    async def _swap(self, stream: Stream) -> None:
        peer, ready = stream.peer_id, self.group.readies[stream.peer_id]
        # The size equals our own payload's (the roster was checked), so a peer cannot make this
        # node allocate more.
        scratch = buffer(ready.nbytes)
        incoming = scratch.numpy().data
        hashes = HashList(incoming)
        await stream.swap(
            self._attempt.contribution.payload,
            incoming,
            chunk_timeout=self._streams.chunk_timeout,
            deadline=self._until,
            longest=self._longest,
            on_progress=hashes.advance,
        )
        if hashes.digest() != ready.sha256:
            raise MessageError(
                f"the payload of peer {short(peer)} does not match the digest it announced.",
                "damaged",
            )
        problem, _ = await asyncio.to_thread(self._attempt.problem, peer, scratch)
        if problem is not None:
            raise MessageError(
                f"the contribution of peer {short(peer)} was refused: {problem.text}.", problem.kind
            )
        self._parts[peer] = ready.weight, scratch
        self.arrived[peer] = asyncio.get_running_loop().time()


PART = 1 << 18
"""Bytes of a share in one message, the same at all members: another number is another protocol."""
ALL_REDUCED_CODECS = frozenset(codec.name for codec in FLOAT_CODECS)
# Times the chunk timeout, for which a member waits for values of its share, and for averages, which
# wait for all values. More than once: the leader's channel to a stopped member is to end first, so
# that the next reduction is without it.
SENDER_CHUNKS = 1.5
AVERAGES_CHUNKS = 2.0


def fits(codec: str, members: int) -> bool:
    """Return whether a group should be reduced by an ``AllReduce``."""
    return codec in ALL_REDUCED_CODECS and members >= ALL_REDUCED


class ShareReduction:
    """A reduction in which every member averages one share of the values for all: all or nothing.

    All coroutines run on the host's loop. ``takes_part``: False for a contribution that cannot be
    reduced so: then this node reports that it holds nothing, and the leader gathers.
    """

    averages = b""
    """What a report says of the averages that came."""

    def __init__(
        self,
        streams: PeerStreams,
        group: Roster,
        me: str,
        attempt: Attempt,
        longest: float,
        takes_part: bool,
    ) -> None:
        self._streams = streams
        self.group = group
        self._me = me
        self._attempt = attempt
        self._mine = attempt.contribution
        # A bound on the whole: each message has a deadline of its own.
        self._until = longest
        self._takes_part = takes_part
        self._whole = False
        """True once everything is here."""
        self._failed, self._over = asyncio.Event(), asyncio.Event()
        self._callers: dict[str, asyncio.Future[Stream]] = {}
        """The streams on which the other members send this node its share."""
        if takes_part:
            new = asyncio.get_running_loop().create_future
            self._callers = {peer: new() for peer in group.members if peer != me}
        self._awaited: set[str] = set()
        """The members whose part of this node's share is being waited for."""
        self.arrived: dict[str, float] = {}
        """When all that each member sends of this node's share was here.

        The averages of others wait for all members.
        """

    async def run(self) -> None:
        if not self._takes_part:
            return
        reducing = asyncio.ensure_future(self._reduced())
        failing = asyncio.ensure_future(self._failed.wait())
        try:
            left = self._until - asyncio.get_running_loop().time()
            await asyncio.wait(
                {reducing, failing}, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            if not reducing.done():
                raise NetworkError(
                    "a member stopped, or its link broke."
                    if self._failed.is_set()
                    else "its time was up."
                )
            reducing.result()
            self._whole = True
        except (NetworkError, MessageError) as error:
            log.info("round %d: the all-reduce failed: %s", self._mine.key.round, error)
        finally:
            self._over.set()
            await stop(reducing, failing)

    async def _reduced(self) -> None:
        """Move and average everything.

        Raises NetworkError or MessageError as soon as anything is missing.
        """
        raise NotImplementedError

    def places(self) -> int:
        return self.group.everybody if self._whole else 0

    def result(self, mean: int) -> Outcome:
        """Return the mean; ``mean`` is everybody."""
        raise NotImplementedError

    def give_up(self) -> set[str]:
        """Fail; return the members that are still to send."""
        self.lose(self.group.everybody)
        return set(self._awaited)

    def lose(self, places: int) -> None:
        if places:
            self._failed.set()

    async def accept(self, stream: Stream) -> bool:
        """Serve a member that sends its part of this node's share and takes the average of it;
        return whether that ended well.
        """
        caller = self._callers.get(stream.peer_id)
        if caller is None or caller.done() or self._over.is_set():
            return False
        caller.set_result(stream)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(
                self._over.wait(), max(self._until - asyncio.get_running_loop().time(), 0.0)
            )
        if not self._whole:
            stream.abort()
        return self._whole

    async def _called_by(self, peer: str, silence: float) -> Stream:
        """Return the stream on which a member sends this node its share, once it calls."""
        caller = self._callers[peer]
        await asyncio.wait({caller}, timeout=silence)
        if not caller.done():
            raise NetworkError(
                f"peer {short(peer)} did not begin to send within {silence:.3g} s.", "timeout"
            )
        return caller.result()

    def _note_arrival(self, peer: str) -> None:
        self.arrived[peer] = asyncio.get_running_loop().time()


class AllReduce(ShareReduction):
    """One group's all-reduce of plain floats at this node."""

    def __init__(
        self,
        streams: PeerStreams,
        group: Roster,
        me: str,
        attempt: Attempt,
        until: float,
        longest: float,
    ) -> None:
        mine = attempt.contribution
        takes_part = isinstance(mine.codec, FloatCodec) and not mine.unweighted_count
        super().__init__(streams, group, me, attempt, max(until, longest), takes_part)
        self._mean: Tensor | None = None

    def result(self, mean: int) -> Outcome:
        assert self._mean is not None
        weights, limit = self.group.weights()
        counted, shapes = sum(weight > 0 for weight in weights.values()), self._mine.shapes
        flat = torch.split(self._mean, [math.prod(shape) for shape in shapes])
        parts = [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]
        reduced = Mean(parts, sum(weights.values()), self.group.members, counted, limit=limit)
        return lambda: reduced

    async def _reduced(self) -> None:
        assert isinstance(self._mine.codec, FloatCodec)
        whole = await asyncio.to_thread(self._mine.payload.whole)  # which may copy all of it
        values = whole.view(self._mine.codec.dtype)
        mean = torch.empty(values.numel(), dtype=torch.float32, device="cpu")
        others = (self._exchange(peer, values, mean) for peer in self._callers)
        works = [asyncio.ensure_future(work) for work in (self._average(values, mean), *others)]
        try:
            await asyncio.gather(*works)
        finally:
            await stop(*works)
        if not await asyncio.to_thread(all_finite, [mean]):
            raise MessageError("the mean holds NaN or infinity.")
        self._mean = mean

    def _parts(self, peer: str, values: Tensor) -> list[slice]:
        """Return the parts of the share that ``peer`` averages; none if there are fewer values than
        members.
        """
        place = self.group.members.index(peer)
        count = len(self.group.members)
        step = PART // values.element_size()
        start, end = (values.numel() * bound // count for bound in (place, place + 1))
        return [slice(at, min(at + step, end)) for at in range(start, end, step)]

    async def _exchange(self, peer: str, values: Tensor, mean: Tensor) -> None:
        """Send a member its share of this node's ``values``, and put the averages into ``mean`` as
        they arrive.
        """
        parts, patience = self._parts(peer, values), AVERAGES_CHUNKS * self._streams.chunk_timeout
        if not parts:
            return

        async def send(stream: Stream) -> None:
            for part in parts:
                await stream.send(_packed(values[part]), patience)

        async def use(stream: Stream) -> None:
            async with running(send(stream)) as (sending,):
                for part in parts:
                    mean[part] = await self._received(stream, part, torch.float32, patience)
                await sending

        share = (parts[-1].stop - parts[0].start) * mean.element_size()
        await self._streams.call(peer, self.group.nonce, share, use)

    async def _average(self, values: Tensor, mean: Tensor) -> None:
        """Average this node's share of the values of all members, and send each of them the
        averages.
        """
        parts, (weights, _) = self._parts(self._me, values), self.group.weights()
        for part in parts:
            theirs = await asyncio.gather(
                *(
                    self._part_of(peer, part, values.dtype, part is parts[-1])
                    for peer in self._callers
                )
            )
            given = {self._me: values[part], **dict(zip(self._callers, theirs, strict=True))}
            average = torch.zeros(part.stop - part.start, device="cpu")
            for peer, weight in weights.items():
                average.add_(given[peer], alpha=weight)
            mean[part] = average.div_(sum(weights.values()))
            packed, patience = _packed(average), AVERAGES_CHUNKS * self._streams.chunk_timeout
            await asyncio.gather(
                *(caller.result().send(packed, patience) for caller in self._callers.values())
            )

    async def _part_of(self, peer: str, part: slice, dtype: torch.dtype, last: bool) -> Tensor:
        self._awaited.add(peer)
        silence = SENDER_CHUNKS * self._streams.chunk_timeout
        stream = await self._called_by(peer, silence)
        values = await self._received(stream, part, dtype, silence)
        self._awaited.discard(peer)
        if last:
            self._note_arrival(peer)
        return values

    async def _received(
        self, stream: Stream, part: slice, dtype: torch.dtype, timeout: float
    ) -> Tensor:
        nbytes = (part.stop - part.start) * dtype.itemsize
        data = await stream.receive(nbytes, timeout)
        if len(data) != nbytes:
            error = MessageError(
                f"peer {short(stream.peer_id)} sent a part of {len(data)} bytes where {nbytes} "
                "were agreed.",
                "damaged",
            )
            self._attempt.failed(stream.peer_id, error)
            raise error
        return torch.frombuffer(bytearray(data), dtype=dtype)


def _packed(values: Tensor) -> bytes:
    return values.view(torch.uint8).numpy().tobytes()


Reduction = AllGather | ShareReduction
"""One attempt of one group at one member."""
