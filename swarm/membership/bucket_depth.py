"""The depth of a peer's bucket: how many bits of its position name it.

Nobody counts the swarm, so each peer estimates its size and the depth that follows, and the peers
of neighbouring depths agree. Why these rules: docs/internals.md, "Buckets".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

MAX_BUCKET_DEPTH = 12  # bits of a bucket's prefix: 4,096 buckets
# Shares of the most in a bucket: a mean number beyond the first makes the next epoch deeper, one
# below the second less deep. Between them is more than a factor of two, so peers near a border stay
# where they are.
DEEPEN_SHARE = 0.75
MERGE_SHARE = 0.3


def depth_for(size: float, depth: int, most: int) -> int:
    """Return the depth at which to begin an epoch in a swarm of about ``size`` peers, having been
    at ``depth``.
    """
    while depth < MAX_BUCKET_DEPTH and size / 2**depth > (DEEPEN_SHARE * most if depth else most):
        depth += 1
    while depth and size / 2**depth < MERGE_SHARE * most:
        depth -= 1
    return depth


def agreed(
    depth: int,
    bits: str,
    there: Mapping[int, Collection[str]],
    position: Callable[[str], str],
    most: int,
) -> int:
    """Return the depth to be at from now on.

    ``there``: depth -> the other peers whose newest record is under this peer's key at that depth,
    for all depths that were read. ``position``: peer -> its bits in the epoch.
    """
    view = _LevelView(depth, bits, there, position, most)
    chosen = view.deeper()
    if chosen is None:
        chosen = view.higher()
    if chosen is None and view.is_nearly_empty():
        chosen = view.fullest()
    if chosen is not None:
        return chosen
    return depth + 1 if depth < MAX_BUCKET_DEPTH and view.is_full(depth) else depth


class _LevelView:
    """What one peer sees of its bucket, and of those above and below it."""

    def __init__(
        self,
        depth: int,
        bits: str,
        there: Mapping[int, Collection[str]],
        position: Callable[[str], str],
        most: int,
    ) -> None:
        self._depth = depth
        self._bits = bits
        self._most = most
        self._few = max(most // 16, 2)
        # Depth -> the positions of the peers there.
        self._levels = {level: [position(peer) for peer in peers] for level, peers in there.items()}
        self._here = self._levels.get(depth, [])

    def deeper(self) -> int | None:
        """Return the first deeper level with at least as many as would come along from here."""
        for level in sorted(level for level in self._levels if level > self._depth):
            mine = 1 + self._count(self._here, level)
            # Far down a handful of forged ids is quickly found, so more than that must be there.
            least = max(self._few - mine, 1)
            if level > self._depth + 1:
                least = self._most // 4
            if len(self._levels[level]) >= max(mine, least):
                return level
        return None

    def higher(self) -> int | None:
        """Return the next higher level where more of this bucket are than here."""
        for level in self._levels_above():
            theirs = self._count(self._levels[level], self._depth)
            if theirs > 1 + len(self._here) and not self.is_full(level):
                return level
        return None

    def is_nearly_empty(self) -> bool:
        """Return whether hardly anybody is in this bucket, or will follow to it."""
        crowd = 1 + len(self._here)
        for level in self._levels_above():
            crowd += self._count(self._levels[level], self._depth)
        crowd += len(self._levels.get(self._depth + 1, ()))  # those just below come up as well
        return crowd < self._few

    def fullest(self) -> int:
        """Return the level with the most peers that has room, or one level up."""
        best = self._depth
        most = -1
        for level in sorted(self._levels):
            is_open = level > self._depth + 1
            if level <= self._depth:
                is_open = not self.is_full(level)
            if is_open and len(self._levels[level]) > most:
                best = level
                most = len(self._levels[level])
        if len(self._levels.get(best, ())) > len(self._here):
            return best
        return max(self._depth - 1, 0)

    def is_full(self, level: int) -> bool:
        """Return whether the bucket at that depth has no room, whichever keys its members are
        under.
        """
        if level <= 0:
            return False
        members = sum(self._count(positions, level) for positions in self._levels.values())
        return 1 + members >= self._most

    def _levels_above(self) -> list[int]:
        return sorted((level for level in self._levels if level < self._depth), reverse=True)

    def _count(self, positions: Collection[str], depth: int) -> int:
        """Return how many of ``positions`` are in this peer's bucket at ``depth``."""
        prefix = self._bits[:depth]
        return sum(position.startswith(prefix) for position in positions)
