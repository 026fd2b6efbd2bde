"""Curves for terminals, drawn with braille characters of 2 by 4 dots."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

COLOURS = ("cyan", "magenta", "yellow", "green", "red", "blue", "bright_yellow", "bright_cyan", "bright_magenta", "bright_green")
MEAN = "bold bright_white"
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column, then row from the top
LABEL = 8  # columns of the scale on the left

Points = Sequence[tuple[float, float]]


def colour(number: int) -> str:
    """Return the colour of the curve of this number."""
    return COLOURS[number % len(COLOURS)]


def plot(curves: Sequence[Points], width: int, height: int, mean: Points = (), *, axis: str = "") -> Text:
    """Draw ``curves`` in ``height`` lines of ``width`` characters, with the scale on the left and the ends of x below.

    ``mean`` is drawn over them in `MEAN`; ``axis`` names x. Where curves meet, a character has the colour of the later one.
    """
    columns, rows = max(width - LABEL - 1, 4), max(height - 1, 2)
    points = [point for curve in curves for point in curve]
    if not points:
        return Text("nothing yet", style="dim")
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = min(y for _, y in points), max(y for _, y in points)
    x_scale = (columns * 2 - 1) / ((x_high - x_low) or 1.0)
    y_scale = (rows * 4 - 1) / ((y_high - y_low) or 1.0)
    cells = [[0] * columns for _ in range(rows)]
    owner = [[0] * columns for _ in range(rows)]

    def dot(x: int, y: int, number: int) -> None:
        cells[y // 4][x // 2] |= DOTS[x % 2][y % 4]
        owner[y // 4][x // 2] = number

    for number, curve in enumerate([*curves, mean]):
        before: tuple[int, int] | None = None
        for x, y in curve:
            here = (round((x - x_low) * x_scale), round((y_high - y) * y_scale))
            for spot in _line(before or here, here):
                dot(*spot, number)
            before = here
    text = Text(no_wrap=True, overflow="crop")
    for row in range(rows):
        label = y_high if row == 0 else y_low if row == rows - 1 else None
        text.append(f"{'' if label is None else format(label, '.4g'):>{LABEL}} ", style="dim")
        for column in range(columns):
            style = MEAN if mean and owner[row][column] == len(curves) else colour(owner[row][column])
            text.append(chr(0x2800 + cells[row][column]), style=style)
        text.append("\n")
    left, right = f"{axis} {x_low:.6g}".strip(), format(x_high, ".6g")
    text.append(" " * (LABEL + 1) + left + right.rjust(max(columns - len(left), 1)), style="dim")
    return text


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots from ``start`` to ``end``, both included."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (start[0] + round((end[0] - start[0]) * step / steps), start[1] + round((end[1] - start[1]) * step / steps))
        for step in range(steps + 1)
    ]
