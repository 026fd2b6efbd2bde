"""What a round came to, of totals that only grow: bytes, tokens and seconds of waiting."""

from __future__ import annotations


class RoundTotals:
    """What was counted since the call before; for the thread that trains."""

    def __init__(self) -> None:
        self._sent = 0
        self._received = 0
        self._tokens = 0
        self._waited_s = 0.0

    def sent(self, total: int) -> int:
        """Return the bytes sent, of ``total`` by now."""
        before = self._sent
        self._sent = total
        return total - before

    def received(self, total: int) -> int:
        """Return the bytes received, of ``total`` by now."""
        before = self._received
        self._received = total
        return total - before

    def tokens(self, total: int) -> int:
        """Return the tokens, of ``total`` by now; 0 if there are fewer than before."""
        before = self._tokens
        self._tokens = total
        return max(total - before, 0)

    def waited(self, total_s: float) -> float:
        """Return the seconds of waiting, of ``total_s`` by now."""
        before = self._waited_s
        self._waited_s = total_s
        return total_s - before
