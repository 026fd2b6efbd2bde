"""A partner's weights are tried on data before they count: those that make the loss higher than usual are refused.

A pair has no majority, and the distance of two sets of weights says nothing about their direction: learning with the sign reversed,
or an old state sent again, lies no farther away than an honest peer's weights. The loss tells them apart. The idea is Zeno's (Xie
et al., 2019, 1805.10032), which ranks many gradients at a server; here each peer tries its one partner, on batches that no other
peer knows.

A contribution is refused if the mean of both sets of weights has a higher loss than the own weights, by more than 6 times the
median of what the last 16 partners changed, or the partner's own weights have, by more than 8 times. Until 5 are known the bounds
are 5 % and 10 % of the loss, and they are never below 1 % and 2 %. A refused one counts as 1.5 times the usual, so that a few
hostile partners cannot widen the bounds. A peer whose own weights are bad refuses nobody who is better.

A peer that learns from data unlike the others' finds all of them bad, and would go on alone, ever further away. So a peer that
refused 6 of the last 8 assumes that it is the outlier until it is fewer. With a quarter of all peers hostile that happens by chance
in one exchange of a hundred, and soon to a peer whose data is unlike. The outlier takes its partners as they are: it refuses those
with whom its loss rises by more than twice the median of the last 8, or beyond twice the least of its own last 16 losses.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median

from torch import Tensor

from shoal.optim.exchange.base import RoundKey

Losses = Callable[[int, Sequence[Tensor], Sequence[Tensor]], tuple[float, float, float] | None]
"""Called with a fragment, the own contribution to it and another's. Returns the losses, on the same data, of the model with the own
one, with the mean of both and with the other's alone; None if they cannot be computed."""

FIRST, LAST = 5, 16
WIDER = 1.5
VERDICTS, ODD = 8, 6
TOLERATED = 2.0  # times the median change, and times the least own loss: what the outlier takes


class _Bound:
    """What one kind of change is usually, and how much of it is too much."""

    def __init__(self, times: float, least: float, first: float) -> None:
        self._times, self._least, self._first = times, least, first
        self._seen: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=LAST))

    def passes(self, fragment: int, change: float, loss: float) -> bool:
        seen = self._seen[fragment]
        usual = median(seen) if len(seen) >= FIRST else None
        bound = self._first * loss if usual is None else max(self._least * loss, self._times * usual)
        seen.append(min(abs(change), self._first * loss / 3 if usual is None else WIDER * usual))
        return change <= bound

    def forget(self) -> None:
        self._seen.clear()


class LossCheck:
    """Decides by the losses. ``problem`` may be called from several threads at once."""

    def __init__(self, losses: Losses) -> None:
        self._losses, self._lock = losses, threading.Lock()
        self._mean, self._alone = _Bound(6.0, 0.01, 0.05), _Bound(8.0, 0.02, 0.1)
        self._bad: deque[bool] = deque(maxlen=VERDICTS)
        self._changes: deque[float] = deque(maxlen=VERDICTS)
        self._own: deque[float] = deque(maxlen=LAST)

    def problem(self, key: RoundKey, own: Sequence[Tensor], theirs: Sequence[Tensor]) -> str | None:
        """Return in a few words why the contribution must not count, or None. Neither tensor is changed."""
        found = self._losses(key.fragment, own, theirs)
        if found is None or not math.isfinite(found[0]):
            return None  # this node's own weights are broken: then anybody's are welcome
        mine, mean, alone = found
        if not (math.isfinite(mean) and math.isfinite(alone)):
            return f"with it the loss on this node's own batches, {mine:.4g}, is no longer finite"
        with self._lock:
            passed = [
                self._mean.passes(key.fragment, mean - mine, mine),
                self._alone.passes(key.fragment, alone - mine, mine),
            ]
            odd = sum(self._bad) >= ODD and (passed[0] or self._tolerates(mean - mine, mine))
            self._bad.append(not all(passed))
            self._changes.append(mean - mine)
            self._own.append(mine)
        if all(passed) or odd:
            return None
        return f"with it the loss on this node's own batches is {alone:.4g}, averaged with it {mean:.4g}, in place of {mine:.4g}"

    def _tolerates(self, change: float, mine: float) -> bool:
        return change <= TOLERATED * median(self._changes) and mine + change <= TOLERATED * min(*self._own, mine)

    def forget(self) -> None:
        """Forget what was usual: this node has taken over others' weights."""
        with self._lock:
            self._mean.forget()
            self._alone.forget()
            for seen in (self._bad, self._changes, self._own):
                seen.clear()
