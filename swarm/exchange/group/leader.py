"""The leader of a round: it collects who is ready, forms groups of them, and later decides once what counts.

A peer leads a round because of its rank in it (swarm/group_join.py), in its event loop alone: whether its own training has come to
that round does not matter, for its own contribution joins as any other's does, over a line to itself.

The group of a round is formed as soon as all members in view are ready; or ``quorum`` of them are, and ``grace`` seconds have
passed since; or the patience of one of them is over, and at least two are there. Who comes later is told the leader's next round.
Who is missing after a moment is knocked at: a peer that is gone, or sleeps, does not open, and is not waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.optim.exchange.pairing import order
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.exchange.context import ExchangeTimeouts, PeerContext
from shoal.swarm.exchange.contribution import BARRED
from shoal.swarm.exchange.group.channel import HeartbeatChannel
from shoal.swarm.exchange.group.commit import GroupCommit, MemberState
from shoal.swarm.exchange.group.decision_log import DecisionLog
from shoal.swarm.exchange.group.liveness import LivenessView
from shoal.swarm.exchange.group.roster import difference
from shoal.swarm.exchange.group.rounds import RoundTracker
from shoal.swarm.wire.envelope import ENVELOPE, unseal
from shoal.swarm.wire.group import MAX_GROUP, GroupReady, GroupReceipt, GroupReport

if TYPE_CHECKING:
    from shoal.swarm.p2p.stream import Stream

LEADER_PROTOCOL = "/shoal/group/1"
MAX_TABLES = 64  # rounds that are being collected for at once
MAX_SEATS = 256  # members waiting here, over all rounds
GLANCE_S = 0.25  # seconds between two looks at who is a member
KNOCK_S = 1.0  # seconds after which those who are missing are knocked at, and in which they have to open

log = logging.getLogger(__name__)


@dataclass
class PendingGroup:
    """Those who are ready for one round of one fragment."""

    seats: dict[str, MemberState] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class FormationRules:
    """When a leader forms groups, and how large they are."""

    quorum: int
    """Members that are enough; 0: all in view."""
    grace: float
    """Seconds that the others have once the quorum is there."""
    max_group: int
    """Members of the largest group."""
    gather: bool
    """Never all-reduce."""


class GroupLeader:
    """Serves whoever takes this node for the leader of a round. All coroutines run on the host's loop."""

    def __init__(
        self,
        context: PeerContext,
        timeouts: ExchangeTimeouts,
        rules: FormationRules,
        decisions: DecisionLog,
        rounds: RoundTracker,
        view: LivenessView,
    ) -> None:
        self._context, self._timeouts, self._rules = context, timeouts, rules
        self._decisions, self._rounds, self._view = decisions, rounds, view
        self._tables: dict[tuple[int, int], PendingGroup] = {}
        self._usual: dict[int, GroupReady] = {}
        """What this node's own contributions of each fragment look like."""
        self._tasks: set[asyncio.Task[None]] = set()

    def expect(self, mine: GroupReady) -> None:
        """What this node itself brings: others that differ are refused, even before its own training is there."""
        self._usual[mine.fragment] = mine

    async def serve(self, stream: Stream) -> None:
        """One member, from its ready message to the decision."""
        line = HeartbeatChannel(stream, self._timeouts.chunk)
        try:
            sealed = await stream.receive(GroupReady.LIMIT + ENVELOPE, self._timeouts.chunk)
            signer, ready = unseal(sealed, GroupReady)
            if signer != stream.peer_id:
                raise MessageError("another peer signed this ready message")
        except MessageError as error:
            await line.tell(GroupReceipt(verdict="refuse", reason=str(error), round=self._rounds.next_round))
            return
        receipt = self._judge(signer, ready)
        if receipt.verdict != "noted":
            await line.tell(receipt)
            return
        until = asyncio.get_running_loop().time() + min(ready.patience, self._timeouts.wait)
        seat = MemberState(line, sealed, ready, until)
        table = self._seat(signer, seat)
        try:
            await line.tell(receipt)
            await self._attend(seat)
        finally:
            seat.leave()
            if table.seats.get(signer) is seat:
                del table.seats[signer]
            table.changed.set()

    def _judge(self, peer: str, ready: GroupReady) -> GroupReceipt:
        def say(verdict: str, reason: str = "", round: int = ready.round) -> GroupReceipt:
            return GroupReceipt.model_validate({"verdict": verdict, "reason": reason, "round": round})

        if self._view.barred([peer]):  # it is no member here, and must not be taken for a newcomer
            return say("refuse", BARRED)
        if peer != self._context.me and peer not in self._view.members():
            self._context.look()
        if ready.swarm != self._context.swarm:
            return say("refuse", f"this node is in swarm {self._context.swarm}, the contribution is for {ready.swarm}")
        if ready.model != self._context.model:
            return say("refuse", "the models differ in the shapes or types of their parameters")
        self._view.hear(peer)
        instead = self._rounds.instead(ready.round, ready.fragment)
        if instead is not None:
            return say("passed", round=instead)
        leader = self._rounds.leader(ready.round, ready.fragment)
        if leader not in (None, self._context.me) and peer != self._context.me:
            return self._elsewhere(ready.round, leader)
        table = self._tables.get((ready.round, ready.fragment))
        usual = self._usual.get(ready.fragment)
        if usual is not None:
            usual = usual.model_copy(update={"round": ready.round})
        elif table is not None and table.seats:
            usual = next(iter(table.seats.values())).ready
        reason = None if usual is None else difference(usual, ready)
        if reason is not None:
            return say("refuse", reason)
        if table is not None and peer in table.seats:
            return say("busy", "this peer is waiting here already")
        waiting = sum(len(other.seats) for other in self._tables.values())
        if waiting >= MAX_SEATS or (table is None and len(self._tables) >= MAX_TABLES):
            return say("busy", "too many wait for this node")
        return say("noted")

    def _elsewhere(self, round: int, leader: str | None) -> GroupReceipt:
        addresses = self._view.addresses(leader or "")
        return GroupReceipt(verdict="elsewhere", round=round, leader=leader, addresses=tuple(addresses))

    async def leave(self, round: int, fragment: int, leader: str) -> None:
        """This node itself has found its place at another leader: those who wait here had better go there too."""
        table = self._tables.get((round, fragment))
        for peer, seat in list(table.seats.items()) if table is not None else ():
            if peer != leader:
                with contextlib.suppress(NetworkError):  # it is gone
                    await seat.line.tell(self._elsewhere(round, leader))
                self._dismiss(seat)

    def _dismiss(self, seat: MemberState) -> None:
        seat.line.close()
        seat.over.set()

    def _seat(self, peer: str, seat: MemberState) -> PendingGroup:
        key = (seat.ready.round, seat.ready.fragment)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = PendingGroup()
            self._start(self._collect(key, table))
        table.seats[peer] = seat
        table.changed.set()
        return table

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attend(self, seat: MemberState) -> None:
        """Hear what the member says, until its group is over or it is gone."""
        longest = seat.until + self._timeouts.exchange + 8 * self._timeouts.chunk
        listening = asyncio.ensure_future(self._listen(seat, longest))
        over = asyncio.ensure_future(seat.over.wait())
        try:
            await asyncio.wait({listening, over}, return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                listening.result()
        except (NetworkError, MessageError) as error:
            log.info("a member of a group is gone: %s", error)
        finally:
            listening.cancel()
            over.cancel()
            await asyncio.wait({listening, over})

    async def _listen(self, seat: MemberState, until: float) -> None:
        while True:
            seat.report(await seat.line.hear(until, GroupReport))

    async def _collect(self, key: tuple[int, int], table: PendingGroup) -> None:
        """Wait until the group of a round can be formed, and let it run."""
        loop = asyncio.get_running_loop()
        enough_since: float | None = None
        knocking = asyncio.ensure_future(self._knock(table))
        try:
            while table.seats:
                for peer in self._view.barred(table.seats):  # since it came
                    self._dismiss(table.seats.pop(peer))
                if not table.seats:
                    break
                now = loop.time()
                here = set(table.seats)
                view = self._view.expected()
                if len(here) < max(self._rules.quorum or len(view), 2):
                    enough_since = None
                elif enough_since is None:
                    enough_since = now
                expired = min(seat.until for seat in table.seats.values())
                forming = (
                    expired if enough_since is None or self._rules.quorum == 0 else min(expired, enough_since + self._rules.grace)
                )
                if here >= view and len(here) >= 2:
                    forming = now
                if now >= forming:
                    break
                table.changed.clear()
                try:
                    await asyncio.wait_for(table.changed.wait(), min(forming - now, GLANCE_S))
                except asyncio.TimeoutError:
                    continue
        finally:
            knocking.cancel()
            del self._tables[key]
        seats = table.seats
        if len(seats) < 2:
            for seat in seats.values():  # its patience is over and nobody else came
                self._dismiss(seat)
            return
        self._rounds.formed(*key)
        self._view.miss(self._view.here() - set(seats))
        groups = partition_into_groups(self._context.seed, key[0], seats, self._rules.max_group)
        for members in groups:
            group = {peer: seats[peer] for peer in members}
            verdict = GroupCommit(
                self._decisions, group, alone=len(groups) == 1, gather=self._rules.gather, timeout=self._timeouts.exchange
            )
            self._start(verdict.run())

    async def _knock(self, table: PendingGroup) -> None:
        """Once, at those whom the group would wait for."""
        await asyncio.sleep(KNOCK_S)
        missing = sorted(self._view.expected() - set(table.seats) - {self._context.me})[:MAX_GROUP]
        await asyncio.gather(*(self._knock_at(peer) for peer in missing))
        table.changed.set()

    async def _knock_at(self, peer: str) -> None:
        try:
            addresses = self._view.addresses(peer)
            (await self._context.host.open(peer, LEADER_PROTOCOL, addresses=addresses, timeout=KNOCK_S)).close()
        except NetworkError as error:
            log.info("a peer that is missing is not waited for: %s", error)
            self._view.miss([peer])


def partition_into_groups(seed: int, round: int, peers: Iterable[str], largest: int) -> list[tuple[str, ...]]:
    """The peers in as few groups of at most ``largest`` as possible, nearly equal in size, the same for all who know the peers.

    Nobody is left alone: an odd number of peers in pairs leaves one group of three. ValueError unless ``largest`` is 2 or more.
    """
    if largest < 2:
        raise ValueError(f"a group needs at least two peers, got at most {largest}")
    ordered = order(seed, round, peers)
    count = max(1, min(-(-len(ordered) // largest), len(ordered) // 2))
    bounds = [number * len(ordered) // count for number in range(count + 1)]
    return [tuple(ordered[start:end]) for start, end in itertools.pairwise(bounds)]
