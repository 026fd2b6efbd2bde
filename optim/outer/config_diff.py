"""Comparison of two outer optimizers in everything that peers must have in common."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from shoal.optim.outer.optimizer import OuterOptimizer
from shoal.optim.schedule.schedule import Every, Schedule, Streaming


def config_diff(mine: OuterOptimizer, other: OuterOptimizer) -> str | None:
    """Return the first difference of ``mine`` to ``other`` that matters for averaging ("every is 20 and not 50"), or None.

    Compares rule, present outer rate and momentum of each parameter, schedule but for the lag (each peer may have its own), codec,
    weight, length of a round, number of buffers, and fragments. Tensors are not read, so ``other`` may be on the device "meta".
    """
    for index in range(min(len(mine.slow), len(other.slow))) if type(mine.rule) is type(other.rule) else ():
        present, expected = mine.outer.values(index), other.outer.values(index)
        for name in present.keys() & expected.keys():
            if present[name] != expected[name]:
                return f"{name} is {present[name]} and not {expected[name]}"
    for one, two in ((mine.rule, other.rule), (_sending(mine.schedule), _sending(other.schedule))):
        if type(one) is not type(two):
            return f"it is {_name(one)} and not {_name(two)}"
        for item in fields(one):  # type: ignore[arg-type]
            found = _differ(item.name, getattr(one, item.name), getattr(two, item.name))
            if found is not None and item.name not in mine.outer.defaults.keys() & other.outer.defaults.keys():
                return found
    pairs = {
        "the codec": (mine.codec.name, other.codec.name),
        "the weight": (_shown(mine.weight), _shown(other.weight)),
        "the round": (_length(mine), _length(other)),
        "the number of averaged buffers": (len(mine._buffers), len(other._buffers)),
        "the number of fragments": (mine.fragments, other.fragments),
    }
    differing = (found for what, (one, two) in pairs.items() if (found := _differ(what, one, two)) is not None)
    shapes = [[parameter.shape for parameter in opt.parameters] for opt in (mine, other)]
    cut = None if mine._parts == other._parts and shapes[0] == shapes[1] else "its fragments hold other parameters"
    return next(differing, cut)


def _sending(schedule: Schedule) -> Schedule:
    known = isinstance(schedule, (Every, Streaming))
    return Streaming(schedule.every, getattr(schedule, "fragments", 1)) if known else schedule


def _differ(what: str, one: object, two: object) -> str | None:
    return None if one == two else f"{what} is {one} and not {two}"


def _name(thing: object) -> str:
    return type(thing).__name__.removesuffix("Rule")


def _shown(weight: Any) -> str:
    return getattr(weight, "__name__", str(weight))


def _length(opt: OuterOptimizer) -> str:
    """Return the kind of the length, and its number if it is one; a function of seconds gives all peers the same."""
    public = {name: value for name, value in vars(opt.length).items() if not name.startswith("_")}
    return " ".join([_name(opt.length), *(f"{value:g}" for value in public.values() if not callable(value))])
