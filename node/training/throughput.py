"""How fast training is: inner steps and tokens a second without waiting for others, and model FLOPs utilisation (MFU).

The FLOPs of a step are counted once, in the first one, by torch's own counter: matrix products, convolutions and attention, forward
and backward. What is computed twice to save memory (--recompute) counts once, as MFU has it. Later steps count by their tokens. MFU
is the share of the device's published peak (`shoal.node.training.peaks`) that this makes of the time spent in inner steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from shoal.node.training.peaks import peak_of
from shoal.swarm.training.outer_factory import StepRate


@dataclass(frozen=True)
class Rates:
    """Speed of training, without the time spent waiting for others."""

    steps_per_s: float = 0.0
    tokens_per_s: float = 0.0
    mfu: float | None = None
    """Share of the device's peak, of 1; None where the peak is not known."""


class FlopCount:
    """Count of the FLOPs in its blocks, without what is computed again in `repeated`."""

    current: FlopCount | None = None
    """The one whose block is being run, by any thread: a GPU's backward pass has a thread of its own."""

    def __init__(self) -> None:
        from torch.utils.flop_counter import FlopCounterMode  # only where a device's peak is known

        self.flops = 0
        self._mode = FlopCounterMode(display=False)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is computed in this block. Compiled models run uncompiled meanwhile."""
        FlopCount.current = self
        try:
            with self._mode:
                yield
        finally:
            FlopCount.current = None
        self.flops += self._mode.get_total_flops()

    @contextmanager
    def _repeated(self) -> Iterator[None]:
        before = self._mode.get_total_flops()
        try:
            yield
        finally:
            self.flops -= self._mode.get_total_flops() - before


def repeated() -> AbstractContextManager[None]:
    """Return the context in which activations are computed again."""
    return nullcontext() if FlopCount.current is None else FlopCount.current._repeated()


class Throughput:
    """Measure of one run of training on ``device``.

    Args:
        dtype: number format of its matrix products.
        peak: of the device, FLOPs a second (`peak_of`); None: not known, and nothing is counted.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, peak: Callable[..., float | None] = peak_of) -> None:
        self._peak = peak(device, dtype)
        self._flops_per_token: float | None = None
        self._steps, self._tokens = StepRate(), StepRate()
        self.steps = 0
        self.tokens = 0
        """Inner steps and tokens of this run, from its own first step on."""
        self._reported = (0, 0)
        self.busy_s = 0.0
        """Seconds spent in inner steps."""
        self._count: FlopCount | None = None

    def step(self) -> AbstractContextManager[None]:
        """Return the context of computing one step's gradients; in the first one FLOPs are counted."""
        if self._peak is None or self._flops_per_token is not None:
            return nullcontext()
        self._count = FlopCount()
        return self._count.counting()

    def stepped(self, tokens: int) -> None:
        """Note that the gradients of a batch of ``tokens`` were computed."""
        self.steps += 1
        self.tokens += tokens
        if self._count is not None:
            self._flops_per_token, self._count = self._count.flops / tokens, None

    def report(self, seconds: float) -> Rates:
        """Note that the steps since the last report took ``seconds``, without waiting; return the usual rates of late."""
        steps, tokens = self.steps - self._reported[0], self.tokens - self._reported[1]
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
