"""What the callbacks of trainers share: one outer optimizer from the begin of training to its end,
and the weights to evaluate.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.optim import OuterOptimizer
from shoal.optim.outer.inner import Stepped, all_parameters
from shoal.swarm.errors import ShoalError
from shoal.swarm.training.session import Session
from shoal.swarm.training.step_watch import goes_by_steps

log = logging.getLogger(__name__)


class TakingPart:
    """Base of a callback that takes part in the swarm of ``session`` while a trainer trains, once.

    Args:
        session: of this peer; its state is the model that is trained.
        evaluate: "fast" evaluates the weights that this peer trains, "slow" the averaged ones.
        options: as for `Session.optimizer`.
    """

    def __init__(self, session: Session, *, evaluate: str = "fast", **options: Any) -> None:
        if evaluate not in ("fast", "slow"):
            raise ShoalError(
                f'The weights to evaluate are "fast" or "slow", not {evaluate!r}: choose one of '
                "the two."
            )
        self.session = session
        self.options = options
        self.opt: OuterOptimizer | None = None
        """The outer optimizer, from the begin of training on."""
        self._slow = evaluate == "slow"
        self._over = False
        self._shown = ExitStack()
        self._showing = False
        """Whether the model has the slow weights now."""
        self._schedules: list[LRScheduler] = []
        self._schedule_steps = 0
        self._held: dict[LRScheduler, list[float]] = {}

    def _begin(self, saved: dict[str, Any] | None, inner: Optimizer, model: nn.Module) -> None:
        """Make the optimizer, from the state of an earlier one if it was ``saved``; a trainer that
        begins again keeps its own.

        ``inner``: the trainer's optimizer, which has to be one that an own loop could have, and
        train the session's ``model``.
        """
        if self.opt is not None and not self._over:
            return
        weights = [p.detach().clone() for p in self.session.parameters] if saved is not None else []
        trained = all_parameters(inner)
        known = set(trained)
        # One that is unfrozen later must be seen.
        frozen = [p for p in model.parameters() if not p.requires_grad and p not in known]
        stand_in = Stepped([*trained, *frozen], stands_for=inner)
        self.opt = self.session.optimizer(stand_in, **self.options)
        if saved is None:
            return
        with torch.no_grad():
            for parameter, own in zip(self.session.parameters, weights, strict=True):
                parameter.copy_(own)
        self.opt.load_state_dict(saved)

    def _begun(self) -> OuterOptimizer:
        # The trainer begins before it steps.
        assert self.opt is not None
        return self.opt

    def _follow(self, schedules: Iterable[Any], steps: int) -> None:
        """Step the trainer's ``schedules`` of ``steps`` on to where the swarm is, as `follow` of an
        own loop's session does.
        """
        for schedule in schedules:
            if not goes_by_steps(schedule):
                log.warning(
                    "the trainer's %s cannot follow the swarm: it does not go by steps",
                    type(schedule).__name__,
                )
                continue
            before = schedule.last_epoch
            done = self.session.follow(schedule, steps)
            if done > before:
                log.info(
                    "the learning-rate schedule begins at step %d of %d, where the swarm is",
                    done,
                    steps,
                )
                self._schedules.append(schedule)
        self._schedule_steps = steps
        self._hold_ended()

    def _hold_ended(self) -> None:
        """Keep a schedule that followed the swarm at its end: beyond it some rise again, and
        others raise an error.
        """
        for schedule in self._schedules:
            if schedule.last_epoch < self._schedule_steps:
                continue
            groups = schedule.optimizer.param_groups
            rates = self._held.setdefault(schedule, [group["lr"] for group in groups])
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            # The trainer steps it once more.
            schedule.last_epoch = self._schedule_steps - 1

    def _show_slow(self) -> None:
        """Evaluate on the slow weights from now on, if the callback is to."""
        if self._slow and self.opt is not None and not self._over and not self._showing:
            self._shown.enter_context(self.opt.averaged())
            self._showing = True

    def _show_fast(self) -> None:
        """Give the model the weights back that are trained, as before training goes on or they are
        saved.
        """
        self._showing = False
        self._shown.close()

    def _finish(self) -> None:
        """Wait for pending exchanges, and average once more if the swarm does, once."""
        if not self._over:
            self._show_fast()
            self._over = True
            if self.session.over:
                log.info("the swarm's %d steps are done: training ends", self.session.train.steps)
            self.session.finish()
