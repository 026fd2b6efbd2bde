"""The one line of advice under the table of `shoal plan`, and the row that it advises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.node.plan.table import Row, work_of
from shoal.swarm.exchange.cost import GOOD, Line, forecast, least_every

PREFERRED = (
    ("noloco", "float32"), ("noloco", "bfloat16"), ("noloco", "int8"), ("streaming", "float32"), ("streaming", "bfloat16"),
    ("streaming", "int8"), ("streaming", "e3m0+ef"), ("streaming", "sign+ef"), ("sparseloco", "topk2+ef:0.95"),
)  # fmt: skip
"""What is chosen where the link carries it, the first first: overlapped pairs, then what a thinner link still carries."""
LONGEST = 10_000
"""Inner steps in a round, at most, that are advised."""


def advise(found: Sequence[Row], line: Line) -> tuple[Row, str]:
    """Return the row to choose, with a longer round if nothing else is enough, and a sentence about it.

    What is advised computes nearly all the time and leaves a fifth of the link (``BUSY``) to all else.
    """
    named = {(row.outer.method, row.outer.codec): row for row in found if not row.blocks}
    liked = [named[choice] for choice in PREFERRED if choice in named]
    for row in liked:
        if row.forecast.good:
            return row, f"On this link choose {_named(row)}: {_cost(row)}{_instead(row, found)}."
    # Frequent rounds are worth more than precise ones.
    for row in sorted(liked, key=lambda row: (row.outer.method != "noloco", row.work.nbytes)):
        every = least_every(row.work, line, most=LONGEST)
        if every is not None:
            longer = _with(row, every, line)
            now = row.forecast
            before = f"computing {100 * now.utilisation:.0f} % of the time and filling {100 * now.filled:.0f} % of it"
            return (
                longer,
                f"On this link choose {_named(longer)}: {_cost(longer)}, in place of {before} with every {row.work.every}.",
            )
    best = max(found, key=lambda row: row.forecast.utilisation)
    return best, (
        f"This link carries none of the settings: the best is {_named(best)}, with which {_cost(best)}; choose a smaller model, or "
        "train a part of it (LoRA)."
    )


def _with(row: Row, every: int, line: Line) -> Row:
    """Return the row with rounds of ``every`` steps."""
    outer = row.outer.model_copy(update={"every": every})
    work = work_of(outer, params=row.params, peers=row.work.peers, step_s=row.work.step_s)
    return replace(row, outer=outer, work=work, forecast=forecast(work, line))


def _named(row: Row) -> str:
    lag = f", lag {row.work.lag}" if row.outer.lag is not None else ""
    return f"{row.outer.method}, {row.outer.codec}, every {row.work.every}{lag}"


def _cost(row: Row) -> str:
    found = row.forecast
    return (
        f"a node computes {100 * found.utilisation:.0f} % of the time, sends {amount(found.sent_a_day)} a day and fills "
        f"{100 * found.filled:.0f} % of the link"
    )


def _instead(chosen: Row, found: Sequence[Row]) -> str:
    """Return what waiting for each exchange would cost, if that is much."""
    for row in found:
        same = (row.outer.method, row.outer.codec) == (chosen.outer.method, chosen.outer.codec)
        if same and row.blocks and row.forecast.utilisation < GOOD:
            return f" (with lag 0, which waits for each exchange, it would compute {100 * row.forecast.utilisation:.0f} %)"
    return ""


def amount(nbytes: float) -> str:
    """Format a number of bytes: ``1.2 GB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes / 1e3:.3g} kB"
