"""Whom a round is formed with: the members in view, and those of them that need not be waited for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shoal.optim.exchange.pairing import order
from shoal.swarm.exchange.context import PeerContext


class LivenessView:
    """The directory as a group sees it."""

    def __init__(self, context: PeerContext) -> None:
        self.members, self._context = context.members, context
        self._absent: dict[str, float] = {}
        """Peers that died or stayed away, and when the record was issued that we had of them then."""
        self._silent: dict[str, float] = {}
        """Those that did not even answer as leaders: their processes sleep or are gone."""

    def here(self) -> set[str]:
        """All peers in view, this node included."""
        return {peer for peer, member in self.members().items() if member.model == self._context.model} | {self._context.me}

    def expected(self) -> set[str]:
        """Those of them that a round waits for: whoever was absent has to renew its record first, and the dead never do."""
        self._absent = self._still(self._absent)
        return self.here() - self._absent.keys()

    def order(self, seed: int, round: int) -> list[str]:
        """Who leads a round, best first. The silent come last: each would cost a part of everybody's patience again.

        Views differ for a moment, and then two may lead; a member that waits elsewhere says so, and one of the groups is given up.
        """
        self._silent = self._still(self._silent)
        return sorted(order(seed, round, self.here()), key=lambda peer: peer in self._silent)  # sorted keeps the order of equals

    def miss(self, peers: Iterable[str]) -> None:
        """These did not come, or died in the middle: their records would keep everybody waiting until they expire."""
        self._absent.update(self._issued(peers))

    def silence(self, peer: str) -> None:
        """This one did not answer in time when it was to lead a round."""
        if peer != self._context.me:
            self._silent.update(self._issued([peer]))
            self.miss([peer])

    def hear(self, peer: str) -> None:
        """This one is awake, whatever its record says, and brings a contribution: the next round waits for it again."""
        self._absent.pop(peer, None)
        self._silent.pop(peer, None)

    def _issued(self, peers: Iterable[str]) -> dict[str, float]:
        records = self.members()
        return {peer: records[peer].issued for peer in peers if peer in records}

    def _still(self, peers: Mapping[str, float]) -> dict[str, float]:
        """Those of them that have not renewed their records since."""
        now = self._issued(peers)
        return {peer: issued for peer, issued in peers.items() if now.get(peer) == issued}

    def barred(self, peers: Iterable[str]) -> list[str]:
        """Those with whom this node has nothing to do. Who is unknown is not among them: it may be a newcomer."""
        return [peer for peer in peers if peer != self._context.me and self._context.is_barred(peer)]

    def addresses(self, peer: str) -> Sequence[str]:
        """Where a member says it can be reached."""
        member = self.members().get(peer)
        return member.addresses if member is not None else ()

    def furthest(self, peer: str, round: int) -> int:
        """The round that half of the members have reached, if ``peer`` is in ``round``.

        No further may one peer alone send us, to where nobody is. Records are seconds old; what a peer just said of itself is
        newer than its own.
        """
        said = sorted(({other: member.round for other, member in self.members().items()} | {peer: round}).values())
        return said[len(said) // 2]
