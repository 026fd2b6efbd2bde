"""Agreement between the processes of one job about a round, over the job's key-value store.

    consensus.arrive(ticket, offer)
    members = consensus.members(ticket)
    counts = consensus.agree(ticket, members, have_the_mean, limit)

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
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch._C._distributed_c10d import Store

from shoal.optim.exchange.polling import Pause

logger = logging.getLogger(__name__)

MEAN = "mean"
"""Outcome of a round whose mean counts."""
VOID = "void"
"""Outcome of a round whose mean does not."""
ABSENT = "-"
"""In place of an offer: this process takes no part."""
CHECK_S = 0.5
"""Seconds between two checks of a waiting process whether the missing peers are still alive."""


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
