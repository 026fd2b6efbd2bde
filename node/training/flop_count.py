"""The FLOPs of a step, by torch's own counter: matrix products, convolutions and attention, forward
and backward.

What is computed twice to save memory (train.recompute) counts once, as MFU has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


class FlopCount:
    """Count of the FLOPs in its blocks, without what is computed again in `repeated`."""

    current: FlopCount | None = None
    """The one whose block is being run, by any thread: a GPU's backward pass has a thread of its
    own.
    """

    def __init__(self) -> None:
        # Only where a device's peak is known.
        from torch.utils.flop_counter import FlopCounterMode, flop_registry

        self.flops = 0
        self.known = True
        guarded = {key: self._guarded(one) for key, one in flop_registry.items()}
        self._mode = FlopCounterMode(display=False, custom_mapping=guarded)

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

        # Torch then gives it tensors, for ``count`` takes their shapes itself.
        guarded._get_raw = True  # type: ignore[attr-defined]
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
    if FlopCount.current is None:
        return nullcontext()
    return FlopCount.current._repeated()
