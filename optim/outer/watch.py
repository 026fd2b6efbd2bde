"""Notices what a training loop does behind an outer optimizer's back, where rounds would be lost.

A loop may load weights into the model between two steps, step the inner optimizer in place of the
outer one, unfreeze a parameter, or add one. The first two are warned of, once in all; the last two
are errors, since what is trained then would never be averaged. Values are looked at only after
torch's own count of changes has moved: a step costs one look at a number per parameter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from shoal.optim.device import uncompiled
from shoal.optim.outer.averaged import Exclude, fits
from shoal.optim.outer.inner import Stepped, all_parameters, parts_of
from shoal.optim.outer.weights import ModelWeights
from shoal.optim.parameters import plain_name

STEPPED_BEHIND = 2
"""Inner steps in a row without an outer one that are warned of; ``after_inner`` follows one."""
WATCH = "_shoal_watch"
"""Attribute of an inner optimizer that holds the handle of ``watch_steps``."""


class LoopWatch:
    """What of a training loop one outer optimizer has to notice.

    Args:
        inner: the inner optimizer, whose steps are watched.
        weights: the model's, whose changes between two steps are noticed.
        unfrozen: notices parameters that are trained only later.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, weights: ModelWeights, unfrozen: Unfrozen
    ) -> None:
        self._inner = inner
        self._weights = weights
        self._unfrozen = unfrozen
        self._count = len(all_parameters(inner))
        self._warned = False
        self._versions: list[int] | None = None
        """Of the model's weights when they were noted; None: unknown, and any change is right."""
        self._steps_behind = 0
        """Steps of the inner optimizer since the last of the outer one."""
        self.loaded_count = True
        """False until the next step if weights that are loaded before it are to be replaced."""
        self.note_weights()
        watch_steps(inner, self._inner_stepped)

    def stepped(self) -> None:
        """Take note of an outer step."""
        self._steps_behind = 0

    def note_weights(self) -> None:
        """Take the model's weights, as they are now, for the outer optimizer's own doing."""
        steps_elsewhere = any(isinstance(one, Stepped) for one in parts_of(self._inner))
        self._versions = None
        if not steps_elsewhere and not self._warned:
            self._versions = self._weights.versions()

    def forget_weights(self) -> None:
        """Take any weights that the model has until ``note_weights`` for right."""
        self._versions = None

    @property
    def noted(self) -> bool:
        return self._versions is not None

    def weights_changed(self) -> bool:
        """Return True if the model's weights were changed since they were noted."""
        return self._versions is not None and self._versions != self._weights.versions()

    def warn_of_weights(self, stacklevel: int) -> None:
        """Warn that the model's weights changed; no further change is noticed."""
        assert self._versions is not None
        now = self._weights.versions()
        changed = sum(a != b for a, b in zip(now, self._versions, strict=True))
        self._versions = None
        self._warned = True
        warnings.warn(
            f"the model's weights changed outside step() ({changed} of {len(now)} tensors), while "
            "the slow weights stay those of before: if others were loaded on purpose, call "
            "opt.restart_from_model() after it, on all peers; a loop that clamps weights itself, "
            "or swaps an average in and out, needs nothing",
            stacklevel=stacklevel + 1,
        )

    def check_parameters(self, round: int) -> None:
        """Raise ValueError if a parameter is trained that was not there, or was frozen, at first.

        The whole model is looked through once in each ``round``.
        """
        if sum(len(group["params"]) for group in self._inner.param_groups) != self._count:
            raise ValueError(
                "the inner optimizer has other parameters than when the outer one was made, and "
                "they would never be averaged: on all peers, finish() and make a new one after "
                "adding parameter groups"
            )
        found = self._unfrozen.found(round)
        if found is not None:
            raise ValueError(
                f"{found} is trained now, and would never be averaged: on all peers, finish() and "
                "make a new outer optimizer after unfreezing or adding it, or freeze it again"
            )

    def _inner_stepped(self) -> None:
        """Warn, once, if the caller steps the inner optimizer in place of the outer one."""
        self._steps_behind += 1
        if self._steps_behind != STEPPED_BEHIND or self._warned:
            return
        self._versions = None
        self._warned = True
        warnings.warn(
            "the inner optimizer is stepped and not the outer one, so nothing is averaged: call "
            "step() of the outer optimizer (of what session.optimizer returned), which steps the "
            "inner one",
            stacklevel=5,
        )


class Unfrozen:
    """Finds a parameter that is trained, and was frozen or not there when this was made.

    Args:
        model: whose parameters are looked through by name, for wrappers may put others in their
            place; None: none.
        others: parameters besides, of an inner optimizer.
        exclude: what stays a peer's own, as an outer optimizer has it.
    """

    def __init__(
        self, model: nn.Module | None, others: Iterable[Tensor], exclude: Exclude = ()
    ) -> None:
        self._model = model
        self._patterns = [one for one in exclude if isinstance(one, str)]
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

    def found(self, round: int) -> str | None:
        """Return the first such parameter as a message names it.

        The whole model is looked through once in each ``round``.
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

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of each parameter of the model that is not excluded by name."""
        if self._model is None:
            return
        for name, parameter in self._model.named_parameters():
            if not any(fits(name, pattern) for pattern in self._patterns):
                yield plain_name(name), parameter


def watch_steps(inner: torch.optim.Optimizer, stepped: Callable[[], None]) -> None:
    """Call the bound method ``stepped`` after each step of ``inner``, of the first of several.

    An earlier caller's watch ends, and the method's object is not kept alive. A `Stepped`, or an
    optimizer without torch's hooks, is not watched.
    """
    one = parts_of(inner)[0]
    if isinstance(one, Stepped) or not hasattr(one, "_optimizer_step_post_hooks"):
        return
    method = WeakMethod(stepped)

    @uncompiled
    def after(*_: Any) -> None:
        alive = method()
        if alive is not None:
            alive()

    before = vars(one).pop(WATCH, None)
    if before is not None:
        before.remove()
    vars(one)[WATCH] = one.register_step_post_hook(after)
