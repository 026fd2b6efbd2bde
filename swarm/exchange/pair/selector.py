"""The partner of a node in each round, or two, and who is free when the partner is dead.

    partner, order = selector.of(round)          # whom to call, the partner first
    second = selector.second(round)              # of the middle of a chain

Partners follow from the members in view (`shoal.optim.exchange.pairing`). A peer counts as dead
from when it could not be reached until it calls, or issues another record. One that wastes this
node's rounds is passed over as if it were dead (`PassedOver`); the pairs of all others stay as they
are. Who meets whom then: docs/internals.md, "A partner that is dead or passed over".

Peers that are much slower than this node are not in its pairs: they would not be there in most of
its rounds. They call it. Why: docs/internals.md, "Peers of unlike speed".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from shoal.optim.exchange.pairing import candidates, groups, partner_of, partners_of
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.passed_over import PassedOver
from shoal.swarm.wire.messages import Member

# Not 2, so that a peer of half the speed is on the same side of it for all.
GAP_TIMES = 1.7
"""How many times as quick as those beyond it the peers on this side of a gap are."""


def no_speed(member: Member) -> float:
    """Return a speed that is not known: nobody is slower."""
    return 0.0


class PairSelector:
    """Selects this peer's partner in a round from the members in view with the same model.

    ``fragments``: sent in turn. ``speed``: returns the rounds that a member says it makes in a
    time, in any unit; 0: not known.
    """

    def __init__(
        self,
        context: PeerContext,
        departed: Callable[[], Mapping[str, Member]] = dict,
        fragments: int = 1,
        speed: Callable[[Member], float] = no_speed,
    ) -> None:
        self._context, self._departed, self._speed = context, departed, speed
        self.passed = PassedOver(fragments)
        self._unreached: dict[str, float] = {}
        """Peer -> the time of issue of the record that it had when it could not be reached."""

    def of(self, round: int) -> tuple[str | None, list[str]]:
        """Return the partner in ``round`` (None without another peer) and the others to call: the
        partner first, unless it is dead.
        """
        met = self._met(round)
        others = self.left_over(round)
        if not met:
            return None, []
        partner = met[0]
        here = self._context.members()
        order = []
        for peer in candidates(self._context.seed, round, self._context.me, self._in(round)):
            if peer in here and peer not in met[1:]:
                order.append(peer)
        if others:
            order = [peer for peer in order if peer in others]
        elif others is not None and self._is_dead(partner, round):
            if partner in self._unreached or self.passed.costly(partner):
                return partner, []  # to train on without a partner is better
            return partner, [partner]  # there is nobody better
        return partner, sorted(order, key=lambda peer: peer != partner)

    def second(self, round: int) -> str | None:
        """Return the second partner in ``round``, which only the middle of a chain has."""
        return next(iter(self._met(round)[1:]), None)

    def _met(self, round: int) -> tuple[str, ...]:
        """Return whom this node meets in ``round``, as far as it knows who is dead. Where partners
        are passed over, those left over and the one without a pair are paired once more.
        """
        seed, me = self._context.seed, self._context.me
        partners = self.partners(round)
        left_over = self._left_over(round)
        if left_over is None:
            return partners
        if me not in left_over:  # one without a pair may be with another that is left over
            return partners if left_over == {*partners[1:]} else partners[:1]
        pair = partner_of(seed, round, me, self._in(round))
        is_free = pair is None or (pair not in self._unreached and self._over(pair, round))
        if is_free and len(left_over) > 1:
            return partners_of(seed, round, me, left_over)
        return partners[:1]

    def partner(self, round: int) -> str | None:
        """Return the partner in ``round`` if nobody is dead: of the middle of a chain, the first of
        the two.
        """
        return next(iter(self.partners(round)), None)

    def partners(self, round: int) -> tuple[str, ...]:
        """Return whom this node exchanges with in ``round`` if nobody is dead."""
        return partners_of(self._context.seed, round, self._context.me, self._in(round))

    def left_over(self, round: int) -> set[str] | None:
        """Return the other peers without a partner if this node has no pair with one that is alive;
        None if it has, as far as is known, or if no peer is known to be dead.
        """
        left_over = self._left_over(round)
        if left_over is None or self._context.me not in left_over:
            return None
        return left_over - {self._context.me}

    def _left_over(self, round: int) -> set[str] | None:
        """Return all that have no pair with one that is alive; None if no peer is known to be
        dead.
        """
        here = self._context.members()
        self._unreached = {
            p: issued
            for p, issued in self._unreached.items()
            if p in here and here[p].issued == issued
        }
        dead = {
            peer for peer in (*self._unreached, *self.passed.misses) if self._is_dead(peer, round)
        }
        if not dead:  # the usual case: no pairs need be computed
            return None
        pairs = groups(self._context.seed, round, self._in(round) | {self._context.me})
        living = [[peer for peer in pair if peer not in dead] for pair in pairs]
        return {pair[0] for pair in living if len(pair) == 1}

    def _is_dead(self, peer: str, round: int) -> bool:
        return peer in self._unreached or self._over(peer, round)

    def takes(self, peer: str, round: int) -> bool:
        """Return whether ``peer`` is not passed over."""
        return not self._over(peer, round)

    def accepts(self, peer: str, round: int) -> bool:
        """Return whether a node that found nobody is free for ``peer`` if that calls unasked: also
        for one that failed once.
        """
        return self.takes(peer, round) or self.passed.once(peer)

    def _over(self, peer: str, round: int) -> bool:
        if not self.passed.at(peer, round):
            return False
        others = self._in(round)
        return not (
            self.passed.once(peer)
            and len(others) > 1
            and all(self.passed.at(other, round) for other in others)
        )

    def tried(self, peer: str, round: int) -> None:
        """Note that ``peer`` was called in vain: a failure if it is a partner; others may well be
        busy.
        """
        if peer in self.partners(round):
            self.passed.missed(peer, round, away=peer in self._unreached)

    def ended(self, peer: str, round: int, *, met: bool, over: int = 0) -> None:
        """Note the end of a transfer; ``over``: rounds for which the peer is passed over although
        they met.
        """
        if met and not over:
            self.passed.met(peer, round)
        else:
            self.passed.missed(peer, round, over)

    def failed(self, peer: str) -> None:
        """Note that no stream to ``peer`` could be opened."""
        record = self._context.members().get(peer)
        if record is not None:
            self._unreached[peer] = record.issued

    def alive(self, peer: str) -> None:
        """Note that ``peer`` calls."""
        self._unreached.pop(peer, None)
        self.passed.returned(peer)

    def is_too_slow(self, peer: str, round: int) -> bool:
        """Return whether ``peer`` is in no pair of this node because it is much slower."""
        here = self._alike(self._context.members())
        me = self._context.me
        return peer != me and peer in here and me in here and peer not in self._in(round)

    def expects_slower(self, peer: str, round: int) -> bool:
        """Return whether this node is a partner of ``peer``, which is too slow for its own pairs,
        in those of the speed of ``peer``, and does not pass it over.
        """
        if not self.is_too_slow(peer, round) or self._over(peer, round):
            return False
        others = self._in(round, peer)
        return self._context.me in partners_of(self._context.seed, round, peer, others)

    def _slowest(self, one: Member, others: Iterable[Member]) -> float:
        """Return the lowest speed of ``others`` that leads up to that of ``one`` without a gap."""
        lowest = self._speed(one)
        known = [speed for member in others if (speed := self._speed(member)) > 0]
        for speed in sorted(known, reverse=True):
            if speed * GAP_TIMES < lowest:
                break
            lowest = min(speed, lowest)
        return lowest

    def _in(self, round: int, of: str | None = None) -> set[str]:
        """Return all other peers that have partners in ``round``, as a peer counts them (this node
        by default): without those beyond a gap in the speeds below its own, unless these are all.
        """
        of = self._context.me if of is None else of
        here = self._alike(self._context.members())
        # A peer that left after this round had a partner in it: without it the others would be
        # paired differently from how peers that are further ahead have already paired.
        departed = self._alike(self._departed())
        gone = {peer: member for peer, member in departed.items() if member.round > round}
        others = gone | here
        one = others.pop(of, None)
        if one is None:
            return set(others)
        # One more speed closes gaps and makes none: a liar can leave itself out only.
        slowest = self._slowest(one, others.values())
        slower = {peer for peer, member in others.items() if 0 < self._speed(member) < slowest}
        return (others.keys() - slower) or set(others)

    def _alike(self, members: Mapping[str, Member]) -> dict[str, Member]:
        """Return those of ``members`` that train the same model."""
        model = self._context.model
        return {peer: member for peer, member in members.items() if member.model == model}
