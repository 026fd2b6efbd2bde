"""A set of bounded size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class LRUSet:
    """A set of the newest ``limit`` items; older ones are forgotten. Not for several threads at once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: OrderedDict[Hashable, None] = OrderedDict()

    def __contains__(self, item: Hashable) -> bool:
        return item in self._items

    def add(self, item: Hashable) -> bool:
        """Add ``item``; return False if it was there."""
        if item in self._items:
            return False
        self._items[item] = None
        if len(self._items) > self._limit:
            self._items.popitem(last=False)
        return True
