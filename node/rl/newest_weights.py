"""Whether a server draws completions with the weights that it was given last.

A server may accept an adapter and draw without it, or go on from a prompt that it has cached under
older weights. Neither fails, and after a small update neither is far off. Let ``e`` be the server's
log-probability of a token minus the node's, and ``d`` that of older weights minus the node's. The
slope of ``e`` over ``d`` is 0 for a server that has the newest weights and 1 for one that has the
older ones, whatever its rounding adds.

    check = OlderWeights()
    if (slope := check.add(theirs - own, before - own, mask)) is not None:
        ...  # the server has older weights
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

STALE_SLOPE = 0.25
"""Of a server with older weights, at least: a cache may give a part of its tokens."""
CERTAIN_ERRORS = 5.0
"""Standard errors between the slope and `STALE_SLOPE` before either is concluded."""
FEWEST_COMPLETIONS = 16
"""Before anything is concluded."""
EXACT_NATS = 1e-4
"""Log-probabilities are no more exact than this."""


class OlderWeights:
    """Evidence that a server answers with certain older weights, over as many answers as it takes.

    Tokens of one completion go wrong together, so the standard error is that of independent
    completions (clustered, Liang and Zeger, 1986).
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._rows = 0
        # Sums over completions, each of which has sums xy of e * d and xx of d * d over its tokens.
        self._xy = 0.0
        self._xx = 0.0
        self._xy_xy = 0.0
        self._xy_xx = 0.0
        self._xx_xx = 0.0

    def add(self, error: Tensor, difference: Tensor, mask: Tensor) -> float | None:
        """Take in completions, all (B, T) on the CPU; return the slope once it is certainly above
        `STALE_SLOPE`.

        Once it is certainly below, the evidence begins anew.
        """
        mask = mask & difference.isfinite()
        e = error.double().masked_fill(~mask, 0.0)
        d = difference.double().masked_fill(~mask, 0.0)
        xy = (e * d).sum(1)
        xx = (d * d).sum(1)
        self._rows += len(mask)
        self._xy += float(xy.sum())
        self._xx += float(xx.sum())
        self._xy_xy += float(torch.dot(xy, xy))
        self._xy_xx += float(torch.dot(xy, xx))
        self._xx_xx += float(torch.dot(xx, xx))
        if self._rows < FEWEST_COMPLETIONS or not self._xx > 0:
            return None
        slope = self._xy / self._xx
        spread = self._xy_xy - 2 * slope * self._xy_xx + slope * slope * self._xx_xx
        deviation = math.sqrt(max(spread, 0.0) / self._xx**2 + EXACT_NATS**2 / self._xx)
        if abs(slope - STALE_SLOPE) <= CERTAIN_ERRORS * deviation:
            return None
        self._begin()
        return slope if slope > STALE_SLOPE else None
