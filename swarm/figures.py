"""Figures for people: numbers of bytes, of seconds and of the like, with a unit and no more digits
than one reads.

Example: ``amount(5_000)`` is ``5 kB``, ``duration(0.0000197)`` is ``under 1 ms``.
"""

from __future__ import annotations

import math

PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
LONG_S = 120.0  # from here on seconds are minutes, and from as many minutes on hours
UNKNOWN = "-"


def _three_digits(value: float) -> str:
    """Return ``value`` in three digits; as a whole number where that has more."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def amount(value: float, unit: str = "B") -> str:
    """Return a number of bytes, or of another ``unit``, in three digits: ``1.2 GB``."""
    for prefix, size in PREFIXES:
        if value >= 0.9995 * size:  # what three digits would round to 1000 of the unit below
            return f"{_three_digits(value / size)} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def duration(seconds: float | None) -> str:
    """Return a time in the unit that fits: ``under 1 ms``, ``20 ms``, ``1.5 s``, ``3 min``, ``2.5
    h``; a dash if not known.
    """
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds <= 0:
        return "0 s"
    if seconds < 0.001:
        return "under 1 ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < LONG_S:
        return f"{seconds:.3g} s"
    if seconds < 60 * LONG_S:
        return f"{seconds / 60:.3g} min"
    return f"{_three_digits(seconds / 3600)} h"
