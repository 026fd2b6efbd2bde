"""The losses by which a node tries a partner's weights before they count (`shoal.swarm.exchange.loss_check`)."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from shoal.node.task import Shard, Task, iterator_of
from shoal.node.training.trainer import Trainer, to_device
from shoal.optim import OuterOptimizer
from shoal.swarm.exchange.loss_check import LossCheck
from shoal.swarm.exchange.robust import DistanceScreen

BATCHES = 2
TOO_LONG_S = 10.0
"""A trial that takes longer is the last one: a partner waits ``ExchangeTimeouts.trial`` seconds for it."""
OTHER_SEED = 7_919
"""Added to the shard's seed, so that a trial's batches are others than those that are trained on at that time."""


class LossTrial:
    """Computes losses with a copy of the model, beside training. It may be called from several threads at once.

    Args:
        task: its batches and loss.
        model: what is trained; frozen parameters are shared with the copy.
        opt: the outer optimizer, whose slow weights stand for those that a contribution leaves out.
        device: the model's.
        shard: the part of the data that this node trains on. Its batches are known to no other peer.
        autocast: makes the context of computing in this node's precision.
        log: told once if a trial takes too long.
    """

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        opt: OuterOptimizer,
        device: torch.device,
        shard: Shard,
        autocast: Callable[[], AbstractContextManager[object]],
        log: Callable[[str], None],
    ) -> None:
        shared = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
        self._model = copy.deepcopy(model, shared).eval()
        self._params = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._task, self._opt, self._device, self._autocast, self._log = task, opt, device, autocast, log
        other = Shard(shard.index, shard.of, shard.seed + OTHER_SEED)
        self._batches = iterator_of(task.batches(other), other)
        self._lock, self._ended = threading.Lock(), False

    @torch.no_grad()
    def __call__(self, fragment: int, own: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[float, float, float] | None:
        """Return the losses of this node's weights, of the mean with the other's, and of the other's, on the same fresh batches."""
        with self._lock:
            if self._ended:
                return None
            began = time.monotonic()
            places = self._opt.positions(fragment)
            mine, other = self._weights(places, own), self._weights(places, theirs)
            for place in {*range(len(self._params))}.difference(places):
                self._params[place].copy_(self._opt.slow[place])
            batches = [to_device(next(self._batches), self._device) for _ in range(BATCHES)]
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
            return sum(float(self._task.loss(self._model, batch)) for batch in batches) / len(batches)


def try_partners(trainer: Trainer, screen: DistanceScreen, log: Callable[[str], None]) -> None:
    """Let ``screen`` try what partners send, if the swarm's settings ask for it (``outer.check_loss``) and this node can.

    ``trainer`` has its shard.
    """
    if not trainer.outer.check_loss:
        return
    why = "the batches of its task are made with the model" if trainer.task.draws_with_model else ""
    if trainer.layout.ranks > 1:
        why = "its model is trained by several processes"
    if why:
        log(f"this node counts partners' weights untried (outer.check_loss), for {why}")
        return
    own = trainer.inner_step
    trial = LossTrial(trainer.task, trainer.model, trainer.whole, trainer.device, trainer.shard, own.autocast, log)
    screen.loss_check = LossCheck(trial)
