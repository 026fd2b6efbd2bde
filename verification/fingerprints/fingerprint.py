"""The evidence of comparing a proof with an output.

    Evidence(features, values=((0.0, 0.1),), sizes=(1.0,)).means()
    Evidence(features, fault="the proof has 3 bytes, but one of 32 tokens has 258")

It is the features of windows, or a fault.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_WINDOWS = 1 << 20
"""Windows of a claim, at most."""


class ProofError(ValueError):
    """Invalid proof: of the wrong length, out of range, or about something else.

    One sentence says which.
    """


@dataclass(frozen=True)
class Feature:
    """Measure of how a proof may differ from an output.

    ``name`` says what is measured, in words that fit into a sentence; larger is further away, 0 is
    equal. ``grain`` is the difference, in the same unit, that other hardware may make although a
    calibration did not show it.
    """

    name: str
    grain: float


@dataclass(frozen=True)
class Evidence:
    """Result of a comparison.

    ``values[w][f]`` is feature f in window w, and ``sizes[w]`` how much of a whole window w is, in
    (0, 1]. ``fault`` is empty, or one sentence saying why the proof cannot be one of this output;
    then there are no windows.
    """

    features: tuple[Feature, ...]
    values: tuple[tuple[float, ...], ...] = ()
    sizes: tuple[float, ...] = ()
    fault: str = ""

    def __post_init__(self) -> None:
        both_or_neither = bool(self.fault) == bool(self.values)
        count = len(self.values)
        if both_or_neither or count != len(self.sizes) or count > MOST_WINDOWS:
            raise ValueError("evidence is either a fault or windows, each of them with its size")
        for row in self.values:
            if len(row) != len(self.features) or not all(map(math.isfinite, row)):
                raise ValueError(
                    f"each window of evidence must have {len(self.features)} finite values"
                )
        if not all(0 < size <= 1 for size in self.sizes):
            raise ValueError("a window's size must be above 0 and at most 1")

    @property
    def size(self) -> float:
        return math.fsum(self.sizes)

    def means(self) -> tuple[float, ...]:
        """Return the mean of each feature, weighted by the windows' sizes.

        Raises ``ValueError`` if there is a fault instead.
        """
        if self.fault:
            raise ValueError(f"there is nothing to measure: {self.fault}")
        total = self.size
        means = []
        for column in zip(*self.values, strict=True):
            weighted = [size * value for size, value in zip(self.sizes, column, strict=True)]
            means.append(math.fsum(weighted) / total)
        return tuple(means)
