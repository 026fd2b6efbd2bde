"""Claims and appeals that wait until verifiers are drawn for them, within bounds."""

from __future__ import annotations

from shoal.verification.consensus.records import Claim, Dispute, Opening, Refused


class WaitingList:
    """At most ``most`` that wait, of which ``strangers`` of authors who could not be drawn."""

    def __init__(self, most: int, strangers: int) -> None:
        self._most = most
        self._most_strangers = strangers
        self._items: dict[bytes, Claim | Dispute | Opening] = {}
        self._strange: set[bytes] = set()

    def add(self, item: Claim | Dispute | Opening, *, is_strange: bool) -> None:
        """Let ``item`` wait. Raises Refused if there is no room."""
        is_full = len(self._items) >= self._most
        if is_full or (is_strange and len(self._strange) >= self._most_strangers):
            raise Refused(f"A {item.KIND} was refused: too many wait for their draw.", "overflow")
        self._items[item.id] = item
        if is_strange:
            self._strange.add(item.id)

    def end(self, round: int) -> None:
        """Drop those of rounds up to ``round``: their draw is due."""
        self._items = {key: item for key, item in self._items.items() if item.round > round}
        self._strange &= self._items.keys()
