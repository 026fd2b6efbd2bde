"""Reduction by hivemind's butterfly all-reduce, for plain floats: every member averages one share of the values for all.

Costs a node about two payloads in either direction, however large the group is, where gathering costs one for each other member.
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
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from hivemind.averaging.allreduce import AllreduceException, AllReduceRunner
from hivemind.compression import NoCompression
from hivemind.p2p import P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2, runtime_pb2
from torch import Tensor

from shoal.optim.codecs.base import FloatCodec, all_finite
from shoal.optim.exchange.base import Mean
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.exchange.contribution import Contribution
from shoal.swarm.exchange.group.channel import stop
from shoal.swarm.exchange.group.reduction import Attempt, PeerStreams
from shoal.swarm.exchange.group.roster import Roster
from shoal.swarm.p2p.stream import short

if TYPE_CHECKING:
    from shoal.swarm.p2p.stream import Stream

PART = 1 << 18  # bytes that are averaged at a time
FLOATS = frozenset({"float32", "float16", "bfloat16"})
SMALLEST = 4  # members; fewer move no more bytes by gathering, or hardly more
# The leader's channel to a stopped member times out before it is given up here, so that the next attempt is without it.
SENDER, REDUCER = 1.5, 2.0  # times the chunk timeout

log = logging.getLogger(__name__)


def fits(codec: str, members: int) -> bool:
    """Return whether a group should be reduced this way."""
    return codec in FLOATS and members >= SMALLEST


@dataclass(frozen=True)
class Reduced:
    """A finished mean as one flat tensor."""

    members: tuple[str, ...]
    weight: float
    flat: Tensor
    mine: Contribution
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

    def __init__(self, streams: PeerStreams, group: Roster, me: str, mine: Contribution) -> None:
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
