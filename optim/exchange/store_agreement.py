"""How the processes of one job agree about a round, over the key-value store of torch.distributed: who takes part, what came of it.

Two values of a round are written once, with compare-and-set, so everybody reads the same: its members, and whether their mean
counts. Nobody can be left in the middle: who gives up proposes to go without itself, or, later, that the mean does not count, and
learns what was decided. A peer may be several processes, its shards: it takes part if all of them do, and the outcome is
one for all of them.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

MEAN, VOID, ABSENT = "mean", "void", "-"
LOOK_S = 0.5
"""How often a waiting process asks whether those it waits for are there at all."""


@dataclass(frozen=True)
class ProcessCoordinates:
    """Which process this is: shard ``shard`` of peer ``peer``."""

    peer: int
    shard: int
    shards: int


@dataclass(frozen=True)
class Offer:
    """What a process says when it comes to a round. ``what`` must be equal among all who take part."""

    what: str
    """In words: shapes, codec, size."""
    weight: float


@dataclass
class RoundTicket:
    """This process's part in one round."""

    name: str
    """The same in all processes, and of this round alone."""
    expected: tuple[int, ...]
    """The peers that are to meet, this one among them."""
    closed: threading.Event = field(default_factory=threading.Event)
    """Set by whoever waits for the outcome, to give up."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    voted: bool = False

    @property
    def label(self) -> str:
        """The round, for people."""
        return self.name.split(" of ")[0]


class StoreConsensus:
    """The rounds of one exchange.

    Args:
        store: of the job; it must answer at once, so nothing here waits inside of it.
        process: this process.
        wait: seconds that a peer is waited for, in all, until it comes to some round again. A dead one costs that much once.
    """

    def __init__(self, store: Store, process: ProcessCoordinates, wait: float) -> None:
        self.store, self.process, self.wait = store, process, wait
        self._silent: dict[int, tuple[int, float]] = {}  # peer: the rounds it had come to, and the seconds it was waited for since

    def arrive(self, ticket: RoundTicket, offer: Offer | None) -> None:
        """Say that this process is there; None: that it takes no part, so that nobody waits for it."""
        text = ABSENT if offer is None else json.dumps([offer.what, offer.weight])
        self.store.set(self._offer(ticket, self.process.peer, self.process.shard), text)
        self.store.add(f"come/{self.process.peer}", 1)
        self.store.add(f"{ticket.name}/come", 1)

    def leave(self) -> None:
        """Nobody has to wait for this peer any more."""
        self.store.set(f"gone/{self.process.peer}", ABSENT)

    def members(self, ticket: RoundTicket) -> tuple[int, ...]:
        """Wait for the expected peers; whom the round is between. Less than two or without this one: there is nothing to do."""
        if self.process.peer not in ticket.expected or len(ticket.expected) < 2:
            return ()
        began = looked = time.monotonic()
        until, processes = began, -1
        pause = Pause(ticket.closed)
        while not self.store.check([f"{ticket.name}/members"]):
            now = time.monotonic()
            before, processes = processes, self.store.add(f"{ticket.name}/come", 0)
            if processes == len(ticket.expected) * self.process.shards or ticket.closed.is_set():
                self._propose(ticket)
                break
            if processes != before or now - looked > LOOK_S:  # who is missing, and is it worth the wait?
                looked, until = now, began + self._patience(ticket, 0.0)
            if now >= until:
                self._patience(ticket, now - began)
                self._propose(ticket)
                break
            pause()
        text = self.store.get(f"{ticket.name}/members").decode()
        return tuple(int(peer) for peer in text.split(",") if peer)

    def offers(self, ticket: RoundTicket, members: Sequence[int]) -> list[Offer]:
        """What the members' processes of the own shard said."""
        texts = [self.store.get(self._offer(ticket, peer, self.process.shard)) for peer in members]
        return [Offer(str(what), float(weight)) for what, weight in map(json.loads, texts)]

    def over(self, ticket: RoundTicket) -> bool:
        """The outcome is decided, or this process gives up: as long as it has not voted, the mean will not count."""
        return ticket.closed.is_set() or self.store.check([f"{ticket.name}/outcome"])

    def agree(self, ticket: RoundTicket, members: Sequence[int], whole: bool, limit: float) -> bool:
        """True if the mean counts: all processes of all members have it ``whole``, and nobody gave up within ``limit`` seconds."""
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
        """Delete what this process said about a round that is long over."""
        self.store.delete_key(self._offer(ticket, self.process.peer, self.process.shard))

    def forget(self, ticket: RoundTicket) -> None:
        """Delete the rest, once nobody can come to that round any more."""
        if (self.process.peer, self.process.shard) == (min(ticket.expected), 0):
            for what in ("come", "members", "votes", "outcome"):
                self.store.delete_key(f"{ticket.name}/{what}")

    def _offer(self, ticket: RoundTicket, peer: int, shard: int) -> str:
        return f"{ticket.name}/{peer}/{shard}"

    def _has_arrived(self, ticket: RoundTicket, peer: int) -> bool:
        return self.store.check([self._offer(ticket, peer, shard) for shard in range(self.process.shards)])

    def _patience(self, ticket: RoundTicket, waited: float) -> float:
        """Seconds that are left to wait for those who are missing; ``waited`` is noted down."""
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
                        "peer %d did not come to %s within %g s: rounds go on without it until it comes again.",
                        peer, ticket.label, self.wait,
                    )  # fmt: skip
                self._silent[peer] = came, used
            if not self.store.check([f"gone/{peer}"]):
                left = max(left, self.wait - used)
        return left

    def _propose(self, ticket: RoundTicket) -> None:
        there = [peer for peer in ticket.expected if self._has_arrived(ticket, peer)]
        willing = [
            peer
            for peer in there
            if not (peer == self.process.peer and ticket.closed.is_set())
            and not any(self.store.get(self._offer(ticket, peer, shard)) == ABSENT.encode() for shard in range(self.process.shards))
        ]
        self.store.compare_set(f"{ticket.name}/members", "", ",".join(map(str, willing)) if len(willing) > 1 else ",")

    def _decide(self, ticket: RoundTicket, outcome: str) -> bool:
        return self.store.compare_set(f"{ticket.name}/outcome", "", outcome).decode() == MEAN


class Pause:
    """Waits between two questions, longer each time, or until ``closed`` is set."""

    def __init__(self, closed: threading.Event, longest: float = 0.02) -> None:
        self._closed, self._longest, self._seconds = closed, longest, 0.0005

    def __call__(self) -> None:
        """Wait once."""
        if self._closed.is_set():
            time.sleep(self._seconds)  # whoever asks will not find anything sooner for not waiting
        else:
            self._closed.wait(self._seconds)
        self._seconds = min(1.5 * self._seconds, self._longest)
