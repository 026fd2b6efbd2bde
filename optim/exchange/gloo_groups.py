"""The transfer of a round's payloads between the processes of one job, over gloo.

    mean = groups.mean(ticket, members, weights, payload, over)

Who the members are, and whether their mean counts: `shoal.optim.exchange.store_consensus`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    Work,
)

from shoal.optim.codecs.base import Codec, Shape, check_finite
from shoal.optim.codecs.bits import pack
from shoal.optim.codecs.buffer_tail import BufferTailCodec
from shoal.optim.codecs.floats import FLOAT32
from shoal.optim.codecs.pair_message import PairMessage, Reading
from shoal.optim.codecs.two_way import Average, TwoWayCodec, two_way
from shoal.optim.exchange.averaging import mean_of, middle_mean, pair_mean
from shoal.optim.exchange.base import Mean
from shoal.optim.exchange.butterfly import (
    applies,
    assemble,
    average_share,
    deal,
    mean_of_averages,
)
from shoal.optim.exchange.polling import Pause
from shoal.optim.exchange.store_consensus import ProcessCoordinates, RoundTicket
from shoal.optim.exchange.update_screen import TRUSTING
from shoal.optim.exchange.weighted_mean import counted_weights

CONNECT_S = 10.0
"""Seconds in which the members of a gloo group must connect."""
GIVEN_UP = "another rank has given it up"
"""Why there is no mean, where this process saw no fault."""

Gloo = Any
"""A ``ProcessGroupGloo``; torch's stubs lack its collectives."""


@dataclass(eq=False)
class Payload:
    """Encoded contribution of one process to a round."""

    data: Tensor
    shapes: list[Shape]
    codec: Codec
    unweighted_count: int = 0
    """How many of the first tensors get a plain mean."""
    message: PairMessage | None = None
    """What reads the partner's contribution, if the codec is one for pairs."""
    readings: list[Reading] = field(default_factory=list)
    """The partners' contributions, once they are here: the codec learns from them if the round
    counts.
    """
    average: Average | None = None
    """What this process has sent back of its share: the codec keeps it if the round counts."""

    @property
    def plain(self) -> bool:
        """True if the bytes are the values as float32 and nothing else."""
        codec = self.codec.codec if isinstance(self.codec, BufferTailCodec) else self.codec
        return codec == FLOAT32


class GlooGroups:
    """Gloo groups between processes of the same shard, one for each set of peers that has met.

    Groups are made here and not by ``dist.new_group``, which all ranks of the job would have to
    call, dead ones too. All members keep a group or all make a new one: each member calls ``drop``
    when a round did not count.
    """

    def __init__(self, store: Store, process: ProcessCoordinates, timeout: float) -> None:
        self._store = store
        self._process = process
        self._timeout = timedelta(seconds=timeout)
        self._groups: dict[tuple[int, ...], Gloo] = {}
        self._abandoned: list[tuple[Work, Gloo]] = []

    def mean(
        self,
        ticket: RoundTicket,
        members: tuple[int, ...],
        weights: Sequence[float],
        own: Payload,
        over: Callable[[], bool],
        chain: tuple[int, ...] = (),
    ) -> Mean | str:
        """Return the weighted mean of the members' contributions; or the reason why there is none.

        It has the same bits on all members; with a codec for pairs each side's is its own.
        ``weights`` are in the order of ``members``. ``over`` is polled and ends the waiting. The
        payload is overwritten. ``chain``: the members in their order, if they are a chain.
        """
        # A group with an operation in it cannot be closed, and deleting it would block: keep it
        # until gloo is done.
        self._abandoned = [item for item in self._abandoned if not item[0].is_completed()]
        try:
            group = self._group(ticket, members)
            # With two equal weights the sum is bit-identical to ``weighted_mean``, which swarm and
            # simulation use.
            both_ways = two_way(own.codec)
            plain = (
                own.plain and any(weights) and not (own.unweighted_count and len(set(weights)) > 1)
            )
            if chain:
                mean = self._chain_mean(group, members, chain, weights, own, over)
            elif plain and (len(members) > 2 or weights[0] == weights[1]):
                mean = self._summed(group, members, weights, own, over)
            elif own.message is not None:
                mean = self._pair_mean(group, members, weights, own, own.message, over)
            elif both_ways is not None and applies(own.codec, len(members), gathers=False):
                mean = self._averaged(group, members, weights, own, both_ways, over)
            else:
                mean = self._gathered(group, members, weights, own, over)
            if mean is None:
                return GIVEN_UP
            check_finite(mean.tensors, "the mean")
        except ValueError as error:
            return str(error)
        except RuntimeError as error:
            first = str(error).split("\n")[0][:200]
            return (
                f"a connection between ranks failed ({first}): if a rank died, the others go on "
                "without it; to have it back restart the job, best under torchrun --max-restarts"
            )
        return mean

    def _summed(
        self,
        group: Gloo,
        members: tuple[int, ...],
        weights: Sequence[float],
        own: Payload,
        over: Callable[[], bool],
    ) -> Mean | None:
        """Return the mean of plain floats, by an all-reduce; None if the round is over."""
        counted, limit = counted_weights(weights)
        share = counted[members.index(self._process.peer)] / sum(counted)
        if not self._sum(group, own.data, share, over):
            return None
        return Mean(
            tensors=own.codec.decode(own.data, own.shapes),
            weight=sum(counted),
            members=tuple(sorted(map(str, members))),
            limit=limit,
        )

    def _pair_mean(
        self,
        group: Gloo,
        members: tuple[int, ...],
        weights: Sequence[float],
        own: Payload,
        message: PairMessage,
        over: Callable[[], bool],
    ) -> Mean | None:
        """Return the mean of two that read each other by their own weights; None if the round is
        over.
        """
        mine = members.index(self._process.peer)
        theirs = 1 - mine
        payloads = self._gather(group, own.data, 2, over)
        if not payloads:
            return None
        reading = message.read(payloads[theirs])
        own.readings = [reading]
        refused = self._gather(group, _refused(reading), 2, over)
        if not refused:
            return None
        return pair_mean(
            TRUSTING,
            0,
            (str(members[mine]), weights[mine], message),
            (str(members[theirs]), weights[theirs], reading),
            refused[theirs].numpy().tobytes(),
            own.unweighted_count,
        )

    def _chain_mean(
        self,
        group: Gloo,
        members: tuple[int, ...],
        chain: tuple[int, ...],
        weights: Sequence[float],
        own: Payload,
        over: Callable[[], bool],
    ) -> Mean | None:
        """Return what this peer takes of a chain of three: the mean with the middle, or of the
        middle with both ends; None if the round is over.

        All three get all payloads: of a job that has no swarm's bytes to save.
        """
        payloads = self._gather(group, own.data, 3, over)
        if not payloads:
            return None
        place = chain.index(self._process.peer)
        neighbours = [members.index(peer) for peer in chain[:place][-1:] + chain[place + 1 :][:1]]
        mine = members.index(self._process.peer)
        message = own.message
        if message is None:
            # Each is computed in place.
            means = [
                self._mean_with(
                    other, [payload.clone() for payload in payloads], members, weights, own
                )
                for other in neighbours
            ]
        else:
            own.readings = [message.read(payloads[other]) for other in neighbours]
            refused = self._refused_in_chain(group, own.readings, over)
            if not refused:
                return None
            means = []
            for other, reading in zip(neighbours, own.readings, strict=True):
                # The middle has a row for each end, and an end one for the middle.
                row = 1 if place == 2 else 0
                means.append(
                    pair_mean(
                        TRUSTING,
                        0,
                        (str(members[mine]), weights[mine], message),
                        (str(members[other]), weights[other], reading),
                        refused[other][row].numpy().tobytes(),
                        own.unweighted_count,
                    )
                )
        if len(means) == 1:
            return means[0]
        tensors = self._decoded(own, payloads[mine]) if message is None else message.tensors()
        return middle_mean(own.codec, tensors, weights[mine], means, own.unweighted_count)

    def _mean_with(
        self,
        other: int,
        payloads: Sequence[Tensor],
        members: tuple[int, ...],
        weights: Sequence[float],
        own: Payload,
    ) -> Mean:
        """Return the mean with one other member, from all payloads, which are used up."""
        me = self._process.peer
        received = [
            (str(members[at]), weights[at], self._decoded(own, payloads[at]))
            for at in sorted((members.index(me), other))
        ]
        return mean_of(TRUSTING, own.codec, str(me), 0, received, own.unweighted_count)

    def _refused_in_chain(
        self, group: Gloo, readings: Sequence[Reading], over: Callable[[], bool]
    ) -> list[Tensor]:
        """Return what each member refused: a row for each of its neighbours, an end's second one
        empty; no members if the round is over.
        """
        rows = [_refused(reading) for reading in readings]
        rows += [torch.zeros_like(rows[0])] * (2 - len(rows))
        return self._gather(group, torch.stack(rows), 3, over)

    def _averaged(
        self,
        group: Gloo,
        members: tuple[int, ...],
        weights: Sequence[float],
        own: Payload,
        codec: TwoWayCodec,
        over: Callable[[], bool],
    ) -> Mean | None:
        """Return the mean of all, of which this process averages a share (a compressed butterfly);
        None if the round is over.
        """
        peers = [str(member) for member in members]
        dealt = deal(own.shapes, peers)
        shares = [dealt[peer] for peer in peers]
        mine = dealt[str(self._process.peer)]
        sent = [codec.cut(own.data, own.shapes, share) for share in shares]
        received = self._swap(group, sent, [codec.nbytes(mine.shapes)] * len(peers), over)
        if not received:
            return None
        contributions = []
        for peer, weight, payload in zip(peers, weights, received, strict=True):
            contributions.append((peer, weight, codec.decode(payload.clone(), mine.shapes)))
        average = average_share(codec, mine, contributions, own.unweighted_count)
        sizes = [codec.average_nbytes(share) for share in shares]
        payloads = self._swap(group, [average.payload] * len(peers), sizes, over)
        if not payloads:
            return None
        own.average = average
        parts = []
        for share, payload in zip(shares, payloads, strict=True):
            parts.append((share, codec.decode_averages(payload.clone(), share)))
        stated = list(zip(peers, weights, strict=True))
        return mean_of_averages(stated, assemble(own.shapes, parts))

    def _gathered(
        self,
        group: Gloo,
        members: tuple[int, ...],
        weights: Sequence[float],
        own: Payload,
        over: Callable[[], bool],
    ) -> Mean | None:
        """Return the mean of all payloads, decoded here; None if the round is over."""
        payloads = self._gather(group, own.data, len(members), over)
        if not payloads:
            return None
        parts = [self._decoded(own, payload) for payload in payloads]
        received = list(zip(map(str, members), weights, parts, strict=True))
        return mean_of(
            TRUSTING, own.codec, str(self._process.peer), 0, received, own.unweighted_count
        )

    def drop(self, members: tuple[int, ...]) -> None:
        self._groups.pop(members, None)

    def _group(self, ticket: RoundTicket, members: tuple[int, ...]) -> Gloo:
        if members not in self._groups:
            store = PrefixStore(f"gloo/{ticket.name}/{self._process.shard}", self._store)
            timeout = min(timedelta(seconds=CONNECT_S), self._timeout)
            self._groups[members] = ProcessGroupGloo(
                store, members.index(self._process.peer), len(members), timeout
            )
        return self._groups[members]

    def _gather(
        self, group: Gloo, payload: Tensor, count: int, over: Callable[[], bool]
    ) -> list[Tensor]:
        """Return all members' payloads, in the order of the members; empty if the round is over."""
        options = AllgatherOptions()
        options.timeout = self._timeout
        payloads = [torch.empty_like(payload) for _ in range(count)]
        work = group.allgather([payloads], [payload], options)
        return payloads if self._finish(group, work, over) else []

    def _swap(
        self,
        group: Gloo,
        sent: Sequence[Tensor],
        sizes: Sequence[int],
        over: Callable[[], bool],
    ) -> list[Tensor]:
        """Send each member its bytes; return what each has sent, of these sizes, in the order of
        the members; empty if the round is over.
        """
        options = AllToAllOptions()
        options.timeout = self._timeout
        received = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        lengths = [part.numel() for part in sent]
        work = group.alltoall_base(received, torch.cat(list(sent)), list(sizes), lengths, options)
        return list(torch.split(received, list(sizes))) if self._finish(group, work, over) else []

    def _decoded(self, own: Payload, payload: Tensor) -> Iterable[Tensor]:
        """Yield the decoded tensors lazily, so that not all contributions are in memory at once."""
        yield from own.codec.decode(payload, own.shapes)

    def _sum(self, group: Gloo, payload: Tensor, share: float, over: Callable[[], bool]) -> bool:
        """Replace the payload by the sum over the members, each times its share.

        False if the round is over.

        Each process sends and receives the bytes of two payloads, whatever the number of members.
        """
        options = AllreduceOptions()
        options.timeout = self._timeout
        values = payload.view(torch.float32)
        if share:
            values.mul_(share)
        else:
            values.zero_()
        return self._finish(group, group.allreduce([values], options), over)

    def _finish(self, group: Gloo, work: Work, over: Callable[[], bool]) -> bool:
        """Wait for the bytes. RuntimeError if gloo failed; return False if the round is over."""
        pause = Pause(Event())
        while not work.is_completed():
            if over():
                self._abandoned.append((work, group))
                return False
            pause()
        work.wait()
        return True


def _refused(reading: Reading) -> Tensor:
    """Return the blocks that this process refused, as bits."""
    return pack((~reading.kept).view(torch.uint8), 1)
