"""Numbers of the command line that are finite."""

from __future__ import annotations

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A range of floats, neither nan, which is in every range of click's, nor infinite.

    Example:
        @click.option("--minutes", type=FiniteRange(0, min_open=True))
    """

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number
