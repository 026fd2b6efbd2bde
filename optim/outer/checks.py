"""Checks of outer state before it is loaded or adopted, each with a message that names the fault.

Nothing of an optimizer is changed before all of them have passed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from shoal.optim.outer.rule import Rule
from shoal.optim.schedule.schedules import Schedule

Given = Mapping[str, Sequence[Tensor]]


def check_rank(saved: Sequence[int] | None, own: Sequence[int] | None) -> None:
    """Raise ValueError unless the state is of the same part of a peer: rank and number of ranks,
    None if it is one process.
    """
    if saved == own:
        return
    was, now = (
        "one process" if rank is None else f"rank {rank[0]} of {rank[1]}" for rank in (saved, own)
    )
    raise ValueError(
        f"the saved outer state is of {was}, and this is {now}: each rank loads its own, and "
        "shoal.optim.ranks.orders saves and "
        "loads what goes with any number of ranks"
    )


def check_keys(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state. ValueError, naming the first, if something is missing."""
    for name in ("inner", "slow", "rule", "steps", "round"):
        if name not in state:
            raise ValueError(
                f"the saved state has no {name!r}, so it is not an outer optimizer's: load it into "
                "the inner one"
            )
    return state


def check_shapes(what: str, theirs: Sequence[Tensor], mine: Sequence[Tensor]) -> None:
    """Raise ValueError, naming the first difference, unless the shapes are equal."""
    if len(theirs) != len(mine):
        raise ValueError(f"{what} has {len(theirs)} tensors, this model has {len(mine)}")
    for index, (their, own) in enumerate(zip(theirs, mine, strict=True)):
        if their.shape != own.shape:
            raise ValueError(
                f"{what} has shape {tuple(their.shape)} at tensor {index}, this model has "
                f"{tuple(own.shape)}"
            )


def check_record(record: Mapping[str, Any], parts: int, steps: int, position: int) -> None:
    """Raise ValueError unless the numbers of a saved exchange in flight are possible.

    Its tensors are checked elsewhere.
    """
    facts = record["facts"]
    bounds = {
        "round": 2**63,
        "fragment": parts - 1,
        "step": steps,
        "position": position,
        "lag": 2**31,
        "even": 2**31,
    }
    for name, most in bounds.items():
        if not isinstance(facts[name], int) or not 0 <= facts[name] <= most:
            raise ValueError(
                f"the saved exchange in flight has {name} {facts[name]!r}, which must lie between "
                f"0 and {most}"
            )
    for name in ("weight", "counts"):
        if not 0 <= float(facts[name]) < math.inf:
            raise ValueError(
                f"the saved exchange in flight has {name} {facts[name]!r}: it must be finite and "
                "not negative"
            )
    if facts["arrived"] is not None and not 0 < int(facts["arrived"]) <= position:
        raise ValueError(
            f"the saved exchange in flight has arrived {facts['arrived']!r}, before it was sent or "
            "after now"
        )


def check_given(
    slow: Sequence[Tensor],
    shared: Given,
    applied: Sequence[int] | None,
    own: Sequence[Tensor],
    own_shared: Given,
    fragments: int,
) -> None:
    """Raise ValueError unless what is to be adopted has the names and shapes of the own."""
    check_shapes("the given list of slow weights", slow, own)
    for name, tensors in shared.items():
        if name not in own_shared:
            raise ValueError(
                f"the given shared state has {name!r}, which this method does not share"
            )
        check_shapes(f"the given shared state {name!r}", tensors, own_shared[name])
    if applied is not None and len(applied) != fragments:
        raise ValueError(
            f"the given weights are in {len(applied)} fragments, this optimizer's in {fragments}"
        )


def settings_of(rule: Rule) -> dict[str, Any]:
    values = {field.name: getattr(rule, field.name) for field in fields(rule)}  # type: ignore[arg-type]
    return {
        name: value
        for name, value in values.items()
        if value is None or isinstance(value, int | float)
    }


def groups_of(state: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = state["groups"]
    if len(groups) != count:
        raise ValueError(
            f"the saved outer state has {len(groups)} parameter groups, this optimizer {count}"
        )
    return groups


def settings_changed(
    state: Mapping[str, Any], rule: Rule, schedule: Schedule, restored: Collection[str] = ()
) -> str | None:
    """Return a clause on the settings, but for those ``restored``, that were others when ``state``
    was saved, or None.
    """
    was, now = state["settings"], settings_of(rule)
    names = [
        name for name in now if name in was and was[name] != now[name] and name not in restored
    ]
    before, after = ([f"{name} {values[name]}" for name in names] for values in (was, now))
    if state["schedule"] != repr(schedule):
        before, after = [*before, state["schedule"]], [*after, repr(schedule)]
    return (
        f"the saved outer state had {', '.join(before)}, this optimizer has {', '.join(after)}"
        if before
        else None
    )
