"""How fast training is: inner steps and tokens a second without waiting for others, and model FLOPs
utilisation (MFU).

The FLOPs of a step are counted once, in the first one, by torch's own counter: matrix products,
convolutions and attention, forward and backward. What is computed twice to save memory
(train.recompute) counts once, as MFU has it. Later steps count by their tokens. MFU is the share of
the device's published peak (`PEAKS`) that this makes of the time spent in inner steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from shoal.swarm.training.step_rate import Rates, StepRate

# Published peaks of devices, by which model FLOPs utilisation is measured. A device that is not
# listed has none: no guesses.
#
# Dense matrix products (half of what data sheets give "with sparsity"), TFLOPS of one device as
# torch lists it, from NVIDIA's data sheets of each product and its architecture white papers
# (Ampere GA102, Ada), and AMD's data sheet of the MI300X. For float16 and bfloat16 of the GeForce
# cards it is the figure with accumulation in float32, which torch uses.


class Peak(NamedTuple):
    """Peaks in TFLOPS; None: not supported.

    ``half``: float16; ``brain``: bfloat16; ``tensor``: TF32; ``single``: float32.
    """

    half: float
    brain: float | None
    tensor: float | None
    single: float


# Names are whole: a laptop's version, a MIG slice or a cut-down export model is another device.
PEAKS: tuple[tuple[str, Peak], ...] = (
    (r"NVIDIA B200", Peak(2250, 2250, 1125, 75)),
    (r"NVIDIA (H200|H100 80GB HBM3|GH200 480GB)", Peak(989.4, 989.4, 494.7, 66.9)),
    (r"NVIDIA H100 NVL", Peak(835, 835, 417.5, 60)),
    (r"NVIDIA H100 PCIe", Peak(756, 756, 378, 51)),
    (r"(NVIDIA )?A100-(SXM4|PCIE)-[48]0GB|NVIDIA A100 80GB PCIe", Peak(312, 312, 156, 19.5)),
    (r"NVIDIA A10", Peak(125, 125, 62.5, 31.2)),
    (r"NVIDIA L40S", Peak(362, 362, 183, 91.6)),
    (r"NVIDIA L4", Peak(121, 121, 60, 30.3)),
    (r"NVIDIA RTX A6000", Peak(154.8, 154.8, 77.4, 38.7)),
    (r"NVIDIA GeForce RTX 4090", Peak(165.2, 165.2, 82.6, 82.6)),
    (r"NVIDIA GeForce RTX 3090", Peak(71, 71, 35.6, 35.6)),
    (r"Tesla V100-SXM2-(16|32)GB", Peak(125, None, None, 15.7)),
    (r"Tesla V100-PCIE-(16|32)GB", Peak(112, None, None, 14)),
    (r"Tesla T4", Peak(65, None, None, 8.1)),
    (r"AMD Instinct MI300X", Peak(1307.4, 1307.4, 653.7, 163.4)),
)


def peak_flops(name: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """Return the peak of the device ``name`` for matrix products in ``dtype``, FLOPs a second; None
    if it is not known.

    ``tf32``: products of float32 are computed in TF32, where the device has it.
    """
    found = next((peak for pattern, peak in PEAKS if re.fullmatch(pattern, name)), None)
    if found is None:
        return None
    single = found.tensor if tf32 and found.tensor is not None else found.single
    peaks = {torch.float16: found.half, torch.bfloat16: found.brain, torch.float32: single}
    peak = peaks.get(dtype)
    return None if peak is None else peak * 1e12


def peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak of ``device``, FLOPs a second, for matrix products in ``dtype`` as torch is
    set now; None if not known.
    """
    if device.type != "cuda":
        return None
    matmul = torch.backends.cuda.matmul
    # The older question is an error in torch 2.9 and later where the format was chosen in the newer
    # way.
    tf32 = (
        matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    )
    return peak_flops(torch.cuda.get_device_name(device), dtype, tf32=tf32)


class FlopCount:
    """Count of the FLOPs in its blocks, without what is computed again in `repeated`."""

    current: FlopCount | None = None
    """The one whose block is being run, by any thread: a GPU's backward pass has a thread of its
    own.
    """

    def __init__(self) -> None:
        from torch.utils.flop_counter import (
            FlopCounterMode,
            flop_registry,
        )  # only where a device's peak is known

        self.flops = 0
        self.known = True
        self._mode = FlopCounterMode(
            display=False,
            custom_mapping={key: self._guarded(one) for key, one in flop_registry.items()},
        )

    def _guarded(self, count: Callable[..., int]) -> Callable[..., int]:
        """Return ``count``, but where it fails, as torch 2.11's does for grouped queries, training
        goes on and nothing is known.
        """

        def guarded(*args: Any, **kwargs: Any) -> int:
            try:
                return count(*args, **kwargs)
            except Exception:
                self.known = False
                return 0

        guarded._get_raw = True  # type: ignore[attr-defined]  # torch: tensors, for ``count`` takes their shapes itself
        return guarded

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
        self.steps, self.tokens, self.busy_s = 0, 0, 0.0
        """Inner steps and tokens of this run, from its own first step on, and the seconds spent in
        them.
        """
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
            self._flops_per_token, self._peak = (
                self._count.flops / tokens,
                self._peak if self._count.known else None,
            )
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
