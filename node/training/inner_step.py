"""One inner step: the gradients of a batch, in parts and in mixed precision, clipped; the inner
optimizer, and its schedule.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from shoal.node.config.settings import OwnTraining, Precision
from shoal.node.inner_tensors import load_whole_model, same_values
from shoal.node.task import Task, leaves, mapped
from shoal.node.task import parts as parts_of
from shoal.node.user_code import SMALLER, UserCodeError, calling, out_of_memory, summary
from shoal.optim import OuterOptimizer
from shoal.optim.inner import LR as MUON_LR
from shoal.optim.inner import WEIGHT_DECAY as MUON_WEIGHT_DECAY
from shoal.optim.inner import Split, muon, split
from shoal.optim.outer.inner import all_parameters
from shoal.optim.outer.weights import Processes
from shoal.optim.parameters import AveragedParameters
from shoal.swarm.errors import ShoalError
from shoal.swarm.manifest import TrainSettings


class TrainingError(ShoalError):
    """The task's model, batches or loss cannot be trained, or not as the settings ask for."""


# Equal parts of a batch, for gradient accumulation and for the ranks of a peer.


def batch_rows(batch: Any) -> int | None:
    """Return the first dimension of the first tensor or array in ``batch`` that has one; None if
    there is none.
    """
    return next((len(leaf) for leaf in leaves(batch) if _has_rows(leaf)), None)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def _uneven(batch: Any, count: int) -> str | None:
    """Return the type of an object of a library's own in ``batch`` whose tensors do not all have
    ``count`` rows, or None.

    In a dict, tuple, list or dataclass a tensor of another length is the same for all rows, such as
    a mask.
    """
    inside = parts_of(batch)
    if inside is None:
        return None
    if not isinstance(batch, Mapping | tuple | list) and not is_dataclass(batch):
        lengths = {len(leaf) for leaf in leaves(batch) if _has_rows(leaf)}
        if lengths - {count}:
            return type(batch).__name__
    for part in inside.values():
        if (kind := _uneven(part, count)) is not None:
            return kind
    return None


def cut_batch(batch: Any, parts: int) -> list[Any]:
    """Return ``parts`` equal parts of ``batch``, in order, whatever holds its tensors
    (`shoal.node.task`).

    Every tensor and array of which the first dimension is that of the first one (`batch_rows`) is
    cut along it, as a view; all else is the same in each part.

    Raises TrainingError: the batch has no rows, or they do not divide.
    """
    if parts == 1:
        return [batch]
    count = batch_rows(batch)
    if not count:
        kind = "None" if batch is None else f"an object of type {type(batch).__name__}"
        raise TrainingError(
            f"The task's batch, {kind}, has no tensor with rows to cut into {parts} parts: leave "
            "train.accumulate at 1, on one "
            "device."
        )
    if count % parts:
        raise TrainingError(
            f"A batch of {count} rows cannot be cut into {parts} equal parts: choose "
            "train.accumulate (times the devices) so that "
            "it divides the batch, or another batch size."
        )
    if (uneven := _uneven(batch, count)) is not None:
        raise TrainingError(
            f"The batch holds an object of type {uneven} with tensors of other lengths than "
            f"{count}, such as a graph's edges, and "
            f"cannot be cut into {parts} parts: leave train.accumulate at 1, on one device, or "
            "yield dicts of tensors with a row "
            "for each example."
        )
    size = count // parts

    def part(number: int) -> Any:
        at = slice(number * size, (number + 1) * size)
        return mapped(
            batch, lambda leaf: leaf[at] if _has_rows(leaf) and len(leaf) == count else leaf
        )

    return [part(number) for number in range(parts)]


# Mixed precision: autocast for computing, and a scaled loss for float16. The weights stay as the
# task made them.

DTYPES: dict[Precision, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def check_precision(
    precision: Precision, device: torch.device, parameters: Iterable[Tensor] = ()
) -> None:
    """Raise TrainingError if ``device`` cannot compute in ``precision``, or not with these
    ``parameters``.
    """
    if precision not in DTYPES:
        return
    if not _computes(DTYPES[precision], device):
        others = (
            "float32" if precision == "bfloat16" and device.type != "cuda" else "float16 or float32"
        )
        others = "bfloat16 or float32" if precision == "float16" else others
        raise TrainingError(
            f"The device {str(device)!r} cannot compute in {precision}: set train.precision to "
            f"{others}."
        )
    if precision == "float16" and any(p.dtype == torch.float16 for p in parameters):
        raise TrainingError(
            "The model has weights of float16, whose gradients cannot be scaled back: have the "
            "task make them float32, and leave "
            "train.precision at float16."
        )


def _computes(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a small layer can be trained in ``dtype``.

    A GPU that only imitates bfloat16 would be slower than float32.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # a device without this autocast only warns, and computes in float32
            weight = torch.ones(8, 8, device=device, requires_grad=True)
            with torch.autocast(device.type, dtype=dtype):
                found = torch.nn.functional.linear(torch.ones(8, 8, device=device), weight)
            found.float().sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return found.dtype == dtype


class Layout:
    """A model in one process.

    Those of several ranks override all of it, and every rank calls each method at the same point.
    """

    rank, ranks = 0, 1
    group: Processes | None = None

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Move ``model`` to the device, and cut it in place if need be; return what the loss is
        computed with.
        """
        return model.to(device)

    def gathered_bytes(self, model: nn.Module) -> int:
        """Return the bytes of others' parts of ``model`` that are on this rank's device at most,
        while it computes.
        """
        return 0

    def backward_of(self, part: int, count: int) -> AbstractContextManager[Any]:
        """Return the context of the backward pass of the ``part``-th of ``count`` parts of a
        batch.
        """
        return nullcontext()

    def backward_done(self, count: int) -> None:
        """Have the gradients of ``count`` backward passes be the same on all ranks, if they are not
        yet.
        """

    def mean(self, loss: Tensor) -> Tensor:
        return loss

    def evaluated(self, work: Callable[[], float]) -> float:
        """Return what ``work`` returns on rank 0, which may take long; the value of other ranks is
        their own affair.
        """
        return work()

    # A whole state is rank 0's to get and to give; it may be the tensors of the model or optimizer
    # itself.

    def whole_model(self, model: nn.Module) -> dict[str, Tensor]:
        return model.state_dict()

    def load_model(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Raise ValueError if the model does not hold what ``state`` says afterwards."""
        load_whole_model(model, state)

    def whole_outer(self, opt: OuterOptimizer) -> dict[str, Any]:
        return opt.whole_state(copy=False)

    def load_outer(self, opt: OuterOptimizer, state: dict[str, Any]) -> None:
        """Raise ValueError if ``state`` does not fit; nothing is changed then."""
        opt.load_state_dict(state)

    def agreed(self, value: Any) -> Any:
        """Return rank 0's value."""
        return value

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order, on rank 0."""
        return [value]


UNCOMPILED = "install a C++ compiler where it asks for one, or leave --compile out"
UNUSABLE = (RuntimeError, LookupError, TypeError, ValueError, AttributeError)
"""Errors of torch's optimizers with a state of other names, shapes or types."""
# steps in a row without finite gradients: by then the scale of the loss is below 1e-10, and is not
# the reason
SKIPS = 50


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
        self.own, self.layout = own, layout
        check_precision(self.own.precision, device, parameters)
        self.task, self.parameters, self.device, self.clip = task, parameters, device, clip
        self.model = model
        if (
            self.own.compile
        ):  # as a module around it: the model itself keeps its names, and evaluates as it is
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
        self._skipped, self._outer_in_memory = 0, outer_in_memory
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
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def gradients(self, batch: Any) -> torch.Tensor:
        """Add the mean of the gradients of this rank's parts of ``batch``; return the mean of their
        losses, on the device.

        TrainingError if the batch cannot be cut, or memory runs out.
        """
        count, first = self.own.accumulate, self.layout.rank * self.own.accumulate
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
        return loss.detach().to(
            torch.promote_types(loss.dtype, torch.float32)
        )  # sums of bfloat16 stick at 256 times a loss

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
        self.loaded_from = None if watched.stepped else self.loaded_from
        self._skipped = 0 if watched.stepped else self._skipped + 1
        if self._skipped >= SKIPS:
            raise TrainingError(
                f"The gradients of {SKIPS} steps in a row were not finite: lower the learning "
                "rate, or set train.precision to "
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
            cause = (
                error.__cause__
                if isinstance(error, UserCodeError) and error.__cause__ is not None
                else error
            )
            if self.own.compile and type(cause).__module__.startswith(
                ("torch._dynamo", "torch._inductor")
            ):
                raise TrainingError(
                    f"Cannot compile the model ({summary(cause)}): {UNCOMPILED}."
                ) from error
            if not out_of_memory(cause):
                if batch is None and self.loaded_from is not None and isinstance(error, UNUSABLE):
                    raise TrainingError(
                        f"The checkpoint in {str(self.loaded_from)!r} holds a state that the inner "
                        "optimizer cannot use "
                        f"({summary(error)}): take an older one, or start without --resume in "
                        "another folder."
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
        found, count = [], self.own.accumulate
        rows = (batch_rows(batch) or 0) // self.layout.ranks
        files = (
            ["keep the outer optimizer in files (--offload DIR)"] if self._outer_in_memory else []
        )
        if batch is None:  # in the optimizer: the activations are gone by then
            return ", ".join([*files, SMALLER])
        if finer := next(
            (parts for parts in range(count + 1, rows + 1) if rows % parts == 0), None
        ):
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


class _Watched:
    """An optimizer as GradScaler sees it; ``stepped`` says whether its step was taken."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self.param_groups, self.stepped = optimizer, optimizer.param_groups, False

    def step(self) -> None:
        self.stepped = True
        self._optimizer.step()


LR, WEIGHT_DECAY, BETAS = 3e-4, 0.01, (0.9, 0.99)
KNOBS = ("lr", "weight_decay")
LAST = 0.1  # of the peak: where a cosine ends
DECAY = 0.2  # of the steps: the end of warm-up-stable-decay
RATES = ("lr", "initial_lr")
"""Settings of a parameter group that every scheduler sets."""


def resolved(train: TrainSettings) -> TrainSettings:
    """Return the settings with the inner optimizer's defaults written out, as a new manifest has
    them: versions may differ.
    """
    if train.optimizer == "task":
        return train
    if train.optimizer == "muon":
        usual = {"lr": MUON_LR, "weight_decay": MUON_WEIGHT_DECAY}
    else:
        usual = {"lr": LR, "weight_decay": WEIGHT_DECAY}
    return train.model_copy(
        update={name: value for name, value in usual.items() if getattr(train, name) is None}
    )


def make_inner(task: Task, train: TrainSettings, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the inner steps of ``model``, over the parameters that require a
    gradient.

    TrainingError if Muon finds no matrix in it, or torch has no Muon; or if the task's own
    optimizer trains others than those.
    """
    train = resolved(train)
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    params = [param for _, param in trained]
    if train.optimizer == "task":
        given: Any = trained if task.optimizer_takes_names() else params
        return _checked(AveragedParameters.of(model), task.inner_optimizer(given))
    if train.optimizer == "muon":
        with _explained():
            return muon(
                model,
                matrices=task.hidden_matrices(model),
                **{name: getattr(train, name) for name in KNOBS},
            )
    # The fused kernel halves the optimizer's time on the CPU; elsewhere torch chooses.
    fused = True if all(p.device.type == "cpu" for p in params) else None
    return torch.optim.AdamW(
        params, betas=BETAS, fused=fused, **{name: getattr(train, name) for name in KNOBS}
    )


def _checked(averaged: AveragedParameters, inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the task's optimizer.

    TrainingError unless it trains the parameters that are averaged, and no others.
    """
    lacking, more = averaged.compared(all_parameters(inner))
    if lacking:
        count = len(averaged)
        raise TrainingError(
            f"The task's inner_optimizer() trains {count - len(lacking)} of the {count} parameters "
            "that require a gradient, and "
            f"not {lacking[0]}: let it train all that it is given, or freeze the rest in model() "
            "(requires_grad_(False))."
        )
    if trained := [parameter for parameter in more if parameter.requires_grad]:
        raise TrainingError(
            f"The task's inner_optimizer() trains {len(trained)} parameters that are not its "
            "model's, such as one of shape "
            f"{tuple(trained[0].shape)}: make them part of what model() returns."
        )
    return inner


def parameter_split(task: Task, train: TrainSettings, model: torch.nn.Module) -> Split | None:
    """Return which parameters of ``model`` Muon and AdamW train; None with another optimizer.

    TrainingError as `make_inner`.
    """
    if train.optimizer != "muon":
        return None
    with _explained():
        return split(model, task.hidden_matrices(model))


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise TrainingError(f"The optimizer muon cannot train this model: {error}.") from error


def make_scheduler(
    task: Task, train: TrainSettings, optimizer: torch.optim.Optimizer
) -> LRScheduler | None:
    """Return the schedule, to be stepped after each inner step; None: the rate stays.

    TrainingError if it leads to an end, and this node's run has none.
    """
    if train.schedule == "task":
        return task.lr_scheduler(optimizer, train.steps)
    if train.schedule in ("cosine", "wsd") and not train.steps:
        raise TrainingError(
            f"The schedule {train.schedule} leads to an end, and this node's run has none: leave "
            "--steps 0 out."
        )
    if train.schedule == "constant" and not train.warmup:
        return None
    return LambdaLR(optimizer, factor(train.schedule, train.warmup, train.steps))


def factor(schedule: str, warmup: int, steps: int) -> Callable[[int], float]:
    """Return the learning rate as a fraction of its peak, by the number of steps done: a line up,
    then what ``schedule`` says.

    A function, and no object with a state: a resumed run has the length that its settings give it
    now.
    """
    rise = min(warmup, steps // 2) if steps else warmup
    decay = max(round(DECAY * steps), 1)

    def fraction(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        if schedule == "cosine":
            progress = min(1.0, (step - rise) / max(1, steps - rise))
            return LAST + (1.0 - LAST) * 0.5 * (1.0 + math.cos(math.pi * progress))
        if schedule == "wsd":
            return min(1.0, max(0.0, (steps - step) / decay))
        return 1.0

    return fraction


class Schedule:
    """The schedule of a run: its scheduler, the length that it was made for, and how far it has
    come.

    A schedule is taken for a function of the number of its steps, as all of torch's are that
    `Trainer` can step. So one of another length comes to the same place by as many steps. After its
    length the rate stays: some schedulers would rise again, or raise.

    Args:
        optimizer: with the parameter groups of the inner one, before any step.
        length: inner steps from the start to the end of the schedule; 0: it has no end.
    """

    def __init__(
        self, task: Task, train: TrainSettings, optimizer: torch.optim.Optimizer, length: int
    ) -> None:
        self._task, self._optimizer, self.length = task, optimizer, length
        self._train, self._before = train, copy.deepcopy(self._groups())
        before = self._before
        self.scheduler = make_scheduler(task, train.model_copy(update={"steps": length}), optimizer)
        self._start = copy.deepcopy(self._groups())
        self._set = {*RATES, *_changed(before, self._start)}
        self._made = copy.deepcopy(self.fields())
        self.done = 0
        """Steps of the schedule."""
        self.factor = 1.0
        """What the rates are multiplied by after the schedule has set them, because the swarm's
        rate was changed.
        """
        self._unscaled: list[float] | None = None
        """The rates of the groups without the factor; None if there is none in them."""

    @property
    def peak(self) -> float:
        """The highest rate of the parameter groups as the inner optimizer was made; 0: no group has
        a rate.
        """
        return max((float(group.get("lr", 0.0)) for group in self._before), default=0.0)

    def scale(self, factor: float) -> None:
        """Multiply the rates by ``factor``, in place of an earlier one, from now on."""
        self._without_factor()
        self.factor = factor
        self._with_factor()

    def resized(self, length: int) -> Schedule:
        """Return the same schedule in another ``length``, at the same step and with the same
        factor. It replaces this one.
        """
        self._without_factor()
        for group, first in zip(self._optimizer.param_groups, self._before, strict=True):
            group.update(
                {name: copy.copy(first[name]) for name in self._set & first.keys() & group.keys()}
            )
        made = Schedule(self._task, self._train, self._optimizer, length)
        made.forward(self.done)
        made.done = self.done  # also where the new one ends before
        made.scale(self.factor)
        return made

    def _without_factor(self) -> None:
        if self._unscaled is not None:
            for group, rate in zip(self._optimizer.param_groups, self._unscaled, strict=True):
                _set_rate(group, rate)
            self._unscaled = None

    def _with_factor(self) -> None:
        if self.factor == 1.0 or self._unscaled is not None:
            return
        groups = self._optimizer.param_groups
        self._unscaled = [float(group.get("lr", 0.0)) for group in groups]
        for group, rate in zip(groups, self._unscaled, strict=True):
            _set_rate(group, rate * self.factor)

    def _groups(self) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]

    def fields(self) -> dict[str, Any] | None:
        """Return the scheduler's state without its functions; None if the rate stays."""
        return None if self.scheduler is None else plain(self.scheduler.state_dict())

    def step(self) -> None:
        if 0 < self.length <= self.done:
            return
        if self.scheduler is not None:
            self._without_factor()
            with calling(self._task, "the scheduler of lr_scheduler()"):
                self.scheduler.step()
            self._with_factor()
        self.done += 1

    def forward(self, step: int) -> None:
        """Go on to ``step``, at most to the end; an earlier one changes nothing."""
        step = min(step, self.length) if self.length else step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the optimizer has not stepped yet
            if (
                type(self.scheduler) is LambdaLR and step > self.done
            ):  # its rate follows from the number alone
                self.scheduler.last_epoch, self.scheduler._step_count = step - 1, step
                self.done = step - 1
            if self.scheduler is None:
                self.done = max(self.done, step)
            while self.done < step:
                before = self._groups()
                self.step()
                self._set |= _changed(before, self._groups())

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"length": self.length, "made": self._made, "done": self.done}
        if self._unscaled is not None:
            state["unscaled"] = self._unscaled
        return state

    def resume(self, saved: Mapping[str, Any] | None, about: Mapping[str, Any]) -> bool:
        """Go on from a run's ``fields`` and ``state_dict``.

        The parameter groups are the saved ones by now. Return False if this is another schedule
        now, which then goes on from the same step. The scheduler must be new.
        """
        done = int(about["done"])
        self._unscaled = about.get("unscaled")
        self._without_factor()
        if about["length"] == self.length and same_values(about["made"], self._made):
            if self.scheduler is not None and saved is not None:
                self.scheduler.load_state_dict(copy.deepcopy(dict(saved)))
            self.done = done
            self._with_factor()
            return True
        kept = self._groups()
        for group, start in zip(
            self._optimizer.param_groups, copy.deepcopy(self._start), strict=True
        ):
            group.update(start)
        self.forward(done)
        self._without_factor()
        for group, values in zip(self._optimizer.param_groups, kept, strict=True):
            group.update({name: value for name, value in values.items() if name not in self._set})
        self._with_factor()
        return False


def _set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a parameter group, which has a tensor for it if the optimizer was
    made with one.
    """
    if "lr" not in group:
        return
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _changed(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> set[str]:
    """Return the settings that any of the groups has anew, or otherwise."""
    both = zip(before, after, strict=True)
    return {
        name
        for old, new in both
        for name, value in new.items()
        if name not in old or not same_values(old[name], value)
    }


def plain(value: Any) -> Any:
    """Return a scheduler's state without its functions: a checkpoint cannot hold them, and the task
    makes them anew.
    """
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if not callable(item)}
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value if not callable(item))
    return value
