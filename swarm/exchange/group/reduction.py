"""A group's two reductions, and the streams between its members.

**By gathering** (`AllGather`) every member sends its payload to every other, and each computes the same mean from the same bytes.
This costs a node as many payloads as there are other members, in either direction, and works with every codec, because the mean is
of the decoded tensors. Received bytes stay in scratch of exactly the own payload's size until their digest, their form and their
finiteness are checked; then they are held whole, and stay as small as they came.

**By hivemind's butterfly all-reduce** (`AllReduce`), for plain floats, every member averages one share of the values for all.
This costs a node about two payloads in either direction, however large the group is, and gathering one for each other member.
hivemind's ``AllReduceRunner`` runs in the host's loop, into scratch, with three differences:

* Its messages travel over our own streams, which are bounded, counted and have deadlines, as the bare bytes of each part. Type,
  shape, number and weight of the parts follow from what the group signed, so a member cannot state others.
* Averages are sent back, as float32, and not differences: a member that adds a difference to its own value rounds otherwise than
  the next one, so the members would drift apart. Averages have the same bits everywhere.
* It is all or nothing: a member banned in the middle, a failed part, or a mean that is not finite ends the attempt.

The order in which a share is summed is that in which its parts arrive: two runs agree but for rounding.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from hivemind.averaging.allreduce import AllreduceException, AllReduceRunner
from hivemind.compression import NoCompression
from hivemind.p2p import P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2, runtime_pb2
from torch import Tensor

from shoal.optim.codecs.base import FloatCodec, all_finite, buffer
from shoal.optim.exchange.averaging import UpdateScreen, mean_of
from shoal.optim.exchange.base import Mean
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.exchange.contribution import EncodedContribution, ExchangeAttempt
from shoal.swarm.exchange.group.liveness import LivenessView
from shoal.swarm.exchange.group.roster import Roster, stop
from shoal.swarm.p2p.limits import StreamPlaces
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.envelope import HashList, pack, unpack
from shoal.swarm.wire.messages import GroupHello

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host
    from shoal.swarm.p2p.stream import Stream

PAYLOAD_PROTOCOL = "/shoal/group-payload/1"
MAX_HELD = 64  # callers from groups that this node does not know yet


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


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gathered:
    """The whole, verified contributions of a group: peer id -> weight and payload. For any thread."""

    me: str
    mine: EncodedContribution
    screen: UpdateScreen
    parts: dict[str, tuple[float, Tensor | None]]
    """None: this node's own. Empty once the mean is there."""
    _means: list[Mean] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def mean(self) -> Mean:
        """Average in order of peer ids, so that every member gets the same bits. It is computed once, in the first payload."""
        with self._lock:
            if not self._means:
                mine = self.mine
                contributions: list[tuple[str, float, Iterable[Tensor]]] = [
                    (peer, weight, mine.tensors() if payload is None else self._tensors(payload))
                    for peer, (weight, payload) in self.parts.items()
                ]
                self.parts.clear()
                self._means.append(mean_of(self.screen, mine.codec, self.me, mine.key.fragment, contributions, mine.even))
            return self._means[0]

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
        """When the last of what other members sent was here, by peer id: the loop's time."""

    async def run(self) -> None:
        """Exchange payloads with everybody; returns when each has succeeded or failed. Failures are missing from ``places``."""
        try:
            await asyncio.gather(*(self._with(peer) for peer in self._called))
        finally:
            for moving in self._moving.values():
                moving.cancel()
            if self._moving:
                await asyncio.wait(self._moving.values())  # afterwards nothing refers to the own payload any more

    def places(self) -> int:
        """Return the members whose contributions are held whole, as bits."""
        return self.group.places(self._parts)

    def result(self, mean: int) -> Gathered:
        """Return the decided contributions, ready to be averaged; ``mean`` is a part of ``places``."""
        # Not of the attempt, which will hold it: a ring of both would keep every round's payloads until Python looks for rings.
        attempt = self._attempt
        return Gathered(self._me, attempt.contribution, attempt.screen, {peer: self._parts[peer] for peer in self.group.at(mean)})

    def lose(self, places: int) -> None:
        """Stop waiting for members that have died."""
        for peer in self.group.at(places):
            if peer in self._called:
                self._called[peer].set()
            if peer in self._moving:
                self._moving[peer].cancel()

    def give_up(self) -> set[str]:
        """Stop waiting for all that is not here; return the members that are still to send."""
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
        """Serve a member that has called; its stream is closed when this returns."""
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


PART = 1 << 18  # bytes that are averaged at a time
FLOATS = frozenset({"float32", "float16", "bfloat16"})
SMALLEST = 4  # members; fewer move no more bytes by gathering, or hardly more
# The leader's channel to a stopped member times out before it is given up here, so that the next attempt is without it.
SENDER, REDUCER = 1.5, 2.0  # times the chunk timeout


def fits(codec: str, members: int) -> bool:
    """Return whether a group should be reduced this way."""
    return codec in FLOATS and members >= SMALLEST


@dataclass(frozen=True)
class Reduced:
    """A finished mean as one flat tensor."""

    members: tuple[str, ...]
    weight: float
    flat: Tensor
    mine: EncodedContribution
    counted: int
    limit: float

    def mean(self) -> Mean:
        sizes = [torch.Size(shape).numel() for shape in self.mine.shapes]
        parts = [part.view(shape) for part, shape in zip(torch.split(self.flat, sizes), self.mine.shapes, strict=True)]
        return Mean(parts, self.weight, self.members, self.counted, limit=self.limit)


class AllReduce:
    """One group's all-reduce at this node. All coroutines run on the host's loop."""

    def __init__(self, streams: PeerStreams, group: Roster, me: str, attempt: Attempt, until: float, longest: float) -> None:
        mine = attempt.contribution
        self._me, self.group, self._mine = me, group, mine
        self._until = max(until, longest)  # each part of it has a deadline of its own
        self._mean: Tensor | None = None
        self._called: set[str] = set()
        # A node whose contribution cannot be all-reduced reports that it holds nothing, and the leader gathers.
        self._runner = _Runner(streams, group, me, mine) if isinstance(mine.codec, FloatCodec) and not mine.even else None

    async def run(self) -> None:
        """Reduce within the group's time."""
        if self._runner is None:
            return
        try:
            left = self._until - asyncio.get_running_loop().time()
            mean = await asyncio.wait_for(self._runner.reduced(), left)
            if not await asyncio.to_thread(all_finite, [mean]):
                raise AllreduceException("the mean holds NaN or infinity")
            self._mean = mean
        except (asyncio.TimeoutError, AllreduceException, NetworkError, MessageError) as error:
            log.info("round %d: the all-reduce failed: %s", self._mine.key.round, error or "its time was up")

    def places(self) -> int:
        return 0 if self._mean is None else self.group.everybody

    def result(self, mean: int) -> Reduced:
        """Return the mean of all."""
        assert self._mean is not None
        weights = [self.group.weight(peer) for peer in self.group.members]
        counted = sum(weight > 0 for weight in weights)
        return Reduced(self.group.members, sum(weights), self._mean, self._mine, counted, self.group.limit)

    @property
    def arrived(self) -> Mapping[str, float]:
        """When all that each member sends of this node's share was here. The averages of others wait for all members."""
        return {} if self._runner is None else self._runner.arrived

    def give_up(self) -> set[str]:
        """Fail; return the members that are still to send."""
        self.lose(self.group.everybody)
        return set(self.group.members) - {self._me} - self.arrived.keys()

    def lose(self, places: int) -> None:
        if self._runner is not None and places:
            self._runner.failed.set()

    async def accept(self, stream: Stream) -> None:
        """Serve a member that sends its part of this node's share and takes the average of it."""
        if self._runner is not None and stream.peer_id not in self._called:
            self._called.add(stream.peer_id)
            await self._runner.serve(stream)


class _Raw(NoCompression):  # type: ignore[misc]
    """A codec of hivemind that leaves the bytes of a tensor as they are; hivemind's own widens bfloat16."""

    def compress(self, tensor: Tensor, info: Any, allow_inplace: bool = False) -> Any:
        return _packed(tensor)


def _packed(tensor: Tensor) -> Any:
    return runtime_pb2.Tensor(buffer=tensor.view(torch.uint8).numpy().tobytes())


class _Endpoint:
    """The runner's stand-in for its daemon."""

    def __init__(self, runner: _Runner, me: str) -> None:
        self.peer_id, self.runner = PeerID.from_base58(me), runner


class _Calls(ServicerBase):  # type: ignore[misc]
    """The runner's stand-in for another runner's remote side."""

    @classmethod
    def get_stub(cls, p2p: _Endpoint, peer: PeerID, *, namespace: str | None = None) -> _Call:
        return _Call(p2p.runner, peer)


class _Call:
    """A call of one member."""

    def __init__(self, runner: _Runner, peer: PeerID) -> None:
        self._runner, self._peer = runner, peer

    async def rpc_aggregate_part(self, parts: AsyncIterator[Any]) -> AsyncIterator[Any]:
        return self._runner.averages(self._peer, parts)


class _Runner(AllReduceRunner):  # type: ignore[misc]
    """hivemind's runner, of one flat tensor, with averages in place of differences (its private hooks: the release is pinned)."""

    def __init__(self, streams: PeerStreams, group: Roster, me: str, mine: EncodedContribution) -> None:
        assert isinstance(mine.codec, FloatCodec)
        self.failed = asyncio.Event()
        self._streams, self._group, self._dtype = streams, group, mine.codec.dtype
        self._silence = SENDER * streams.chunk_timeout
        self._calls: dict[Stream, None] = {}
        self.arrived: dict[str, float] = {}
        flat = mine.payload.whole().view(mine.codec.dtype)
        share = -(-flat.numel() // len(group.members)) * flat.element_size()
        super().__init__(
            p2p=_Endpoint(self, me),
            servicer_type=_Calls,
            prefix=None,
            group_id=group.nonce,
            tensors=[flat],
            weight=group.weight(me),
            ordered_peer_ids=[PeerID.from_base58(peer) for peer in group.members],
            peer_fractions=(1 / len(group.members),) * len(group.members),
            sender_timeout=self._silence,
            reducer_timeout=REDUCER * streams.chunk_timeout,
            part_size_bytes=max(min(PART, share), flat.element_size()),
            compression=_Raw(),
        )
        self._shares = [[part.numel() for part, _ in parts] for parts in self.tensor_part_container._input_parts_by_peer]
        self._shares[group.members.index(me)] = [part.numel() for part in self.parts_for_local_averaging]

    async def reduced(self) -> Tensor:
        """Return the mean of all, flat, float32. Raises AllreduceException as soon as anything is missing."""
        whole = asyncio.ensure_future(self._whole())
        failing = asyncio.ensure_future(self.failed.wait())
        try:
            await asyncio.wait({whole, failing}, return_when=asyncio.FIRST_COMPLETED)
            if self.failed.is_set():
                raise AllreduceException("a member stopped, or its link broke")
            return whole.result()
        finally:
            try:
                await stop(whole, failing)
            finally:  # also if this is cancelled once more meanwhile, as in a process that slept
                for stream in self._calls:  # of abandoned generators: the garbage collector may be slow
                    stream.abort()
                if self._future.done() and not self._future.cancelled():
                    self._future.exception()

    async def _whole(self) -> Tensor:
        outputs = [tensor async for tensor in self.run()]
        flat: Tensor = outputs[0]
        return flat

    async def averages(self, peer: PeerID, parts: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Send this node's parts of another member's share; yield the averages as they arrive."""
        name = peer.to_base58()
        try:
            stream = await self._streams.open(name, self._group.nonce)
        except NetworkError as error:
            yield self._broken(name, error)
            return
        self._calls[stream] = None

        async def send() -> None:
            async for message in parts:
                await stream.send(message.tensor_part.buffer, self.reducer_timeout)

        sending = asyncio.ensure_future(send())
        try:
            for count in self._shares[self._group.members.index(name)]:
                data = await self._received(stream, 4 * count, self.reducer_timeout)
                tensor = runtime_pb2.Tensor(buffer=data, size=[count], dtype="float32")
                yield averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=tensor)
            await sending
        except (NetworkError, MessageError) as error:
            yield self._broken(name, error)
        finally:
            stream.close()
            self._calls.pop(stream, None)
            await stop(sending)

    async def serve(self, stream: Stream) -> None:
        """Serve the other end of ``averages``."""
        context = P2PContext(handle_name="", local_id=self.peer_id, remote_id=PeerID.from_base58(stream.peer_id))
        try:
            async with contextlib.aclosing(self.rpc_aggregate_part(self._parts(stream), context)) as replies:
                async for reply in replies:
                    if reply.code != averaging_pb2.AVERAGED_PART:
                        raise NetworkError(f"the all-reduce with peer {short(stream.peer_id)} failed.")
                    await stream.send(reply.tensor_part.buffer, self.reducer_timeout)
        except (NetworkError, MessageError):
            self.failed.set()
            stream.abort()

    async def _parts(self, stream: Stream) -> AsyncIterator[Any]:
        weight = self._group.weight(stream.peer_id)
        for part in self.parts_for_local_averaging:
            try:
                data = await self._received(stream, part.numel() * part.element_size(), self._silence)
            except (NetworkError, MessageError) as error:
                yield self._broken(stream.peer_id, error)
                return
            yield averaging_pb2.AveragingData(
                code=averaging_pb2.PART_FOR_AVERAGING, group_id=self.group_id, weight=weight,
                tensor_part=runtime_pb2.Tensor(buffer=data),
            )  # fmt: skip
        self.arrived[stream.peer_id] = asyncio.get_running_loop().time()

    def _broken(self, peer: str, error: NetworkError | MessageError) -> Any:
        """Return the message for hivemind that a stream has broken. Raised here, in a step of a generator that hivemind cancels at
        the same moment, the error would be one that nobody retrieves.
        """
        log.debug("the all-reduce with peer %s failed: %s", short(peer), error)
        return averaging_pb2.AveragingData(code=averaging_pb2.INTERNAL_ERROR)

    async def _received(self, stream: Stream, nbytes: int, timeout: float) -> bytes:
        data = await stream.receive(nbytes, timeout)
        if len(data) != nbytes:
            raise MessageError(f"peer {short(stream.peer_id)} sent a part of {len(data)} bytes where {nbytes} were agreed.")
        return data

    async def _accumulate_parts_streaming(self, stream: AsyncIterator[Any], sender_index: int) -> AsyncIterator[Any]:
        number = 0
        try:
            async for message in stream:
                if message.code == averaging_pb2.INTERNAL_ERROR:
                    raise AllreduceException("a member's stream broke")
                part = torch.frombuffer(bytearray(message.tensor_part.buffer), dtype=self._dtype)
                average = await self.tensor_part_reducer.accumulate_part(sender_index, number, part, weight=message.weight)
                number += 1
                yield averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=_packed(average))
        finally:
            if number != self.tensor_part_reducer.num_parts:
                await self._ban_sender(self.sender_peer_ids[sender_index])

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        if peer_id != self.peer_id:
            try:
                await super()._communicate_with_peer(peer_id)
            except Exception:
                self.failed.set()
                raise
            return
        index, sender = self.ordered_peer_ids.index(peer_id), self.sender_peer_ids.index(peer_id)
        for number, part in enumerate(self.parts_for_local_averaging):
            average = await self.tensor_part_reducer.accumulate_part(sender, number, part, weight=self.weight)
            self.tensor_part_container.register_processed_part(index, number, average)

    async def _ban_sender(self, peer_id: PeerID) -> None:
        await super()._ban_sender(peer_id)
        self.failed.set()


Outcome = Gathered | Reduced
"""A decided mean, whole and verified."""
Attempt = ExchangeAttempt[Outcome]
Reduction = AllGather | AllReduce
"""One attempt of one group at one member."""
