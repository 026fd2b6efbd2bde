"""Callback that trains in a swarm with Lightning's ``Trainer``.

    with swarm.create(state=module, every=50) as s:         # or swarm.join(link, state=module)
        Trainer(max_steps=1000, callbacks=[SwarmCallback(s)]).fit(module, loader)

The module keeps its optimizer and its steps, automatic or not; after each of them the callback takes the outer one. For one process
and one optimizer: Lightning's distributed strategies average, or cut, the model in their own way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from shoal.node.batch import elements
from shoal.optim import OuterOptimizer
from shoal.swarm.errors import ShoalError
from shoal.swarm.training.session import Session


class SwarmCallback(Callback):  # type: ignore[misc]
    """Callback that takes part in the swarm of ``session`` while a trainer fits, once. ``options`` as for `Session.optimizer`."""

    def __init__(self, session: Session, **options: Any) -> None:
        self.session, self.options = session, options
        self.opt: OuterOptimizer | None = None
        self._steps = self._tokens = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the swarm's weights, and its place in the directory. ShoalError if the trainer cannot take part."""
        if trainer.world_size > 1 or len(trainer.optimizers) != 1:
            raise ShoalError(
                f"The trainer has {trainer.world_size} processes and {len(trainer.optimizers)} optimizers: a peer has one of each."
            )
        self.opt = self.session.optimizer(**self.options)
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Do the outer part of the step, if the batch ended one; peers' weights count elements of batches."""
        assert self.opt is not None  # the trainer begins before it steps
        self._tokens += elements(batch)
        if trainer.global_step == self._steps:  # gradients are being accumulated
            return
        self._steps = trainer.global_step
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and self.opt.steps % 10 == 0:  # to look at it makes a GPU wait
            self.session.report(float(loss))
        self.opt.count(self._tokens)
        self._tokens = 0
        self.opt.step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for pending exchanges, so that the model is complete when it is saved."""
        self.session.finish()
