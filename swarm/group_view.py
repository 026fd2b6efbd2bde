"""Whom a round is formed with: the members in view, and those of them that need not be waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from swarm.messages import Member


class View:
    """The directory as a group sees it.

    ``members``: peer id -> newest record; ``model``: members with another are not met; ``barred``: peers that nobody may bring in.
    """

    def __init__(
        self,
        members: Callable[[], Mapping[str, Member]],
        model: str,
        me: str,
        barred: Callable[[str], bool] = lambda peer: False,
    ) -> None:
        self.members, self._model, self._me, self._barred = members, model, me, barred
        self._absent: dict[str, float] = {}
        """Peers that died or stayed away, and when the record was issued that we had of them then."""

    def here(self) -> set[str]:
        """All peers in view, this node included."""
        return {peer for peer, member in self.members().items() if member.model == self._model} | {self._me}

    def expected(self) -> set[str]:
        """Those of them that a round waits for: whoever was absent has to renew its record first, and the dead never do."""
        records = self.members()
        self._absent = {
            peer: issued for peer, issued in self._absent.items() if peer in records and records[peer].issued == issued
        }
        return self.here() - self._absent.keys()

    def miss(self, peers: Iterable[str]) -> None:
        """These did not come, or died in the middle: their records would keep everybody waiting until they expire."""
        records = self.members()
        self._absent.update({peer: records[peer].issued for peer in peers if peer in records})

    def barred(self, peers: Iterable[str]) -> list[str]:
        """Those with whom this node has nothing to do. Who is unknown is not among them: it may be a newcomer."""
        return [peer for peer in peers if peer != self._me and self._barred(peer)]

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
