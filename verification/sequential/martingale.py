"""Test martingale: a gambler's capital that bets on small p-values, and grows only if they come too often.

Each p-value multiplies a share of the capital by kappa * p^(kappa - 1), whose mean is 1 for a uniform p and less for a larger one
(a power calibrator; Vovk and Wang 2021). The shares have kappas from 1, which keeps its money, to 0.1, which bets on very small
p; before each bet a part of all capital is dealt anew among them (the Simple Jumper of Vovk, Nouretdinov and Gammerman 2021), so
that a peer which was honest for long and then cheats is found as well. If each p-value is at least uniform given those before,
P(the capital ever reaches c) <= 1 / c (Ville's inequality), at whatever claim one stops to look.

Every factor falls with p, and no bet depends on earlier p-values. So rounding a p-value up only lowers the capital.
"""

from __future__ import annotations

import math

KAPPAS = (1.0, 0.95, 0.85, 0.7, 0.5, 0.35, 0.2, 0.1)
JUMP = 0.001  # of the capital, dealt anew before each bet


class Martingale:
    """Capital, of 1 at the begin, after a sequence of p-values."""

    def __init__(self) -> None:
        self._logs = [-math.log(len(KAPPAS))] * len(KAPPAS)
        self.log_capital = 0.0
        """Its natural logarithm."""

    def bet(self, p: float) -> float:
        """Bet on ``p``, in (0, 1], and return the new ``log_capital``. Raises ValueError for another number."""
        if not 0 < p <= 1:
            raise ValueError(f"a p-value is above 0 and at most 1, not {p}")
        dealt = math.log(JUMP / len(KAPPAS)) + self.log_capital
        for at, kappa in enumerate(KAPPAS):
            share = _log_sum((math.log1p(-JUMP) + self._logs[at], dealt))
            self._logs[at] = share + math.log(kappa) + (kappa - 1) * math.log(p)
        self.log_capital = _log_sum(self._logs)
        return self.log_capital


def _log_sum(logs: tuple[float, ...] | list[float]) -> float:
    largest = max(logs)
    return largest + math.log(math.fsum(math.exp(one - largest) for one in logs))
