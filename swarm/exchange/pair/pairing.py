"""The partner of this node in each round, as far as it sees the swarm, and the peers that are free when the partner is dead.

Every partner follows from the members in the directory, where a dead peer stays for some seconds. Its partner of the round is free;
all others are taken. So a node that cannot reach its partner also knows which peers are free, as far as it knows which are dead,
and need not search among the others. It considers a peer dead from when it could not be reached until it calls, or issues another
record.

A peer that wastes this node's rounds is passed over as if it were dead (`shoal.swarm.exchange.passed_over`). The pairs of all
others stay as they are. Those whose partners are passed over, and the odd one out, meet each other: nodes that have seen the same
failures agree about that, and an odd one out that has seen any listens for a moment, for others may have seen more. A node that
would have to pass over all, and several, had more likely a fault of its own: it meets those that failed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.optim.exchange.pairing import candidates, groups, partner_of
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.passed_over import PassedOver
from shoal.swarm.wire.member import Member


class PairSelector:
    """Selects this peer's partner in a round from the members in view with the same model. ``fragments``: sent in turn."""

    def __init__(
        self,
        context: PeerContext,
        departed: Callable[[], Mapping[str, Member]] = dict,
        fragments: int = 1,
    ) -> None:
        self._context, self._departed = context, departed
        self.passed = PassedOver(fragments)
        self._unreached: dict[str, float] = {}
        """Peer -> the time of issue of the record that it had when it could not be reached."""

    def of(self, round: int) -> tuple[str | None, list[str]]:
        """Return the partner in ``round`` (None for the odd one out) and the others to call: the partner first, unless it is
        dead. Where partners are passed over, those left over and the odd one out are paired once more.
        """
        here, peers = self._context.members(), self._in(round)
        partner = self.partner(round)
        others = self.left_over(round)
        order = [p for p in candidates(self._context.seed, round, self._context.me, peers) if p in here]
        if others is None:
            return partner, order
        if partner is None or (self._over(partner, round) and partner not in self._unreached):
            if not others:
                if partner is not None and self.passed.costly(partner):
                    return partner, []  # to train on without a partner is better
                return partner, order if partner is None else [partner]  # there is nobody better
            partner = partner_of(self._context.seed, round, self._context.me, others)
        return partner, sorted((p for p in order if p in others), key=lambda peer: peer != partner)

    def partner(self, round: int) -> str | None:
        """Return the partner in ``round`` if nobody is dead."""
        return partner_of(self._context.seed, round, self._context.me, self._in(round))

    def left_over(self, round: int) -> set[str] | None:
        """Return the other peers without a partner if this node has none that is alive; None if it has, as far as is known."""
        here = self._context.members()
        self._unreached = {p: issued for p, issued in self._unreached.items() if p in here and here[p].issued == issued}
        dead = {peer for peer in (*self._unreached, *self.passed.misses) if peer in self._unreached or self._over(peer, round)}
        if not dead:  # the usual case: no pairs need be computed
            return None
        pairs = groups(self._context.seed, round, self._in(round) | {self._context.me})
        living = [[peer for peer in pair if peer not in dead] for pair in pairs]
        mine = next(number for number, pair in enumerate(pairs) if self._context.me in pair)
        if len(living[mine]) == 2:
            return None
        return {pair[0] for pair in living if len(pair) == 1} - {self._context.me}

    def takes(self, peer: str, round: int) -> bool:
        """Return whether ``peer`` is not passed over."""
        return not self._over(peer, round)

    def accepts(self, peer: str, round: int) -> bool:
        """Return whether a node that found nobody is free for ``peer`` if that calls unasked: also for one that failed once."""
        return self.takes(peer, round) or self.passed.once(peer)

    def _over(self, peer: str, round: int) -> bool:
        if not self.passed.at(peer, round):
            return False
        others = self._in(round)
        return not (self.passed.once(peer) and len(others) > 1 and all(self.passed.at(other, round) for other in others))

    def tried(self, peer: str, round: int) -> None:
        """Note that ``peer`` was called in vain: a failure if it is the partner; others may well be busy."""
        if peer == self.partner(round):
            self.passed.missed(peer, round)

    def ended(self, peer: str, round: int, *, met: bool, over: int = 0) -> None:
        """Note the end of a transfer; ``over``: rounds for which the peer is passed over although they met."""
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
        self._unreached.pop(peer, None)

    def _in(self, round: int) -> set[str]:
        """Return all other peers that have partners in ``round``."""
        here = {peer for peer, member in self._context.members().items() if member.model == self._context.model}
        # A peer that left after this round had a partner in it: without it the others would be paired differently
        # from how peers that are further ahead have already paired.
        gone = {peer for peer, member in self._departed().items() if member.model == self._context.model and member.round > round}
        return (here | gone) - {self._context.me}
