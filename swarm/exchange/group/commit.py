"""The way from a formed group to its decision: the leader collects each member's report, decides once, and informs all.

The decision, as the leader signed it, is kept for members that lost their channel to it and ask again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from shoal.optim.exchange.pairing import common
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.exchange.group.allreduce import fits
from shoal.swarm.exchange.group.channel import HeartbeatChannel
from shoal.swarm.exchange.group.roster import encode_roster
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.envelope import Message, fresh_nonce, pack, seal, unpack, unseal
from shoal.swarm.wire.group import GroupDecision, GroupFormed, GroupLost, GroupQuestion, GroupReady, GroupReply, GroupReport

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host
    from shoal.swarm.p2p.stream import Stream

DECISION_PROTOCOL = "/shoal/decision/1"
REMEMBERED = 1024
ASK_S = 1.0  # seconds that a member in doubt spends on asking

log = logging.getLogger(__name__)


class DecisionLog:
    """The decisions that this node made as a leader or received as a member. All coroutines run on the host's loop."""

    def __init__(self, host: Host, identity: Identity, swarm: str) -> None:
        self._host, self._identity, self._swarm = host, identity, swarm
        self._sealed: OrderedDict[bytes, bytes] = OrderedDict()
        self._pending: dict[bytes, asyncio.Event] = {}
        host.serve(DECISION_PROTOCOL, self._answer)

    def expect(self, nonce: bytes) -> None:
        """Note that this node leads the group and will decide: a peer that asks earlier waits for it."""
        self._pending[nonce] = asyncio.Event()

    def settle(self, nonce: bytes, mean: int) -> bytes:
        if nonce not in self._sealed:
            self.remember(nonce, seal(GroupDecision(swarm=self._swarm, nonce=nonce, mean=mean), self._identity))
        return self._sealed[nonce]

    def remember(self, nonce: bytes, sealed: bytes) -> None:
        """Remember a decision, to pass it on."""
        self._sealed[nonce] = sealed
        pending = self._pending.pop(nonce, None)
        if pending is not None:
            pending.set()
        while len(self._sealed) > REMEMBERED:
            self._sealed.popitem(last=False)

    def open(self, sealed: bytes | None, leader: str, nonce: bytes) -> int | None:
        """Return the contributions in the mean, as bits, if this is the leader's decision on the group. Raises MessageError."""
        if sealed is None:
            return None
        signer, decision = unseal(sealed, GroupDecision)
        if signer != leader or decision.nonce != nonce or decision.swarm != self._swarm:
            raise MessageError(f"a decision was refused: it is not the one of peer {short(leader)} on this group.")
        return decision.mean

    async def ask(self, leader: str, nonce: bytes, peers: Iterable[tuple[str, Sequence[str]]]) -> bytes | None:
        """Return the decision from any of ``peers`` (peer id, addresses) that has it; None if none of them does within a second."""
        asking = [asyncio.ensure_future(self._asked(peer, addresses, leader, nonce)) for peer, addresses in peers]
        try:
            for answer in asyncio.as_completed(asking, timeout=ASK_S):
                sealed = await answer
                if sealed is not None:
                    return sealed
        except asyncio.TimeoutError:
            pass  # no remaining member knows of a decision
        finally:
            for question in asking:
                question.cancel()
        log.warning("the channel to the leader of a group broke and no member knows its decision: going on without the group")
        return None

    async def _asked(self, peer: str, addresses: Sequence[str], leader: str, nonce: bytes) -> bytes | None:
        try:
            stream = await self._host.open(peer, DECISION_PROTOCOL, addresses=addresses, timeout=ASK_S)
            try:
                await stream.send(pack(GroupQuestion(nonce=nonce)), ASK_S)
                reply = unpack(await stream.receive(GroupReply.LIMIT, ASK_S), GroupReply)
                self.open(reply.decision, leader, nonce)
                return reply.decision
            finally:
                stream.close()
        except (NetworkError, MessageError) as error:
            log.debug("peer %s sent no decision: %s", short(peer), error)
            return None

    async def _answer(self, stream: Stream) -> None:
        question = unpack(await stream.receive(GroupQuestion.LIMIT, ASK_S), GroupQuestion)
        pending = self._pending.get(question.nonce)
        if pending is not None:
            try:
                await asyncio.wait_for(pending.wait(), ASK_S)
            except asyncio.TimeoutError:
                log.debug("a peer asked for a decision that is not made yet")
        await stream.send(pack(GroupReply(decision=self._sealed.get(question.nonce))), ASK_S)


def moved(nbytes: int, members: int) -> int:
    """Return the bytes each way that a member of a group moves for a contribution of ``nbytes``, whichever way it is reduced."""
    return nbytes * max(members - 1, 2)  # an all-reduce moves twice the contribution at most


class MemberState:
    """One member as its leader sees it: its channel, and its messages so far."""

    def __init__(self, channel: HeartbeatChannel, sealed: bytes, ready: GroupReady, until: float) -> None:
        self.channel, self.sealed, self.ready = channel, sealed, ready
        self.until = until
        """The loop's time at which its patience is over."""
        self.over = asyncio.Event()
        """Set when no more messages follow."""
        self.gone = False
        self.held: dict[bytes, int] = {}
        """Its reports, by the nonce of the group."""
        self.changed = asyncio.Event()
        """Set at each report and departure. Replaced by the event of its group."""

    def report(self, report: GroupReport) -> None:
        """Record what the member holds. The first report counts; those about groups it is not asked about are useless."""
        if len(self.held) < 2:
            self.held.setdefault(report.nonce, report.held)
        self.changed.set()

    def leave(self) -> None:
        """Note that its channel has ended."""
        self.gone = True
        self.changed.set()


class GroupCommit:
    """One group as its leader ``me`` sees it. ``members``: by peer id; ``alone``: there is no other group; ``timeout``: seconds
    that it has in any case. While the leader's own part of the reduction moves, it goes on for up to ``longest`` seconds, and
    then the others have as long again as that part took, because their links may be slower; once the leader's training waits
    (``needed``), no more than that, or ``again`` seconds if they are more. Nobody that is ``passed_over`` is waited for.

    An all-reduce counts if every member has every part of it. If not, those who are left try once more, by gathering, which
    counts for whatever they all hold.
    """

    def __init__(
        self,
        decisions: DecisionLog,
        members: Mapping[str, MemberState],
        *,
        alone: bool,
        gather: bool,
        timeout: float,
        me: str = "",
        longest: float = 0.0,
        again: float = math.inf,
        needed: asyncio.Event | None = None,
        passed_over: Callable[[str], bool] = lambda peer: False,
    ) -> None:
        self._decisions, self._alone, self._gather, self._timeout = decisions, alone, gather, timeout
        self._me, self._longest, self._began = me, longest, 0.0
        self._again, self._needed, self._passed_over = again, needed or asyncio.Event(), passed_over
        self._members = dict(sorted(members.items()))
        self._changed = asyncio.Event()
        for member in self._members.values():
            member.changed = self._changed

    async def run(self) -> None:
        """Lead the group to its decision."""
        self._began = asyncio.get_running_loop().time()
        until = self._began + self._timeout
        everybody = self._members
        waiting = asyncio.ensure_future(self._needed.wait())
        waiting.add_done_callback(lambda _: self._changed.set())
        try:
            codec = next(iter(everybody.values())).ready.codec
            if fits(codec, len(everybody)) and not self._gather:
                if await self._try_reduction("allreduce", until):
                    return
                self._members = {p: member for p, member in everybody.items() if not (member.gone or self._passed_over(p))}
                log.info("an all-reduce of %d failed: the remaining %d gather", len(everybody), len(self._members))
            if len(self._members) >= 2:
                await self._try_reduction("gather", until)
        finally:
            waiting.cancel()
            for member in everybody.values():
                member.channel.close()
                member.over.set()

    async def _try_reduction(self, reduction: Literal["gather", "allreduce"], until: float) -> bool:
        """Form the group, wait for the reports and decide; inform the members unless another attempt is due. Return whether
        there is a mean.
        """
        nonce = fresh_nonce()
        self._decisions.expect(nonce)
        mean, whole = 0, reduction == "allreduce"
        try:
            listed = encode_roster(member.sealed for member in self._members.values())
            await self._send_all(GroupFormed(nonce=nonce, reduction=reduction, alone=self._alone, members=listed))
            await self._reports(nonce, until, whole)
            mean = self._everybody(nonce) if whole else self._common(nonce)
        finally:
            decision = self._decisions.settle(nonce, mean)
        if mean or not whole:
            await self._send_all(GroupReply(decision=decision))
        return mean != 0

    def _everybody(self, nonce: bytes) -> int:
        """Return all members, as bits, if each reported that it holds everything (one may have died since); else 0."""
        everybody = (1 << len(self._members)) - 1
        return everybody if all(member.held.get(nonce) == everybody for member in self._members.values()) else 0

    def _common(self, nonce: bytes) -> int:
        """Return the contributions that all remaining members hold, as bits."""
        everybody = (1 << len(self._members)) - 1
        held = {
            place: member.held[nonce] & everybody | 1 << place
            for place, member in enumerate(self._members.values())
            if nonce in member.held and not member.gone
        }
        mean, takers = common(held)
        log.info("of a group of %d, %d are in the mean and %d take it", len(self._members), _count(mean), _count(takers))
        return mean

    async def _reports(self, nonce: bytes, until: float, whole: bool) -> None:
        """Wait until every remaining member has reported or, if all are needed, anything failed; send which members are lost."""
        loop = asyncio.get_running_loop()
        everybody, lost = (1 << len(self._members)) - 1, 0
        own, deadline, took = self._members.get(self._me), until, 0.0
        if own is not None:
            deadline = max(until, self._began + self._longest)
        while True:
            self._changed.clear()
            if own is not None and (own.gone or nonce in own.held):
                took, own = loop.time() - self._began, None
                deadline = max(until, loop.time() + took)
            if own is None and took and self._needed.is_set():
                deadline, took = min(deadline, loop.time() + max(self._again, took)), 0.0
            gone = sum(
                1 << place for place, member in enumerate(self._members.values()) if member.gone and nonce not in member.held
            )
            failed = gone or any(member.held.get(nonce, everybody) != everybody for member in self._members.values())
            if whole and failed:
                return
            if gone != lost:  # sent in any case: the next round need not wait for them either
                lost = gone
                await self._send_all(GroupLost(nonce=nonce, lost=lost))
            if all(member.gone or nonce in member.held or self._passed_over(p) for p, member in self._members.items()):
                return
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - loop.time())
            except asyncio.TimeoutError:
                return

    async def _send_all(self, message: Message) -> None:
        """Send a message to every remaining member; one that cannot be reached counts as gone."""
        await asyncio.gather(*(self._send(member, message) for member in self._members.values() if not member.gone))

    async def _send(self, member: MemberState, message: Message) -> None:
        try:
            await member.channel.send(message)
        except NetworkError as error:
            log.info("a member of a group is gone: %s", error)
            member.leave()


def _count(places: int) -> int:
    return bin(places).count("1")
