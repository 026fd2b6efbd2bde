"""From a formed group to the decision: the leader hears what each member holds, decides once, and tells all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Literal

from shoal.optim.exchange.pairing import common
from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange.group.allreduce import fits
from shoal.swarm.exchange.group.channel import HeartbeatChannel
from shoal.swarm.exchange.group.decision_log import DecisionLog
from shoal.swarm.exchange.group.roster import encode_roster
from shoal.swarm.wire.envelope import Message
from shoal.swarm.wire.group import GroupFormed, GroupLost, GroupReady, GroupReply, GroupReport
from shoal.swarm.wire.nonce import fresh_nonce

log = logging.getLogger(__name__)


class MemberState:
    """One member's place at its leader: its line, and what it has said over it."""

    def __init__(self, line: HeartbeatChannel, sealed: bytes, ready: GroupReady, until: float) -> None:
        self.line, self.sealed, self.ready = line, sealed, ready
        self.until = until
        """The loop's time at which its patience is over."""
        self.over = asyncio.Event()
        """Nothing more will be said."""
        self.gone = False
        self.held: dict[bytes, int] = {}
        """Its reports, by the nonce of the group."""
        self.news = asyncio.Event()
        """Replaced by its group's, which wakes up with each report and each departure."""

    def report(self, report: GroupReport) -> None:
        """Note what it holds; the first word counts, and one about a group that it is not asked about is of no use."""
        if len(self.held) < 2:
            self.held.setdefault(report.nonce, report.held)
        self.news.set()

    def leave(self) -> None:
        """Its line has ended."""
        self.gone = True
        self.news.set()


class GroupCommit:
    """One group, seen from its leader. ``seats``: by peer id; ``alone``: there is no other group; ``timeout``: seconds.

    An all-reduce counts if every member has every part of it. If not, those who are left try once more, by gathering, which
    counts for whatever they all hold.
    """

    def __init__(
        self, decisions: DecisionLog, seats: Mapping[str, MemberState], *, alone: bool, gather: bool, timeout: float
    ) -> None:
        self._decisions, self._alone, self._gather, self._timeout = decisions, alone, gather, timeout
        self._seats = dict(sorted(seats.items()))
        self._news = asyncio.Event()
        for seat in self._seats.values():
            seat.news = self._news

    async def run(self) -> None:
        """Lead the group to its decision."""
        until = asyncio.get_running_loop().time() + self._timeout
        everybody = self._seats
        try:
            codec = next(iter(everybody.values())).ready.codec
            if fits(codec, len(everybody)) and not self._gather:
                if await self._attempt("allreduce", until):
                    return
                self._seats = {peer: seat for peer, seat in everybody.items() if not seat.gone}
                log.info("an all-reduce of %d failed: the %d who are left gather", len(everybody), len(self._seats))
            if len(self._seats) >= 2:
                await self._attempt("gather", until)
        finally:
            for seat in everybody.values():
                seat.line.close()
                seat.over.set()

    async def _attempt(self, reduction: Literal["gather", "allreduce"], until: float) -> bool:
        """Form the group, wait for the reports, decide; tell, unless another attempt is due. Whether a mean was decided on."""
        nonce = fresh_nonce()
        self._decisions.expect(nonce)
        mean, whole = 0, reduction == "allreduce"
        try:
            listed = encode_roster(seat.sealed for seat in self._seats.values())
            await self._tell_all(GroupFormed(nonce=nonce, reduction=reduction, alone=self._alone, members=listed))
            await self._reports(nonce, until, whole)
            mean = self._everybody(nonce) if whole else self._common(nonce)
        finally:
            decision = self._decisions.settle(nonce, mean)
        if mean or not whole:
            await self._tell_all(GroupReply(decision=decision))
        return mean != 0

    def _everybody(self, nonce: bytes) -> int:
        """All, if each has said that it has everything; one may have died since."""
        everybody = (1 << len(self._seats)) - 1
        return everybody if all(seat.held.get(nonce) == everybody for seat in self._seats.values()) else 0

    def _common(self, nonce: bytes) -> int:
        """What all who are left hold."""
        everybody = (1 << len(self._seats)) - 1
        held = {
            place: seat.held[nonce] & everybody | 1 << place
            for place, seat in enumerate(self._seats.values())
            if nonce in seat.held and not seat.gone
        }
        mean, takers = common(held)
        log.info("of a group of %d, %d are in the mean and %d take it", len(self._seats), _count(mean), _count(takers))
        return mean

    async def _reports(self, nonce: bytes, until: float, whole: bool) -> None:
        """Wait until everybody who is left has reported, or, if it takes all, anything failed; tell the others who is lost."""
        loop = asyncio.get_running_loop()
        everybody, lost = (1 << len(self._seats)) - 1, 0
        while True:
            self._news.clear()
            gone = sum(1 << place for place, seat in enumerate(self._seats.values()) if seat.gone and nonce not in seat.held)
            failed = gone or any(seat.held.get(nonce, everybody) != everybody for seat in self._seats.values())
            if whole and failed:
                return
            if gone != lost:  # told in any case, for the next round need not wait for them either
                lost = gone
                await self._tell_all(GroupLost(nonce=nonce, lost=lost))
            if all(seat.gone or nonce in seat.held for seat in self._seats.values()):
                return
            try:
                await asyncio.wait_for(self._news.wait(), until - loop.time())
            except asyncio.TimeoutError:
                return

    async def _tell_all(self, message: Message) -> None:
        """Say it to everybody who is still there; who cannot be told counts as gone."""
        await asyncio.gather(*(self._tell(seat, message) for seat in self._seats.values() if not seat.gone))

    async def _tell(self, seat: MemberState, message: Message) -> None:
        try:
            await seat.line.tell(message)
        except NetworkError as error:
            log.info("a member of a group is gone: %s", error)
            seat.leave()


def _count(places: int) -> int:
    return bin(places).count("1")
