"""The inner optimizers that an outer one wraps: one, several side by side (Muon for matrices, AdamW for the rest), a stand-in."""

from __future__ import annotations

import inspect
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from shoal.optim.device import wide
from shoal.optim.outer.fsdp import local
from shoal.optim.outer.parameters import Inner

_OF_EARLIER_WEIGHTS = ("LBFGS", "ASGD", "ScheduleFree")
"""Parts of the names of optimizers whose state holds earlier weights, or differences to them."""


def as_one(inner: Inner) -> torch.optim.Optimizer:
    """Return the optimizer, or several as a ``Combined``.

    ValueError for one that keeps weights in its state (LBFGS, ASGD, schedule-free ones): a round moves the parameters, and the next
    inner step would go on from where they were.
    """
    for one in [inner] if isinstance(inner, torch.optim.Optimizer) else inner:
        for kind in (*type(one).__mro__, *type(getattr(one, "optimizer", None)).__mro__):
            if any(name in kind.__name__ for name in _OF_EARLIER_WEIGHTS):
                raise ValueError(
                    f"{kind.__name__} remembers earlier weights, from which it would go on after a round has moved the model: use "
                    "an inner optimizer whose state holds gradients only, such as AdamW"
                )
        if any("outer" in group for group in one.param_groups):  # of `shoal.optim.outer.torch_form`
            raise ValueError(
                "the inner optimizer holds the saved state of an outer one: load that into the outer optimizer, once it is made"
            )
    return inner if isinstance(inner, torch.optim.Optimizer) else Combined(inner)


def accumulates(inner: torch.optim.Optimizer) -> bool:
    """Return True if ``inner`` was prepared by accelerate, which has it take no step in the middle of an accumulation."""
    several = inner.parts if isinstance(inner, Combined) else [inner]
    return any(not one.gradient_state.sync_gradients for one in several if hasattr(one, "gradient_state"))


def initialises(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a step now would only make the optimizer's state: there is none, and all rates and gradients are 0.

    So torch.distributed.checkpoint's ``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` prepare a new optimizer.
    """
    if optimizer.state or any(bool(group.get("lr", 1.0) != 0) for group in optimizer.param_groups):
        return False
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return all(gradient is not None and not bool(local(gradient).any()) for gradient in gradients)


def step_unless_overflow(inner: torch.optim.Optimizer, scale: Tensor | None, overflow: Tensor) -> None:
    """Do to ``inner`` what ``GradScaler`` does: divide gradients by ``scale`` (None: that is done), and step if they are finite.

    ``overflow``: above 0 if one is not. Optimizers that do both in their own kernels (torch's fused ones) get both tensors, without
    a wait for the device. ValueError for gradients in float16, which hold no master weights' gradients.
    """
    parts = inner.parts if isinstance(inner, Combined) else [inner]
    fused = [one for one in parts if getattr(one, "_step_supports_amp_scaling", False)]
    fused = [one for one in fused if "grad_scaler" not in inspect.signature(one.step).parameters]  # torch's older contract
    if len(fused) < len(parts):
        if scale is not None:
            unscale((p for one in parts if one not in fused for group in one.param_groups for p in group["params"]), scale)
        if overflow.item():
            return
    for one in fused:
        vars(one).update(grad_scale=scale, found_inf=overflow)
    try:
        inner.step()
    finally:
        for one in fused:
            del vars(one)["grad_scale"], vars(one)["found_inf"]


@torch.no_grad()
def unscale(params: Iterable[Tensor], scale: Tensor) -> None:
    """Divide the gradients by ``scale``, by the very operations of ``GradScaler.unscale_``."""
    inverse = scale.to(wide(scale.device)).reciprocal().float()
    found: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for param in params:
        if param.grad is not None:
            if param.grad.dtype == torch.float16:
                raise ValueError("Attempting to unscale FP16 gradients: keep the parameters in float32, and compute in autocast.")
            gradient = local(param.grad)
            found[gradient.device].append(gradient._values() if gradient.is_sparse else gradient)
    for device, gradients in found.items():
        torch._foreach_mul_(gradients, inverse.to(device))


class Wrapper(torch.optim.Optimizer):
    """Base of optimizers whose parameter groups and state are those of others: always the present ones, also after these loaded."""

    def _inside(self) -> Sequence[torch.optim.Optimizer]:
        """Return the wrapped optimizers; none while this is being made."""
        raise NotImplementedError

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizers."""
        inside = self._inside()
        if len(inside) == 1:
            return inside[0].param_groups
        return [group for one in inside for group in one.param_groups] if inside else self._made_with

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        inside = self._inside()
        if len(inside) > 1:
            raise AttributeError("the groups of several optimizers cannot be replaced at once: replace those of each")
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
        return defaultdict(dict, {parameter: state for one in inside for parameter, state in one.state.items()})

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        inside = self._inside()  # none when torch's constructor sets it
        if len(inside) > 1:
            raise AttributeError("the state of several optimizers cannot be replaced at once: replace that of each")
        if inside:
            inside[0].state = state


class Combined(Wrapper):
    """Several optimizers as one: each steps its own parameters, and keeps its schedulers.

    ``state_dict`` is that of a single optimizer with the groups of all, in their order.

    Args:
        optimizers: at least one.
        order: in which an outer optimizer is to have the parameters, at least all of theirs; empty: that of the groups.

    Raises:
        ValueError: there is no optimizer, two have the same parameter, or ``order`` lacks one.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], order: Sequence[Tensor] = ()) -> None:
        self._optimizers: list[torch.optim.Optimizer] = []
        self.order = list(order)
        if not optimizers:
            raise ValueError("there is no inner optimizer: hand in at least one")
        groups = [dict(group) for one in optimizers for group in one.param_groups]
        if order and not {parameter for group in groups for parameter in group["params"]} <= set(order):
            raise ValueError("the order lacks a parameter of the optimizers")
        super().__init__(groups, dict(ChainMap(*(one.defaults for one in optimizers))))
        self._optimizers = list(optimizers)

    def _inside(self) -> Sequence[torch.optim.Optimizer]:
        return self._optimizers

    @property
    def parts(self) -> Sequence[torch.optim.Optimizer]:
        return self._optimizers

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError once it is made: the group would have no optimizer."""
        if self._optimizers:
            raise ValueError("add parameter groups to one of the inner optimizers before combining them")
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step of each. ``closure`` is called once, by the first."""
        loss: float | None = None
        for number, one in enumerate(self._optimizers):
            if number == 0 and closure is not None:
                loss = one.step(closure)
            else:
                one.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all, with the parameters numbered throughout."""
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        for one in self._optimizers:
            first, own = sum(len(group["params"]) for group in groups), one.state_dict()
            state |= {first + key if isinstance(key, int) else key: value for key, value in own["state"].items()}
            groups += [{**group, "params": [first + key for key in group["params"]]} for group in own["param_groups"]]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned. ValueError if the groups are others; nothing is changed then."""
        groups = state_dict["param_groups"]
        own, saved = ([len(group["params"]) for group in some] for some in (self.param_groups, groups))
        if own != saved:
            raise ValueError(f"the saved inner optimizers have parameter groups of {saved} parameters, these of {own}")
        first = 0
        for one in self._optimizers:
            mine = groups[first : first + len(one.param_groups)]
            first += len(mine)
            keys = {key for group in mine for key in group["params"]}
            state = {key: value for key, value in state_dict["state"].items() if key in keys}
            one.load_state_dict({"state": state, "param_groups": mine})


class Stepped(torch.optim.Optimizer):
    """Optimizer whose ``step`` does nothing: wrapped in an outer optimizer, whose ``step`` then does the outer part alone.

    For training loops in which a library steps the inner optimizer. Call the outer optimizer's ``step`` after each inner one.
    ``defaults``: settings of the parameter groups, if there are any. ValueError without parameters.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any] | None = None) -> None:
        super().__init__(params, defaults or {})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do nothing but call ``closure``: what this optimizer stands for is stepped elsewhere."""
        return None if closure is None else closure()
