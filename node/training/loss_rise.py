"""A training loss that is far above that of the first step: training has diverged.

    rise.add(loss)                       # after each step
    said = rise.news(progress.loss)      # at each report

A loss that is not finite ends training (`shoal.node.training.meter`); with most models and AdamW
it stays finite whatever the learning rate.
"""

from __future__ import annotations

import torch

FAR_ABOVE = 3.0
"""Times the loss of the first step; noise and a warm-up that is too short stay below twice."""
REPORTS = 3
"""In a row, so that one batch does not count."""


class LossRise:
    """The loss of one run, compared with that of its first step.

    Of weights that were trained before, a first step says nothing: their loss may be near 0, and
    three times as high in the next batch.
    """

    def __init__(self) -> None:
        self._first: torch.Tensor | None = None
        self._high = 0  # reports in a row
        self._is_over = False

    def stop(self) -> None:
        """Say nothing from now on."""
        self._is_over = True

    def add(self, loss: torch.Tensor) -> None:
        """Note the training loss of a step."""
        if self._first is None:
            self._first = loss.detach().clone()

    def news(self, loss: float) -> str:
        """Return one sentence, once in a run, if the mean ``loss`` of the steps since the last
        report shows that training has diverged; else nothing.
        """
        first = 0.0 if self._first is None else float(self._first)
        if not loss > FAR_ABOVE * first > 0.0:
            self._high = 0
            return ""
        self._high += 1
        if self._high < REPORTS or self._is_over:
            return ""
        self.stop()
        return (
            f"training diverges: the loss is {loss:.4g}, and was {first:.4g} in the first step; "
            "begin again with a lower learning rate (`shoal tune` finds one)"
        )
