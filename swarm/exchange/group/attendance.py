"""Members that a group leaves out for a while: ``Attendance``.

    attendance.missed(peer, round)       # a deadline of the round was over without it
    attendance.is_left_out(peer, later)  # True in the rounds after the second miss

Nothing is charged to a member that is in time, however long it takes. Why: docs/internals.md, "The
deadline of a group".
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.swarm.exchange.terms import FORGOTTEN, REMEMBERED, term_end
from shoal.swarm.p2p.newest import Newest

ALLOWED = 1  # rounds missed that leave nobody out: everyone sleeps once


class _Misses(NamedTuple):
    rounds: int
    last: int
    """The round of the last one."""
    held: bool
    """Whether one of them held a group that was formed already."""


class Attendance:
    """The misses of the other members, as one node counts them. ``fragments``: sent in turn."""

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._misses = Newest[str, _Misses](REMEMBERED)

    def missed(self, peer: str, round: int, *, held: bool = False) -> None:
        """Note that ``peer`` was not there when a deadline of ``round`` was over; ``held``: the
        group was formed, and waited for what it had still to send.
        """
        before = self._misses.get(peer)
        if before is None or round >= self._end(before) + FORGOTTEN * self._fragments:
            self._misses[peer] = _Misses(1, round, held)
            return
        rounds, last = before.rounds, before.last
        # Fragments that were in flight together count as one round.
        if round >= last + self._fragments:
            rounds, last = rounds + 1, round
        self._misses[peer] = _Misses(rounds, last, held or before.held)

    def was_in_time(self, peer: str) -> None:
        """Note that ``peer`` held no group up: one that it held before is forgiven."""
        misses = self._misses.get(peer)
        if misses is not None and misses.held:
            self._misses[peer] = misses._replace(held=False)

    def is_left_out(self, peer: str, round: int) -> bool:
        """Return whether ``peer`` is neither waited for in ``round`` nor leads it; not in one far
        before its misses, to which this node went back.
        """
        misses = self._misses.get(peer)
        if misses is None or misses.rounds <= ALLOWED:
            return False
        return misses.last - self._fragments < round < self._end(misses)

    def is_turned_away(self, peer: str, round: int) -> bool:
        """Return whether ``peer`` is left out of the groups of ``round`` even if it comes in time:
        others would wait for what it sends.
        """
        misses = self._misses.get(peer)
        return misses is not None and misses.held and self.is_left_out(peer, round)

    def _end(self, misses: _Misses) -> int:
        """Return the first round in which a member is no longer left out."""
        if misses.rounds <= ALLOWED:
            return misses.last
        return term_end(misses.rounds - ALLOWED, misses.last, self._fragments)
