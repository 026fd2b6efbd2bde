"""Test martingale: a gambler's capital that bets on small p-values, and grows only if they come too
often.

    martingale = Martingale()
    martingale.bet(0.01)               # the logarithm of the capital, which was 1 at the begin

If each p-value is at least uniform given those before, P(the capital ever reaches c) <= 1 / c
(Ville's inequality), at whatever claim one stops to look. The bets: docs/internals.md, "Odds
against a peer".
"""

from __future__ import annotations

import math

KAPPAS = (1.0, 0.95, 0.85, 0.7, 0.5, 0.35, 0.2, 0.1)
"""Exponents of the bets, kappa p^(kappa - 1): from 1, which keeps its money, to 0.1, which bets on
very small p.
"""
JUMP = 0.001
"""Part of the capital that is divided anew before each bet."""


class Martingale:
    """Capital, of 1 at the begin, after a sequence of p-values."""

    def __init__(self) -> None:
        self._logs = [-math.log(len(KAPPAS))] * len(KAPPAS)
        self.log_capital = 0.0
        """The natural logarithm of the capital."""

    def bet(self, p: float) -> float:
        """Bet on ``p``, in (0, 1], and return the new ``log_capital``.

        Raises ValueError for another number.
        """
        if not 0 < p <= 1:
            raise ValueError(f"a p-value is above 0 and at most 1, not {p}")
        divided = math.log(JUMP / len(KAPPAS)) + self.log_capital
        for at, kappa in enumerate(KAPPAS):
            share = _log_sum((math.log1p(-JUMP) + self._logs[at], divided))
            self._logs[at] = share + math.log(kappa) + (kappa - 1) * math.log(p)
        self.log_capital = _log_sum(self._logs)
        return self.log_capital


def _log_sum(logs: tuple[float, ...] | list[float]) -> float:
    largest = max(logs)
    return largest + math.log(math.fsum(math.exp(one - largest) for one in logs))
