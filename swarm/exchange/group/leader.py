"""The leader of a round: it collects the peers that are ready, forms groups of them, and lets each
group decide.

A ready message is answered, and so is the leader's question where a missing peer is (a probe):

    noted       you are waited for, or I may still come
    passed      that round is over here; go on to ``round``
    elsewhere   I wait at another leader, whose addresses these are
    busy        I have ended; too many wait here, or you do already; groups waited for you in vain
    refuse      our contributions differ in this, or you are barred

What a group does once it is formed: `shoal.swarm.exchange.group.commit`.

For whom a leader waits, and what two leaders of one round do: docs/internals.md, "For whom a leader
waits".
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.optim.exchange.pairing import order
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.contribution import BARRED, ENDED
from shoal.swarm.exchange.group.commit import GroupCommit, MemberState, moved
from shoal.swarm.exchange.group.deadline import GroupDeadline
from shoal.swarm.exchange.group.decisions import DecisionLog
from shoal.swarm.exchange.group.roster import HeartbeatChannel, LivenessView, difference
from shoal.swarm.exchange.round_tracker import RoundTracker
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.p2p.stream_places import StreamPlaces
from shoal.swarm.p2p.tasks import first_of, running
from shoal.swarm.wire.envelope import ENVELOPE, seal, unpack, unseal
from shoal.swarm.wire.messages import (
    MAX_GROUP,
    GroupProbe,
    GroupReady,
    GroupReceipt,
    GroupReport,
)

log = logging.getLogger(__name__)


LEADER_PROTOCOL = "/shoal/group/1"
MAX_PENDING = 64  # rounds for which members are collected at once
MAX_WAITING = 256  # members waiting here, over all rounds
# rounds of a fragment for which one peer waits: the next, while the end of its last stream is not
# noticed
MAX_ROUNDS = 2
CROWDED = "too many wait for this node"
MISSED = "groups waited in vain for what this peer had to send"
LOOK_S = 0.25  # seconds between two looks at the members
PROBE_S = 1.0  # seconds after which missing members are probed


@dataclass
class PendingGroup:
    """The members that are ready for one round of one fragment."""

    members: dict[str, MemberState] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    probed: set[str] = field(default_factory=set)
    """Missing members that answered a probe: who was on its way would have come before."""
    gone: set[str] = field(default_factory=set)
    """Missing members that could not be reached."""
    passed: dict[str, GroupReceipt] = field(default_factory=dict)
    """Missing members that are through with the round -> what they said."""


@dataclass(frozen=True)
class OwnContribution:
    """This node's own contribution of a fragment, the last that was announced."""

    ready: GroupReady
    """Its form, from which no member may differ."""
    needed: asyncio.Event
    """Set once this node's training waits for the outcome."""
    over: asyncio.Event
    """Set once its round is over."""


class GroupLeader:
    """The server of members that take this node for the leader of a round.

    All coroutines run on the host's loop. ``max_group``:
    members of the largest group; ``gather``: never all-reduce; ``blame``: called with round and
    fragment, and a member that lied about averages.
    """

    def __init__(
        self,
        context: PeerContext,
        decisions: DecisionLog,
        rounds: RoundTracker,
        view: LivenessView,
        time: GroupDeadline,
        max_group: int,
        gather: bool,
        protocol: str = LEADER_PROTOCOL,
        blame: Callable[[tuple[int, int], str], None] = lambda key, peer: None,
    ) -> None:
        self._protocol = protocol
        self.blame = blame
        self.context, self.me, self.time, self.timeouts = context, context.me, time, time.timeouts
        self._max_group, self.gather = max_group, gather
        self.decisions, self._rounds, self.view = decisions, rounds, view
        self._pending: dict[tuple[int, int], PendingGroup] = {}
        self._own: dict[int, OwnContribution] = {}
        """By fragment."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._places = StreamPlaces(MAX_WAITING)

    def expect(self, mine: GroupReady, needed: asyncio.Event, over: asyncio.Event) -> None:
        """Note this node's own contribution: others that differ are refused, even before its own
        training is there. ``needed``: set once its training waits for the outcome; ``over``: once
        its round is over.
        """
        self._own[mine.fragment] = OwnContribution(mine, needed, over)

    def needed(self, fragment: int) -> asyncio.Event:
        """Return the event that is set once this node's training waits for ``fragment``; it never
        is if nothing was contributed.
        """
        own = self._own.get(fragment)
        return asyncio.Event() if own is None else own.needed

    async def serve(self, stream: Stream) -> None:
        """Serve one member, from its ready message to the decision."""
        channel = HeartbeatChannel(stream, self.timeouts.chunk)
        try:
            sealed = await stream.receive(GroupReady.LIMIT + ENVELOPE, self.timeouts.chunk)
            signer, message = unseal(sealed, GroupReady, GroupProbe)
            if signer != stream.peer_id:
                raise MessageError("another peer signed this message")
        except MessageError as error:
            await channel.send(
                GroupReceipt(verdict="refuse", reason=str(error), round=self._rounds.next_round)
            )
            return
        if isinstance(message, GroupProbe):
            await channel.send(self._standing(signer, message))
            return
        assert isinstance(message, GroupReady)
        ready = message
        receipt = self._judge(signer, ready)
        if receipt.verdict == "noted" and signer != self.me and not self._places.take(stream):
            receipt = GroupReceipt(verdict="busy", reason=CROWDED, round=ready.round)
        if receipt.verdict != "noted":
            await channel.send(receipt)
            return
        until = asyncio.get_running_loop().time() + self._patience(signer, ready)
        member = MemberState(channel, sealed, ready, until)
        pending = self._admit(signer, member)
        try:
            await channel.send(receipt)
            await self._attend(member)
        finally:
            self._places.free(stream)
            member.leave()
            if pending.members.get(signer) is member:
                del pending.members[signer]
            pending.changed.set()

    def _patience(self, peer: str, ready: GroupReady) -> float:
        """Return the seconds for which ``peer`` waits for its group: what it states, within this
        node's own. A stranger cannot state so few that the others are too late.
        """
        least = 0.0 if self._is_known(peer) else self.time.forming(ready.fragment)
        return min(max(ready.patience, least), self.time.collecting(ready.fragment))

    def _is_known(self, peer: str) -> bool:
        """Return whether this node is ``peer``, or has exchanged with it."""
        return peer == self.me or self.view.evidence.knows(peer)

    def _judge(self, peer: str, ready: GroupReady) -> GroupReceipt:
        """Return the answer to a ready message."""
        refusal = self._refusal(peer, ready)
        if refusal is not None:
            return GroupReceipt(verdict="refuse", reason=refusal, round=ready.round)
        self.view.mark_awake(peer)
        self.view.evidence.heard(peer, ready.round)
        if self.view.has_ended:
            return GroupReceipt(verdict="busy", reason=ENDED, round=ready.round)
        instead = self._rounds.instead(ready.round, ready.fragment)
        if instead is not None:
            if peer != self.me:
                self.view.evidence.called(peer, ready.round)
            return GroupReceipt(verdict="passed", round=instead)
        leader = self._rounds.leader(ready.round, ready.fragment)
        if leader not in (None, self.me) and peer != self.me:
            return self._elsewhere(ready.round, leader)
        if self.view.attendance.is_turned_away(peer, ready.round):
            return GroupReceipt(verdict="busy", reason=MISSED, round=ready.round)
        reason = self._difference(ready)
        if reason is not None:
            return GroupReceipt(verdict="refuse", reason=reason, round=ready.round)
        crowded = self._make_room(peer, ready)
        if crowded is not None:
            return GroupReceipt(verdict="busy", reason=crowded, round=ready.round)
        return GroupReceipt(verdict="noted", round=ready.round)

    def _refusal(self, peer: str, ready: GroupReady) -> str | None:
        """Return why nothing of ``peer`` is taken here, in words, or None."""
        if self.view.barred([peer]):  # it is no member here, and must not be taken for a newcomer
            return BARRED
        if peer != self.me and peer not in self.view.members():
            self.context.look()
        if ready.swarm != self.context.swarm:
            here = self.context.swarm
            return f"this node is in swarm {here}, the contribution is for {ready.swarm}"
        if ready.model != self.context.model:
            return "the models differ in the names, shapes or types of their parameters"
        fragments = self._rounds.fragments
        if ready.fragment > fragments:  # one beyond the schedule's: the last average
            return (
                f"there are {fragments} fragments here, the contribution is of number "
                f"{ready.fragment}"
            )
        return None

    def _difference(self, ready: GroupReady) -> str | None:
        """Return in what a contribution differs from this node's, or from those that wait here."""
        pending = self._pending.get((ready.round, ready.fragment))
        own = self._own.get(ready.fragment)
        if own is not None:
            return difference(own.ready.model_copy(update={"round": ready.round}), ready)
        if pending is not None and pending.members:
            return difference(next(iter(pending.members.values())).ready, ready)
        return None

    def _make_room(self, peer: str, ready: GroupReady) -> str | None:
        """Make room for one more member; return why there is none, in words, or None."""
        pending = self._pending.get((ready.round, ready.fragment))
        rounds = sum(
            peer in other.members
            for (_, fragment), other in self._pending.items()
            if fragment == ready.fragment
        )
        if (pending is not None and peer in pending.members) or rounds >= MAX_ROUNDS:
            return "this peer is waiting here already"
        if pending is None and len(self._pending) >= MAX_PENDING:
            last = max(self._pending)  # nobody but a stranger is far ahead
            if last[0] <= ready.round:
                return CROWDED
            for member in self._pending[last].members.values():
                member.dismiss()
        return None

    def _standing(self, peer: str, probe: GroupProbe) -> GroupReceipt:
        """Return where this node is in the round that ``peer`` leads."""
        round = probe.round
        fragment = probe.fragment
        if self.view.barred([peer]):
            return GroupReceipt(verdict="refuse", reason=BARRED, round=round)
        if probe.swarm != self.context.swarm:
            reason = f"this node is in swarm {self.context.swarm}"
            return GroupReceipt(verdict="refuse", reason=reason, round=round)
        if self.view.has_ended:
            return GroupReceipt(verdict="busy", reason=ENDED, round=round)
        instead = self._rounds.instead(round, fragment)
        if instead is not None:
            return GroupReceipt(verdict="passed", round=instead)
        leader = self._rounds.leader(round, fragment)
        if leader is not None:
            return self._elsewhere(round, leader)
        return GroupReceipt(verdict="noted", round=round)

    def _elsewhere(self, round: int, leader: str | None) -> GroupReceipt:
        addresses = self.view.addresses(leader or "")
        return GroupReceipt(
            verdict="elsewhere", round=round, leader=leader, addresses=tuple(addresses)
        )

    async def leave(self, round: int, fragment: int, leader: str) -> None:
        """Send the members that wait here to the leader at which this node itself waits."""
        pending = self._pending.get((round, fragment))
        if pending is not None:
            await self._send_away(pending, self._elsewhere(round, leader))

    async def _send_away(self, pending: PendingGroup, receipt: GroupReceipt) -> None:
        """Let the members that wait here go where ``receipt`` says.

        Of two nodes that wait at each other the first in the order goes back to lead itself.
        """
        leader = receipt.leader
        for peer, member in list(pending.members.items()):
            if peer != leader or self._is_behind(leader, receipt.round):
                with contextlib.suppress(NetworkError):  # it is gone
                    await member.channel.send(receipt)
                member.dismiss()

    def _is_behind(self, leader: str, round: int) -> bool:
        """Return whether ``leader`` comes before this node in the order of the round."""
        return order(self.context.seed, round, [leader, self.me])[0] == leader

    def _admit(self, peer: str, member: MemberState) -> PendingGroup:
        key = (member.ready.round, member.ready.fragment)
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = PendingGroup()
            self.start(self._collect(key, pending))
        pending.members[peer] = member
        pending.changed.set()
        return pending

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin ``work`` on the loop, which knows a task only as long as somebody holds it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):  # this node's own, which nobody else would see
            self.context.host.internal_errors.caught("exchange", error)

    async def _attend(self, member: MemberState) -> None:
        """Receive the member's reports until its group is over or it is gone."""
        most = moved(member.ready.nbytes, self._max_group + 1)
        longest = member.until + self.timeouts.longest(most) + 8 * self.timeouts.chunk
        try:
            async with running(self._listen(member, longest), member.over.wait()) as (
                listening,
                over,
            ):
                await first_of(listening, over)
                if listening.done():
                    listening.result()
        except (NetworkError, MessageError) as error:
            log.info("a member of a group is gone: %s", error)

    async def _listen(self, member: MemberState, until: float) -> None:
        while True:
            member.report(await member.channel.receive(until, GroupReport))

    async def _collect(self, key: tuple[int, int], pending: PendingGroup) -> None:
        """Wait until the group of a round can be formed, and let it run."""
        looking = [
            asyncio.ensure_future(self._find_absent(key, pending)),
            asyncio.ensure_future(self._probe_missing(key, pending)),
        ]
        try:
            await self._wait_for_members(key, pending)
        finally:
            for task in looking:
                task.cancel()
            del self._pending[key]
        if len(pending.members) < 2 or self.view.has_ended:
            # Patience is over and no other member came, none is left, or this node takes no others.
            await self._let_go(key, pending)
        else:
            self._form(key, pending.members)

    async def _wait_for_members(self, key: tuple[int, int], pending: PendingGroup) -> None:
        """Return once all that are awaited are here, the wait is over, or nobody else can come."""
        loop = asyncio.get_running_loop()
        two_since = loop.time()
        while pending.members and not self.view.has_ended:
            for peer in self.view.barred(pending.members):  # barred since it came
                pending.members.pop(peer).dismiss()
            now, here = loop.time(), set(pending.members)
            if not here:
                return
            # all others have left since it came, or have ended this round
            if len(here) == 1 and here >= self._possible(key, pending):
                return
            awaited = self._awaited(key, pending)
            expired = min(member.until for member in pending.members.values())
            if len(here) < 2 or self._is_early(*key):
                two_since = now
            expired = min(expired, two_since + self.time.forming(key[1]))
            forms_at = now if here >= awaited and len(here) >= 2 else expired
            if now >= forms_at:
                if now >= expired:
                    self._go_on_without(awaited - here, here, key)
                return
            pending.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(pending.changed.wait(), min(forms_at - now, LOOK_S))

    async def _let_go(self, key: tuple[int, int], pending: PendingGroup) -> None:
        """Let those that wait here go: the one that is left to where the others are, if they said
        so.
        """
        round, _ = key
        if self.view.has_ended:
            ended = GroupReceipt(verdict="busy", reason=ENDED, round=round)
            await self._send_away(pending, ended)
        elif pending.passed and set(pending.members) >= self._possible(key, pending):
            earliest = min(pending.passed.values(), key=lambda receipt: receipt.round)
            await self._send_away(pending, earliest)
        for member in pending.members.values():
            member.dismiss()

    def _form(self, key: tuple[int, int], members: Mapping[str, MemberState]) -> None:
        """Deal the members into groups, and let each run."""
        # Else two free keys could end every round to come, before anybody else is there.
        if any(map(self._is_known, members)) or not self.view.evidence.partners:
            self._rounds.formed(*key)
            self.view.mark_absent(self.view.here() - set(members))
        groups = partition_into_groups(self.context.seed, key[0], members, self._max_group)
        for names in groups:
            group = {peer: members[peer] for peer in names}
            self.start(GroupCommit(self, key, group, alone=len(groups) == 1).run())

    def _is_early(self, round: int, fragment: int) -> bool:
        """Return whether this node's own training goes on without the outcome of the round, or is
        on its way to it.
        """
        own = self._own.get(fragment)
        if not self.time.waits_until_needed(fragment) or own is None or self._is_held():
            return False
        return own.ready.round < round or (own.ready.round == round and not own.needed.is_set())

    def _is_held(self) -> bool:
        """Return whether this node's training waits for the outcome of a round."""
        return any(own.needed.is_set() and not own.over.is_set() for own in self._own.values())

    def _go_on_without(self, late: set[str], here: set[str], key: tuple[int, int]) -> None:
        """Note that the wait of a round for those who are ``late`` is over."""
        self.view.mark_late(here, *key)
        if late:  # none where one waits alone
            names = ", ".join(short(peer) for peer in sorted(late))
            log.info("round %d goes on without %s, which did not come", key[0], names)

    def _possible(self, key: tuple[int, int], pending: PendingGroup) -> set[str]:
        """Return the peers for which one member alone still waits: those that may come, or of the
        last group, once any of them has said that it is through with the round.
        """
        hoped, roster = self._hoped(key[0], pending), self.view.roster(*key)
        return hoped & roster if roster and pending.passed else hoped

    def _hoped(self, round: int, pending: PendingGroup) -> set[str]:
        """Return the peers that may still come to the round."""
        return self.view.hoped(round) - pending.passed.keys() - pending.gone

    def _awaited(self, key: tuple[int, int], pending: PendingGroup) -> set[str]:
        """Return the peers for which the group waits."""
        return self.view.awaited(*key, pending.probed) - pending.passed.keys()

    async def _find_absent(self, key: tuple[int, int], pending: PendingGroup) -> None:
        """Ask the missing members soon: one that died is not waited for. Any other is on its way,
        and is asked again when it should have come.
        """
        await asyncio.sleep(LOOK_S)
        missing = self._missing(key, pending)
        await asyncio.gather(*(self._ask(peer, key, pending) for peer in missing))

    async def _probe_missing(self, key: tuple[int, int], pending: PendingGroup) -> None:
        """Ask the missing members where they are, ever more rarely, and look up how far they
        are.
        """
        pause_s = PROBE_S
        while self._pending.get(key) is pending:  # wait_for of Python 3.11 may lose a cancellation
            await asyncio.sleep(pause_s)
            pause_s *= 2
            missing = self._hoped(key[0], pending) - set(pending.members)
            if self.me in missing:  # it may have moved on, and others have waited here since
                receipt = self._standing(self.me, self._question(key))
                await self._follow(self.me, receipt, key, pending)
            asked = self._missing(key, pending)
            if asked:
                self.context.look()
            await asyncio.gather(*(self._probe(peer, key, pending) for peer in asked))

    def _missing(self, key: tuple[int, int], pending: PendingGroup) -> list[str]:
        """Return the other peers that may still come to the round, as many as are probed."""
        missing = self._hoped(key[0], pending) - set(pending.members) - {self.me}
        return sorted(missing)[:MAX_GROUP]

    def _question(self, key: tuple[int, int]) -> GroupProbe:
        return GroupProbe(swarm=self.context.swarm, round=key[0], fragment=key[1])

    async def _probe(self, peer: str, key: tuple[int, int], pending: PendingGroup) -> None:
        receipt = await self._ask(peer, key, pending, pending.probed)
        if receipt is not None:
            await self._follow(peer, receipt, key, pending)
        pending.changed.set()

    async def _ask(
        self,
        peer: str,
        key: tuple[int, int],
        pending: PendingGroup,
        reached: set[str] | None = None,
    ) -> GroupReceipt | None:
        """Return where a missing member says that it is; add it to those ``reached``, or note that
        it cannot be.
        """
        seconds = self.timeouts.probe(self.timeouts.wait)
        late_at = asyncio.get_running_loop().time() + seconds
        try:
            stream = await self.context.host.open(
                peer, self._protocol, addresses=self.view.addresses(peer), timeout=seconds
            )
        except NetworkError as error:
            if not self.view.is_absent(peer):  # it is asked in each round until its record expires
                log.info("a missing peer is not waited for: %s", error)
            self.view.mark_absent([peer])
            if asyncio.get_running_loop().time() < late_at:  # else it may only be slow
                pending.gone.add(peer)
            pending.changed.set()
            return None
        if reached is not None:
            reached.add(peer)
        with contextlib.closing(stream):
            try:
                sealed = seal(self._question(key), self.context.identity)
                await stream.send(sealed, seconds)
                receipt = unpack(await stream.receive(GroupReceipt.LIMIT, seconds), GroupReceipt)
            except (NetworkError, MessageError) as error:
                log.info("a missing peer does not say where it is: %s", error)
                return None
        if receipt.verdict == "busy":  # it is in no more rounds
            self.view.mark_absent([peer])
            pending.gone.add(peer)
            pending.changed.set()
        return receipt

    async def _follow(
        self, peer: str, receipt: GroupReceipt, key: tuple[int, int], pending: PendingGroup
    ) -> None:
        """Act on where a missing member says that it is."""
        leader = receipt.leader or self.me
        if receipt.verdict == "passed":
            self.view.evidence.heard(peer, receipt.round)
            pending.passed[peer] = receipt.model_copy(update={"leader": peer})
        elif receipt.verdict == "elsewhere" and leader != self.me:
            # One that this node does not know cannot take others away from it.
            known = leader in self.view.hoped(key[0]) or len(pending.members) < 2
            if known and (self._is_behind(leader, key[0]) or self.view.is_outside(key[1])):
                await self._send_away(pending, receipt)


def partition_into_groups(
    seed: int, round: int, peers: Iterable[str], largest: int
) -> list[tuple[str, ...]]:
    """Divide the peers into as few groups of at most ``largest`` as possible, nearly equal in size,
    equal for equal peers.

    Nobody is left without a partner: an odd number of peers in pairs leaves one group of three.
    Raises ValueError unless ``largest`` is 2 or more.
    """
    if largest < 2:
        raise ValueError(f"a group needs at least two peers, got at most {largest}")
    ordered = order(seed, round, peers)
    count = max(1, min(-(-len(ordered) // largest), len(ordered) // 2))
    bounds = [number * len(ordered) // count for number in range(count + 1)]
    return [tuple(ordered[start:end]) for start, end in itertools.pairwise(bounds)]
