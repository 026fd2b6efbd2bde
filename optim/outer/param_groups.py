"""The outer rate and momentum in parameter groups, as torch has them, and rules with the groups' present values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from shoal.optim.outer.inner import Stepped
from shoal.optim.rules.base import RoundContext, Rule, State

SETTINGS = ("lr", "momentum")
"""Numbers of a rule that schedulers may change."""

Parts = list[tuple[Rule, list[int]]]
"""Rules, and for each the places of its parameters in a fragment."""


class OuterGroups(Stepped):
    """The slow weights as a torch optimizer, whose groups hold the outer ``lr`` and ``momentum``: ``OuterOptimizer.outer``.

        schedule = CosineAnnealingLR(opt.outer, T_max=100)      # step() it once a round

    There is one group for each of the inner optimizer's. A rule that has no outer rate (local SGD, SPARTA), or was made without
    momentum, has no such key. ``step`` does nothing; it is called whenever a mean was applied, so that hooks and schedulers see it.
    A change counts from the next contribution on. All peers must follow the same schedule.
    """

    def __init__(self, rule: Rule, slow: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> None:
        self._rule = self._latest = rule
        self._made_with = {name: getattr(rule, name) for name in SETTINGS if hasattr(rule, name)}
        if self._made_with.get("momentum") == 0 and rule.initial([]) != replace(rule, momentum=0.5).initial([]):  # type: ignore[type-var]
            del self._made_with["momentum"]  # it has no buffer
        self._group_of = {index: number for number, group in enumerate(groups) for index in group}
        super().__init__([{"params": [slow[index] for index in group]} for group in groups], dict(self._made_with))

    def values(self, index: int) -> dict[str, float]:
        """Return the present settings of a parameter, by its position in the slow weights."""
        group = self.param_groups[self._group_of[index]]
        return {name: float(group[name]) for name in self._made_with}

    def rules(self, part: Sequence[int]) -> Parts:
        """Return the rules for the parameters ``part``: one, unless groups differ. ValueError for values that no rule takes."""
        places: dict[tuple[float, ...], list[int]] = {}
        groups = [tuple(float(group[name]) for name in self._made_with) for group in self.param_groups]
        for place, index in enumerate(part):
            places.setdefault(groups[self._group_of[index]], []).append(place)
        return [(self._with(values), found) for values, found in places.items()]

    def _with(self, values: tuple[float, ...]) -> Rule:
        wanted = dict(zip(self._made_with, values, strict=True))
        if wanted == self._made_with:
            return self._rule
        if any(getattr(self._latest, name) != value for name, value in wanted.items()):
            self._latest = replace(self._rule, **wanted)  # type: ignore[type-var]
        return self._latest

    def again(self, saved: Sequence[tuple[dict[str, float], list[int]]]) -> Parts:
        """Return the rules of saved settings and places. KeyError or ValueError for settings that no rule takes."""
        return [(self._with(tuple(float(values[name]) for name in self._made_with)), list(places)) for values, places in saved]

    def settings(self) -> list[dict[str, Any]]:
        """Return each group without its parameters, to be saved."""
        return [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]

    def restore(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take over what ``settings`` returned."""
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({name: value for name, value in saved.items() if name not in SETTINGS or name in self._made_with})


def contribution(parts: Parts, slow: list[Tensor], fast: list[Tensor], state: State, context: RoundContext) -> Sequence[Tensor]:
    """Return a fragment's contribution: whole multiples of its parameters, in their order.

    ValueError if the groups' rules send unequally many tensors.
    """
    if len(parts) == 1:
        return parts[0][0].contribution(slow, fast, state, context)
    sent = [rule.contribution(*_cut(places, slow, fast, state), replace(context, places=places)) for rule, places in parts]
    times = {len(tensors) // len(places) for tensors, (_, places) in zip(sent, parts, strict=True)}
    if len(times) != 1:
        raise ValueError("the outer settings of the parameter groups send unequally many tensors: leave out pull, or make lr equal")
    found = {
        number * len(slow) + place: tensors[number * len(places) + at]
        for tensors, (_, places) in zip(sent, parts, strict=True)
        for at, place in enumerate(places)
        for number in range(max(times))
    }
    return [found[place] for place in sorted(found)]


def apply(
    parts: Parts, slow: list[Tensor], fast: list[Tensor], mean: Sequence[Tensor], state: State, context: RoundContext
) -> None:
    """Let each rule apply its part of the mean."""
    if len(parts) == 1:
        parts[0][0].apply(slow, fast, mean, state, context)
        return
    for rule, places in parts:
        own_slow, own_fast, own_state = _cut(places, slow, fast, state)
        own_mean, sent = (
            [tensors[first + at] for first in range(0, len(tensors), len(slow)) for at in places]
            for tensors in (mean, context.sent)
        )
        kept = [context.fast[at] for at in places] if context.fast else []
        rule.apply(own_slow, own_fast, own_mean, own_state, replace(context, sent=sent, fast=kept, places=places))


def _cut(places: list[int], slow: list[Tensor], fast: list[Tensor], state: State) -> tuple[list[Tensor], list[Tensor], State]:
    own = {name: [tensors[at] for at in places] for name, tensors in state.items()}
    return [slow[at] for at in places], [fast[at] for at in places], own
