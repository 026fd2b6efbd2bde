"""The inner optimizers that an outer one wraps: one, several side by side (Muon for matrices, AdamW
for the rest), a stand-in.

The parameters of inner optimizers: all, those that are averaged, and those that stay a peer's own;
averaged buffers.

The outer rate and momentum in parameter groups, as torch has them, and rules with the groups'
present values.
"""

from __future__ import annotations

import inspect
import logging
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim.optimizer import ParamsT

from shoal.optim.device import uncompiled, wide
from shoal.optim.exchange.base import Exchange
from shoal.optim.outer.probe import LEAST_LEFT, STEPS_AFTER, needs_closure, share_left
from shoal.optim.outer.rule import RoundContext, Rule, State
from shoal.optim.outer.weights import local
from shoal.optim.parameters import AveragedParameters, plain_name

log = logging.getLogger(__name__)

Inner = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""An optimizer, or several of different parameters."""

Exclude = Sequence[str | Tensor]
"""Parameters, their names, names of modules, or patterns of names, in which "*" stands for any
characters.
"""


def all_parameters(inner: Inner) -> list[Tensor]:
    """Return the parameters of an optimizer, or of several, in the order of their groups: frozen
    ones too.
    """
    several = [inner] if isinstance(inner, torch.optim.Optimizer) else inner
    return [
        parameter for one in several for group in one.param_groups for parameter in group["params"]
    ]


def fault_of(parameter: Tensor) -> str:
    """Return why a parameter cannot be trained and averaged, with the remedy, to follow its name;
    nothing if it can.
    """
    if nn.parameter.is_lazy(parameter):
        return "has no shape yet (a lazy layer): call the model once with an example before"
    if parameter.is_complex():
        return (
            "is complex, and real numbers are averaged: keep torch.view_as_real of it as the "
            "parameter"
        )
    if not parameter.is_floating_point():
        return f"is of {parameter.dtype}, which is not averaged: freeze it (requires_grad = False)"
    if parameter.is_meta:
        return (
            "is on the meta device, without values: make the model on a real one, or fill it "
            "(to_empty) before"
        )
    if parameter.is_inference():
        return (
            "was made under torch.inference_mode(), where nothing can be trained: make the "
            "model outside it"
        )
    return ""


def trained(
    inner: Inner, exchange: Exchange, but: Iterable[Tensor] = (), model: nn.Module | None = None
) -> AveragedParameters:
    """Return the parameters that require a gradient, ``but`` for some: those that are averaged.

    They are in the order of ``model``, without one in that of ``all_parameters``; an exchange may
    have an order of its own, that of a session's model.

    ValueError names one that cannot be trained.
    """
    left_out = set(but)
    averaged = [
        parameter
        for parameter in all_parameters(inner)
        if parameter.requires_grad and parameter not in left_out
    ]
    for number, parameter in enumerate(all_parameters(inner)):
        if parameter.requires_grad and (fault := fault_of(parameter)):
            raise ValueError(f"parameter {number} of the inner optimizer {fault}")
    if model is None:
        return exchange.ordered(AveragedParameters(averaged))
    return exchange.ordered(AveragedParameters.of(model, averaged))


def excluded(exclude: Exclude, inner: Inner, model: nn.Module | None) -> set[Tensor]:
    """Return the parameters of ``inner`` that ``exclude`` means.

    ValueError if a parameter is not in ``inner``, a name fits none of ``model`` (buffers included),
    or there is no model.
    """
    if isinstance(exclude, str):
        raise ValueError(
            f"exclude must be a list of names, patterns or parameters, got {exclude!r}: put it "
            "into brackets"
        )
    every, meant = set(all_parameters(inner)), set()
    for item in exclude:
        if isinstance(item, Tensor):
            if item not in every:
                raise ValueError(
                    f"a parameter to exclude, of shape {tuple(item.shape)}, is not in the inner "
                    "optimizer"
                )
            meant.add(item)
            continue
        if model is None:
            raise ValueError(
                f"to exclude {item!r} by name hand in model=, or exclude the parameters themselves"
            )
        every_name = (
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
        named = [tensor for name, tensor in chain(*every_name) if fits(name, item)]
        if not named:
            raise ValueError(f"no parameter of the model fits {item!r}, which was to be excluded")
        meant |= every.intersection(named)
    return meant


def fits(name: str, pattern: str) -> bool:
    """Return True if a parameter's or buffer's name is the pattern, lies in the module of that
    name, or matches it.
    """
    name = plain_name(name)
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


class Unfrozen:
    """Notices a parameter that is trained and was frozen, or was not there, when this was made.

    Args:
        model: whose parameters are looked through by name, for wrappers may put others in their
            place; None: none.
        others: parameters besides, of an inner optimizer.
        exclude: what stays a peer's own, as an outer optimizer has it.
    """

    def __init__(
        self, model: nn.Module | None, others: Iterable[Tensor], exclude: Exclude = ()
    ) -> None:
        self._model, self._patterns = model, [one for one in exclude if isinstance(one, str)]
        own = {id(one) for one in exclude if isinstance(one, Tensor)}
        self._frozen: dict[Tensor, str] = {}
        """Parameters that are frozen, each as a message names it."""
        self._known: set[str] = set()
        """Names of those that are trained or a peer's own."""
        self._round = -1
        """In which the whole model was looked through last."""
        for name, parameter in self._named():
            if parameter.requires_grad or id(parameter) in own:
                self._known.add(name)
            else:
                self._frozen[parameter] = f"the parameter {name!r}, frozen at first,"
        for other in others:
            if not other.requires_grad:
                shape = tuple(other.shape)
                self._frozen.setdefault(other, f"a parameter of shape {shape}, frozen at first,")

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of each parameter of the model that is not excluded by name."""
        named = () if self._model is None else self._model.named_parameters()
        for name, parameter in named:
            if not any(fits(name, pattern) for pattern in self._patterns):
                yield plain_name(name), parameter

    def found(self, round: int) -> str | None:
        """Return the first such parameter, as a message names it; the model is looked through once
        in each ``round``.
        """
        for parameter, what in self._frozen.items():
            if parameter.requires_grad:
                return what
        if round == self._round:
            return None
        self._round = round
        for name, parameter in self._named():
            if parameter.requires_grad and name not in self._known:
                return f"the parameter {name!r}, frozen or not there at first,"
        return None


def power_iteration_buffers(model: nn.Module) -> set[str]:
    """Return the names of buffers that hold the singular vectors of torch's spectral norms.

    A mean of two of them is none: the vectors of two peers may point in opposite directions, and
    the norm then comes out near 0. Each peer finds those of the averaged weight by its own
    iteration.
    """
    found: set[str] = set()
    for place, module in model.named_modules():
        prefix = f"{place}." if place else ""
        if isinstance(module, _SpectralNorm):  # of a parametrization
            found |= {f"{prefix}_u", f"{prefix}_v"}
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                found |= {f"{prefix}{hook.name}_u", f"{prefix}{hook.name}_v"}
    return found


def float_buffers(model: nn.Module) -> list[Tensor]:
    """Return the model's floating-point buffers that are in its state_dict, each once; so no
    counters and masks.
    """
    return AveragedBuffers(model).now()


class AveragedBuffers:
    """The buffers of ``float_buffers`` by name: ``model.to`` and modules that assign to a buffer
    put another tensor in its place.

    Without a model there are none. Those whose names are in ``exclude`` are left out, and those of
    ``power_iteration_buffers``.
    """

    def __init__(self, model: nn.Module | None, exclude: Exclude = ()) -> None:
        self._model = nn.Module() if model is None else model
        saved = self._model.state_dict(keep_vars=True)
        own = [pattern for pattern in exclude if isinstance(pattern, str)]
        vectors = power_iteration_buffers(self._model)
        self._shapes = {
            name: buffer.shape
            for name, buffer in self._model.named_buffers()
            if name in saved
            and name not in vectors
            and buffer.is_floating_point()
            and not any(fits(name, pattern) for pattern in own)
        }

    def __len__(self) -> int:
        return len(self._shapes)

    def now(self) -> list[Tensor]:
        """Return the model's present tensors.

        ValueError if one is gone or has another shape than at first.
        """
        buffers = dict(self._model.named_buffers(remove_duplicate=False)) if self._shapes else {}
        for name, shape in self._shapes.items():
            if name not in buffers or buffers[name].shape != shape:
                raise ValueError(
                    f"the averaged buffer {name!r} is not of shape {tuple(shape)} any more: keep "
                    "it so, or ignore buffers"
                )
        return [buffers[name] for name in self._shapes]


WATCH = "_shoal_watch"
"""Attribute of an inner optimizer with the handle of `watch_steps`."""


def as_one(inner: Inner) -> torch.optim.Optimizer:
    """Return the optimizer, or several as a ``Combined``. ValueError as ``check_inner`` raises."""
    check_inner(inner)
    return inner if isinstance(inner, torch.optim.Optimizer) else Combined(inner)


def check_inner(inner: Inner) -> None:
    """Raise ValueError for an optimizer that keeps weights in its state, which would undo a round's
    move (``probe``).

    So do Lookahead, MADGRAD and schedule-free ones. LBFGS compares gradients at weights between
    which a round may lie.
    """
    for one in [inner] if isinstance(inner, torch.optim.Optimizer) else inner:
        if any("outer" in group for group in one.param_groups):  # of `shoal.optim.outer.torch_form`
            raise ValueError(
                "the inner optimizer holds the saved state of an outer one: load that into the "
                "outer optimizer, once it is made"
            )
        # Some keep a counter of their own beside the parameters' states.
        states = [state for state in one.state.values() if isinstance(state, Mapping)]
        kept = [value for state in states for value in state.values()]
        if any(isinstance(value, Tensor) and value.is_inference() for value in kept):
            raise ValueError(
                "the inner optimizer's state was made under torch.inference_mode(), where nothing "
                "can be trained: make the "
                "optimizer outside it"
            )
        for part in one.parts if isinstance(one, Combined) else [one]:
            _check_keeps_moves(part)


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
            "in steps that need a "
            f"closure: {remedy}"
        )
    share = share_left(optimizer)
    if share is None:
        _say_untried(name)
    elif share < LEAST_LEFT:
        raise ValueError(
            f"{name} remembers earlier weights, to which it would go back after a round has moved "
            "the model (of a move "
            f"{max(share, 0):.0%} was left after {STEPS_AFTER} steps): {remedy}"
        )


@cache
def _say_untried(name: str) -> None:
    """Say it once in a process."""
    log.warning(
        "whether %s remembers earlier weights could not be tried, for a small copy of it takes no "
        "step: if its state holds "
        "weights, a round's move is lost",
        name,
    )


def watch_steps(inner: torch.optim.Optimizer, stepped: Callable[[], None]) -> None:
    """Call the bound method ``stepped`` after each step of ``inner``, of the first of several; an
    earlier caller's watch ends.

    Not for a `Stepped`, nor for an optimizer without torch's hooks. The method's object is not kept
    alive.
    """
    one = inner.parts[0] if isinstance(inner, Combined) else inner
    if isinstance(one, Stepped) or not hasattr(one, "_optimizer_step_post_hooks"):
        return
    method = WeakMethod(stepped)

    @uncompiled
    def after(*_: Any) -> None:
        if (alive := method()) is not None:
            alive()

    if (before := vars(one).pop(WATCH, None)) is not None:
        before.remove()
    vars(one)[WATCH] = one.register_step_post_hook(after)


def accumulates(inner: torch.optim.Optimizer) -> bool:
    """Return True if ``inner`` was prepared by accelerate, which has it take no step in the middle
    of an accumulation.
    """
    several = inner.parts if isinstance(inner, Combined) else [inner]
    return any(
        not one.gradient_state.sync_gradients for one in several if hasattr(one, "gradient_state")
    )


def initialises(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a step now would only make the optimizer's state: there is none, and all rates
    and gradients are 0.

    So torch.distributed.checkpoint's ``get_optimizer_state_dict`` and ``set_optimizer_state_dict``
    prepare a new optimizer.
    """
    if optimizer.state or any(bool(group.get("lr", 1.0) != 0) for group in optimizer.param_groups):
        return False
    gradients = [
        p.grad for group in optimizer.param_groups for p in group["params"] if p.requires_grad
    ]
    return all(gradient is not None and not bool(local(gradient).any()) for gradient in gradients)


def step_unless_overflow(
    inner: torch.optim.Optimizer, scale: Tensor | None, overflow: Tensor
) -> None:
    """Do to ``inner`` what ``GradScaler`` does: divide gradients by ``scale`` (None: that is done),
    and step if they are finite.

    ``overflow``: above 0 if one is not. Optimizers that do both in their own kernels (torch's fused
    ones) get both tensors, without a wait for the device. ValueError for gradients in float16,
    which hold no master weights' gradients.
    """
    parts = inner.parts if isinstance(inner, Combined) else [inner]
    fused = [one for one in parts if getattr(one, "_step_supports_amp_scaling", False)]
    fused = [
        one for one in fused if "grad_scaler" not in inspect.signature(one.step).parameters
    ]  # torch's older contract
    if len(fused) < len(parts):
        if scale is not None:
            unscale(
                (
                    p
                    for one in parts
                    if one not in fused
                    for group in one.param_groups
                    for p in group["params"]
                ),
                scale,
            )
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
                raise ValueError(
                    "Attempting to unscale FP16 gradients: keep the parameters in float32, and "
                    "compute in autocast."
                )
            gradient = local(param.grad)
            found[gradient.device].append(gradient._values() if gradient.is_sparse else gradient)
    for device, gradients in found.items():
        torch._foreach_mul_(gradients, inverse.to(device))


class Wrapper(torch.optim.Optimizer):
    """Base of optimizers whose parameter groups and state are those of others: always the present
    ones, also after these loaded.
    """

    def _inside(self) -> Sequence[torch.optim.Optimizer]:
        """Return the wrapped optimizers; none while this is being made."""
        raise NotImplementedError

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        inside = self._inside()
        if len(inside) == 1:
            return inside[0].param_groups
        return (
            [group for one in inside for group in one.param_groups] if inside else self._made_with
        )

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
        return defaultdict(
            dict, {parameter: state for one in inside for parameter, state in one.state.items()}
        )

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
        # torch gives each group the settings that it lacks, for schedulers look for the same ones
        # in all (OneCycleLR: betas).
        groups = [group for one in optimizers for group in one.param_groups]
        super().__init__(groups, dict(ChainMap(*(one.defaults for one in optimizers))))
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
        for one in self.parts:
            first, own = sum(len(group["params"]) for group in groups), one.state_dict()
            state |= {
                first + key if isinstance(key, int) else key: value
                for key, value in own["state"].items()
            }
            groups += [
                {**group, "params": [first + key for key in group["params"]]}
                for group in own["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned.

        ValueError if the groups are others; nothing is changed then.
        """
        groups = state_dict["param_groups"]
        own, saved = (
            [len(group["params"]) for group in some] for some in (self.param_groups, groups)
        )
        if own != saved:
            raise ValueError(
                f"the saved inner optimizers have parameter groups of {saved} parameters, these of "
                f"{own}"
            )
        first = 0
        for one in self.parts:
            mine = groups[first : first + len(one.param_groups)]
            first += len(mine)
            keys = {key for group in mine for key in group["params"]}
            state = {key: value for key, value in state_dict["state"].items() if key in keys}
            one.load_state_dict({"state": state, "param_groups": mine})


class Stepped(torch.optim.Optimizer):
    """Optimizer whose ``step`` does nothing: wrapped in an outer optimizer, whose ``step`` then
    does the outer part alone.

    For training loops in which a library steps the inner optimizer. Call the outer optimizer's
    ``step`` after each inner one. ``defaults``: settings of the parameter groups, if there are any.
    ``stands_for``: what takes the inner steps, to be checked as an inner optimizer is. ValueError
    without parameters.
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
        self._rule = self._latest = rule
        self._made_with = {name: getattr(rule, name) for name in SETTINGS if hasattr(rule, name)}
        if self._made_with.get("momentum") == 0 and rule.initial([]) != replace(
            rule, momentum=0.5
        ).initial([]):  # type: ignore[type-var]
            del self._made_with["momentum"]  # it has no buffer
        self._group_of = {index: number for number, group in enumerate(groups) for index in group}
        super().__init__(
            [{"params": [slow[index] for index in group]} for group in groups],
            dict(self._made_with),
        )

    def values(self, index: int) -> dict[str, float]:
        """Return the present settings of a parameter, by its position in the slow weights."""
        group = self.param_groups[self._group_of[index]]
        return {name: float(group[name]) for name in self._made_with}

    def rules(self, part: Sequence[int]) -> Parts:
        """Return the rules for the parameters ``part``: one, unless groups differ.

        ValueError for values that no rule takes.
        """
        places: dict[tuple[float, ...], list[int]] = {}
        groups = [
            tuple(float(group[name]) for name in self._made_with) for group in self.param_groups
        ]
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
        """Return the rules of saved settings and places.

        KeyError or ValueError for settings that no rule takes.
        """
        return [
            (self._with(tuple(float(values[name]) for name in self._made_with)), list(places))
            for values, places in saved
        ]

    def settings(self) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.param_groups
        ]

    def restore(self, groups: Sequence[dict[str, Any]]) -> None:
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update(
                {
                    name: value
                    for name, value in saved.items()
                    if name not in SETTINGS or name in self._made_with
                }
            )


def contribution_of(
    parts: Parts, slow: list[Tensor], fast: list[Tensor], state: State, context: RoundContext
) -> Sequence[Tensor]:
    """Return a fragment's contribution: whole multiples of its parameters, in their order.

    ValueError if the groups' rules send unequally many tensors.
    """
    if len(parts) == 1:
        return parts[0][0].contribution(slow, fast, state, context)
    sent = [
        rule.contribution(*_cut(places, slow, fast, state), replace(context, places=places))
        for rule, places in parts
    ]
    times = {len(tensors) // len(places) for tensors, (_, places) in zip(sent, parts, strict=True)}
    if len(times) != 1:
        raise ValueError(
            "the outer settings of the parameter groups send unequally many tensors: leave out "
            "pull, or make lr equal"
        )
    by_place = {
        number * len(slow) + place: tensors[number * len(places) + at]
        for tensors, (_, places) in zip(sent, parts, strict=True)
        for at, place in enumerate(places)
        for number in range(max(times))
    }
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
        own_mean, sent = (
            [tensors[first + at] for first in range(0, len(tensors), len(slow)) for at in places]
            for tensors in (mean, context.sent)
        )
        kept = [context.fast[at] for at in places] if context.fast else []
        rule.apply(
            own_slow,
            own_fast,
            own_mean,
            own_state,
            replace(context, sent=sent, fast=kept, places=places),
        )


def _cut(
    places: list[int], slow: list[Tensor], fast: list[Tensor], state: State
) -> tuple[list[Tensor], list[Tensor], State]:
    own = {name: [tensors[at] for at in places] for name, tensors in state.items()}
    return [slow[at] for at in places], [fast[at] for at in places], own
