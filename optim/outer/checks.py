"""Checks of outer state before it is loaded or adopted, each with a message that names the fault.

Nothing of an optimizer is changed before all of them have passed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from shoal.optim.outer.rule import Rule, State, same_memory
from shoal.optim.schedule.schedules import Schedule

Given = Mapping[str, Sequence[Tensor]]
"""A rule's tensors by name, as another peer has them."""

POSSIBLE_ROUNDS = 2**63
"""Above every round number that is sent."""
POSSIBLE_COUNT = 2**31
"""Above every lag and every number of tensors."""


def check_rank(saved: Sequence[int] | None, own: Sequence[int] | None) -> None:
    """Raise ValueError unless the state is of the same part of a peer.

    That is a rank and the number of ranks; None if it is one process.
    """
    if saved == own:
        return
    raise ValueError(
        f"the saved outer state is of {_rank_name(saved)}, and this is {_rank_name(own)}: each "
        "rank loads its own, and shoal.optim.ranks.orders saves and loads what goes with any "
        "number of ranks"
    )


def _rank_name(rank: Sequence[int] | None) -> str:
    return "one process" if rank is None else f"rank {rank[0]} of {rank[1]}"


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


def check_rule_state(state: Mapping[str, Any], own: State, kind: str) -> None:
    """Raise ValueError unless a rule of this ``kind`` can go on with the saved rule's state.

    ``own``: its initial state, for names and shapes.
    """
    for name, tensors in state["rule"].items():
        if name not in own:
            raise ValueError(
                f"the saved outer state has {name!r}, which this method does not use: resume "
                "with the same method"
            )
        check_shapes(f"the saved outer state {name!r}", tensors, own[name])
    was = state.get("kind")
    if state["rule"] and was is not None and not same_memory(was, kind):
        raise ValueError(
            f"the saved outer state is of {was}, not of {kind}: resume with the same method"
        )


def check_record(record: Mapping[str, Any], fragments: int, steps: int, position: int) -> None:
    """Raise ValueError unless the numbers of a saved exchange in flight are possible.

    Its tensors are checked elsewhere.
    """
    facts = record["facts"]
    highest = {
        "round": POSSIBLE_ROUNDS,
        "fragment": fragments - 1,
        "step": steps,
        "position": position,
        "lag": POSSIBLE_COUNT,
        "even": POSSIBLE_COUNT,
    }
    for name, most in highest.items():
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


def groups_of(state: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the saved outer groups. ValueError unless there are ``count``."""
    groups: list[dict[str, Any]] = state["groups"]
    if len(groups) != count:
        raise ValueError(
            f"the saved outer state has {len(groups)} parameter groups, this optimizer {count}"
        )
    return groups


def settings_of(rule: Rule) -> dict[str, Any]:
    """Return the numbers that a rule was made with."""
    found: dict[str, Any] = {}
    for field in fields(rule):  # type: ignore[arg-type]
        value = getattr(rule, field.name)
        if value is None or isinstance(value, int | float):
            found[field.name] = value
    return found


def settings_changed(
    state: Mapping[str, Any], rule: Rule, schedule: Schedule, restored: Collection[str] = ()
) -> str | None:
    """Return a clause on the settings that were others when ``state`` was saved, or None.

    ``restored``: settings that the state brings along, of which nothing is said.
    """
    before: list[str] = []
    after: list[str] = []
    was = state["settings"]
    for name, value in settings_of(rule).items():
        if name in was and was[name] != value and name not in restored:
            before.append(f"{name} {was[name]}")
            after.append(f"{name} {value}")
    if state["schedule"] != repr(schedule):
        before.append(state["schedule"])
        after.append(repr(schedule))
    if not before:
        return None
    return f"the saved outer state had {', '.join(before)}, this optimizer has {', '.join(after)}"
