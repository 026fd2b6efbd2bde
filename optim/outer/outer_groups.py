"""The outer learning rate and momentum in parameter groups, and the rules with their values.

    schedule = CosineAnnealingLR(opt.outer, T_max=100)      # step() it once a round

A rule is a frozen dataclass with one rate and one momentum. Where the groups differ, or a scheduler
has changed them, a fragment has one rule for each pair of values, and each rule sees the tensors of
its own parameters only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from shoal.optim.outer.inner import Stepped
from shoal.optim.outer.rule import RoundContext, Rule, State

SETTINGS = ("lr", "momentum")
"""Numbers of a rule that schedulers may change."""

Parts = list[tuple[Rule, list[int]]]
"""Rules, and for each the places of its parameters in a fragment."""


class OuterGroups(Stepped):
    """The slow weights as a torch optimizer, whose groups hold the outer ``lr`` and ``momentum``:
    ``OuterOptimizer.outer``.

        schedule = CosineAnnealingLR(opt.outer, T_max=100)      # step() it once a round

    There is one group for each of the inner optimizer's. A rule that has no outer rate (local SGD,
    SPARTA), or was made without momentum, has no such key. ``step`` does nothing; it is called
    whenever a mean was applied, so that hooks and schedulers see it. A change counts from the next
    contribution on. All peers must follow the same schedule.
    """

    def __init__(self, rule: Rule, slow: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> None:
        self._rule = rule
        self._latest = rule
        """The last rule of other values: most often the next one has the same."""
        self._made_with = {name: getattr(rule, name) for name in SETTINGS if hasattr(rule, name)}
        if self._made_with.get("momentum") == 0 and _makes_buffer(rule):
            del self._made_with["momentum"]  # made without momentum it has no buffer to use
        self._group_of: dict[int, int] = {}
        for number, group in enumerate(groups):
            for index in group:
                self._group_of[index] = number
        own = [{"params": [slow[index] for index in group]} for group in groups]
        super().__init__(own, dict(self._made_with))

    def values(self, index: int) -> dict[str, float]:
        """Return the present settings of a parameter, by its position in the slow weights."""
        group = self.param_groups[self._group_of[index]]
        return {name: float(group[name]) for name in self._made_with}

    def rules(self, part: Sequence[int]) -> Parts:
        """Return the rules for the parameters ``part``: one, unless groups differ.

        Raises:
            ValueError: values that no rule takes.
        """
        groups: list[tuple[float, ...]] = []
        for group in self.param_groups:
            groups.append(tuple(float(group[name]) for name in self._made_with))
        places: dict[tuple[float, ...], list[int]] = {}
        for place, index in enumerate(part):
            places.setdefault(groups[self._group_of[index]], []).append(place)
        return [(self._with(values), found) for values, found in places.items()]

    def again(self, saved: Sequence[tuple[dict[str, float], list[int]]]) -> Parts:
        """Return the rules of saved settings and places.

        Raises:
            KeyError, ValueError: settings that no rule takes.
        """
        parts: Parts = []
        for values, places in saved:
            wanted = tuple(float(values[name]) for name in self._made_with)
            parts.append((self._with(wanted), list(places)))
        return parts

    def settings(self) -> list[dict[str, Any]]:
        """Return all that is in each group but its parameters."""
        found = []
        for group in self.param_groups:
            found.append({name: value for name, value in group.items() if name != "params"})
        return found

    def restore(self, groups: Sequence[dict[str, Any]]) -> None:
        """Restore what ``settings`` returned, but for a rate or momentum that the rule lacks."""
        lacking = set(SETTINGS) - set(self._made_with)
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({name: value for name, value in saved.items() if name not in lacking})

    def _with(self, values: tuple[float, ...]) -> Rule:
        wanted = dict(zip(self._made_with, values, strict=True))
        if wanted == self._made_with:
            return self._rule
        if any(getattr(self._latest, name) != value for name, value in wanted.items()):
            self._latest = replace(self._rule, **wanted)  # type: ignore[type-var]
        return self._latest


def _makes_buffer(rule: Rule) -> bool:
    """Return True if the rule would keep other state with momentum than it does without."""
    with_momentum: Rule = replace(rule, momentum=0.5)  # type: ignore[type-var]
    return rule.initial([]) != with_momentum.initial([])


def contribution_of(
    parts: Parts, slow: list[Tensor], fast: list[Tensor], state: State, context: RoundContext
) -> Sequence[Tensor]:
    """Return a fragment's contribution: whole multiples of its parameters, in their order.

    Raises:
        ValueError: the groups' rules send unequally many tensors.
    """
    if len(parts) == 1:
        return parts[0][0].contribution(slow, fast, state, context)
    times: set[int] = set()
    by_place: dict[int, Tensor] = {}
    for rule, places in parts:
        own = replace(context, places=places)
        sent = rule.contribution(*_cut(places, slow, fast, state), own)
        times.add(len(sent) // len(places))
        for number, tensor in enumerate(sent):
            row, at = divmod(number, len(places))
            by_place[row * len(slow) + places[at]] = tensor
    if len(times) != 1:
        raise ValueError(
            "the outer settings of the parameter groups send unequally many tensors: leave out "
            "pull, or make lr equal"
        )
    return [by_place[place] for place in sorted(by_place)]


def apply_mean(
    parts: Parts,
    slow: list[Tensor],
    fast: list[Tensor],
    mean: Sequence[Tensor],
    state: State,
    context: RoundContext,
) -> None:
    """Let each rule apply its part of the mean."""
    if len(parts) == 1:
        parts[0][0].apply(slow, fast, mean, state, context)
        return
    for rule, places in parts:
        own_slow, own_fast, own_state = _cut(places, slow, fast, state)
        own_context = replace(
            context,
            sent=rows_at(context.sent, places, len(slow)),
            fast=[context.fast[at] for at in places] if context.fast else [],
            places=places,
        )
        own_mean = rows_at(mean, places, len(slow))
        rule.apply(own_slow, own_fast, own_mean, own_state, own_context)


def _cut(
    places: list[int], slow: list[Tensor], fast: list[Tensor], state: State
) -> tuple[list[Tensor], list[Tensor], State]:
    own = {}
    for name, tensors in state.items():
        own[name] = [tensors[at] for at in places]
    return [slow[at] for at in places], [fast[at] for at in places], own


def rows_at(tensors: Sequence[Tensor], places: list[int], count: int) -> list[Tensor]:
    """Return the tensors at ``places`` of each row of ``count`` tensors."""
    found: list[Tensor] = []
    for first in range(0, len(tensors), count):
        found += [tensors[first + at] for at in places]
    return found
