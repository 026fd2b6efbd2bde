"""The losses by which a node tries a partner's weights before they count (`shoal.swarm.exchange.loss_check`)."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from shoal.optim import OuterOptimizer
from shoal.optim.device import current_device

BATCHES = 2
TOO_LONG_S = 10.0
"""A trial that takes longer is the last one: a partner waits ``ExchangeTimeouts.trial`` seconds for it."""


class LossTrial:
    """Computes losses with a copy of the model, beside training. It may be called from several threads at once.

    Args:
        loss: returns the loss of a model on a batch.
        batches: none of them is known to another peer.
        model: what is trained; frozen parameters are shared with the copy.
        opt: the outer optimizer, whose slow weights stand for those that a contribution leaves out.
        autocast: makes the context of computing in this node's precision.
        log: told once if a trial takes too long.
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
        self._lock, self._ended, self._begin = threading.Lock(), False, current_device()

    @torch.no_grad()
    def __call__(self, fragment: int, own: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[float, float, float] | None:
        """Return the losses of this node's weights, of the mean with the other's, and of the other's, on the same fresh batches."""
        with self._lock:
            if self._ended:
                return None
            began = time.monotonic()
            self._begin()
            places = self._opt.positions(fragment)
            mine, other = self._weights(places, own), self._weights(places, theirs)
            for place in {*range(len(self._params))}.difference(places):
                self._params[place].copy_(self._opt.slow[place])
            batches = list(islice(self._batches, BATCHES))
            if not batches:
                return None
            mean = [(a + b) / 2 for a, b in zip(mine, other, strict=True)]
            first, second, third = (self._loss(places, weights, batches) for weights in (mine, mean, other))
            if time.monotonic() - began > TOO_LONG_S:
                self._ended = True
                self._log(f"trying weights took over {TOO_LONG_S:g} s: from now on they count untried (outer.check_loss)")
            return first, second, third

    def _weights(self, places: Sequence[int], contribution: Sequence[Tensor]) -> list[Tensor]:
        """Return the fast weights of a contribution: it is those, or slow weights and pseudo-gradients, then buffers."""
        count = len(places)
        first, second = contribution[:count], contribution[count : 2 * count]
        if [tensor.shape for tensor in first] == [tensor.shape for tensor in second]:
            return [slow - step for slow, step in zip(first, second, strict=True)]
        return list(first)

    def _loss(self, places: Sequence[int], weights: Sequence[Tensor], batches: Sequence[object]) -> float:
        for place, tensor in zip(places, weights, strict=True):
            self._params[place].copy_(tensor)
        with self._autocast():
            return sum(float(self._task_loss(self._model, batch)) for batch in batches) / len(batches)
