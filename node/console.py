"""What commands print: JSON, and tables and numbers for people."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any


def finite(value: Any) -> Any:
    """Return ``value``, of mappings, sequences and plain values, with None for each float that is
    not finite: JSON has none.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(inner) for inner in value]
    return value


def dumps(value: Any) -> str:
    """Return ``value`` as JSON, with null for floats that are not finite."""
    return json.dumps(finite(value), allow_nan=False)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: Collection[str],
    width: int,
    title: str = "",
) -> str:
    """Return a table for people, ``width`` characters wide at most: ``words`` are the columns that
    stand to the left.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=Text(title) if title else None)
    for column in columns:
        grid.add_column(column, justify="left" if column in words else "right")
    for cells in rows:
        # A stranger's name must not be markup.
        grid.add_row(*map(Text, cells))
    console = Console(width=width)
    with console.capture() as capture:
        console.print(grid)
    return capture.get().rstrip()


def figure(value: float | None, form: str = ".3f") -> str:
    """Return a number for people; a dash where it is not known or not finite."""
    return format(value, form) if value is not None and math.isfinite(value) else "-"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
