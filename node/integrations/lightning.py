"""Callback that trains in a swarm with Lightning's ``Trainer``.

    with shoal.create(state=module, every=25) as s:         # or shoal.join(link, state=module)
        Trainer(max_steps=1000, callbacks=[SwarmCallback(s)]).fit(module, loader)

The module keeps its optimizer and its steps, automatic or not; after each of them the callback
takes the outer one. A node that joins late begins a schedule that goes by steps where the swarm is,
and the trainer stops where the swarm's steps are done. For one process and one optimizer:
Lightning's distributed strategies average, or cut, the model in their own way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from shoal.node.batch_contents import elements
from shoal.node.integrations.taking_part import TakingPart
from shoal.swarm.errors import ShoalError

LOSS_EVERY_STEPS = 10
"""Between two looks at the loss."""


class SwarmCallback(TakingPart, Callback):  # type: ignore[misc]
    """Callback that takes part in the swarm of ``session`` while a trainer fits, once.

    The session is finished with the last step, or by the validation that stops training, before
    checkpoints are saved; where ``EarlyStopping`` looks at a training epoch, after them. The outer
    state is in the trainer's checkpoints, but for those with ``save_weights_only``, and restored by
    ``fit(ckpt_path=...)``.
    """

    _saved: dict[str, Any] | None = None
    _steps = 0
    """Of the trainer."""
    _tokens = 0
    """Elements of batches since the last step."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Come after all callbacks that may stop training, and before those that save."""
        if stage == "fit":
            others = [one for one in trainer.callbacks if one is not self]
            before = [one for one in others if not isinstance(one, Checkpoint)]
            savers = [one for one in others if isinstance(one, Checkpoint)]
            trainer.callbacks = [*before, self, *savers]

    def state_dict(self) -> dict[str, Any]:
        return {} if self.opt is None else self.opt.whole_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the swarm's weights, or go on from a checkpoint's.

        Raises ShoalError if the trainer cannot take part.
        """
        if trainer.world_size > 1 or len(trainer.optimizers) != 1:
            raise ShoalError(
                f"The trainer has {trainer.world_size} processes and {len(trainer.optimizers)} "
                "optimizers: a peer has one of each."
            )
        self._begin(self._saved, trainer.optimizers[0], pl_module)
        self._steps = trainer.global_step
        by_step: list[Any] = []
        for one in trainer.lr_scheduler_configs:
            if one.interval == "step" and one.frequency == 1:
                by_step.append(one.scheduler)
        steps = trainer.estimated_stepping_batches
        if math.isfinite(steps) and steps > 0:
            self._follow(by_step, int(steps))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Do the outer part of the step, if the batch ended one; peers' weights count elements of
        batches.
        """
        opt = self._begun()
        self._hold_ended()
        self._tokens += elements(batch)
        # Otherwise gradients are being accumulated.
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            # To look at it makes a GPU wait.
            if isinstance(loss, torch.Tensor) and opt.steps % LOSS_EVERY_STEPS == 0:
                self.session.report(float(loss))
            opt.count(self._tokens)
            self._tokens = 0
            opt.step()
            trainer.should_stop |= self.session.over
        self._stopped(trainer, trainer.is_last_batch)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the weights to evaluate; in the check before training, and in a validation of its
        own, those of the module.
        """
        if trainer.state.fn == "fit":
            self._show_slow()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the weights that are trained, and finish if the result stops training."""
        self._show_fast()
        if trainer.state.fn == "fit":
            self._stopped(trainer, trainer.is_last_batch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stopped(trainer, True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finish if what stopped training said so last."""
        self._finish()

    def _stopped(self, trainer: Trainer, epoch_over: bool) -> None:
        """Finish if no step follows, as the trainer's loop decides."""
        epochs = trainer.current_epoch + epoch_over
        steps = trainer.global_step
        has_least = epochs >= (trainer.min_epochs or 0) and steps >= (trainer.min_steps or 0)
        has_all_steps = 0 <= trainer.max_steps <= steps
        has_all_epochs = 0 < (trainer.max_epochs or -1) <= epochs
        is_stopped = trainer.should_stop and has_least
        if self.opt is not None and (has_all_steps or has_all_epochs or is_stopped):
            self._finish()
