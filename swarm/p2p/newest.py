"""A dict of bounded size."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Newest(OrderedDict[K, V]):
    """The ``most`` entries that were set last; older ones are forgotten, so that no peer can make
    it grow.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._most,), None, None, iter(self.items())  # a copy has its bound
