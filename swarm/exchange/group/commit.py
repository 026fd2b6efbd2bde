"""One group of a round, from its forming to its decision.

The leader that formed it sends each member the list of all (`GroupFormed`), waits for what each
holds in the end (`GroupReport`) and decides whose mean counts (`GroupReply`). Members that ask
again find the decision in `shoal.swarm.exchange.group.decisions`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shoal.optim.exchange.common_mean import common_mean
from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.group import butterfly
from shoal.swarm.exchange.group.deadline import GroupDeadline
from shoal.swarm.exchange.group.decisions import DecisionLog
from shoal.swarm.exchange.group.reduction import fits
from shoal.swarm.exchange.group.roster import HeartbeatChannel, LivenessView, encode_list
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.envelope import Message, fresh_nonce
from shoal.swarm.wire.messages import (
    GroupFormed,
    GroupLost,
    GroupReady,
    GroupReply,
    GroupReport,
    Way,
)

log = logging.getLogger(__name__)


def moved(nbytes: int, members: int) -> int:
    """Return the bytes each way that a member of a group moves for a contribution of ``nbytes``,
    whichever way it is reduced.
    """
    return nbytes * max(members - 1, 2)  # an all-reduce moves twice the contribution at most


@dataclass(eq=False)
class MemberState:
    """One member as its leader sees it: its channel, and its messages so far."""

    channel: HeartbeatChannel
    sealed: bytes
    ready: GroupReady
    until: float
    """The loop's time at which its patience is over."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no more messages follow."""
    gone: bool = False
    held: dict[bytes, int] = field(default_factory=dict)
    """Its reports, by the nonce of the group."""
    averages: dict[bytes, bytes] = field(default_factory=dict)
    """The signed averages in them."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at each report and departure. Replaced by the event of its group."""

    def report(self, report: GroupReport) -> None:
        """Record what the member holds.

        The first report counts; those about groups it is not asked about are useless.
        """
        if len(self.held) < 2:
            self.held.setdefault(report.nonce, report.held)
            self.averages.setdefault(report.nonce, report.averages)
        self.changed.set()

    def leave(self) -> None:
        """Note that its channel has ended."""
        self.gone = True
        self.changed.set()

    def dismiss(self) -> None:
        """End its channel; no more messages follow."""
        self.channel.stream.close()
        self.over.set()


class Leader(Protocol):
    """What a group needs of the node that formed it (``GroupLeader``)."""

    me: str
    context: PeerContext
    decisions: DecisionLog
    view: LivenessView
    time: GroupDeadline
    timeouts: ExchangeTimeouts
    gather: bool
    blame: Callable[[tuple[int, int], str], None]

    def needed(self, fragment: int) -> asyncio.Event:
        """Return the event that is set once the node's own training waits for the outcome."""
        ...


class GroupCommit:
    """One group that ``leader`` formed for ``key``, a round and fragment.

    ``members``: by peer id; ``alone``: there is no other.

    While the leader's own part of the reduction moves, it goes on for as long as that may take, and
    then the others have as long again as that part took, because their links may be slower; once
    the leader's training waits, no more than that, or its budget if that is more. Where the leader
    is no member, half of the members stand for its part. Nobody that is passed over is waited for.

    An all-reduce counts if every member has every part of it. If not, those who are left try once
    more, by gathering, which counts for whatever they all hold.
    """

    def __init__(
        self,
        leader: Leader,
        key: tuple[int, int],
        members: Mapping[str, MemberState],
        *,
        alone: bool,
    ) -> None:
        self._leader, self._decisions, self._key, self._alone = leader, leader.decisions, key, alone
        self._needed = leader.needed(key[1])
        self._began = self._longest = self._again = 0.0
        self._members = dict(sorted(members.items()))
        self._liars: set[str] = set()
        self._changed = asyncio.Event()
        for member in self._members.values():
            member.changed = self._changed

    def _passed_over(self, peer: str) -> bool:
        return self._leader.view.attendance.is_turned_away(peer, self._key[0])

    async def run(self) -> None:
        everybody, leader = self._members, self._leader
        nbytes = moved(next(iter(everybody.values())).ready.nbytes, len(everybody))
        self._began = asyncio.get_running_loop().time()
        self._longest = leader.timeouts.longest(nbytes)
        self._again = leader.time.reducing(nbytes, self._key[1])
        until = self._began + leader.timeouts.moving(nbytes)
        waiting = asyncio.ensure_future(self._needed.wait())
        waiting.add_done_callback(lambda _: self._changed.set())
        try:
            codec = next(iter(everybody.values())).ready.codec
            way = None if leader.gather else _by_shares(codec, len(everybody))
            if way is not None:
                if await self._try_reduction(way, until):
                    return
                self._members = {
                    p: member
                    for p, member in everybody.items()
                    if not (member.gone or self._passed_over(p) or p in self._liars)
                }
                for p in everybody.keys() - self._members.keys():
                    everybody[p].dismiss()
                log.info(
                    "an all-reduce of %d failed: the remaining %d gather",
                    len(everybody),
                    len(self._members),
                )
            if len(self._members) >= 2:
                await self._try_reduction("gather", until)
        finally:
            waiting.cancel()
            for member in everybody.values():
                member.dismiss()

    async def _try_reduction(self, reduction: Way, until: float) -> bool:
        """Form the group, wait for the reports and decide; inform the members unless another
        attempt is due. Return whether there is a mean.
        """
        nonce = fresh_nonce()
        self._decisions.expect(nonce)
        mean, whole = 0, reduction != "gather"
        averages = b""
        try:
            listed = encode_list(member.sealed for member in self._members.values())
            await self._send_all(
                GroupFormed(nonce=nonce, reduction=reduction, alone=self._alone, members=listed)
            )
            await self._reports(nonce, until, whole)
            mean = self._all_or_none(nonce) if whole else self._common(nonce)
            if mean and whole:
                averages = next(iter(self._members.values())).averages[nonce]
        finally:
            decision = self._decisions.settle(nonce, mean, averages)
        if mean or not whole:
            await self._send_all(GroupReply(decision=decision))
        return mean != 0

    @property
    def _everybody(self) -> int:
        """All members, as bits."""
        return (1 << len(self._members)) - 1

    def _all_or_none(self, nonce: bytes) -> int:
        """Return all members, as bits, if each reported that it holds everything, and the same
        averages (one may have died since); else 0.
        """
        everybody = self._everybody
        for member in self._members.values():
            if member.held.get(nonce) != everybody:
                return 0
        reports = {peer: member.averages[nonce] for peer, member in self._members.items()}
        if len(set(reports.values())) == 1:
            return everybody
        self._liars = butterfly.contradicted(reports, self._leader.context.swarm, nonce)
        for peer in sorted(self._liars):
            log.warning(
                "round %d: peer %s sent different averages of its share to two members, or reports "
                "what was not signed: it is left out.",
                self._key[0],
                short(peer),
            )
            self._leader.blame(self._key, peer)
        return 0

    def _common(self, nonce: bytes) -> int:
        """Return the contributions that all remaining members hold, as bits."""
        held = {
            place: member.held[nonce] & self._everybody | 1 << place
            for place, member in enumerate(self._members.values())
            if nonce in member.held and not member.gone
        }
        mean, takers = common_mean(held)
        log.info(
            "of a group of %d, %d are in the mean and %d take it",
            len(self._members),
            mean.bit_count(),
            takers.bit_count(),
        )
        return mean

    async def _reports(self, nonce: bytes, until: float, whole: bool) -> None:
        """Wait until every remaining member has reported or, if all are needed, anything failed;
        send which members are lost.
        """
        loop = asyncio.get_running_loop()
        lost = 0
        took: float | None = None
        deadline = until
        own = self._members.get(self._leader.me)
        if own is not None:
            deadline = max(until, self._began + self._longest)
        while True:
            self._changed.clear()
            if took is None and self._is_first_part_over(nonce, own):
                took = loop.time() - self._began
                deadline = max(until, loop.time() + took)
            if took is not None and (own is None or self._needed.is_set()):
                deadline = min(deadline, loop.time() + max(self._again, took))
            gone = self._gone(nonce)
            if whole and (gone or self._lacks_any(nonce)):
                return
            if gone != lost:  # sent in any case: the next round need not wait for them either
                lost = gone
                await self._send_all(GroupLost(nonce=nonce, lost=lost))
            if not self._awaits_any(nonce):
                return
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - loop.time())
            except TimeoutError:
                return

    def _gone(self, nonce: bytes) -> int:
        """Return the members that are gone without a report, as bits."""
        gone = 0
        for place, member in enumerate(self._members.values()):
            if member.gone and nonce not in member.held:
                gone |= 1 << place
        return gone

    def _lacks_any(self, nonce: bytes) -> bool:
        """Return whether a member reported that it does not hold everything."""
        reports = [member.held.get(nonce) for member in self._members.values()]
        return any(held is not None and held != self._everybody for held in reports)

    def _awaits_any(self, nonce: bytes) -> bool:
        """Return whether a member that is not passed over has still to report."""
        for peer, member in self._members.items():
            has_ended = member.gone or nonce in member.held
            if not has_ended and not self._passed_over(peer):
                return True
        return False

    def _is_first_part_over(self, nonce: bytes, own: MemberState | None) -> bool:
        """Return whether the leader's part is over; where it has none, half of the members'."""
        if own is not None:
            return own.gone or nonce in own.held
        over = sum(member.gone or nonce in member.held for member in self._members.values())
        return 2 * over >= len(self._members)

    async def _send_all(self, message: Message) -> None:
        """Send a message to every remaining member; one that cannot be reached counts as gone."""
        await asyncio.gather(
            *(self._send(member, message) for member in self._members.values() if not member.gone)
        )

    async def _send(self, member: MemberState, message: Message) -> None:
        try:
            await member.channel.send(message)
        except NetworkError as error:
            log.info("a member of a group is gone: %s", error)
            member.leave()


def _by_shares(codec: str, members: int) -> Way | None:
    """Return how a group averages by shares; None if it gathers."""
    if fits(codec, members):
        return "allreduce"
    return "butterfly" if butterfly.fits(codec, members) else None
