"""Agreement between the processes of one job about a round, and the transfer of its payloads.

    members = consensus.members(ticket)                    # over the job's key-value store
    mean = groups.mean(ticket, members, weights, payload, over)      # over gloo
    consensus.agree(ticket, members, isinstance(mean, Mean), limit)

Two values of a round are written once, with compare-and-set, so all processes read the same: its
members, and whether their mean counts. No process can be left undecided: one that gives up proposes
members without itself, or, later, that the mean does not count, and reads the decision. A peer may
be several processes, its shards: it takes part if all of them do, and all of them have the same
outcome.
"""

from __future__ import annotations

import json
import logging
import threading
import time
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
    PrefixStore,
    ProcessGroupGloo,
    Store,
    Work,
)

from shoal.optim.codecs.base import FLOAT32, BufferTailCodec, Codec, Shape, check_finite
from shoal.optim.codecs.bits import pack
from shoal.optim.codecs.mod4 import PairMessage, Reading
from shoal.optim.exchange.averaging import TRUSTING, mean_of, pair_mean
from shoal.optim.exchange.base import Mean, counted_weights

logger = logging.getLogger(__name__)

MEAN = "mean"
"""Outcome of a round whose mean counts."""
VOID = "void"
"""Outcome of a round whose mean does not."""
ABSENT = "-"
"""In place of an offer: this process takes no part."""
CHECK_S = 0.5
"""Seconds between two checks of a waiting process whether the missing peers are still alive."""
FIRST_PAUSE_S = 0.0005
"""Seconds of the first pause between two polls; each further one is half as long again."""
LONGEST_PAUSE_S = 0.02
"""Seconds of a pause, at most."""


@dataclass(frozen=True)
class ProcessCoordinates:
    """Identity of a process: shard ``shard`` of peer ``peer``."""

    peer: int
    shard: int
    shards: int


@dataclass(frozen=True)
class StoreOffer:
    """Contribution that a process announces for a round. ``what`` must be equal among all
    members.
    """

    what: str
    """Shapes, codec and size, in words."""
    weight: float
    state: tuple[float, ...] = ()
    """That of the ``Contribution``."""


@dataclass
class RoundTicket:
    """State of this process in one round."""

    name: str
    """The same in all processes, and unique to this round."""
    expected: tuple[int, ...]
    """The peers that the pairing puts together, this one among them."""
    closed: threading.Event = field(default_factory=threading.Event)
    """Set to give the round up."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    voted: bool = False

    @property
    def label(self) -> str:
        return self.name.split(" of ")[0]


class StoreConsensus:
    """Consensus on the members and outcomes of one exchange's rounds.

    Args:
        store: the job's; nothing here blocks inside it.
        process: this process.
        wait: seconds that all rounds together wait for a missing peer until it comes to a round
            again. A dead one costs that once.
    """

    def __init__(self, store: Store, process: ProcessCoordinates, wait: float) -> None:
        self.store = store
        self.process = process
        self.wait = wait
        self._silent: dict[int, tuple[int, float]] = {}
        """By peer: rounds that it had come to, and seconds waited for it since."""

    def arrive(self, ticket: RoundTicket, offer: StoreOffer | None) -> None:
        """Announce this process's offer; None: that it takes no part, so that nobody waits for
        it.
        """
        text = ABSENT if offer is None else json.dumps([offer.what, offer.weight, offer.state])
        self.store.set(self._offer(ticket, self.process.peer, self.process.shard), text)
        self.store.add(f"come/{self.process.peer}", 1)
        self.store.add(f"{ticket.name}/come", 1)

    def leave(self) -> None:
        """Announce that nobody has to wait for this peer any more."""
        self.store.set(f"gone/{self.process.peer}", ABSENT)

    def members(self, ticket: RoundTicket) -> tuple[int, ...]:
        """Wait for the expected peers, then return the round's members.

        Fewer than two, or without this peer: no exchange.
        """
        if self.process.peer not in ticket.expected or len(ticket.expected) < 2:
            return ()
        began = time.monotonic()
        checked = began
        until = began
        processes = -1
        pause = Pause(ticket.closed)
        while not self.store.check([f"{ticket.name}/members"]):
            now = time.monotonic()
            before = processes
            processes = self.store.add(f"{ticket.name}/come", 0)
            if processes == len(ticket.expected) * self.process.shards or ticket.closed.is_set():
                self._propose(ticket)
                break
            if processes != before or now - checked > CHECK_S:
                checked = now
                until = began + self._patience(ticket, 0.0)
            if now >= until:
                self._patience(ticket, now - began)
                self._propose(ticket)
                break
            pause()
        text = self.store.get(f"{ticket.name}/members").decode()
        return tuple(int(peer) for peer in text.split(",") if peer)

    def offers(self, ticket: RoundTicket, members: Sequence[int]) -> list[StoreOffer]:
        return [self._offered(ticket, peer, self.process.shard) for peer in members]

    def states(self, ticket: RoundTicket, members: Sequence[int]) -> dict[str, tuple[float, ...]]:
        """Return each member's state, that of all its shards in a row; empty if one has none."""
        found: dict[str, tuple[float, ...]] = {}
        for peer in members:
            row: tuple[float, ...] = ()
            for shard in range(self.process.shards):
                state = self._offered(ticket, peer, shard).state
                if not state:
                    return {}
                row += state
            found[str(peer)] = row
        return found

    def over(self, ticket: RoundTicket) -> bool:
        """Return True if the outcome is decided or this process gives up; before its vote that
        means no mean.
        """
        return ticket.closed.is_set() or self.store.check([f"{ticket.name}/outcome"])

    def agree(self, ticket: RoundTicket, members: Sequence[int], whole: bool, limit: float) -> bool:
        """Vote, and return True if the mean counts: all members' processes had it ``whole`` and
        voted within ``limit`` seconds.
        """
        with ticket.lock:
            ticket.voted = whole and not ticket.closed.is_set()
        if not ticket.voted:
            return self._decide(ticket, VOID)
        if self.store.add(f"{ticket.name}/votes", 1) == len(members) * self.process.shards:
            return self._decide(ticket, MEAN)
        until = time.monotonic() + limit
        pause = Pause(ticket.closed)
        while not self.over(ticket) and time.monotonic() < until:
            pause()
        return self._decide(ticket, VOID)

    def forget_offer(self, ticket: RoundTicket) -> None:
        """Delete this process's offer for a round that is long over."""
        self.store.delete_key(self._offer(ticket, self.process.peer, self.process.shard))

    def forget(self, ticket: RoundTicket) -> None:
        """Delete the round's other values, once no process can come to it any more."""
        if (self.process.peer, self.process.shard) == (min(ticket.expected), 0):
            for what in ("come", "members", "votes", "outcome"):
                self.store.delete_key(f"{ticket.name}/{what}")

    def _offer(self, ticket: RoundTicket, peer: int, shard: int) -> str:
        return f"{ticket.name}/{peer}/{shard}"

    def _offered(self, ticket: RoundTicket, peer: int, shard: int) -> StoreOffer:
        what, weight, state = json.loads(self.store.get(self._offer(ticket, peer, shard)))
        return StoreOffer(str(what), float(weight), tuple(map(float, state)))

    def _has_arrived(self, ticket: RoundTicket, peer: int) -> bool:
        return self.store.check(
            [self._offer(ticket, peer, shard) for shard in range(self.process.shards)]
        )

    def _patience(self, ticket: RoundTicket, waited: float) -> float:
        """Return the seconds left to wait for the missing peers, to whose account ``waited`` is
        added.
        """
        left = 0.0
        for peer in ticket.expected:
            if self._has_arrived(ticket, peer):
                continue
            came = self.store.add(f"come/{peer}", 0)
            before, used = self._silent.get(peer, (came, 0.0))
            used = waited + (used if came == before else 0.0)
            if waited:
                if used - waited < self.wait - 1e-3 <= used:
                    logger.warning(
                        "peer %d did not come to %s within %g s: rounds go on without it until it "
                        "comes again.",
                        peer,
                        ticket.label,
                        self.wait,
                    )
                self._silent[peer] = came, used
            if not self.store.check([f"gone/{peer}"]):
                left = max(left, self.wait - used)
        return left

    def _propose(self, ticket: RoundTicket) -> None:
        present = [peer for peer in ticket.expected if self._has_arrived(ticket, peer)]
        willing = [str(peer) for peer in present if self._is_willing(ticket, peer)]
        members = ",".join(willing) if len(willing) > 1 else ","
        self.store.compare_set(f"{ticket.name}/members", "", members)

    def _is_willing(self, ticket: RoundTicket, peer: int) -> bool:
        if peer == self.process.peer and ticket.closed.is_set():
            return False
        for shard in range(self.process.shards):
            if self.store.get(self._offer(ticket, peer, shard)) == ABSENT.encode():
                return False
        return True

    def _decide(self, ticket: RoundTicket, outcome: str) -> bool:
        return self.store.compare_set(f"{ticket.name}/outcome", "", outcome).decode() == MEAN


class Pause:
    """Waiting time between two polls, longer each time; ends early when ``closed`` is set."""

    def __init__(self, closed: threading.Event) -> None:
        self._closed = closed
        self._seconds = FIRST_PAUSE_S

    def __call__(self) -> None:
        if self._closed.is_set():
            time.sleep(self._seconds)  # without it the caller would poll in a busy loop
        else:
            self._closed.wait(self._seconds)
        self._seconds = min(1.5 * self._seconds, LONGEST_PAUSE_S)


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
    even: int = 0
    """How many of the first tensors get a plain mean."""
    message: PairMessage | None = None
    """What reads the partner's contribution, if the codec is one for pairs."""
    read: Reading | None = None
    """The partner's contribution, once it is here: the codec learns from it if the round counts."""

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
    ) -> Mean | str:
        """Return the weighted mean of the members' contributions; or the reason why there is none.

        It has the same bits on all members; with a codec for pairs each side's is its own.
        ``weights`` are in the order of ``members``. ``over`` is polled and ends the waiting. The
        payload is overwritten.
        """
        # A group with an operation in it cannot be closed, and deleting it would block: keep it
        # until gloo is done.
        self._abandoned = [item for item in self._abandoned if not item[0].is_completed()]
        try:
            group = self._group(ticket, members)
            # With two equal weights the sum is bit-identical to ``weighted_mean``, which swarm and
            # simulation use.
            plain = own.plain and any(weights) and not (own.even and len(set(weights)) > 1)
            if plain and (len(members) > 2 or weights[0] == weights[1]):
                mean = self._summed(group, members, weights, own, over)
            elif own.message is not None:
                mean = self._pair_mean(group, members, weights, own, own.message, over)
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
        own.read = message.read(payloads[theirs])
        refused_here = pack((~own.read.kept).view(torch.uint8), 1)
        refused = self._gather(group, refused_here, 2, over)
        if not refused:
            return None
        return pair_mean(
            TRUSTING,
            0,
            (str(members[mine]), weights[mine], message),
            (str(members[theirs]), weights[theirs], own.read),
            refused[theirs].numpy().tobytes(),
            own.even,
        )

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
        return mean_of(TRUSTING, own.codec, str(self._process.peer), 0, received, own.even)

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
