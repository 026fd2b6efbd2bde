"""One inner step: the gradients of a batch, in parts and in mixed precision, and the optimizer.

A failure of memory or of torch's compiler becomes a sentence that names the settings that help.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoal.node.config.train_settings import OwnTraining
from shoal.node.task import Task
from shoal.node.training.batch_parts import batch_rows, cut_batch
from shoal.node.training.layout import Layout
from shoal.node.training.precision import DTYPES, check_precision
from shoal.node.training.training_error import DivergedError, TrainingError
from shoal.node.user_code import SMALLER, UserCodeError, calling, out_of_memory, summary
from shoal.optim import OuterOptimizer

UNCOMPILED = "install a C++ compiler where it asks for one, or leave --compile out"
UNUSABLE = (RuntimeError, LookupError, TypeError, ValueError, AttributeError)
"""Errors of torch's optimizers with a state of other names, shapes or types."""
MAX_SKIPPED_STEPS = 50
"""In a row, for gradients that are not finite: by then float16's scale of the loss is below 1e-10,
and is not the reason.
"""


class InnerStep:
    """The inner step of one process: `gradients`, then `step`.

    Args:
        model: what the loss is computed with; the wrapped one, if it is wrapped (DDP, FSDP).
        parameters: those that are trained.
        clip: largest norm of all gradients together; 0: any.
        layout: of ``model``.
        outer_in_memory: the outer optimizer is in the device's own memory, and could be in files.

    Raises TrainingError: the device cannot compute as ``own`` asks for.
    """

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        parameters: Sequence[Tensor],
        device: torch.device,
        *,
        clip: float,
        own: OwnTraining,
        layout: Layout,
        outer_in_memory: bool = False,
    ) -> None:
        self.own = own
        self.layout = layout
        check_precision(self.own.precision, device, parameters)
        self.task = task
        self.parameters = parameters
        self.device = device
        self.clip = clip
        self.model = model
        if self.own.compile:
            # As a module around it: the model itself keeps its names, and evaluates as it is.
            try:
                self.model = cast(nn.Module, torch.compile(model))
            # torch says so of versions of Python, and systems, that it cannot compile on
            except RuntimeError as error:
                raise TrainingError(
                    f"Cannot compile the model ({summary(error)}): {UNCOMPILED}."
                ) from error
        self.scaler: torch.amp.GradScaler | None = None
        if self.own.precision == "float16":
            self.scaler = torch.amp.GradScaler(device.type)
            # The first steps are often left out until the scale fits; the schedule goes on all the
            # same, as the other peers' do.
            warnings.filterwarnings(
                "ignore",
                message=r"Detected call of `lr_scheduler.step\(\)` before",
                category=UserWarning,
            )
        self._skipped = 0
        self._outer_in_memory = outer_in_memory
        self.loaded_from: Path | None = None
        """Checkpoint of the inner optimizer's state, until a step was taken with it: torch loads
        states that no step can use.
        """

    @property
    def dtype(self) -> torch.dtype:
        """The format of most matrix products."""
        return DTYPES.get(self.own.precision, self.parameters[0].dtype)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of computing in this node's precision; for float32 it changes
        nothing.
        """
        dtype = DTYPES.get(self.own.precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    def gradients(self, batch: Any) -> torch.Tensor:
        """Add the mean of the gradients of this rank's parts of ``batch``; return the mean of their
        losses, on the device.

        TrainingError if the batch cannot be cut, or memory runs out.
        """
        count = self.own.accumulate
        first = self.layout.rank * self.own.accumulate
        parts = cut_batch(batch, self.layout.ranks * count)[first : first + count]
        total: torch.Tensor | None = None
        with self._explained(batch):
            for number, part in enumerate(parts):
                with self.layout.backward_of(number, count):
                    loss = self._backward(part)
                total = loss if total is None else total + loss
            self.layout.backward_done(count)
        assert total is not None
        return total if count == 1 else total / count

    def _backward(self, part: Any) -> torch.Tensor:
        with self.autocast():
            loss = self.task.loss(self.model, part)
        scaled = loss if self.own.accumulate == 1 else loss / self.own.accumulate
        if self.scaler is not None:
            scaled = self.scaler.scale(scaled)
        with calling(self.task, "the backward pass of loss()"):
            scaled.backward()  # type: ignore[no-untyped-call]
        # Sums of bfloat16 stick at 256 times a loss.
        return loss.detach().to(torch.promote_types(loss.dtype, torch.float32))

    def step(self, optimizer: torch.optim.Optimizer, through: object = None) -> bool:
        """Clip the gradients and take a step of ``optimizer``; return whether the weights were
        stepped.

        With float16 a step of which a gradient is not finite is left out, as GradScaler does, and
        the scale lowered. The outer part of an `OuterOptimizer` is done all the same: peers count
        the same steps. ``through``: as for `calling`.

        Raises TrainingError: the gradients of many steps in a row were not finite, memory runs out,
        or no step can be taken with the state of a checkpoint.
        """
        with (
            self._explained(None),
            calling(self.task, "the optimizer of inner_optimizer()", through),
        ):
            if self.scaler is None:
                self._clip()
                optimizer.step()
                self.loaded_from = None
                return True
            watched = _Watched(optimizer)
            as_optimizer = cast(torch.optim.Optimizer, watched)
            self.scaler.unscale_(as_optimizer)
            self._clip()
            self.scaler.step(as_optimizer)
            self.scaler.update()
            if not watched.stepped and isinstance(optimizer, OuterOptimizer):
                for _ in optimizer.after_inner():
                    pass  # the next iteration waits for the exchange
        if watched.stepped:
            self.loaded_from = None
            self._skipped = 0
        else:
            self._skipped += 1
        if self._skipped >= MAX_SKIPPED_STEPS:
            raise DivergedError(
                f"The gradients of {MAX_SKIPPED_STEPS} steps in a row were not finite: lower the "
                "learning rate, or set train.precision to bfloat16 or float32."
            )
        return watched.stepped

    def _clip(self) -> None:
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)

    @contextmanager
    def _explained(self, batch: Any) -> Iterator[None]:
        """Turn errors of memory, and of compiling, into sentences that name what would help."""
        try:
            yield
        except Exception as error:
            cause: BaseException = error
            if isinstance(error, UserCodeError) and error.__cause__ is not None:
                cause = error.__cause__
            of_compiler = type(cause).__module__.startswith(("torch._dynamo", "torch._inductor"))
            if self.own.compile and of_compiler:
                raise TrainingError(
                    f"Cannot compile the model ({summary(cause)}): {UNCOMPILED}."
                ) from error
            if not out_of_memory(cause):
                if batch is None and self.loaded_from is not None and isinstance(error, UNUSABLE):
                    raise TrainingError(
                        f"The checkpoint in {str(self.loaded_from)!r} holds a state that the inner "
                        f"optimizer cannot use ({summary(error)}): take an older one, or start "
                        "without --resume in another folder."
                    ) from error
                raise
            remedy = self._remedy(batch)
            if isinstance(error, UserCodeError):
                raise UserCodeError(str(error).replace(SMALLER, remedy), error.trace) from error
            raise TrainingError(
                f"There is not enough memory on {str(self.device)!r} for a step: {remedy}."
            ) from error

    def _remedy(self, batch: Any) -> str:
        """Return what would fit, of what is not in use yet.

        ``batch``: that of the gradients; None: they are there already.
        """
        found = []
        if batch is not None:  # in the optimizer the activations are gone
            rows = (batch_rows(batch) or 0) // self.layout.ranks
            for parts in range(self.own.accumulate + 1, rows + 1):
                if rows % parts == 0:
                    found.append(f"cut the batch into parts (--set train.accumulate={parts})")
                    break
            if self.own.precision == "float32":
                found.append("compute in another format (--precision bfloat16)")
            if not self.own.recompute:
                found.append("keep fewer activations (--set train.recompute=true)")
        if self._outer_in_memory:
            found.append("keep the outer optimizer in files (--offload DIR)")
        return ", ".join([*found, SMALLER])

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the loss's scale; None without one."""
        return None if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue with the scale of ``state``, if both runs have one."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


class _Watched:
    """An optimizer as GradScaler sees it; ``stepped`` says whether its step was taken."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.stepped = False

    def step(self) -> None:
        self.stepped = True
        self._optimizer.step()
