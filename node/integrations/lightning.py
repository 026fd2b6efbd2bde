"""Callback that trains in a swarm with Lightning's ``Trainer``.

    with swarm.create(state=module, every=50) as s:         # or swarm.join(link, state=module)
        Trainer(max_steps=1000, callbacks=[SwarmCallback(s)]).fit(module, loader)

The module keeps its optimizer and its steps, automatic or not; after each of them the callback
takes the outer one. A node that joins late begins a schedule that goes by steps where the swarm is.
For one process and one optimizer: Lightning's distributed strategies average, or cut, the model in
their own way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from shoal.node.integrations.own_loop import TakingPart
from shoal.node.task import elements
from shoal.swarm.errors import ShoalError


class SwarmCallback(TakingPart, Callback):  # type: ignore[misc]
    """Callback that takes part in the swarm of ``session`` while a trainer fits, once.

    The session is finished with the last step, or by the validation that stops training, before
    checkpoints are saved; where ``EarlyStopping`` looks at a training epoch, after them. The outer
    state is in the trainer's checkpoints, but for those with ``save_weights_only``, and restored by
    ``fit(ckpt_path=...)``.
    """

    _saved: dict[str, Any] | None = None
    _steps = _tokens = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Come after all callbacks that may stop training, and before those that save."""
        if stage == "fit":
            trainer.callbacks = sorted(
                trainer.callbacks,
                key=lambda one: 2 if isinstance(one, Checkpoint) else int(one is self),
            )

    def state_dict(self) -> dict[str, Any]:
        return {} if self.opt is None else self.opt.whole_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the swarm's weights, or go on from a checkpoint's.

        ShoalError if the trainer cannot take part.
        """
        if trainer.world_size > 1 or len(trainer.optimizers) != 1:
            raise ShoalError(
                f"The trainer has {trainer.world_size} processes and {len(trainer.optimizers)} "
                "optimizers: a peer has one of each."
            )
        self._begin(self._saved, trainer.optimizers[0], pl_module)
        self._steps = trainer.global_step
        by_step = [
            one
            for one in trainer.lr_scheduler_configs
            if one.interval == "step" and one.frequency == 1
        ]
        steps = trainer.estimated_stepping_batches
        if math.isfinite(steps) and steps > 0:
            self._follow((one.scheduler for one in by_step), int(steps))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Do the outer part of the step, if the batch ended one; peers' weights count elements of
        batches.
        """
        opt = self._begun()
        self._hold_ended()
        self._tokens += elements(batch)
        if trainer.global_step != self._steps:  # otherwise gradients are being accumulated
            self._steps = trainer.global_step
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if (
                isinstance(loss, torch.Tensor) and opt.steps % 10 == 0
            ):  # to look at it makes a GPU wait
                self.session.report(float(loss))
            opt.count(self._tokens)
            self._tokens = 0
            opt.step()
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
        enough = epochs >= (trainer.min_epochs or 0) and trainer.global_step >= (
            trainer.min_steps or 0
        )
        ended = (
            0 <= trainer.max_steps <= trainer.global_step
            or 0 < (trainer.max_epochs or -1) <= epochs
        )
        if self.opt is not None and (ended or (trainer.should_stop and enough)):
            self._finish()
