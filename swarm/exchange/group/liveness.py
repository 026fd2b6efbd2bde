"""The members with which a round is formed: those in view, and those of them for which it need not wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shoal.optim.exchange.pairing import order
from shoal.swarm.exchange.context import PeerContext
from shoal.swarm.exchange.round_evidence import RoundEvidence


class LivenessView:
    """The directory as a group sees it. ``fragments``: sent in turn."""

    def __init__(self, context: PeerContext, fragments: int) -> None:
        self.members, self._context = context.members, context
        self.evidence = RoundEvidence(context, fragments)
        self._absent: dict[str, float] = {}
        """Peers that died or stayed away -> the time of issue of the record they had then."""
        self._silent: dict[str, float] = {}
        """Those that did not even answer as leaders: their processes sleep or are gone."""

    def here(self) -> set[str]:
        """Return all peers in view, this node included."""
        return {peer for peer, member in self.members().items() if member.model == self._context.model} | {self._context.me}

    def expected(self, round: int, slack: int = 0) -> set[str]:
        """Return the peers for which ``round`` waits. An absent one has to renew its record first, and the dead never do.

        One whose record states a round more than ``slack`` beyond this one has begun this round, and perhaps later ones, before: it
        is on its way, or waits elsewhere, or will never come.
        """
        self._absent = self._unrenewed(self._absent)
        rounds = {peer: member.round for peer, member in self.members().items()}
        return {peer for peer in self.here() - self._absent.keys() if rounds.get(peer, 0) <= round + slack}

    def order(self, seed: int, round: int) -> list[str]:
        """Return the leaders of a round, best first. Silent ones come last: each would cost a part of everybody's patience
        again.

        Views differ for a moment, and then two may lead; a member that waits elsewhere answers so, and one of the groups is given
        up.
        """
        self._silent = self._unrenewed(self._silent)
        return sorted(order(seed, round, self.here()), key=lambda peer: peer in self._silent)  # sorted keeps the order of equals

    def mark_absent(self, peers: Iterable[str]) -> None:
        """Note peers that did not come or died in the middle: rounds would wait for them until their records expire."""
        self._absent.update(self._issued(peers))

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

    def _issued(self, peers: Iterable[str]) -> dict[str, float]:
        records = self.members()
        return {peer: records[peer].issued for peer in peers if peer in records}

    def _unrenewed(self, peers: Mapping[str, float]) -> dict[str, float]:
        """Return the peers that have not renewed their records since."""
        now = self._issued(peers)
        return {peer: issued for peer, issued in peers.items() if now.get(peer) == issued}

    def barred(self, peers: Iterable[str]) -> list[str]:
        """Return the barred ones of ``peers``. An unknown peer is not among them: it may be a newcomer."""
        return [peer for peer in peers if peer != self._context.me and self._context.is_barred(peer)]

    def addresses(self, peer: str) -> Sequence[str]:
        """Return the addresses in a member's record."""
        member = self.members().get(peer)
        return member.addresses if member is not None else ()
