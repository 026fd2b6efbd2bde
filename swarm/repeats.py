"""Sentences that are not said again while what they are about lasts.

said = Repeats()
if said.due("clock", every=600.0):
    log.warning("the clock is wrong")
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable

MAX_SUBJECTS = 100
"""That one memory has, for strangers may name them."""


class Repeats:
    """Memory of when sentences were said last, by their subject, so that none is said again while
    what it is about lasts.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._said: dict[Hashable, float] = {}

    def due(self, subject: Hashable, every: float = math.inf) -> bool:
        """Return whether a sentence is due, and note that it is said: none was, or none within
        ``every`` seconds.
        """
        now = self.clock()
        last = self._said.get(subject)
        if last is not None and now - last < every:
            return False
        if last is None and len(self._said) >= MAX_SUBJECTS:
            return False
        self._said[subject] = now
        return True

    def over(self, *subjects: Hashable) -> bool:
        """Forget ``subjects``, because what they are about is over; return whether any was said."""
        was_said = False
        for subject in subjects:
            if self._said.pop(subject, None) is not None:
                was_said = True
        return was_said
