"""The settings on which peers must agree.

    config_diff(mine, theirs)       # "every is 20 and not 50", or None

They are compared between two outer optimizers.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from shoal.optim.outer.rule import kind_of
from shoal.optim.outer.state import OuterState
from shoal.optim.schedule.schedules import Every, Schedule, SentAhead, Streaming


def config_diff(mine: OuterState, other: OuterState) -> str | None:
    """Return the first difference of ``mine`` to ``other`` that matters for averaging, or None.

    Compares rule, present outer rate and momentum of each parameter, schedule but for the lag (each
    peer may have its own), codec, weight, length of a round, number of buffers, and fragments.
    Tensors are not read, so ``other`` may be on the device "meta".
    """
    found = _group_difference(mine, other)
    if found is not None:
        return found
    in_groups = mine.outer.defaults.keys() & other.outer.defaults.keys()
    compared = (
        (mine.rule, other.rule),
        (_without_lag(mine.schedule), _without_lag(other.schedule)),
    )
    for one, two in compared:
        if type(one) is not type(two):
            return f"it is {kind_of(one)} and not {kind_of(two)}"
        for item in fields(one):  # type: ignore[arg-type]
            if item.name in in_groups:
                continue
            found = _difference(item.name, getattr(one, item.name), getattr(two, item.name))
            if found is not None:
                return found
    pairs = {
        "the codec": (mine.codec.name, other.codec.name),
        "the weight": (_name_of(mine.weight), _name_of(other.weight)),
        "the round": (_length(mine), _length(other)),
        "the number of averaged buffers": (mine.buffer_count, other.buffer_count),
        "the number of fragments": (mine.fragments, other.fragments),
    }
    for what, (own, theirs) in pairs.items():
        found = _difference(what, own, theirs)
        if found is not None:
            return found
    if _layout(mine) != _layout(other):
        return "its fragments hold other parameters"
    return None


def _group_difference(mine: OuterState, other: OuterState) -> str | None:
    """Return the first difference of the outer settings of a parameter, if the rules are alike."""
    if type(mine.rule) is not type(other.rule):
        return None
    for index in range(min(len(mine.slow), len(other.slow))):
        present = mine.outer.values(index)
        expected = other.outer.values(index)
        for name in present.keys() & expected.keys():
            if present[name] != expected[name]:
                return f"{name} is {present[name]} and not {expected[name]}"
    return None


def _without_lag(schedule: Schedule) -> Schedule:
    # With it what is sent ahead would be sent at other steps.
    if isinstance(schedule, SentAhead):
        return schedule
    if isinstance(schedule, (Every, Streaming)):
        return Streaming(schedule.every, getattr(schedule, "fragments", 1))
    return schedule


def _difference(what: str, one: object, two: object) -> str | None:
    return None if one == two else f"{what} is {one} and not {two}"


def _name_of(weight: Any) -> str:
    return getattr(weight, "__name__", str(weight))


def _length(opt: OuterState) -> str:
    """Return the kind of the length, and its number if it is one.

    A function of seconds gives all peers the same.
    """
    words = [kind_of(opt.length)]
    for name, value in vars(opt.length).items():
        if not name.startswith("_") and not callable(value):
            words.append(f"{value:g}")
    return " ".join(words)


def _layout(opt: OuterState) -> object:
    parts = [opt.positions(fragment) for fragment in range(opt.fragments)]
    return parts, [parameter.shape for parameter in opt.parameters]
