"""Callback that trains in a swarm with the ``Trainer`` of Hugging Face's transformers.

    with swarm.create(state=model, every=50) as s:          # or swarm.join(link, state=model)
        Trainer(model, args, train_dataset=data, callbacks=[SwarmCallback(s)]).train()

The trainer keeps its optimizer, scheduler and gradient accumulation; after each of its steps the callback takes the outer one. With
LoRA (peft) only the adapters are exchanged, for only they require a gradient; all peers must have the same base model. Not for
models that the trainer cuts into shards (FSDP, DeepSpeed), nor for several processes in one trainer.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from shoal.optim import OuterOptimizer
from shoal.swarm.errors import ShoalError
from shoal.swarm.training.session import Session


class SwarmCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that takes part in the swarm of ``session`` while a trainer trains, once. ``options`` as for `Session.optimizer`."""

    def __init__(self, session: Session, **options: Any) -> None:
        self.session, self.options = session, options
        self.opt: OuterOptimizer | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take over the swarm's weights, and its place in the directory. ShoalError if the trainer cannot take part."""
        if args.world_size > 1:
            raise ShoalError(
                f"The trainer has {args.world_size} processes: start one process for each peer, without a distributed launcher."
            )
        self.opt = self.session.optimizer(**self.options)
        self._samples = args.per_device_train_batch_size * args.gradient_accumulation_steps

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Do the outer part of the trainer's last step; peers' weights count samples."""
        assert self.opt is not None  # the trainer begins before it steps
        self.opt.count(self._samples)
        self.opt.step()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report the loss that the trainer logs to the other peers."""
        logs = kwargs.get("logs") or {}
        if "loss" in logs:
            self.session.report(float(logs["loss"]))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Wait for pending exchanges, so that the model is complete when it is saved."""
        self.session.finish()
