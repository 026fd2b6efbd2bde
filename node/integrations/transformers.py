"""Callback that trains in a swarm with the ``Trainer`` of Hugging Face's transformers.

    with shoal.create(state=model, every=25) as s:          # or shoal.join(link, state=model)
        Trainer(model, args, train_dataset=data, callbacks=[SwarmCallback(s)]).train()

The trainer keeps its optimizer, scheduler and gradient accumulation; after each of its steps the
callback takes the outer one. A node that joins late begins its learning-rate schedule where the
swarm is, and the trainer stops where the swarm's steps are done. With LoRA (peft) only the adapters
are exchanged, for only they require a gradient; all peers must have the same base model. Not for
models that the trainer cuts into shards (FSDP, DeepSpeed), nor for several processes in one
trainer.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from shoal.node.checkpoint.folder import listed
from shoal.node.checkpoint.store import load, save
from shoal.node.integrations.taking_part import TakingPart
from shoal.swarm.errors import ShoalError
from shoal.swarm.exchange.contribution import float32_digest
from shoal.swarm.training.session_setup import parameters_of

FILE = "shoal"
"""The folder of the outer optimizer's state, in each of the trainer's checkpoints."""

log = logging.getLogger(__name__)


class SwarmCallback(TakingPart, TrainerCallback):  # type: ignore[misc]
    """Callback that takes part in the swarm of ``session`` while a trainer trains, once.

    Put it after callbacks that stop training or ask for evaluation, such as
    ``EarlyStoppingCallback``. The session is finished with the last step, before the trainer
    evaluates, saves and loads the best model. The outer state is saved in the trainer's checkpoints
    (`FILE`), unless ``save_only_model``, and restored from the one in ``output_dir``.
    """

    _saved = -1
    """The step of the last checkpoint."""
    _hook: RemovableHandle | None = None
    """While the trainer evaluates."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take over the swarm's weights, or go on from a checkpoint's.

        Raises ShoalError if the trainer cannot take part.
        """
        if args.world_size > 1:
            raise ShoalError(
                f"The trainer has {args.world_size} processes: start one process for each peer, "
                "without a distributed launcher."
            )
        # As the optimizer, handed to all callbacks.
        model: nn.Module = kwargs["model"]
        self._begin(_restored(args, state, model), kwargs["optimizer"], model)
        schedule = kwargs.get("lr_scheduler")
        if state.max_steps > 0:
            self._follow([] if schedule is None else [schedule], state.max_steps)
        # Nothing is left to train, and the best model may be loaded next.
        if state.global_step >= state.max_steps > 0:
            self._finish()
        self._asked(args.eval_on_start, model)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._asked(False)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Do the outer part of the trainer's last step; peers' weights count samples."""
        opt = self._begun()
        batch = state.train_batch_size or args.train_batch_size
        opt.count(batch * args.gradient_accumulation_steps)
        opt.step()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._hold_ended()
        control.should_training_stop |= self.session.over
        self._stopped(state, control)
        self._asked(control.should_evaluate, kwargs.get("model"))

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the fast weights again, and finish if the result stops training."""
        self._show_fast()
        self._stopped(state, control)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the outer state beside the trainer's own."""
        self._asked(False)
        self._saved = state.global_step
        folder = _folder(args, state)
        model = kwargs.get("model")
        if model is None or args.save_only_model or not folder.is_dir():
            return
        digest = float32_digest(parameters_of(model)).hex()
        outer = self._begun().whole_state(copy=False)
        save(folder / FILE, state.global_step, {"weights": digest, "outer": outer})

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Finish if training is stopped; what was saved before is saved again."""
        self._stopped(state, control)
        self._asked(control.should_evaluate, kwargs.get("model"))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        logs = kwargs.get("logs") or {}
        if "loss" in logs:
            self.session.report(float(logs["loss"]))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Finish if the trainer ended without a last epoch."""
        self._asked(False)
        self._finish()

    def _stopped(self, state: TrainerState, control: TrainerControl) -> None:
        if control.should_training_stop and not self._over:
            self._finish()
            control.should_save |= self._saved == state.global_step

    def _asked(self, evaluates: bool, model: nn.Module | None = None) -> None:
        """Begin an evaluation on the slow weights, or be ready for training."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if not evaluates:
            self._show_fast()
        elif self._slow and model is not None:
            self._show_slow()
            # Of several evaluation sets the trainer says the end of each, but not the begin.
            self._hook = model.register_forward_pre_hook(
                lambda module, _: self._show_slow() if module is model else None
            )


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _restored(
    args: TrainingArguments, state: TrainerState, model: nn.Module
) -> dict[str, Any] | None:
    """Return the outer state that was saved with the model's weights; None if the trainer does not
    resume, or there is none.
    """
    if not state.global_step:
        return None
    place = _folder(args, state) / FILE
    saved: dict[str, Any] = {}
    if listed(place):
        _, saved = load(place)
    if saved.get("weights") == float32_digest(parameters_of(model)).hex():
        outer: dict[str, Any] = saved["outer"]
        return outer
    log.warning(
        "the trainer resumes, but no outer state of these weights is in %s: the outer optimizer "
        "begins anew",
        place,
    )
    return None
