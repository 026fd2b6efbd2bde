"""Who averaged with whom, round by round, from what the peers say."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

MAX_PAIRS = 4096  # exchanges that are remembered
SHOWN = 6  # newest rounds that are told in words
MAX_ROUNDS = 64  # in which peers without a partner are remembered

Pair = tuple[str, str]


class Edge(NamedTuple):
    """Exchanges of one pair: ``times`` of them, the number of the newest ``round``, and the Unix time when it was heard of."""

    times: int
    round: int
    time: float


class Meetings:
    """Exchanges of a swarm. Peers are named by the ends of their ids."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[int, str, str], float] = OrderedDict()
        self._alone: OrderedDict[int, dict[str, None]] = OrderedDict()

    def add(self, round: int, me: str, partners: tuple[str, ...], now: float) -> None:
        """Note a round of ``me``. Both partners of a pair tell of it; the first to do so counts."""
        for other in partners:
            low, high = sorted((me, other))
            self._pairs.setdefault((round, low, high), now)
        while len(self._pairs) > MAX_PAIRS:
            self._pairs.popitem(last=False)
        if not partners and len(alone := self._alone.setdefault(round, {})) < MAX_PAIRS:
            alone[me] = None
        while len(self._alone) > MAX_ROUNDS:
            self._alone.popitem(last=False)

    def pairs(self, rounds: int = 0) -> dict[Pair, int]:
        """Count the exchanges of each pair; in the newest ``rounds`` rounds if that is not 0."""
        newest = max((number for number, _, _ in self._pairs), default=0)
        return dict(Counter((a, b) for number, a, b in self._pairs if not rounds or number > newest - rounds))

    def edges(self) -> dict[Pair, Edge]:
        """Return the exchanges of each pair."""
        found: dict[Pair, Edge] = {}
        for (number, a, b), time in self._pairs.items():
            before = found.get((a, b), Edge(0, -1, 0.0))
            newer = number >= before.round
            found[a, b] = Edge(before.times + 1, number if newer else before.round, time if newer else before.time)
        return found

    def newest(self) -> list[tuple[int, list[list[str]], list[str]]]:
        """Return the newest `SHOWN` rounds, newest first: number, the groups that averaged, and who had no partner."""
        numbers = sorted({number for number, _, _ in self._pairs} | set(self._alone), reverse=True)[:SHOWN]
        return [(number, self._groups(number), sorted(self._alone.get(number, ()))) for number in numbers]

    def _groups(self, round: int) -> list[list[str]]:
        groups: dict[str, set[str]] = {}
        for number, a, b in self._pairs:
            if number == round:
                joined = groups.get(a, {a}) | groups.get(b, {b})
                groups.update(dict.fromkeys(joined, joined))
        return sorted(sorted(group) for group in {id(group): group for group in groups.values()}.values())
