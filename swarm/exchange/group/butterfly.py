"""The compressed butterfly of a group at one member (`Butterfly`), and who lied in one.

    caller --> owner     its part of the encoded contribution, in parts
    owner  --> caller    a signed `GroupAverage`, then the encoded average of all, in parts

Reports hold the signed messages of all owners. The leader decides only if all members report the
same; an owner that signed two averages is found by them (`contradicted`). The mathematics:
`shoal.optim.exchange.butterfly`; why it is as it is: docs/internals.md, "The compressed butterfly".
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.optim.codecs.base import check_finite
from shoal.optim.codecs.slices import Share
from shoal.optim.codecs.two_way import Average, TwoWayCodec, named_two_way, two_way
from shoal.optim.exchange.base import Mean
from shoal.optim.exchange.butterfly import (
    FEWEST,
    assemble,
    average_share,
    deal,
    mean_of_averages,
)
from shoal.swarm.errors import MessageError
from shoal.swarm.exchange.group.reduction import (
    AVERAGES_CHUNKS,
    PART,
    SENDER_CHUNKS,
    Attempt,
    Outcome,
    ShareReduction,
)
from shoal.swarm.exchange.group.roster import Roster, encode_list, open_list
from shoal.swarm.exchange.group.streams import PeerStreams
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.p2p.tasks import stop
from shoal.swarm.wire.envelope import ENVELOPE, seal, unseal
from shoal.swarm.wire.messages import GroupAverage


def fits(codec: str, members: int) -> bool:
    """Return whether a group should be reduced this way."""
    return named_two_way(codec) and members >= FEWEST


@dataclass(frozen=True)
class Averaged:
    """The outcome of a butterfly: the mean, and what this node owes of its share once it takes
    that.
    """

    mean: Mean
    codec: TwoWayCodec
    average: Average

    def __call__(self) -> Mean:
        return self.mean

    def keep(self) -> None:
        """Note that the mean is taken; for the thread that takes it, which may save the codec's
        state before.
        """
        self.codec.keep(self.average)


@dataclass
class _Averages:
    """The encoded averages that are here, by owner."""

    signed: dict[str, bytes] = field(default_factory=dict)
    payloads: dict[str, Tensor] = field(default_factory=dict)


class Butterfly(ShareReduction):
    """One group's compressed butterfly at this node."""

    def __init__(
        self,
        streams: PeerStreams,
        group: Roster,
        me: str,
        attempt: Attempt,
        until: float,
        longest: float,
        *,
        identity: Identity,
    ) -> None:
        codec = two_way(attempt.contribution.codec)
        super().__init__(streams, group, me, attempt, max(until, longest), codec is not None)
        self._codec = codec
        self._identity = identity
        self._swarm = attempt.key.run
        self._shares: dict[str, Share] = {}
        self._averages = _Averages()
        self._own: Average | None = None
        self._tensors: list[Tensor] = []

    def result(self, mean: int) -> Outcome:
        assert self._codec is not None
        assert self._own is not None
        stated = [(peer, self.group.readies[peer].weight) for peer in self.group.members]
        return Averaged(mean_of_averages(stated, self._tensors), self._codec, self._own)

    async def _reduced(self) -> None:
        codec = self._codec
        assert codec is not None
        shapes = self._mine.shapes
        payload = self._mine.payload.whole()
        self._shares = await asyncio.to_thread(deal, shapes, self.group.members)
        owners = [peer for peer in self.group.members if self._shares[peer].ranges]
        works = [asyncio.ensure_future(self._average(codec, payload))]
        for owner in owners:
            if owner != self._me:
                works.append(asyncio.ensure_future(self._exchange(codec, payload, owner)))
        try:
            await asyncio.gather(*works)
        finally:
            await stop(*works)
        values = [await asyncio.to_thread(self._values, codec, owner) for owner in owners]
        parts = [(self._shares[owner], each) for owner, each in zip(owners, values, strict=True)]
        self._tensors = await asyncio.to_thread(assemble, shapes, parts)
        self.averages = encode_list(self._averages.signed[owner] for owner in owners)

    async def _exchange(self, codec: TwoWayCodec, payload: Tensor, owner: str) -> None:
        """Send a member its share of this node's contribution, and take the average of it."""
        share = self._shares[owner]
        cut = await asyncio.to_thread(codec.cut, payload, self._mine.shapes, share)
        nbytes = codec.average_nbytes(share)

        async def use(stream: Stream) -> None:
            await self._send(stream, cut)
            # It waits for the shares of all members: the leader notices one that has died.
            signed = await stream.receive(GroupAverage.LIMIT + ENVELOPE, self._left())
            average = await self._received(
                stream, nbytes, AVERAGES_CHUNKS * self._streams.chunk_timeout
            )
            check_average(signed, owner, self._swarm, self.group.nonce, average)
            self._averages.signed[owner] = signed
            self._averages.payloads[owner] = average

        with self._naming(owner):
            await self._streams.call(owner, self.group.nonce, max(cut.numel(), nbytes), use)

    async def _average(self, codec: TwoWayCodec, payload: Tensor) -> None:
        """Average this node's share of the contributions of all members, and send each of them the
        average.
        """
        share = self._shares[self._me]
        if not share.ranges:
            self._own = codec.average(share, [])
            return
        own = await asyncio.to_thread(codec.cut, payload, self._mine.shapes, share)
        theirs = await asyncio.gather(*(self._cut_of(peer, own.numel()) for peer in self._callers))
        cuts = {self._me: own, **dict(zip(self._callers, theirs, strict=True))}
        average = await asyncio.to_thread(self._averaged, codec, share, cuts)
        message = GroupAverage(
            swarm=self._swarm, nonce=self.group.nonce, sha256=digest_of(average.payload)
        )
        signed = seal(message, self._identity)
        self._own = average
        self._averages.signed[self._me] = signed
        self._averages.payloads[self._me] = average.payload
        await asyncio.gather(
            *(self._answer(caller.result(), signed, average) for caller in self._callers.values())
        )

    def _averaged(self, codec: TwoWayCodec, share: Share, cuts: Mapping[str, Tensor]) -> Average:
        """Return the average of the members' parts; slow. Raises MessageError."""
        contributions = []
        for peer, cut in cuts.items():
            with self._naming(peer):
                try:
                    tensors = codec.decode(cut, share.shapes)
                except ValueError as error:
                    raise MessageError(
                        f"the share of peer {short(peer)} is not {codec.name}: {error}.", "damaged"
                    ) from error
            contributions.append((peer, self.group.readies[peer].weight, tensors))
        try:
            return average_share(codec, share, contributions, self._mine.unweighted_count)
        except ValueError as error:
            raise MessageError(f"the average cannot be sent: {error}.") from error

    def _values(self, codec: TwoWayCodec, owner: str) -> list[Tensor]:
        """Return the decoded averages of an owner. Raises MessageError."""
        with self._naming(owner):
            try:
                values = codec.decode_averages(self._averages.payloads[owner], self._shares[owner])
                check_finite(values, "it")
            except ValueError as error:
                raise MessageError(
                    f"the average of peer {short(owner)} is not {codec.back.name}: {error}.",
                    "damaged",
                ) from error
        return values

    async def _answer(self, stream: Stream, signed: bytes, average: Average) -> None:
        await stream.send(signed, AVERAGES_CHUNKS * self._streams.chunk_timeout)
        await self._send(stream, average.payload)

    async def _cut_of(self, peer: str, nbytes: int) -> Tensor:
        """Return a member's part of this node's share."""
        self._awaited.add(peer)
        silence = SENDER_CHUNKS * self._streams.chunk_timeout
        with self._naming(peer):
            stream = await self._called_by(peer, silence)
            cut = await self._received(stream, nbytes, silence)
        self._awaited.discard(peer)
        self._note_arrival(peer)
        return cut

    @contextlib.contextmanager
    def _naming(self, peer: str) -> Iterator[None]:
        """Count what is wrong with what a member has sent as its failure."""
        try:
            yield
        except MessageError as error:
            self._attempt.failed(peer, error)
            raise

    async def _send(self, stream: Stream, payload: Tensor) -> None:
        data = payload.numpy().data
        for start in range(0, len(data), PART):
            part = bytes(data[start : start + PART])
            await stream.send(part, AVERAGES_CHUNKS * self._streams.chunk_timeout)

    async def _received(self, stream: Stream, nbytes: int, silence: float) -> Tensor:
        payload = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        data = payload.numpy().data
        for start in range(0, nbytes, PART):
            wanted = min(PART, nbytes - start)
            part = await stream.receive(wanted, silence)
            if len(part) != wanted:
                raise MessageError(
                    f"peer {short(stream.peer_id)} sent {len(part)} bytes of a share where "
                    f"{wanted} were agreed.",
                    "damaged",
                )
            data[start : start + wanted] = part
        return payload

    def _left(self) -> float:
        return max(self._until - asyncio.get_running_loop().time(), 0.01)


def check_average(signed: bytes, owner: str, swarm: str, nonce: bytes, average: Tensor) -> None:
    """Raise MessageError unless the owner has signed this average for the group of ``nonce``."""
    signer, message = unseal(signed, GroupAverage)
    if (signer, message.swarm, message.nonce) != (owner, swarm, nonce):
        raise MessageError(
            f"an average was refused: peer {short(owner)} has not signed it for this group."
        )
    if message.sha256 != digest_of(average):
        raise MessageError(
            f"the average of peer {short(owner)} does not match the digest that it signed.",
            "damaged",
        )


def contradicted(reports: Mapping[str, bytes], swarm: str, nonce: bytes) -> set[str]:
    """Return the owners that signed different averages for the group of ``nonce``, and the members
    whose reports hold what nobody in it signed; ``reports``: the signed averages in each member's.
    """
    digests: defaultdict[str, set[bytes]] = defaultdict(set)
    liars = set()
    for reporter, listed in reports.items():
        try:
            for signed in open_list(listed):
                owner, message = unseal(signed, GroupAverage)
                if owner not in reports or (message.swarm, message.nonce) != (swarm, nonce):
                    raise MessageError("an average in a report is not of this group.")
                digests[owner].add(message.sha256)
        except MessageError:
            liars.add(reporter)
    liars.update(owner for owner, found in digests.items() if len(found) > 1)
    return liars


def digest_of(payload: Tensor) -> bytes:
    return hashlib.sha256(payload.numpy().data).digest()
