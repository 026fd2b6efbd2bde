"""A bounded memory of what was there before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class LRUSet:
    """The newest ``limit`` things; older ones are forgotten. Not for several threads at once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._things: OrderedDict[Hashable, None] = OrderedDict()

    def __contains__(self, thing: Hashable) -> bool:
        return thing in self._things

    def add(self, thing: Hashable) -> bool:
        """Remember ``thing``; False if it was known."""
        if thing in self._things:
            return False
        self._things[thing] = None
        if len(self._things) > self._limit:
            self._things.popitem(last=False)
        return True
