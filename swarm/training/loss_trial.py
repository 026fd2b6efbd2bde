"""The losses by which a node tries a partner's weights before they count (`shoal.swarm.exchange.robust`)."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from shoal.optim import OuterOptimizer
from shoal.optim.device import Beside, current_device

BATCHES = 2
TOO_LONG_S = 10.0
"""A trial that takes longer is broken off: a partner waits ``ExchangeTimeouts.trial`` seconds for it."""
MOST_UNTRIED = 64
"""Contributions at most that count untried before the next trial. A trial that is broken off doubles them."""


class LossTrial:
    """Computes losses with a copy of the model, beside training: on a device with streams, on one of its own.

    It may be called from several threads at once. A trial that takes too long, or finds no memory, is broken off; then the
    contribution counts untried, as do some of those that follow, so that such trials cost a bounded part of the time.

    Args:
        loss: returns the loss of a model on a batch.
        batches: none of them is known to another peer.
        model: what is trained; frozen parameters are shared with the copy.
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
        shared = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
        self._model = copy.deepcopy(model, shared).eval()
        self._params = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._task_loss, self._batches, self._opt, self._autocast, self._log = loss, batches, opt, autocast, log
        self._device = next((parameter.device for parameter in self._params), torch.device("cpu"))
        self._lock, self._begin, self._stream = threading.Lock(), current_device(), Beside(self._device)
        self._left = self._untried = 0
        """Contributions that count untried from now on, and how many they were after the last trial."""

    @torch.no_grad()
    def __call__(self, fragment: int, own: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[float, float, float] | None:
        """Return the losses of this node's weights, of the mean with the other's, and of the other's, on the same fresh batches.

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
                if not any(isinstance(one, torch.OutOfMemoryError) for one in (error, error.__cause__)):
                    raise
                self._break_off(f"found no memory on {self._device}")
                return None

    def _losses(self, fragment: int, own: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[float, float, float] | None:
        until = time.monotonic() + TOO_LONG_S
        places = self._opt.positions(fragment)
        others = {*range(len(self._params))}.difference(places)
        with self._stream.before():  # which changes the slow weights, where they are on the device
            self._copy({place: self._opt.slow[place] for place in others if self._opt.slow[place].device == self._device})
        with self._stream.after():
            self._copy({place: self._opt.slow[place] for place in others if self._opt.slow[place].device != self._device})
            mine, other = self._weights(places, own), self._weights(places, theirs)
            batches = list(islice(self._batches, BATCHES))
            if not batches:
                return None
            mean = [(a + b) / 2 for a, b in zip(mine, other, strict=True)]
            losses = []
            for weights in (mine, mean, other):
                self._copy(dict(zip(places, weights, strict=True)))
                losses.append(self._loss(batches))
                if time.monotonic() > until:
                    self._break_off(f"took over {TOO_LONG_S:g} s")
                    return None
        self._untried = 0
        first, second, third = losses
        return first, second, third

    def _break_off(self, why: str) -> None:
        self._left = self._untried = min(2 * self._untried or 1, MOST_UNTRIED)
        self._log(
            f"trying a partner's weights {why}: they count untried, as will the next {self._left} (outer.check_loss): give the "
            "task smaller batches, or make the swarm without check_loss"
        )

    def _copy(self, weights: Mapping[int, Tensor]) -> None:
        for place, tensor in weights.items():
            self._params[place].copy_(tensor)

    def _weights(self, places: Sequence[int], contribution: Sequence[Tensor]) -> list[Tensor]:
        """Return the fast weights of a contribution: it is those, or slow weights and pseudo-gradients, then buffers."""
        count = len(places)
        first, second = contribution[:count], contribution[count : 2 * count]
        if [tensor.shape for tensor in first] == [tensor.shape for tensor in second]:
            return [slow - step for slow, step in zip(first, second, strict=True)]
        return list(first)

    def _loss(self, batches: Sequence[object]) -> float:
        with self._autocast():
            return sum(float(self._task_loss(self._model, batch)) for batch in batches) / len(batches)
