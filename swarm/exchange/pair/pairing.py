"""The partner of this node in each round, as far as it sees the swarm, and the peers that are free when the partner is dead.

Every partner follows from the members in the directory, where a dead peer stays for some seconds. Its partner of the round is free;
all others are taken. So a node that cannot reach its partner also knows which peers are free, as far as it knows which are dead,
and need not search among the others. It considers a peer dead from when it could not be reached until it calls, or issues another
record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.optim.exchange.pairing import candidates, groups, partner_of
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.wire.member import Member


class PairSelector:
    """Selects this peer's partner in a round from the members in view with the same model."""

    def __init__(
        self,
        context: PeerContext,
        departed: Callable[[], Mapping[str, Member]] = dict,
    ) -> None:
        self._context, self._departed = context, departed
        self._unreached: dict[str, float] = {}
        """Peer -> the time of issue of the record that it had when it could not be reached."""

    def of(self, round: int) -> tuple[str | None, list[str]]:
        """Return the partner in ``round`` (None for the odd one out) and the peers to call: the partner first, unless it is
        dead.
        """
        here, peers = self._context.members(), self._in(round)
        partner = partner_of(self._context.seed, round, self._context.me, peers)
        others = self.left_over(round)
        order = [p for p in candidates(self._context.seed, round, self._context.me, peers) if p in here]
        return partner, order if others is None else [p for p in order if p in others]

    def left_over(self, round: int) -> set[str] | None:
        """Return the other peers without a partner if this node's partner is dead; None if it is not, as far as is known."""
        here = self._context.members()
        self._unreached = {p: issued for p, issued in self._unreached.items() if p in here and here[p].issued == issued}
        if not self._unreached:  # the usual case: no pairs need be computed
            return None
        pairs = groups(self._context.seed, round, self._in(round) | {self._context.me})
        living = [[peer for peer in pair if peer not in self._unreached] for pair in pairs]
        mine = next(number for number, pair in enumerate(pairs) if self._context.me in pair)
        if len(pairs[mine]) == len(living[mine]):
            return None
        return {pair[0] for pair in living if len(pair) == 1} - {self._context.me}

    def failed(self, peer: str) -> None:
        """Note that no stream to ``peer`` could be opened."""
        record = self._context.members().get(peer)
        if record is not None:
            self._unreached[peer] = record.issued

    def alive(self, peer: str) -> None:
        """Note that ``peer`` called."""
        self._unreached.pop(peer, None)

    def _in(self, round: int) -> set[str]:
        """Return all other peers that have partners in ``round``."""
        here = {peer for peer, member in self._context.members().items() if member.model == self._context.model}
        # A peer that left after this round had a partner in it: without it the others would be paired differently
        # from how peers that are further ahead have already paired.
        gone = {peer for peer, member in self._departed().items() if member.model == self._context.model and member.round > round}
        return (here | gone) - {self._context.me}
