"""Whose mate this node is in a round, by what it sees of the swarm, and who else is left over when its own mate is dead.

Everybody's mate follows from who is in the directory, and who died stays there for some seconds. Its mate of the round is left
over; all others are taken. So a node that cannot reach its mate knows who is left over too, as far as it knows who is dead, and
need not search among the others. It takes a peer for dead from when it could not be reached until it calls, or issues another
record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.optim.exchange.pairing import candidates, groups, partner_of
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.wire.member import Member


class PairSelector:
    """Of the peer ``me``. ``members``, ``departed``: the directory's; only those of the same ``model`` count."""

    def __init__(
        self,
        context: PeerContext,
        departed: Callable[[], Mapping[str, Member]] = dict,
    ) -> None:
        self._context, self._departed = context, departed
        self._unreached: dict[str, float] = {}
        """Peer -> when the record was issued that it had when it could not be reached."""

    def of(self, round: int) -> tuple[str | None, list[str]]:
        """The mate of ``round``, or None for the odd one out, and whom to call, in order: the mate first, unless it is dead."""
        here, peers = self._context.members(), self._in(round)
        partner = partner_of(self._context.seed, round, self._context.me, peers)
        others = self.left_over(round)
        order = [p for p in candidates(self._context.seed, round, self._context.me, peers) if p in here]
        return partner, order if others is None else [p for p in order if p in others]

    def left_over(self, round: int) -> set[str] | None:
        """Who else has no partner, if this node's mate is dead; None if it is not, as far as is known."""
        here = self._context.members()
        self._unreached = {p: issued for p, issued in self._unreached.items() if p in here and here[p].issued == issued}
        if not self._unreached:  # mostly: then nobody's order need be worked out for it
            return None
        pairs = groups(self._context.seed, round, self._in(round) | {self._context.me})
        living = [[peer for peer in pair if peer not in self._unreached] for pair in pairs]
        mine = next(number for number, pair in enumerate(pairs) if self._context.me in pair)
        if len(pairs[mine]) == len(living[mine]):
            return None
        return {pair[0] for pair in living if len(pair) == 1} - {self._context.me}

    def failed(self, peer: str) -> None:
        """No stream to ``peer`` came about."""
        record = self._context.members().get(peer)
        if record is not None:
            self._unreached[peer] = record.issued

    def alive(self, peer: str) -> None:
        """It called."""
        self._unreached.pop(peer, None)

    def _in(self, round: int) -> set[str]:
        """All but this node who have mates in ``round``."""
        here = {peer for peer, member in self._context.members().items() if member.model == self._context.model}
        # Who left after this round was in it with a mate of its own: leaving it out would pair up the others differently
        # from how those who are further have already paired.
        gone = {peer for peer, member in self._departed().items() if member.model == self._context.model and member.round > round}
        return (here | gone) - {self._context.me}
