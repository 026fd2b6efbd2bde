"""Protocol of fingerprints: a proof of an output in bytes, and the evidence of comparing it with another output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

MOST_WINDOWS = 1 << 20

Output = TypeVar("Output", contravariant=True)


class ProofError(ValueError):
    """Invalid proof: of the wrong length, out of range, or about something else. One sentence says which."""


@dataclass(frozen=True)
class Feature:
    """Measure of how a proof may differ from an output.

    ``name`` says what is measured, in words that fit into a sentence; larger is further away, 0 is equal. ``grain`` is the
    difference, in the same unit, that other hardware may make although a calibration did not show it.
    """

    name: str
    grain: float


@dataclass(frozen=True)
class Evidence:
    """Result of a comparison.

    ``values[w][f]`` is feature f in window w, and ``sizes[w]`` how much of a whole window w is, in (0, 1]. ``fault`` is empty, or
    one sentence saying why the proof cannot be one of this output; then there are no windows.
    """

    features: tuple[Feature, ...]
    values: tuple[tuple[float, ...], ...] = ()
    sizes: tuple[float, ...] = ()
    fault: str = ""

    def __post_init__(self) -> None:
        if bool(self.fault) == bool(self.values) or len(self.values) != len(self.sizes) or len(self.sizes) > MOST_WINDOWS:
            raise ValueError("evidence is either a fault or windows, each of them with its size")
        if any(len(row) != len(self.features) or not all(map(math.isfinite, row)) for row in self.values):
            raise ValueError(f"each window of evidence must have {len(self.features)} finite values")
        if not all(0 < size <= 1 for size in self.sizes):
            raise ValueError("a window's size must be above 0 and at most 1")

    @property
    def size(self) -> float:
        """Length in whole windows."""
        return math.fsum(self.sizes)

    def means(self) -> tuple[float, ...]:
        """Return the mean of each feature, weighted by the windows' sizes. Raises ``ValueError`` if there is a fault instead."""
        if self.fault:
            raise ValueError(f"there is nothing to measure: {self.fault}")
        total = self.size
        return tuple(
            math.fsum(s * v for s, v in zip(self.sizes, column, strict=True)) / total for column in zip(*self.values, strict=True)
        )

    @staticmethod
    def single(features: Sequence[Feature], *values: float) -> Evidence:
        """Make the evidence of a fingerprint of the output as a whole."""
        return Evidence(tuple(features), (tuple(values),), (1.0,))


class Fingerprint(Protocol[Output]):
    """Way to prove an output, and to compare a proof with an output of one's own.

    ``make`` raises ``ValueError`` if the own output has no fingerprint. ``compare`` raises it too, but only for the own output;
    whatever is wrong with the proof, which may be any bytes, is said in ``Evidence.fault``. Whether differences are small enough
    is for ``verification.calibration`` to say, from what honest peers show.
    """

    @property
    def name(self) -> str: ...

    @property
    def features(self) -> tuple[Feature, ...]:
        """Measures of ``compare``."""
        ...

    def make(self, output: Output) -> bytes:
        """Prove ``output``."""
        ...

    def compare(self, proof: bytes, output: Output) -> Evidence:
        """Measure how far ``proof``, made by another, is from the own ``output``."""
        ...
