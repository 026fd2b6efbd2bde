"""The inner optimizers that an outer one wraps: one, or several side by side.

    Combined([Muon(matrices), AdamW(rest)])       # what OuterOptimizer makes of a list
    Stepped(model.parameters())                   # stands for one that a library steps itself

`check_inner` refuses those that keep weights in their state: docs/internals.md, "An inner optimizer
that goes back".
"""

from __future__ import annotations

import logging
from collections import ChainMap, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from shoal.optim.outer.probe import LEAST_LEFT, STEPS_AFTER, needs_closure, share_left

log = logging.getLogger(__name__)

Inner = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""An optimizer, or several of different parameters."""


def as_one(inner: Inner) -> torch.optim.Optimizer:
    """Return the optimizer, or several as a ``Combined``. ValueError as ``check_inner`` raises."""
    check_inner(inner)
    return inner if isinstance(inner, torch.optim.Optimizer) else Combined(inner)


def parts_of(inner: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that a ``Combined`` is made of, or the optimizer itself."""
    return inner.parts if isinstance(inner, Combined) else [inner]


def all_parameters(inner: Inner) -> list[Tensor]:
    """Return the parameters in the order of their groups, frozen ones too."""
    several = [inner] if isinstance(inner, torch.optim.Optimizer) else inner
    found: list[Tensor] = []
    for one in several:
        for group in one.param_groups:
            found += group["params"]
    return found


class Wrapper(torch.optim.Optimizer):
    """Base of optimizers whose parameter groups and state are always the present ones of others.

    So a scheduler made for the outer optimizer acts on the inner one.
    """

    def _inside(self) -> Sequence[torch.optim.Optimizer]:
        """Return the wrapped optimizers; none while this is being made."""
        raise NotImplementedError

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        inside = self._inside()
        if not inside:
            return self._made_with
        if len(inside) == 1:
            return inside[0].param_groups
        groups: list[dict[str, Any]] = []
        for one in inside:
            groups += one.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        inside = self._inside()
        if len(inside) > 1:
            raise AttributeError(
                "the groups of several optimizers cannot be replaced at once: replace those of each"
            )
        if inside:
            inside[0].param_groups = groups
        else:
            self._made_with = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of the wrapped optimizers; of several together, a copy of the table."""
        inside = self._inside()
        if len(inside) == 1:
            return inside[0].state
        together: defaultdict[Tensor, Any] = defaultdict(dict)
        for one in inside:
            together.update(one.state)
        return together

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        inside = self._inside()  # none when torch's constructor sets it
        if len(inside) > 1:
            raise AttributeError(
                "the state of several optimizers cannot be replaced at once: replace that of each"
            )
        if inside:
            inside[0].state = state


class Combined(Wrapper):
    """Several optimizers as one: each steps its own parameters, and keeps its schedulers.

    ``state_dict`` is that of a single optimizer with the groups of all, in their order.

    Raises:
        ValueError: there is no optimizer, or two have the same parameter.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.parts: list[torch.optim.Optimizer] = []
        if not optimizers:
            raise ValueError("there is no inner optimizer: hand in at least one")
        groups: list[dict[str, Any]] = []
        for one in optimizers:
            groups += one.param_groups
        # torch gives each group the settings that it lacks, for schedulers look for the same ones
        # in all (OneCycleLR: betas).
        defaults = dict(ChainMap(*(one.defaults for one in optimizers)))
        super().__init__(groups, defaults)
        self.parts = list(optimizers)

    def _inside(self) -> Sequence[torch.optim.Optimizer]:
        return self.parts

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError once it is made: the group would have no optimizer."""
        if self.parts:
            raise ValueError(
                "add parameter groups to one of the inner optimizers before combining them"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of each. ``closure`` is called once, by the first."""
        loss = None
        for number, one in enumerate(self.parts):
            if number == 0 and closure is not None:
                loss = one.step(closure)
            else:
                one.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all, with the parameters numbered throughout."""
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for one in self.parts:
            own = one.state_dict()
            for key, value in own["state"].items():
                state[first + key if isinstance(key, int) else key] = value
            for group in own["param_groups"]:
                groups.append({**group, "params": [first + key for key in group["params"]]})
            first = sum(len(group["params"]) for group in groups)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned.

        Raises:
            ValueError: the groups are others; nothing is changed then.
        """
        groups = state_dict["param_groups"]
        own = [len(group["params"]) for group in self.param_groups]
        saved = [len(group["params"]) for group in groups]
        if own != saved:
            raise ValueError(
                f"the saved inner optimizers have parameter groups of {saved} parameters, these of "
                f"{own}"
            )
        first = 0
        for one in self.parts:
            mine = groups[first : first + len(one.param_groups)]
            first += len(mine)
            keys: set[Any] = set()
            for group in mine:
                keys.update(group["params"])
            state = {key: value for key, value in state_dict["state"].items() if key in keys}
            one.load_state_dict({"state": state, "param_groups": mine})


class Stepped(torch.optim.Optimizer):
    """Optimizer whose ``step`` does nothing, for training loops in which a library steps itself.

        opt = NoLoCo(Stepped(model.parameters()), exchange)
        ...; opt.step()      # after each step of the library: does the outer part alone

    Args:
        params: as of any optimizer; ValueError if there are none.
        defaults: settings of the parameter groups, if there are any.
        stands_for: what takes the inner steps, to be checked as an inner optimizer is.
    """

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any] | None = None,
        *,
        stands_for: Inner | None = None,
    ) -> None:
        self.stands_for = stands_for
        super().__init__(params, defaults or {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do nothing but call ``closure``: what this optimizer stands for is stepped elsewhere."""
        return None if closure is None else closure()


def check_inner(inner: Inner) -> None:
    """Raise ValueError for an optimizer whose state would undo a round's move.

    Lookahead, MADGRAD and schedule-free ones keep weights in their state; LBFGS compares gradients
    at weights between which a round may lie. Each is tried (`shoal.optim.outer.probe`).
    """
    for one in [inner] if isinstance(inner, torch.optim.Optimizer) else inner:
        _check_state(one)
        for part in parts_of(one):
            _check_keeps_moves(part)


def _check_state(optimizer: torch.optim.Optimizer) -> None:
    if any("outer" in group for group in optimizer.param_groups):  # a loaded `TorchForm`
        raise ValueError(
            "the inner optimizer holds the saved state of an outer one: load that into the "
            "outer optimizer, once it is made"
        )
    for state in optimizer.state.values():
        if not isinstance(state, Mapping):  # some keep a counter beside the parameters' states
            continue
        if any(isinstance(value, Tensor) and value.is_inference() for value in state.values()):
            raise ValueError(
                "the inner optimizer's state was made under torch.inference_mode(), where nothing "
                "can be trained: make the optimizer outside it"
            )


def _check_keeps_moves(optimizer: torch.optim.Optimizer) -> None:
    if hasattr(optimizer, "gradient_state"):  # accelerate's, around the one that steps
        optimizer = getattr(optimizer, "optimizer")  # noqa: B009 (mypy: no attribute of all)
    if isinstance(optimizer, Stepped):
        if optimizer.stands_for is not None:
            check_inner(optimizer.stands_for)
        return
    name = type(optimizer).__name__
    remedy = "use an inner optimizer whose state holds gradients only, such as AdamW"
    if needs_closure(optimizer):
        raise ValueError(
            f"{name} compares gradients at weights between which a round may have moved the model, "
            f"in steps that need a closure: {remedy}"
        )
    share = share_left(optimizer)
    if share is None:
        _say_untried(name)
    elif share < LEAST_LEFT:
        raise ValueError(
            f"{name} remembers earlier weights, to which it would go back after a round has moved "
            f"the model (of a move {max(share, 0):.0%} was left after {STEPS_AFTER} steps): "
            f"{remedy}"
        )


@cache
def _say_untried(name: str) -> None:
    """Log that an optimizer could not be tried, once in a process."""
    log.warning(
        "whether %s remembers earlier weights could not be tried, for a small copy of it takes no "
        "step: if its state holds weights, a round's move is lost",
        name,
    )
