"""Whether an inner optimizer goes on from where a round has moved the model.

    share_left(AdamW(params))         # 1.0: a move of the weights stays
    share_left(Lookahead(AdamW))      # about .5: it goes back to weights that it remembers

A small copy of the optimizer takes the same steps with the same gradients twice, once with its
weights displaced on the way. What is left of the displacement at the end is the answer. Why it is
tried: docs/internals.md, "An inner optimizer that goes back".
"""

from __future__ import annotations

import copy
import inspect
import math
import random
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shoal.optim.outer.sharded import local

STEPS_BEFORE = 10
"""Steps before the displacement. The next, the 11th, is a prime: of Lookahead's k only 1 and 11 go
back in it.
"""
STEPS_AFTER = 56
"""Steps after it: Lookahead and Ranger go back every 5 or 6 steps, others a little in each step."""
LONGEST_SIDE = 8
"""Sides of a tried parameter at most."""
DEEPEST = 4
"""Containers inside each other in which kept weights are looked for."""
RATE = 1e-4
"""Factor on the learning rate: weight decay and trust ratios are then too small to count."""
LEAST_LEFT = 0.9
"""Share of the displacement that must be left; those seen keep .99 and more, or .8 and less."""
LEAST_AT_ONCE = 0.7
"""Share that must be left after one step. If it is, that step's loss does not count: a projection
such as Nero's takes a share at once and no more.
"""
FORMS = ("plain", "closure", "graph")
"""Ways to hand in gradients, tried in turn; "graph" is for those that differentiate twice."""
CURVATURE = 1e-4
"""Factor on the weights added to each gradient in the form "graph", so that it depends on them and
can be differentiated again.
"""
MOST_REMEMBERED = 64
"""Verdicts kept: a simulation makes one optimizer for each of many peers."""

_verdicts: OrderedDict[object, float | None] = OrderedDict()


def share_left(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the share of a displacement that further steps leave: the least of all parameters.

    What the first step takes does not count if it leaves `LEAST_AT_ONCE`. 1 if the optimizer
    remembers no weights; None if it cannot be tried, for a copy of it does not step. The optimizer
    and the random numbers of Python and torch (CPU and CUDA) stay as they are.
    """
    kind = _kind(optimizer)
    if kind not in _verdicts:
        _verdicts[kind] = _tried(optimizer)
        while len(_verdicts) > MOST_REMEMBERED:
            _verdicts.popitem(last=False)
    return _verdicts[kind]


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if ``step`` has to be given a closure, as LBFGS's does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _uncompiled() -> AbstractContextManager[object]:
    """Return a context in which compiled optimizers run uncompiled.

    Where torch._dynamo is not loaded there are none, and ``set_stance`` would load it.
    """
    if "torch._dynamo" in sys.modules:
        eager: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
        return eager
    return nullcontext()


def _tried(optimizer: torch.optim.Optimizer) -> float | None:
    accelerators: set[torch.device] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type == "cuda":
                accelerators.add(parameter.device)
    python_state = random.getstate()
    with torch.random.fork_rng(accelerators), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.inference_mode(False), _uncompiled():
                # Some optimizers make their state with the first step, some when they are made.
                for keep_state in (False, True):
                    for form in FORMS:
                        share = _share_of_copy(optimizer, keep_state, form)
                        if share is not None:
                            return share
        finally:
            random.setstate(python_state)
    return None


def _share_of_copy(optimizer: torch.optim.Optimizer, keep_state: bool, form: str) -> float | None:
    try:
        runs = []
        for displaced in (False, True):
            small = SmallCopy(optimizer, keep_state)
            torch.manual_seed(0)
            random.seed(0)
            runs.append(small.run(displaced, form))
    except Exception:
        # An optimizer of any library may fail in a small copy: that is no error of its user's.
        return None
    (soon, end), (soon_displaced, end_displaced) = runs
    shares = []
    for index, displacement in enumerate(small.displacements):
        at_first = soon_displaced[index] - soon[index]
        at_last = end_displaced[index] - end[index]
        kept_at_once = _share(at_first, displacement)
        kept = _share(at_last, at_first)
        shares.append(kept if kept_at_once >= LEAST_AT_ONCE else min(kept_at_once, kept))
    return min(shares, default=None)


def _share(left: Tensor, whole: Tensor) -> float:
    """Return how much of ``whole`` is in ``left``; 0 where there is nothing of it, or no number."""
    square = float((whole * whole).sum())
    share = float((left * whole).sum()) / square if square else 0.0
    return share if math.isfinite(share) else 0.0


class SmallCopy:
    """A copy of an optimizer with one small parameter for each number of dimensions in each of its
    groups.

    ``keep_state``: cut its state to the small parameters' shapes; otherwise there is none, as at
    the first step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, keep_state: bool) -> None:
        self._generator = torch.Generator().manual_seed(1)
        self._keep_state = keep_state
        self.parameters: list[Tensor] = []
        self._shapes: set[torch.Size] = set()
        self._memo: dict[int, Any] = {}
        # deepcopy's memo knows objects by their address, so none may be freed meanwhile.
        self._alive: list[Any] = []
        several = list(nested(optimizer))
        for one in several:
            self._shrink(one)
        for one in several:
            ours = ("state", "param_groups")  # `_shrink` has dealt with these
            self._cut_kept({name: value for name, value in vars(one).items() if name not in ours})
        copies = [object.__new__(type(one)) for one in several]
        for one, made in zip(several, copies, strict=True):
            self._memo[id(one)] = made
        for one, made in zip(several, copies, strict=True):
            for name, value in vars(one).items():
                # A scheduler sets an attribute `step` that is bound to the original.
                if name == "step":
                    continue
                hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
                vars(made)[name] = OrderedDict() if hooks else copy.deepcopy(value, self._memo)
        self._optimizer = copies[0]
        self.displacements = [0.1 * self._normal(one) for one in self.parameters]
        train = getattr(self._optimizer, "train", None)
        if callable(train):
            train()  # schedule-free ones step in no other mode

    def run(self, displaced: bool, form: str) -> tuple[list[Tensor], list[Tensor]]:
        """Return the weights one step after the displacement, and after all steps."""
        soon: list[Tensor] = []
        step: Any = type(self._optimizer).step
        if getattr(step, "hooked", False):  # the wrapper calls torch's hooks for all optimizers
            step = step.__wrapped__
        for number in range(STEPS_BEFORE + STEPS_AFTER):
            if displaced and number == STEPS_BEFORE:
                with torch.no_grad():
                    for parameter, displacement in zip(
                        self.parameters, self.displacements, strict=True
                    ):
                        parameter.add_(displacement)
            gradients = [self._normal(parameter) for parameter in self.parameters]

            def evaluate(gradients: Sequence[Tensor] = gradients) -> Tensor:
                for parameter, gradient in zip(self.parameters, gradients, strict=True):
                    curved = gradient + CURVATURE * parameter if form == "graph" else gradient
                    parameter.grad = curved.clone()
                return torch.ones(())

            evaluate()
            if form == "closure":
                step(self._optimizer, evaluate)
            else:
                step(self._optimizer)
            if number == STEPS_BEFORE:
                soon = [parameter.detach().clone() for parameter in self.parameters]
        return soon, [parameter.detach() for parameter in self.parameters]

    def _normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self._generator, device="cpu").to(like.device)

    def _shrink(self, one: torch.optim.Optimizer) -> None:
        """Note what stands for the groups, parameters and state of ``one`` in its copy."""
        for group in one.param_groups:
            if id(group) in self._memo:  # a wrapper has the groups of the optimizer inside
                continue
            small: dict[int, Tensor] = {}
            for parameter in group["params"]:
                self._shapes.add(parameter.shape)
                dimensions = parameter.dim()
                if dimensions not in small:
                    small[dimensions] = self._small(parameter)
                self._note(parameter, small[dimensions])
            made = {key: value for key, value in group.items() if key != "params"}
            self._cut_kept(made)
            made = copy.deepcopy(made, self._memo)
            made["params"] = list(small.values())
            for name in ("lr", "initial_lr"):
                if name in made:
                    made[name] = made[name] * RATE
            if not made.get("lr", 1.0):  # a warm-up begins at 0
                made["lr"] = made.get("initial_lr", RATE * RATE)
            self._note(group, made)
        state = one.state
        if id(state) not in self._memo:
            cut: defaultdict[Any, Any] = defaultdict(dict)
            if self._keep_state:
                self._cut(state, cut)
            self._note(state, cut)

    def _small(self, parameter: Tensor) -> Tensor:
        device = torch.device("cpu") if parameter.is_meta else parameter.device
        shape = [min(side, LONGEST_SIDE) for side in parameter.shape]
        values = torch.randn(shape, generator=self._generator, device="cpu").to(device)
        made = torch.nn.Parameter(values)
        self.parameters.append(made)
        return made

    def _cut(self, state: dict[Any, Any], cut: dict[Any, Any]) -> None:
        for key, values in list(state.items()):
            small = self._memo.get(id(key))
            if not isinstance(key, Tensor):  # such as a counter of all steps
                cut[key] = copy.deepcopy(values, self._memo)
            if small is None or small in cut or not isinstance(values, dict):
                continue
            for name, value in values.items():
                if isinstance(value, Tensor) and value.shape == key.shape:
                    corner = tuple(slice(side) for side in small.shape)
                    cut[small][name] = local(value)[corner].detach().clone()
                else:
                    cut[small][name] = copy.deepcopy(value, self._memo)

    def _cut_kept(self, value: Any, depth: int = 0) -> None:
        """Note the corner of each tensor in ``value`` that has a parameter's shape, such as weights
        that are kept in a list beside the state.
        """
        if isinstance(value, Tensor):
            if id(value) not in self._memo and value.shape in self._shapes:
                corner = tuple(slice(LONGEST_SIDE) for _ in value.shape)
                self._note(value, local(value)[corner].detach().clone())
        elif depth < DEEPEST and isinstance(value, dict | list | tuple):
            for inside in list(value.values() if isinstance(value, dict) else value):
                self._cut_kept(inside, depth + 1)

    def _note(self, original: Any, replacement: Any) -> None:
        self._memo[id(original)] = replacement
        self._alive.append(original)


def nested(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizer, and then those that it holds, each once."""
    found: list[torch.optim.Optimizer] = [optimizer]
    for one in found:
        yield one
        for value in list(vars(one).values()):
            inside = value if isinstance(value, (list, tuple)) else [value]
            for item in inside:
                known = any(item is other for other in found)
                if isinstance(item, torch.optim.Optimizer) and not known:
                    found.append(item)


def _kind(optimizer: torch.optim.Optimizer) -> object:
    """Return what the verdict depends on: of each nested optimizer the class and plain attributes,
    and of its groups the settings but for their rates, the dimensions and the devices.
    """
    parts: list[object] = []
    for one in nested(optimizer):
        parts.append(type(one))
        # Lookahead's k and alpha, for one, are attributes.
        parts += [f"{name}={value!r}" for name, value in vars(one).items() if _plain(value)]
        for group in one.param_groups:
            settings = []
            for name, value in group.items():
                if name not in ("params", "lr", "initial_lr"):
                    settings.append(f"{name}={value!r}" if _plain(value) else name)
            dimensions = sorted({parameter.dim() for parameter in group["params"]})
            device = {parameter.device.type for parameter in group["params"]}
            parts += [tuple(settings), tuple(dimensions), tuple(sorted(device))]
    return tuple(parts)


def _plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
