"""The exchange with a group over libp2p: `shoal.optim.Exchange` for methods that want the mean of
many peers.

A member does this in a round; several rounds may be in flight at once, one for each fragment:

    find the leader   the first of the roster that answers; this node may lead itself, or be
                      sent on to another leader
    join              send it a signed ready message; it forms the group (`leader`)
    collect           the contributions, by gathering or as shares (`reduction`, `butterfly`); if
                      one is lost the leader may ask once more, to gather
    apply             the leader's signed decision

It ends with the mean of one set of contributions, that of the decision, or with its own alone,
never with a mixture: received bytes stay in scratch and become the result in one assignment. What
holds if members or the leader die: docs/internals.md, "The decision of a group".
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from shoal.optim.codecs.mod4 import check_no_pair
from shoal.optim.exchange.base import Contribution, Mean, RoundKey
from shoal.optim.exchange.update_screen import TRUSTING, UpdateScreen
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.contribution import (
    ExchangeAttempt,
    encode_contribution,
)
from shoal.swarm.exchange.exchange_base import ExchangeBase, ExchangeHandle
from shoal.swarm.exchange.group.butterfly import Averaged, Butterfly
from shoal.swarm.exchange.group.commit import moved
from shoal.swarm.exchange.group.deadline import GroupDeadline
from shoal.swarm.exchange.group.decisions import DECISION_PROTOCOL, DecisionLog
from shoal.swarm.exchange.group.leader import (
    LEADER_PROTOCOL,
    MISSED,
    GroupLeader,
)
from shoal.swarm.exchange.group.reduction import (
    AllGather,
    AllReduce,
    Attempt,
    Outcome,
    Reduction,
)
from shoal.swarm.exchange.group.roster import (
    HeartbeatChannel,
    LivenessView,
    Roster,
    open_roster,
    ready_message,
)
from shoal.swarm.exchange.group.streams import PAYLOAD_PROTOCOL, PeerStreams
from shoal.swarm.exchange.round_tracker import RoundTracker
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.p2p.tasks import first_of, stop
from shoal.swarm.pacing.meter import TrafficMeter
from shoal.swarm.wire.envelope import Message, seal, unpack
from shoal.swarm.wire.messages import (
    LARGEST_GROUP,
    GroupFormed,
    GroupLost,
    GroupReady,
    GroupReceipt,
    GroupReply,
    GroupReport,
)


@dataclass(frozen=True)
class GroupProtocols:
    """Names of the protocols of one group exchange. Two exchanges of a node must differ in them."""

    leader: str = LEADER_PROTOCOL
    decision: str = DECISION_PROTOCOL
    payload: str = PAYLOAD_PROTOCOL


TRIED = 8
"""Leaders tried in one round."""
LINGER_S = 1.0
"""Seconds for which a member still waits for its leader's message when its own patience is over."""
ANSWER_CHUNKS = 4
"""Chunk deadlines for which a leader's decision is awaited beyond the time of the reduction."""
# So many times its length beyond a deadline this node slept itself, and blames nobody: for members
# that sent late, and for a leader, which waits for others.
SLEPT_BESIDE_MEMBERS = 1.0
SLEPT_BESIDE_LEADER = 3.0

log = logging.getLogger(__name__)

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connected() -> tuple[Ends, Ends]:
    """Return both ends of a stream within this process."""
    one, two = socket.socketpair()
    return await asyncio.open_unix_connection(sock=one), await asyncio.open_unix_connection(
        sock=two
    )


@dataclass
class _WaitForGroup:
    """How long one round may wait until a group is formed."""

    until: float
    """The loop's time at which it gives up."""
    needed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once training waits for the outcome."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the round is over."""

    def training_waits(self, usual: float, forming: float) -> None:
        """Note that training waits for the outcome: until the loop's time ``usual``, and for
        ``forming`` seconds in any case.
        """
        self.needed.set()
        self.until = min(self.until, max(usual, asyncio.get_running_loop().time() + forming))


@dataclass
class _RoundState:
    """The progress of one round of this node."""

    attempt: Attempt
    began: float
    wait: _WaitForGroup
    entered: bool = False
    """A group was formed, so this round is used up, whatever comes of it."""
    elsewhere: GroupReceipt | None = None
    """The answer of a peer that is itself in the group of another leader."""
    moved_to: int = 0
    """The later round that the swarm has reached for this fragment; 0: none."""
    turned_away: bool = False
    """A leader has left this node out of its round, as the others of its group do."""

    @property
    def until(self) -> float:
        """The loop's time at which this node gives up unless a group was formed."""
        return self.wait.until

    @property
    def needed(self) -> asyncio.Event:
        """Set once training waits for the outcome."""
        return self.wait.needed


@dataclass
class _ReductionDeadline:
    """How long one reduction may hold training. Times are the loop's."""

    began: float
    nbytes: int
    most_s: float
    """That it has from its beginning."""
    least_s: float
    """For which training waits for it in any case."""
    ends: float | None = None
    """When it is given up, once training waits for it."""
    late: set[str] = field(default_factory=set)
    """Members that had still to send when it was given up."""
    unheard: set[str] = field(default_factory=set)
    """Members that had still to send when the leader decided."""

    async def limit(
        self, needed: asyncio.Event, reduction: Reduction, reducing: asyncio.Future[None]
    ) -> None:
        """Give up what is not here at the deadline; return when the leader should have decided."""
        await needed.wait()
        now = asyncio.get_running_loop().time()
        self.ends = max(self.began + self.most_s, now + self.least_s)
        await asyncio.wait({reducing}, timeout=self.ends - now)
        if not reducing.done():
            self.late = reduction.give_up()
        # A member's or the leader's deadline may be longer than this node's.
        await asyncio.sleep(2 * self.most_s)

    def slept(self, beyond: float) -> bool:
        """Return whether this node is ``beyond`` times ``most_s`` past its deadline: then it slept
        itself.
        """
        now = asyncio.get_running_loop().time()
        return self.ends is not None and now > self.ends + beyond * self.most_s


@dataclass(frozen=True)
class _RunningReduction:
    """A reduction in progress, and the three tasks of which one ends it."""

    reduction: Reduction
    deadline: _ReductionDeadline
    reducing: asyncio.Future[None]
    """Collects the contributions."""
    listening: asyncio.Future[GroupFormed | GroupReply]
    """Waits for the leader's message."""
    holding: asyncio.Future[None]
    """Ends when the leader should have decided."""


def _taken(outcomes: tuple[Outcome, ...]) -> Mean:
    """Return the mean, now that training takes it; what an owner of a share owes is then kept."""
    outcome = outcomes[0]
    mean = outcome()
    if isinstance(outcome, Averaged):
        outcome.keep()
    return mean


class GroupExchange(ExchangeBase):
    """``optim.Exchange`` among all members of a swarm, or among groups of them.

    All coroutines run on the host's loop.

    Args:
        context: the node and its swarm; its host serves the group's protocols from now on.
        timeouts: how long a round, and the parts of it, may take.
        fragments: sent in turn, each in rounds of its own.
        overlap: training goes on meanwhile; a group waits for the late until it needs the mean.
        max_group: largest group; more members form several (one may have one more).
        follow: move a late contribution to the swarm's round (SPARTA's masks belong to theirs).
        screen: decides which contributions are refused and what the mean is. One that ``gathers``
            takes part in no all-reduce.
        view, time: who is waited for and for how long, if not as in rounds of training.
        protocols: those of this exchange.

    Raises:
        ValueError: ``max_group`` or ``fragments`` out of range.
    """

    rounds: RoundTracker
    time: GroupDeadline

    def __init__(
        self,
        context: PeerContext,
        timeouts: ExchangeTimeouts = ExchangeTimeouts(),  # noqa: B008 (frozen)
        *,
        fragments: int = 1,
        overlap: bool = False,
        max_group: int = 16,
        follow: bool = True,
        screen: UpdateScreen = TRUSTING,
        view: LivenessView | None = None,
        time: GroupDeadline | None = None,
        protocols: GroupProtocols = GroupProtocols(),
    ) -> None:
        if not 2 <= max_group <= LARGEST_GROUP:
            raise ValueError(f"max_group must be between 2 and {LARGEST_GROUP}, got {max_group}")
        if fragments < 1:
            raise ValueError(f"fragments must be positive, got {fragments}")
        rounds = RoundTracker(fragments)
        view = LivenessView(context, fragments) if view is None else view
        time = GroupDeadline(timeouts, fragments, overlap=overlap) if time is None else time
        super().__init__(context.host, rounds, view.evidence, time)
        self._context, self._timeouts, self._screen = context, timeouts, screen
        self._view, self._largest, self._follow = view, max_group + 1, follow
        self._protocols = protocols
        self._decisions = DecisionLog(
            context.host, context.identity, context.swarm, timeouts.asking, protocols.decision
        )
        self._leader = GroupLeader(
            context,
            self._decisions,
            rounds,
            view,
            time,
            max_group,
            screen.gathers,
            protocols.leader,
            self._blame,
        )
        self._streams = PeerStreams(context.host, view, timeouts.chunk, protocols.payload)
        self._behind: dict[int, tuple[RoundKey, int]] = {}
        """By fragment the last contribution that counted later than training thinks, and by how
        many rounds.
        """
        context.host.serve(protocols.leader, self._leader.serve)

    def due(self, round: int, fragment: int) -> int:
        return self.rounds.due(round, fragment)

    def behind(self, key: RoundKey, round: int) -> int:
        last, later = self._behind.get(key.fragment, (None, 0))
        return later if last == key else 0

    def took_over(self, applied: Sequence[int], *, newcomer: bool = False) -> None:
        self.rounds.taken(applied)
        if newcomer:
            for fragment in range(len(applied)):
                self._view.miss_group(fragment)

    def end(self) -> None:
        self._view.has_ended = True

    def start(self, contribution: Contribution) -> ExchangeHandle[Outcome]:
        """Begin a round.

        ValueError if it is of another run than this swarm, or if the codec refuses the tensors:
        those of an `OnDemand` only by the handle's ``encode``.
        """
        check_no_pair(contribution.codec)
        mine = replace(encode_contribution(self._context.swarm, contribution), sketch=self.sketch())
        nbytes = moved(mine.payload.nbytes, min(self._largest, len(self._context.members())))
        self.stats.begin(mine.key)
        attempt = ExchangeAttempt[Outcome](mine, screen=self._screen, stats=self.stats)
        meeting = self.meet(attempt)
        return ExchangeHandle(self, attempt, meeting, _taken, nbytes)

    async def meet(self, attempt: Attempt) -> Outcome | None:
        """Take part in a round. Returns None if this node goes on with its own contribution. Raises
        ContributionError if the codec refuses that.
        """
        loop, fragment = asyncio.get_running_loop(), attempt.key.fragment
        await asyncio.to_thread(attempt.contribution.prepared)
        now = loop.time()
        self.time.begin(now, fragment)
        self.evidence.begin(now, attempt.key.round)
        # Training keeps what it wakes, so that must not hold the payloads.
        wait = _WaitForGroup(now + self.time.collecting(fragment))
        usual = now + self.time.patience(fragment)
        wakes = partial(wait.training_waits, usual, self.time.forming(fragment))
        attempt.commit.when_awaited(lambda: loop.call_soon_threadsafe(wakes))
        pending = _RoundState(attempt, now, wait)
        try:
            await self._follow_leaders(pending)
        except Exception as error:  # this node's own: it costs one round, never the training
            pending.attempt.caught("exchange", error)
        finally:
            wait.over.set()
            self.rounds.end(pending.attempt.key.round, fragment)
            self._note_behind(pending)
            if not pending.entered:
                self._view.miss_group(fragment)
            if attempt.commit.received is None:
                self.evidence.missed()
        return attempt.commit.received

    def _note_behind(self, pending: _RoundState) -> None:
        """Note by how many rounds a contribution counted later than training thinks."""
        key = pending.attempt.handed_in
        round = pending.attempt.key.round if self._follow else pending.moved_to
        if round > key.round:
            self._behind[key.fragment] = key, round - key.round

    async def _follow_leaders(self, pending: _RoundState) -> None:
        loop = asyncio.get_running_loop()
        while True:
            key = pending.attempt.key
            self.rounds.begin(key.round, key.fragment)
            leaders = self._view.order(self._context.seed, key.round, key.fragment)
            if len(leaders) < 2:
                passed = self._view.here() - {self._context.me}
                turned_away = self._view.attendance.is_turned_away
                slow = {peer for peer in passed if turned_away(peer, key.round)}
                pending.attempt.stats.pass_over(pending.attempt.handed_in, passed, slow)
                return
            for peer in leaders[:TRIED]:
                await self._try_leader(pending, peer, self._view.addresses(peer))
                hint, pending.elsewhere = pending.elsewhere, None
                if hint is not None and hint.leader is not None and not pending.entered:
                    await self._try_leader(pending, hint.leader, hint.addresses)
                if pending.entered or pending.turned_away or loop.time() >= pending.until:
                    return
                sent_away = hint is not None and self._context.me in (peer, hint.leader)
                if sent_away or pending.moved_to > key.round:
                    break
            else:
                return
            if pending.moved_to <= key.round:
                continue
            self.rounds.end(key.round, key.fragment)
            if not self._follow:
                self.rounds.send_on(pending.moved_to, key.fragment)
                return
            pending.attempt = pending.attempt.moved_to(pending.moved_to)

    async def _try_leader(
        self, pending: _RoundState, leader: str, addresses: Sequence[str]
    ) -> None:
        """Join the group of one leader; return early if it is not available."""
        loop = asyncio.get_running_loop()
        patience = pending.until - loop.time()
        ready = ready_message(
            pending.attempt.contribution, self._context.swarm, self._context.model, patience
        )
        self._leader.expect(ready, pending.needed, pending.wait.over)
        probe = loop.time() + max(self._timeouts.probe(min(patience, self._timeouts.wait)), 0.01)
        try:
            stream = await self._open(leader, addresses, probe - loop.time())
        except NetworkError as error:
            log.info("round %d: its leader is not available: %s", ready.round, error)
            pending.attempt.failed(leader, error)
            self._view.mark_silent(leader)
            return
        try:
            await self._join(pending, leader, stream, ready, probe)
        except (NetworkError, MessageError) as error:
            self._note_failure(pending, leader, ready, error)
        finally:
            self.rounds.leave(ready.round, ready.fragment)
            stream.close()

    async def _join(
        self, pending: _RoundState, leader: str, stream: Stream, ready: GroupReady, probe: float
    ) -> None:
        """Wait for the leader's group, and take part in it; the leader has to answer by ``probe``,
        the loop's time.

        Raises NetworkError or MessageError.
        """
        loop = asyncio.get_running_loop()
        sealed = seal(ready, self._context.identity)
        await stream.send(sealed, max(probe - loop.time(), 0.01))
        try:
            answer = await stream.receive(GroupReceipt.LIMIT, max(probe - loop.time(), 0.01))
        except NetworkError:
            self._view.mark_silent(leader)
            raise
        receipt = unpack(answer, GroupReceipt)
        if receipt.verdict != "noted":
            self._note_receipt(pending, leader, receipt)
            return
        self.rounds.join(ready.round, ready.fragment, leader)
        if leader != self._context.me:
            await self._leader.leave(ready.round, ready.fragment, leader)
        channel = HeartbeatChannel(stream, self._timeouts.chunk)
        formed: Message = await channel.receive(
            lambda: pending.until + LINGER_S, GroupFormed, GroupReceipt
        )
        began = loop.time()
        before: Roster | None = None
        while isinstance(formed, GroupFormed):
            group = open_roster(formed, leader, sealed, self._largest)
            self._refuse(group, before)
            pending.entered = True
            self.rounds.end(ready.round, ready.fragment)
            self._note_presence(pending, group, before, began)
            again = await self._reduce(channel, group, pending, began)
            if again is None:
                return
            before, formed = group, again
        if isinstance(formed, GroupReceipt):
            self._note_receipt(pending, leader, formed)

    async def _reduce(
        self, channel: HeartbeatChannel, group: Roster, pending: _RoundState, formed: float
    ) -> GroupFormed | None:
        """Collect the group's contributions and apply the decision; return a new group if the
        leader asks for another attempt.

        ``formed``: the loop's time at which the first group was.
        """
        attempt = pending.attempt
        if group.reduction != "gather" and attempt.screen.gathers:
            raise MessageError(
                "the leader asks for an all-reduce, in which no contribution can be screened by "
                "itself."
            )
        running = self._begin(channel, group, pending, formed)
        reduction = running.reduction
        try:
            answer = await self._answer(running, channel, attempt)
            if isinstance(answer, GroupFormed):
                return answer
            included = self._decisions.open(answer, group.leader, group.nonce, reduction.averages)
        finally:
            self._streams.end(reduction)
            await stop(running.reducing, running.listening, running.holding)
        if answer is not None and included:
            self._decisions.remember(group.nonce, answer)
            await self._take(included, reduction, attempt, running.deadline.began)
        return None

    def _begin(
        self, channel: HeartbeatChannel, group: Roster, pending: _RoundState, formed: float
    ) -> _RunningReduction:
        """Begin the reduction of a group, which was ``formed`` at that time of the loop."""
        key, payload = pending.attempt.key, pending.attempt.contribution.payload
        nbytes = moved(payload.nbytes, len(group.members))
        until = formed + self._timeouts.moving(nbytes)
        longest = formed + self._timeouts.longest(nbytes)
        reduction = self._reduction(group, pending.attempt, until, longest)
        deadline = _ReductionDeadline(
            asyncio.get_running_loop().time(),
            nbytes,
            self.time.reducing(nbytes, key.fragment),
            self.time.least(key.fragment),
        )
        self._streams.begin(reduction)
        reducing = asyncio.ensure_future(reduction.run())
        return _RunningReduction(
            reduction,
            deadline,
            reducing,
            asyncio.ensure_future(self._listen(channel, reduction, longest)),
            asyncio.ensure_future(deadline.limit(pending.needed, reduction, reducing)),
        )

    async def _answer(
        self, running: _RunningReduction, channel: HeartbeatChannel, attempt: Attempt
    ) -> GroupFormed | bytes | None:
        """Return the leader's signed decision, or the group of its next attempt; None if there is
        neither, or training waits no more.
        """
        reduction, reducing, listening = running.reduction, running.reducing, running.listening
        group = reduction.group
        await first_of(reducing, listening)
        if not reducing.done():  # the leader decided first, or the channel to it broke
            running.deadline.unheard = reduction.give_up()
        self._note_times(reduction, attempt.key, running.deadline)
        if not listening.done():
            reducing.result()
            if attempt.commit.closed:
                return None
            report = GroupReport(
                nonce=group.nonce, held=reduction.places(), averages=reduction.averages
            )
            await channel.send(report)
            await first_of(listening, running.holding)
        try:
            if not listening.done():
                raise NetworkError(f"peer {short(group.leader)} did not decide in time.", "timeout")
            message = await listening
        except NetworkError as error:
            log.info("round %d: the channel to the leader broke: %s", attempt.key.round, error)
            self._note_lost_leader(running, attempt.key)
            return await self._ask(group) if reducing.done() else None
        return message if isinstance(message, GroupFormed) else message.decision

    def _note_lost_leader(self, running: _RunningReduction, key: RoundKey) -> None:
        """Note that the leader brought no decision; it is late only if this node did not sleep."""
        leader = running.reduction.group.leader
        self._view.mark_absent([leader])
        is_late = running.holding.done() and not running.deadline.slept(SLEPT_BESIDE_LEADER)
        if is_late and leader != self._context.me:
            self._view.attendance.missed(leader, key.round, held=True)

    def _reduction(
        self, group: Roster, attempt: Attempt, until: float, longest: float
    ) -> Reduction:
        me = self._context.me
        if group.reduction == "gather":
            return AllGather(self._streams, group, me, attempt, until, longest)
        if group.reduction == "allreduce":
            return AllReduce(self._streams, group, me, attempt, until, longest)
        identity = self._context.identity
        return Butterfly(self._streams, group, me, attempt, until, longest, identity=identity)

    async def _listen(
        self, channel: HeartbeatChannel, reduction: Reduction, until: float
    ) -> GroupFormed | GroupReply:
        while True:
            message: Message = await channel.receive(
                until + ANSWER_CHUNKS * self._timeouts.chunk, GroupFormed, GroupReply, GroupLost
            )
            if isinstance(message, GroupFormed | GroupReply):
                return message
            if isinstance(message, GroupLost) and message.nonce == reduction.group.nonce:
                reduction.lose(message.lost)
                self._view.mark_absent(reduction.group.at(message.lost))

    async def _ask(self, group: Roster) -> bytes | None:
        others = [peer for peer in group.members if peer != self._context.me]
        if group.leader not in others and group.leader != self._context.me:
            others.append(group.leader)
        return await self._decisions.ask(
            group.leader, group.nonce, [(peer, self._view.addresses(peer)) for peer in others]
        )

    async def _take(
        self, included: int, reduction: Reduction, attempt: Attempt, began: float
    ) -> None:
        """Hand over the mean of the members ``included`` in a decision (a bit each), if this node
        is one of them, holds all of it, and training still waits for it.
        """
        group, me = reduction.group, self._context.me
        # The weights of several groups differ by design, and a node that shows none has none to
        # compare.
        comparable = group.alone and attempt.contribution.sketch is not None
        others = set(group.at(included)) - {me}
        compared = others if comparable else set()
        self.sketches = {peer: group.readies[peer].sketch for peer in compared}
        is_included = included & group.places([me])
        holds_all = not included & ~reduction.places()
        if not is_included or not holds_all or not others:
            return
        outcome = reduction.result(included)
        if not attempt.commit.commit(outcome):
            return
        attempt.stats.done(attempt.handed_in, others, asyncio.get_running_loop().time() - began)
        self.evidence.met(others, attempt.key.round)
        # Decoded now: until training asks for it all payloads would stay in memory.
        await asyncio.to_thread(outcome)

    async def _open(self, leader: str, addresses: Sequence[str], seconds: float) -> Stream:
        if leader != self._context.me:
            return await self._context.host.open(
                leader, self._protocols.leader, addresses=addresses, timeout=seconds
            )
        # The own daemon connects to others only. Bytes on this channel are no traffic.
        mine, theirs = await connected()
        self._leader.start(self._serve_myself(Stream(leader, *theirs, TrafficMeter())))
        return Stream(leader, *mine, TrafficMeter())

    async def _serve_myself(self, stream: Stream) -> None:
        try:
            await self._leader.serve(stream)
            await stream.more(LINGER_S)
        except (NetworkError, MessageError) as error:
            log.info("this node left the group that it leads: %s", error)
        finally:
            stream.close()

    def _refuse(self, group: Roster, before: Roster | None) -> None:
        """Raise MessageError if this node takes no part in a group; ``before``: the one that it was
        in, if a reduction failed. The second gathers, and is the last.
        """
        refused = f"a group from peer {short(group.leader)} was refused"
        if before is not None and (before.reduction == "gather" or group.reduction != "gather"):
            raise MessageError(f"{refused}: it asks for attempts without end.")
        is_used = self._decisions.knows(group.nonce) or self._streams.is_running(group.nonce)
        if group.leader != self._context.me and is_used:
            raise MessageError(f"{refused}: its nonce is that of another group.")
        if before is not None:
            strangers = sorted(set(group.members) - set(before.members))
            if strangers:
                raise MessageError(
                    f"{refused}: its member {short(strangers[0])} was not in it when it began."
                )
            return  # what was begun is ended, also with one that is banned since
        barred = self._view.barred(group.members)
        if barred:
            raise MessageError(f"{refused}: its member {short(barred[0])} is banned.")

    def _note_presence(
        self, pending: _RoundState, group: Roster, before: Roster | None, formed: float
    ) -> None:
        """Note who is in the group, which was ``formed`` at that time of the loop, and who is
        missing.
        """
        key, members = pending.attempt.key, set(group.members)
        # Otherwise this node, when it leads, would not wait for one that was away and is back.
        for peer in members:
            self._view.mark_awake(peer)
        if before is not None:
            self._view.mark_absent(set(before.members) - members)
        elif group.alone:
            here = self._view.here()
            for late in self._view.awaited(key.round, key.fragment, reached=here) - members:
                pending.attempt.failed(late, "timeout")
            waited = formed - pending.began
            if pending.needed.is_set() and waited > self.time.forming(key.fragment) / 2:
                self._view.mark_late(members, key.round, key.fragment)
            self._view.mark_absent(here - members)
        self._view.note_group(key.fragment, members if group.alone else ())

    def _note_failure(
        self,
        pending: _RoundState,
        leader: str,
        ready: GroupReady,
        error: NetworkError | MessageError,
    ) -> None:
        """Note that a leader brought no group."""
        log.info("round %d: no group with leader %s: %s", ready.round, short(leader), error)
        beyond = asyncio.get_running_loop().time() - pending.until - LINGER_S
        # An honest leader lets its members go in time. If it is much later than that, this node
        # slept.
        is_own = leader == self._context.me
        if 0 <= beyond < self._timeouts.chunk and not pending.entered and not is_own:
            self._view.attendance.missed(leader, ready.round, held=True)
        self._view.mark_absent([leader])
        if not is_own:  # otherwise no peer failed: no other member came
            self._context.look()  # it may have said that it leaves
            pending.attempt.failed(leader, error)

    def _note_receipt(self, pending: _RoundState, leader: str, receipt: GroupReceipt) -> None:
        key = pending.attempt.key
        log.debug(
            "round %d: leader %s answered %s %s",
            key.round,
            short(leader),
            receipt.verdict,
            receipt.reason,
        )
        if leader == self._context.me and receipt.leader is not None:
            leader = receipt.leader  # who answered this node's own question
        else:
            self.evidence.heard(leader, receipt.round)
        if receipt.verdict == "passed":
            self._view.miss_group(key.fragment)
            most = self.evidence.furthest(leader, receipt.round, asyncio.get_running_loop().time())
            pending.moved_to = max(
                pending.moved_to, self.rounds.within(receipt.round, key.round, most)
            )
        elif receipt.verdict == "busy" and receipt.reason == MISSED:
            pending.turned_away = True
        elif receipt.verdict == "elsewhere" and not self._view.barred([receipt.leader or ""]):
            pending.elsewhere = receipt
        elif receipt.verdict == "refuse":
            log.warning(
                "peer %s will not exchange with this node: %s", short(leader), receipt.reason
            )
            pending.attempt.failed(leader, "refused")

    def _note_times(
        self, reduction: Reduction, key: RoundKey, deadline: _ReductionDeadline
    ) -> None:
        """Measure what the members took, and note who missed the deadline."""
        now = asyncio.get_running_loop().time()
        if deadline.slept(SLEPT_BESIDE_MEMBERS):
            return
        late = set(deadline.late)
        # Before half of the time the group was cut short because a member is gone.
        if now - deadline.began > deadline.most_s / 2:
            late |= deadline.unheard
        took = [at - deadline.began for at in reduction.arrived.values()]
        # Those who are late count as well: if a line has become slow, the deadline follows.
        self.time.measure([*took, *[now - deadline.began] * len(late)], deadline.nbytes)
        for peer in sorted(late):
            log.info("round %d: %s did not send in time", key.round, short(peer))
            self._view.attendance.missed(peer, key.round, held=True)
        for peer in reduction.arrived.keys() - late:
            self._view.attendance.was_in_time(peer)

    def _blame(self, key: tuple[int, int], peer: str) -> None:
        self.stats.failed(RoundKey(self._context.swarm, *key), peer, "suspicious")
