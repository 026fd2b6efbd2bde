"""How fast training is: inner steps and tokens a second without waiting for others, and model FLOPs
utilisation (MFU).

The FLOPs of a step are counted once, in the first one (`shoal.node.training.flop_count`). Later
steps count by their tokens. MFU is the share of the device's published peak
(`shoal.node.training.device_peaks`) that this makes of the time spent in inner steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from shoal.node.training.device_peaks import peak_of
from shoal.node.training.flop_count import FlopCount
from shoal.swarm.training.step_rate import Rates, StepRate


class Throughput:
    """Measure of one run on ``device``, with matrix products in ``dtype``; FLOPs are counted where
    its ``peak`` is known.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, peak: Callable[..., float | None] = peak_of
    ) -> None:
        self._peak = peak(device, dtype)
        self._flops_per_token: float | None = None
        self._steps = StepRate()
        self._tokens = StepRate()
        self.steps = 0
        """Inner steps of this run, from its own first step on."""
        self.tokens = 0
        self.busy_s = 0.0
        """Seconds spent in them."""
        self._reported = (0, 0)
        self._count: FlopCount | None = None

    def step(self) -> AbstractContextManager[None]:
        """Return the context of computing one step's gradients; in the first one FLOPs are
        counted.
        """
        if self._peak is None or self._flops_per_token is not None:
            return nullcontext()
        self._count = FlopCount()
        return self._count.counting()

    def stepped(self, tokens: int) -> None:
        """Note that the gradients of a batch of ``tokens`` were computed."""
        self.steps += 1
        self.tokens += tokens
        if self._count is not None:
            self._flops_per_token = self._count.flops / tokens
            if not self._count.known:
                self._peak = None
            self._count = None

    def report(self, seconds: float) -> Rates:
        """Note that the steps since the last report took ``seconds``, without waiting; return the
        usual recent rates.
        """
        steps = self.steps - self._reported[0]
        tokens = self.tokens - self._reported[1]
        self._reported = (self.steps, self.tokens)
        self.busy_s += max(seconds, 0.0)
        tokens_per_s = self._tokens.add(tokens, seconds)
        return Rates(self._steps.add(steps, seconds), tokens_per_s, self._mfu(tokens_per_s))

    def mean(self) -> Rates:
        """Return the mean rates of the whole run; all 0 before the first report."""
        if not self.busy_s:
            return Rates()
        tokens_per_s = self.tokens / self.busy_s
        return Rates(self.steps / self.busy_s, tokens_per_s, self._mfu(tokens_per_s))

    def _mfu(self, tokens_per_s: float) -> float | None:
        if self._peak is None or self._flops_per_token is None:
            return None
        return self._flops_per_token * tokens_per_s / self._peak
