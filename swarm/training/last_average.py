"""The end of a run: all members that are there take the mean of their weights, and so end with one
model.

Gossip leaves every peer with a model of its own, and the mean of all is better than each. A node
whose last step is done says so in its record (`Member.finished`), takes part in no more rounds, and
waits for those that will end soon by their own speed, up to `LONGEST_WAIT_S`. The mean is that of a
group exchange (`shoal.swarm.exchange.group`) with protocols and rounds of its own, so it has that
one's guarantees: all who take it take the same bits, or go on with their own. A second try follows
if somebody who is there is not in the mean of the first. Why it waits so: docs/internals.md, "One
model at the end".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from shoal.optim.exchange.base import Contribution, Exchange, Handle, Mean, NoPartner
from shoal.optim.exchange.update_screen import TRUSTING, UpdateScreen
from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.group.deadline import GroupDeadline
from shoal.swarm.exchange.group.exchange import GroupExchange, GroupProtocols
from shoal.swarm.exchange.group.roster import LivenessView
from shoal.swarm.exchange.robust import DistanceScreen
from shoal.swarm.exchange.timeouts import ExchangeTimeouts
from shoal.swarm.membership.last_step import at_their_end, still_training
from shoal.swarm.membership.membership import Membership
from shoal.swarm.p2p.stream import short
from shoal.swarm.settings.outer import MAX_GROUP, OuterSettings
from shoal.swarm.wire.envelope import SHORT_NAME, real
from shoal.swarm.wire.messages import Member, MemberEnd
from shoal.swarm.wire.record import MAX_MISSING

PROTOCOLS = GroupProtocols(
    leader="/shoal/end/1", decision="/shoal/end-decision/1", payload="/shoal/end-payload/1"
)
LONGEST_WAIT_S = 120.0
"""Seconds from a node's last step for which it waits for others."""
GRACE_S = 10.0
"""Seconds beyond the time that a member should need by its own speed: its record comes late, and it
evaluates first.
"""
STEP_TIME_FACTOR = 1.5
"""Times the seconds that its remaining steps should take: it waits for partners between them."""
SECOND_TRY_S = 10.0
"""Seconds that a try waits at least, also after the longest wait."""
MAX_GATHERED = 8
"""Members of a group in which each holds all contributions, as a robust rule needs: so many models
are in memory.
"""
MAX_PEERS_NAMED = 4
"""Members that a sentence names."""


@dataclass
class EndReport:
    """What the last average came to for this node, ready for JSON."""

    members: tuple[str, ...] = ()
    """Names of the members in the mean, this node included; empty if it ends with its own weights.
    """
    missing: tuple[str, ...] = ()
    """Names of members that were at their end, or are gone, and are not in the mean."""
    training: tuple[str, ...] = ()
    """Names of members that this node waited for, and that were not at their end in time."""
    wait_s: float = 0.0
    loss_before: float | None = None
    """Held-out loss of this node's own model, nats; None where it is not known."""
    loss_after: float | None = None
    """That of the mean."""
    refused: bool = False
    """True if the mean had a higher held-out loss, so that this node kept its own weights
    (``outer.check_loss``).
    """

    def record(self, me: str) -> MemberEnd:
        """Return what others see of it, in the record of the node that is named ``me``."""
        others = [name for name in self.members if name != me]
        return MemberEnd(
            members=len(self.members),
            names=tuple(name[:SHORT_NAME] for name in others[:MAX_MISSING]),
            loss_before=real(self.loss_before),
            loss_after=real(self.loss_after),
            refused=self.refused,
        )

    @property
    def loss(self) -> float | None:
        """Held-out loss of the model with which this node ends, nats, if it is known."""
        if self.members and not self.refused:
            return self.loss_after
        return self.loss_before

    @property
    def complete(self) -> bool:
        """True if this node ends with the model of all members that were at their end."""
        return bool(self.members) and not self.missing and not self.refused

    def said(self) -> str:
        """Return a sentence for people."""
        losses = ""
        if self.loss_before is not None and self.loss_after is not None:
            losses = f": held-out loss {self.loss_before:.4f} before, {self.loss_after:.4f} after"
        if self.refused:
            return (
                "the last average was not taken, because it is worse than this node's own "
                f"model{losses}; this node ends with its own"
            )
        if not self.members:
            why = "no other member was at its end in time"
            if self.missing:
                why = f"no exchange with {_listed(self.missing)} was committed"
            elif self.training:
                why += f" ({_listed(self.training)} still in training)"
            return (
                f"no last average: {why}, so this node ends with a model of its own; `shoal pull "
                "LINK --average` makes one of members that still serve, `shoal merge --slow` one "
                "of checkpoints"
            )
        said = f"one model of {len(self.members)} members ({_listed(self.members)}){losses}"
        if self.missing:
            said += f"; without {_listed(self.missing)}, who did not come in time"
        if self.training:
            said += f"; without {_listed(self.training)}, still in training"
        return said


def _listed(names: Collection[str]) -> str:
    shown = list(names)[:MAX_PEERS_NAMED]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


class _EndTime(GroupDeadline):
    """The time of the last average, which follows no rounds: `until` is this node's deadline once
    its last step is done.
    """

    until: float | None = None

    def patience(self, fragment: int = 0) -> float:
        if self.until is None:
            return LONGEST_WAIT_S
        return max(self.until - time.monotonic(), SECOND_TRY_S)

    def forming(self, fragment: int) -> float:
        return self.patience(fragment)


class _EndView(LivenessView):
    """The members at their end, or soon there.

    A node that still trains may lead a group before it is in one itself.
    """

    def here(self) -> set[str]:
        model = self._context.model
        return {peer for peer, member in self.members().items() if member.model == model}


class LastAverage(Exchange):
    """The exchange of the last average, for `OuterOptimizer.average_over`; it serves others from
    the moment it is made.

    Args:
        membership: this peer's place in the swarm.
        fragments: those of the optimizer.
        model: digest of the model's shapes.
    """

    def __init__(
        self,
        membership: Membership,
        outer: OuterSettings,
        fragments: int,
        model: str,
    ) -> None:
        self._directory = membership.directory
        self._me = membership.identity.peer_id
        self.announce: Callable[[], None] = lambda: None
        """Tells the swarm that this node's last step is done."""
        self.say: Callable[[str], None] = lambda line: None
        """Told what this node waits for."""
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        """Makes a block in which this node waits, and its weights do not change."""
        every = outer.resolved().every if outer.round == "steps" else None
        self._steps_an_exchange = (every or 0) / fragments
        self._until: float | None = None
        self._due: dict[str, float] = {}
        """Peer -> monotonic time until which it is waited for."""
        self._lock = threading.Lock()
        """Held while `_due` and `_ended` are looked at: they belong together."""
        self._ended: Set[str] = frozenset()
        """Peers whose ends `_due` goes by."""
        self._names: dict[str, str] = {}
        self.report = EndReport()
        directory = membership.directory
        manifest = membership.manifest
        context = PeerContext(
            membership.host,
            membership.identity,
            membership.swarm,
            model,
            manifest.train.seed,
            self.present,
            directory.look,
            directory.is_barred,
            self.present,
        )
        timeouts = ExchangeTimeouts(LONGEST_WAIT_S)
        screen = make_last_screen(outer)
        self._time = _EndTime(timeouts, fragments)
        partner = membership.host.resource_manager.partner
        self.inner = GroupExchange(
            context,
            timeouts,
            fragments=fragments,
            max_group=MAX_GATHERED if screen.gathers else MAX_GROUP,
            screen=screen,
            view=_EndView(context, fragments),
            time=self._time,
            protocols=PROTOCOLS,
        )
        membership.host.resource_manager.partner = partner  # that of the rounds of training

    @property
    def ended(self) -> bool:
        """True once this node's last step is done."""
        return self._until is not None

    def begin(self) -> None:
        """Note that this node's last step is done, and say for whom it waits."""
        if self.ended:
            return
        self._until = time.monotonic() + LONGEST_WAIT_S
        self._time.until = self._until
        self.announce()
        self._directory.look()
        others = self._others()
        self._names |= others
        if others:
            self.say(
                f"the last step is done: waiting at most {LONGEST_WAIT_S:.0f} s for "
                f"{_listed(sorted(others.values()))}, to end with one model"
            )

    def start(self, contribution: Contribution) -> Handle:
        """Begin a try; without a partner if the network is gone."""
        self._names |= self._others()
        try:
            return _RestingHandle(self.inner.start(contribution), self.waiting)
        except NetworkError:
            return NoPartner()

    def enough(self, members: tuple[str, ...]) -> bool:
        """Return whether everybody who is there is in the mean of ``members`` (peer ids), of which
        there may be none.

        The report also names those for whom this node waited, and does not any more.
        """
        others = self._others()
        self._names |= others
        left = others.keys() - set(members)
        missing = self._names.keys() - set(members)
        training = missing & still_training(self._directory.members()).keys()
        me = self._directory.own()
        names = self._names | {self._me: me.name if me is not None else "this node"}
        self.report.members = tuple(sorted(names.get(peer, short(peer)) for peer in members))
        self.report.missing = tuple(sorted(names[peer] for peer in missing - training))
        self.report.training = tuple(sorted(names[peer] for peer in training))
        self.report.wait_s = self.inner.waited
        return not left

    def hurry(self, seconds: float) -> None:
        """Wait at most ``seconds`` from now on. Callable from a signal handler."""
        self.inner.hurry(seconds)

    def _others(self) -> dict[str, str]:
        """Return the names of the other members at their end, or soon there, by peer id."""
        return {peer: one.name for peer, one in self.present().items() if peer != self._me}

    def present(self) -> Mapping[str, Member]:
        """Return the members to average with: those at their end, and those that are soon.

        Thread-safe.

        All are in one round, whatever their records state: the tries of the last average are no
        rounds of training.
        """
        with self._lock:
            members = self._directory.members()
            now = time.monotonic()
            ended = at_their_end(members)
            if ended.keys() - self._ended:
                self._due.clear()
            self._ended = frozenset(ended)
            found = {}
            for peer, member in members.items():
                if not ended or peer in ended or now < self._waited_until(peer, member, ended, now):
                    found[peer] = member.model_copy(update={"round": 0})
            return found

    def _waited_until(
        self, peer: str, member: Member, ended: Mapping[str, Member], now: float
    ) -> float:
        """Return the monotonic time until which a member that is not at its end is waited for, as
        it was when the newest of those in ``ended`` came to its own.
        """
        due = self._due.get(peer)
        if due is None:
            due = now + self._allowance(member, ended.values())
            self._due[peer] = due
        return due if self._until is None else min(due, self._until)

    def _allowance(self, member: Member, ended: Iterable[Member]) -> float:
        """Return the seconds that a member may need to its end; 0 if it will not be there in time.

        It may end where one of ``ended`` did: at that one's step, or in its round. The latest of
        these that is in time counts. A step is always left: records come a second late, and one
        without a speed may be there already.
        """
        longest = 0.0
        for end in ended:
            rounds = end.round - member.round
            for steps in (end.step - member.step, rounds * self._steps_an_exchange):
                left = max(steps, 1)
                needs = left / member.steps_per_s if member.steps_per_s > 0 else 0.0
                if needs <= LONGEST_WAIT_S:
                    longest = max(longest, STEP_TIME_FACTOR * needs + GRACE_S)
        return longest


class _RestingHandle(Handle):
    """A handle during whose wait the weights are handed out."""

    def __init__(
        self, inner: Handle, waiting: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._inner = inner
        self._waiting = waiting

    def done(self) -> bool:
        return self._inner.done()

    def result(self, deadline: float | None = None) -> Mean | None:
        with self._waiting():
            return self._inner.result(deadline)

    def encode(self) -> None:
        self._inner.encode()

    def close(self) -> None:
        self._inner.close()


def make_last_screen(outer: OuterSettings) -> UpdateScreen:
    """Return the screen of the last average: among strangers the clipped mean, of which all compute
    the same bits.

    The rules of rounds go by what each node saw before, so that peers would end with models that
    differ.
    """
    if outer.robust == "none" and not outer.check_loss:
        return TRUSTING
    return DistanceScreen(robust="centered-clip", suspect=0.0, sends="weights")


def averages_at_end(outer: OuterSettings) -> bool:
    """Return whether a swarm ends with a last average."""
    return not outer.alone and outer.finish == "average"
