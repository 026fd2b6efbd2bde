"""A mean that is computed once, in place, by whoever asks first: a worker thread while training
goes on, or training.

    mean = MeanOnce()
    mean.of(lambda: mean_of(screen, codec, ...))    # computes it
    mean.of(...)                                    # returns the same
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from shoal.optim.exchange.base import Mean


class MeanOnce:
    """The mean of one exchange, once it is there. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_begun = False
        self._mean: Mean | None = None

    def of(self, compute: Callable[[], Mean]) -> Mean:
        """Return what ``compute`` returns, called the first time only.

        What it raises passes through. Then the contributions may be used up: all further calls
        raise RuntimeError.
        """
        with self._lock:
            if self._mean is None:
                # The error is not kept: it names the frames that hold this and the contributions,
                # a ring, which would keep them until Python's collector came.
                if self._is_begun:
                    raise RuntimeError("the mean of this exchange failed before")
                self._is_begun = True
                self._mean = compute()
            return self._mean
