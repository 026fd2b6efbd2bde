"""The trial of a partner's weights on this node's data, before they count
(`shoal.swarm.exchange.robust`).
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from shoal.optim import OuterOptimizer
from shoal.optim.device import Beside, device_setter

log = logging.getLogger(__name__)

TRIAL_BATCHES = 2
TOO_LONG_S = 10.0
"""A trial that takes longer is broken off: a partner waits ``ExchangeTimeouts.trial`` seconds for
it.
"""
MAX_UNTRIED = 64
"""Contributions at most that count untried before the next trial.

A trial that is broken off doubles them.
"""


class LossTrial:
    """Computes losses with a copy of the model, beside training: on a device with streams, on one
    of its own.

    It may be called from several threads at once. A trial that takes too long, or finds no memory,
    is broken off; then the contribution counts untried, as do some of those that follow, so that
    such trials cost a bounded part of the time.

    Args:
        loss: returns the loss of a model on a batch.
        batches: none of them is known to another peer.
        model: what is trained, with all parameters of ``opt``; frozen parameters are shared with
            the copy, whose buffers, such as running statistics, follow the model's.
        opt: the outer optimizer, whose slow weights stand for those that a contribution leaves out.
        autocast: makes the context of computing in this node's precision.
        log: told of each trial that is broken off.
    """

    def __init__(
        self,
        loss: Callable[[nn.Module, Any], Tensor],
        batches: Iterator[Any],
        model: nn.Module,
        opt: OuterOptimizer,
        log: Callable[[str], None],
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        copies: dict[int, Any] = {}
        for parameter in model.parameters():
            if not parameter.requires_grad:
                copies[id(parameter)] = parameter
        self._trained = model
        self._model = copy.deepcopy(model, copies).eval()
        self._params = [copies[id(parameter)] for parameter in opt.parameters]
        """The copy's parameters, in the order of the slow weights."""
        self._task_loss = loss
        self._batches = batches
        self._opt = opt
        self._autocast = autocast
        self._log = log
        self._device = next((parameter.device for parameter in self._params), torch.device("cpu"))
        self._lock = threading.Lock()
        self._begin = device_setter()
        self._stream = Beside(self._device)
        self._left = 0
        """Contributions that count untried from now on."""
        self._untried = 0
        """How many they were after the last trial."""
        self._have_batches_ended = False

    @torch.no_grad()
    def __call__(
        self, fragment: int, own: Sequence[Tensor], theirs: Sequence[Tensor]
    ) -> tuple[float, float, float] | None:
        """Return the losses of this node's weights, of the mean with the other's, and of the
        other's, on the same fresh batches.

        None without batches, and where the contribution counts untried.
        """
        with self._lock:
            if self._left:
                self._left -= 1
                return None
            self._begin()
            try:
                return self._losses(fragment, own, theirs)
            except Exception as error:  # a task's own has what went wrong as its cause
                if not any(
                    isinstance(one, torch.OutOfMemoryError) for one in (error, error.__cause__)
                ):
                    raise
                self._break_off(f"found no memory on {self._device}")
                return None

    def _losses(
        self, fragment: int, own: Sequence[Tensor], theirs: Sequence[Tensor]
    ) -> tuple[float, float, float] | None:
        until = time.monotonic() + TOO_LONG_S
        places = self._opt.positions(fragment)
        others = {*range(len(self._params))}.difference(places)
        here: dict[int, Tensor] = {}
        elsewhere: dict[int, Tensor] = {}
        for place in others:
            slow = self._opt.slow[place]
            (here if slow.device == self._device else elsewhere)[place] = slow
        with self._stream.before():  # which changes the slow weights, where they are on the device
            self._copy(here)
            self._copy_buffers()
        with self._stream.after():
            self._copy(elsewhere)
            tail = self._opt.buffer_count if fragment == 0 else 0
            mine = self._weights(places, own, tail)
            other = self._weights(places, theirs, tail)
            batches = list(islice(self._batches, TRIAL_BATCHES))
            if not batches:
                self._tell_that_batches_ended()
                return None
            mean = [(a + b) / 2 for a, b in zip(mine, other, strict=True)]
            losses = []
            for weights in (mine, mean, other):
                self._copy(dict(zip(places, weights, strict=True)))
                losses.append(self._loss(batches) if weights is mine else self._loss_with(batches))
                if time.monotonic() > until:
                    self._break_off(f"took over {TOO_LONG_S:g} s")
                    return None
        self._untried = 0
        first, second, third = losses
        return first, second, third

    def _break_off(self, why: str) -> None:
        self._left = self._untried = min(2 * self._untried or 1, MAX_UNTRIED)
        self._log(
            f"trying a partner's weights {why}: they count untried, as will the next {self._left} "
            "(outer.check_loss): give the task smaller batches, or make the swarm without "
            "check_loss"
        )

    def _tell_that_batches_ended(self) -> None:
        if not self._have_batches_ended:
            self._have_batches_ended = True
            self._log(
                "there are no more batches to try partners' weights with: they count untried from "
                "now on (outer.check_loss): have the task's batches(shard) go on without end"
            )

    def _copy(self, weights: Mapping[int, Tensor]) -> None:
        for place, tensor in weights.items():
            self._params[place].copy_(tensor)

    def _copy_buffers(self) -> None:
        live = dict(self._trained.named_buffers())
        for name, buffer in self._model.named_buffers():
            now = live.get(name)
            if now is not None and now.shape == buffer.shape:
                buffer.copy_(now)

    def _weights(
        self, places: Sequence[int], contribution: Sequence[Tensor], tail: int
    ) -> list[Tensor]:
        """Return the fast weights of a contribution: it is those, or slow weights and
        pseudo-gradients, and then ``tail`` buffers.
        """
        count = len(places)
        first = contribution[:count]
        if len(contribution) - tail < 2 * count:
            return list(first)
        second = contribution[count : 2 * count]
        return [slow - step for slow, step in zip(first, second, strict=True)]

    def _loss_with(self, batches: Sequence[object]) -> float:
        """Return the loss with a partner's weights: NaN where it cannot be computed, as it could
        with the own ones.

        A task may check its numbers and raise; then the partner's weights are the cause, and no
        code of this node.
        """
        try:
            return self._loss(batches)
        except Exception as error:
            if isinstance(error.__cause__ or error, torch.OutOfMemoryError):
                raise
            log.info("a partner's weights give no loss: %r", error)
            return math.nan

    def _loss(self, batches: Sequence[object]) -> float:
        with self._autocast():
            losses = [float(self._task_loss(self._model, batch)) for batch in batches]
        return sum(losses) / len(losses)
