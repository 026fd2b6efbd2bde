"""One inner step: the gradients of a batch, in parts and in mixed precision, clipped, and the step of the optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from shoal.node.batch import leaves, mapped
from shoal.node.config.settings import OwnTraining, Precision
from shoal.node.task import Task
from shoal.node.user_code import SMALLER, UserCodeError, calling, out_of_memory, summary
from shoal.optim import OuterOptimizer
from shoal.swarm.errors import ShoalError

# The error of training: what its user can mend.


class TrainingError(ShoalError):
    """The task's model, batches or loss cannot be trained, or not as the settings ask for."""


# Equal parts of a batch, for gradient accumulation and for the ranks of a peer.


def batch_rows(batch: Any) -> int | None:
    """Return the first dimension of the first tensor or array in ``batch`` that has one; None if there is none."""
    return next((len(leaf) for leaf in leaves(batch) if _has_rows(leaf)), None)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def cut_batch(batch: Any, parts: int) -> list[Any]:
    """Return ``parts`` equal parts of ``batch``, in order, whatever holds its tensors (`shoal.node.batch`).

    Every tensor and array of which the first dimension is that of the first one (`batch_rows`) is cut along it, as a view; all
    else is the same in each part.

    Raises TrainingError: the batch has no rows, or they do not divide.
    """
    if parts == 1:
        return [batch]
    count = batch_rows(batch)
    if not count:
        kind = "None" if batch is None else f"an object of type {type(batch).__name__}"
        raise TrainingError(
            f"The task's batch, {kind}, has no tensor with rows to cut into {parts} parts: leave train.accumulate at 1, on one "
            "device."
        )
    if count % parts:
        raise TrainingError(
            f"A batch of {count} rows cannot be cut into {parts} equal parts: choose train.accumulate (times the devices) so that "
            "it divides the batch, or another batch size."
        )
    size = count // parts

    def part(number: int) -> Any:
        at = slice(number * size, (number + 1) * size)
        return mapped(batch, lambda leaf: leaf[at] if _has_rows(leaf) and len(leaf) == count else leaf)

    return [part(number) for number in range(parts)]


# Mixed precision: autocast for computing, and a scaled loss for float16. The weights stay as the task made them.

DTYPES: dict[Precision, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a loss is computed; for float32 it changes nothing."""
    return torch.autocast(device.type, dtype=DTYPES[precision]) if precision in DTYPES else nullcontext()


def make_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler | None:
    """Return the scaler of the loss, which float16 needs and nothing else."""
    if precision != "float16":
        return None
    # The first steps are often left out until the scale fits, and the schedule goes on all the same, as the other peers' do.
    warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)` before", category=UserWarning)
    return torch.amp.GradScaler(device.type)


def check_precision(precision: Precision, device: torch.device, parameters: Iterable[Tensor] = ()) -> None:
    """Raise TrainingError, with one sentence, if ``device`` cannot compute in ``precision``, or not with these ``parameters``."""
    if precision not in DTYPES:
        return
    if not _computes(DTYPES[precision], device):
        others = "float32" if precision == "bfloat16" and device.type != "cuda" else "float16 or float32"
        others = "bfloat16 or float32" if precision == "float16" else others
        raise TrainingError(f"The device {str(device)!r} cannot compute in {precision}: set train.precision to {others}.")
    if precision == "float16" and any(p.dtype == torch.float16 for p in parameters):
        raise TrainingError(
            "The model has weights of float16, whose gradients cannot be scaled back: have the task make them float32, and leave "
            "train.precision at float16."
        )


def _computes(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a small layer can be trained in ``dtype``. A GPU that only imitates bfloat16 would be slower than float32."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a device without this autocast only warns, and computes in float32
            weight = torch.ones(8, 8, device=device, requires_grad=True)
            with torch.autocast(device.type, dtype=dtype):
                found = torch.nn.functional.linear(torch.ones(8, 8, device=device), weight)
            found.float().sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return found.dtype == dtype


UNCOMPILED = "install a C++ compiler where it asks for one, or leave --compile out"
SKIPS = 50  # steps in a row without finite gradients: by then the scale of the loss is below 1e-10, and is not the reason


class InnerStep:
    """The inner step of one process: `gradients`, then `step`.

    Args:
        task: its loss.
        model: what the loss is computed with; the wrapped one, if it is wrapped (DDP, FSDP).
        parameters: those that are trained.
        clip: largest norm of all gradients together; 0: any.
        own: how this node computes.
        rank, ranks: of the processes that share each batch.
        outer_in_memory: the outer optimizer is in the device's own memory, and could be in files.
        unsynchronised: makes the context of every part's backward pass but the last, such as DDP's ``no_sync``.

    Raises TrainingError: the device cannot compute as ``own`` asks for.
    """

    def __init__(
        self,
        task: Task,
        model: torch.nn.Module,
        parameters: list[torch.nn.Parameter],
        device: torch.device,
        *,
        clip: float = 0.0,
        own: OwnTraining | None = None,
        rank: int = 0,
        ranks: int = 1,
        outer_in_memory: bool = False,
        unsynchronised: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.own = own or OwnTraining()
        check_precision(self.own.precision, device, parameters)
        self.task, self.parameters, self.device, self.clip = task, parameters, device, clip
        self.model = _compiled(model) if self.own.compile else model
        self.rank, self.ranks, self.unsynchronised = rank, ranks, unsynchronised
        self.scaler = make_scaler(self.own.precision, device)
        self._skipped, self._outer_in_memory = 0, outer_in_memory

    @property
    def dtype(self) -> torch.dtype:
        """The format of most matrix products."""
        return DTYPES.get(self.own.precision, self.parameters[0].dtype)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of computing in this node's precision."""
        return autocast(self.own.precision, self.device)

    def gradients(self, batch: Any) -> torch.Tensor:
        """Add the mean of the gradients of this rank's parts of ``batch``; return the mean of their losses, on the device.

        TrainingError if the batch cannot be cut, or memory runs out.
        """
        count = self.own.accumulate
        parts = cut_batch(batch, self.ranks * count)[self.rank * count : (self.rank + 1) * count]
        total: torch.Tensor | None = None
        with self._explained(batch):
            for number, part in enumerate(parts):
                with nullcontext() if number == count - 1 else self.unsynchronised():
                    loss = self._backward(part)
                total = loss if total is None else total + loss
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
        return loss.detach()

    def step(self, optimizer: torch.optim.Optimizer, through: object = None) -> bool:
        """Clip the gradients and take a step of ``optimizer``; return whether the weights were stepped.

        With float16 a step of which a gradient is not finite is left out, as GradScaler does, and the scale lowered. The outer part
        of an `OuterOptimizer` is done all the same: peers count the same steps. ``through``: as for `calling`.

        Raises TrainingError: the gradients of many steps in a row were not finite, or memory runs out.
        """
        with self._explained(None), calling(self.task, "the optimizer of inner_optimizer()", through):
            if self.scaler is None:
                self._clip()
                optimizer.step()
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
        self._skipped = 0 if watched.stepped else self._skipped + 1
        if self._skipped >= SKIPS:
            raise TrainingError(
                f"The gradients of {SKIPS} steps in a row were not finite: lower the learning rate, or set train.precision to "
                "bfloat16 or float32."
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
            cause = error.__cause__ if isinstance(error, UserCodeError) and error.__cause__ is not None else error
            if self.own.compile and type(cause).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise TrainingError(f"Cannot compile the model ({summary(cause)}): {UNCOMPILED}.") from error
            if not out_of_memory(cause):
                raise
            remedy = self._remedy(batch)
            if isinstance(error, UserCodeError):
                raise UserCodeError(str(error).replace(SMALLER, remedy), error.trace) from error
            raise TrainingError(f"There is not enough memory on {str(self.device)!r} for a step: {remedy}.") from error

    def _remedy(self, batch: Any) -> str:
        """Return what would fit, of what is not in use yet. ``batch``: that of the gradients; None: they are there already."""
        found, count = [], self.own.accumulate
        rows = (batch_rows(batch) or 0) // self.ranks
        files = ["keep the outer optimizer in files (--offload DIR)"] if self._outer_in_memory else []
        if batch is None:  # in the optimizer: the activations are gone by then
            return ", ".join([*files, SMALLER])
        if finer := next((parts for parts in range(count + 1, rows + 1) if rows % parts == 0), None):
            found.append(f"cut the batch into parts (--set train.accumulate={finer})")
        if self.own.precision == "float32":
            found.append("compute in another format (--precision bfloat16)")
        if not self.own.recompute:
            found.append("keep fewer activations (--set train.recompute=true)")
        return ", ".join([*found, *files, SMALLER])

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the loss's scale; None without one."""
        return None if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue with the scale of ``state``, if both runs have one."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def _compiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return ``model`` compiled, as a module around it: the model itself keeps its names, and evaluates as it is."""
    try:
        return cast(torch.nn.Module, torch.compile(model))
    except RuntimeError as error:  # torch says so of versions of Python, and systems, that it cannot compile on
        raise TrainingError(f"Cannot compile the model ({summary(error)}): {UNCOMPILED}.") from error


class _Watched:
    """An optimizer as GradScaler sees it; ``stepped`` says whether its step was taken."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self.param_groups, self.stepped = optimizer, optimizer.param_groups, False

    def step(self) -> None:
        self.stepped = True
        self._optimizer.step()
