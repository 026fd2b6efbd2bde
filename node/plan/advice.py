"""The one line of advice under the table of `shoal plan`, and the row that it advises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.node.plan.rows import Row, work_of
from shoal.optim.methods import METHODS
from shoal.swarm.exchange.cost import GOOD, Line, forecast, least_every
from shoal.swarm.figures import amount

MAX_EVERY = 10_000
"""Inner steps in a round, at most, that are advised."""


def preferred() -> list[tuple[str, str]]:
    """Return the methods and codecs that are chosen where the link carries them, the first first.

    These are overlapped pairs, then what a thinner link still carries.
    """
    choices: list[tuple[str, str]] = []
    for method in METHODS.values():
        choices += [(method.name, codec) for codec in method.advised]
    return choices


def advise(found: Sequence[Row], line: Line) -> tuple[Row, str]:
    """Return the row to choose, with a longer round if nothing else is enough, and a sentence about
    it.

    What is advised computes nearly all the time and leaves a fifth of the link (``BUSY``) to all
    else.
    """
    named = {(row.outer.method, row.outer.codec): row for row in found if not row.blocks}
    liked = [named[choice] for choice in preferred() if choice in named]
    for row in liked:
        if row.forecast.good:
            said = f"{_cost(row)}{_instead(row, found)}{_thinner(row, liked)}"
            return row, f"On this link choose {_named(row)}: {said}."
    # Frequent rounds are worth more than precise ones.
    for row in sorted(liked, key=lambda row: (row.work.group != "pair", row.work.nbytes)):
        longer = _longer(row, line)
        if longer is not None:
            return longer, (
                f"On this link choose {_named(longer)}: {_cost(longer)}, in place of computing "
                f"{100 * row.forecast.utilisation:.0f} % of the time and filling "
                f"{100 * row.forecast.filled:.0f} % of it with every {row.work.every}."
            )
    best = max(found, key=lambda row: row.forecast.utilisation)
    return best, (
        f"This link carries none of the settings: the best is {_named(best)}, with which "
        f"{_cost(best)}; choose a smaller model, or train a part of it (LoRA)."
    )


def _longer(row: Row, line: Line) -> Row | None:
    """Return ``row`` with rounds so long that the link carries them; None if none are."""
    every = least_every(row.work, line, most=MAX_EVERY)
    if every is None:
        return None
    outer = row.outer.model_copy(update={"every": every})
    work = work_of(outer, row.tensors, peers=row.work.peers, step_s=row.work.step_s)
    return replace(row, outer=outer, work=work, forecast=forecast(work, line))


def _named(row: Row) -> str:
    lag = f", lag {row.work.lag}" if row.outer.lag is not None else ""
    return f"{row.outer.method}, {row.outer.codec}, every {row.work.every}{lag}"


def _cost(row: Row) -> str:
    found = row.forecast
    return (
        f"a node computes {100 * found.utilisation:.0f} % of the time, sends "
        f"{amount(found.sent_a_day)} a day and fills {100 * found.filled:.0f} % of the link"
    )


def _thinner(chosen: Row, liked: Sequence[Row]) -> str:
    """Return why the advice is not the row with the fewest bytes, where the same method can send
    fewer.
    """
    same = [row for row in liked if row.outer.method == chosen.outer.method and row.forecast.good]
    least = min(same, key=lambda row: row.forecast.sent_a_day)
    if least is chosen:
        return ""
    return (
        f"; {least.outer.codec} would send {amount(least.forecast.sent_a_day)} a day and round "
        "more, for a link that is paid by the byte"
    )


def _instead(chosen: Row, found: Sequence[Row]) -> str:
    """Return what waiting for each exchange would cost, if that is much."""
    for row in found:
        same = (row.outer.method, row.outer.codec) == (chosen.outer.method, chosen.outer.codec)
        if same and row.blocks and row.forecast.utilisation < GOOD:
            return (
                " (with lag 0, which waits for each exchange, it would compute "
                f"{100 * row.forecast.utilisation:.0f} %)"
            )
    return ""
