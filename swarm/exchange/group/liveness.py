"""The members with which a round is formed, and this node's rounds by fragment.

It need not wait for all members in view. A late peer moves to the round of the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from shoal.optim.exchange.base import order
from shoal.swarm.exchange.context import PassedOver, PeerContext, RoundEvidence

REMEMBERED = 1024


class RoundTracker:
    """The rounds that a node has begun, joined and ended. Round numbers grow by one with every fragment sent, so those of one
    fragment are ``fragments`` apart.

    A peer that began in the middle may have other remainders than the swarm: it gets the swarm's as an answer.
    """

    def __init__(self, fragments: int) -> None:
        self.fragments = fragments
        self.next_round = 0
        """One beyond the furthest round begun, or the round in which the node joined."""
        self._begun: dict[int, int] = {}
        self._over: dict[int, int] = {}
        self._formed: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._elsewhere: dict[tuple[int, int], str] = {}

    def go_back(self, round: int) -> None:
        self.next_round, self._begun, self._over = round, {}, {}
        self._formed.clear()

    def begin(self, round: int, fragment: int) -> None:
        """Note that this node's contribution to ``round`` is there."""
        self.next_round = max(self.next_round, round + 1)
        self._begun[fragment] = max(round, self._begun.get(fragment, 0))

    def join(self, round: int, fragment: int, leader: str) -> None:
        """Note that this node waits at ``leader`` for its group."""
        self._elsewhere[round, fragment] = leader

    def leave(self, round: int, fragment: int) -> None:
        """Note that it no longer waits there."""
        self._elsewhere.pop((round, fragment), None)

    def end(self, round: int, fragment: int) -> None:
        """Note that this node's own part in ``round`` is over: its group was formed, or it has none."""
        if round < self.next_round:  # else this node went back while it was in it
            self._over[fragment] = max(round, self._over.get(fragment, 0))
        self.leave(round, fragment)

    def formed(self, round: int, fragment: int) -> None:
        """Note that this node has formed the group, with its own contribution or without.

        That has no effect on other rounds: otherwise two peers could send this node far away.
        """
        self._formed[round, fragment] = None
        while len(self._formed) > REMEMBERED:
            self._formed.popitem(last=False)

    def leader(self, round: int, fragment: int) -> str | None:
        """Return the leader at which this node itself waits in ``round``, if it does."""
        return self._elsewhere.get((round, fragment))

    def instead(self, round: int, fragment: int) -> int | None:
        """Return the round to which a contribution to ``round`` should move, or None if it is neither late nor out of step."""
        over, begun = self._over.get(fragment), self._begun.get(fragment)
        if (over is not None and round <= over) or (round, fragment) in self._formed:
            return max(round, over or 0, (begun or 0) - self.fragments) + self.fragments
        if begun is not None and (round < begun or self._out_of_step(round, begun, fragment)):
            return begun + self._up(max(round - begun, 0))
        if begun is None and round < self.next_round:
            return round + self._up(self.next_round - round)
        return None

    def _out_of_step(self, round: int, begun: int, fragment: int) -> bool:
        # A fragment beyond those of the schedule is the last average of all weights, which keeps no step.
        return fragment < self.fragments and (round - begun) % self.fragments != 0

    def _up(self, distance: int) -> int:
        return -(-distance // self.fragments) * self.fragments

    def within(self, wanted: int, mine: int, limit: int) -> int:
        """Return the round to move to from ``mine`` when a peer answers ``wanted``: that far, but not beyond ``limit``."""
        return max(mine, wanted - self._up(max(wanted - limit, 0)))


class LivenessView:
    """The directory as a group sees it. ``fragments``: sent in turn."""

    def __init__(self, context: PeerContext, fragments: int) -> None:
        self.members, self._context, self._fragments = context.members, context, fragments
        self.evidence = RoundEvidence(context, fragments)
        self._absent: dict[str, float] = {}
        """Peers that died or stayed away -> the time of issue of the record they had then."""
        self._silent: dict[str, float] = {}
        """Those that did not even answer as leaders: their processes sleep or are gone."""
        self.late, self.costly, self._warned = PassedOver(fragments), PassedOver(fragments), PassedOver(fragments)
        """Those for which rounds waited in vain, and which for a while none waits for; and those whose exchanges cost more training
        time than they gave, and which for a while are in no group here."""

    def here(self) -> set[str]:
        return {peer for peer, member in self.members().items() if member.model == self._context.model} | {self._context.me}

    def expected(self, round: int, slack: int = 0) -> set[str]:
        """Return the peers for which ``round`` waits. An absent one has to renew its record first, and the dead never do.

        One whose record states a round more than ``slack`` beyond this one has begun this round, and perhaps later ones, before: it
        is on its way, or waits elsewhere, or will never come.
        """
        self._absent = self._unrenewed(self._absent)
        return self._behind(round + slack) & self.hoped(round) - self._absent.keys()

    def _behind(self, round: int) -> set[str]:
        rounds = {peer: member.round for peer, member in self.members().items()}
        return {peer for peer in self.here() if rounds.get(peer, 0) <= round}

    def hoped(self, round: int) -> set[str]:
        """Return the peers in view, this node included, that are not passed over in ``round``."""
        return {peer for peer in self.here() if not (self.late.at(peer, round) or self.costly.at(peer, round))}

    def order(self, seed: int, round: int) -> list[str]:
        """Return the leaders of a round, best first. Silent ones come last: each would cost a part of everybody's patience
        again.

        Views differ for a moment, and then two may lead; a member that waits elsewhere answers so, and one of the groups is given
        up.
        """
        self._silent = self._unrenewed(self._silent)
        return sorted(
            order(seed, round, self.hoped(round)), key=lambda peer: peer in self._silent
        )  # sorted keeps the order of equals

    def mark_absent(self, peers: Iterable[str]) -> None:
        """Note peers that did not come or died in the middle: rounds would wait for them until their records expire."""
        self._absent.update(self._issued(peers))

    def mark_late(self, came: set[str], round: int) -> None:
        """Note that ``round`` waited for others than those who ``came``: if these are most, the others are late. Few may be as well
        in a group of their own while most are elsewhere.
        """
        if 2 * len(came) > len(self.here()):
            for peer in self._behind(round + self._fragments) - came:
                self.late.missed(peer, round, 1)

    def mark_costly(self, peer: str, round: int) -> None:
        """Note a peer that held this node's training for too long. The first time it may have slept."""
        if peer in self._warned.misses:
            self.costly.missed(peer, round, 1)
        self._warned.missed(peer, round)

    def mark_silent(self, peer: str) -> None:
        """Note a peer that did not answer in time when it was to lead a round."""
        if peer != self._context.me:
            self._silent.update(self._issued([peer]))
            self.mark_absent([peer])
            self._context.look()  # it may have said that it leaves

    def mark_awake(self, peer: str) -> None:
        """Note a peer that brings a contribution, whatever its record states: the next round waits for it again."""
        self._absent.pop(peer, None)
        self._silent.pop(peer, None)
        if self.late.once(peer) and peer not in self._warned.misses:  # it may have slept, that once
            self._warned.missed(peer, self.late.misses.pop(peer)[1])

    def _issued(self, peers: Iterable[str]) -> dict[str, float]:
        records = self.members()
        return {peer: records[peer].issued for peer in peers if peer in records}

    def _unrenewed(self, peers: Mapping[str, float]) -> dict[str, float]:
        now = self._issued(peers)
        return {peer: issued for peer, issued in peers.items() if now.get(peer) == issued}

    def barred(self, peers: Iterable[str]) -> list[str]:
        """Return the barred ones of ``peers``. An unknown peer is not among them: it may be a newcomer."""
        return [peer for peer in peers if peer != self._context.me and self._context.is_barred(peer)]

    def addresses(self, peer: str) -> Sequence[str]:
        member = self.members().get(peer)
        return member.addresses if member is not None else ()
