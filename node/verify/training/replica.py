"""Replica of a task's model and inner optimizer, in which training steps are repeated; and its state as bytes.

A snapshot is safetensors, nothing is pickled. It holds what training changes: trainable parameters, buffers, and the numbers of the
inner optimizer; never its settings: the task sets the learning rate, not a prover. A reader knows each name, shape and dtype
beforehand, because it has the same task.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from shoal.node.batch import to_device
from shoal.node.task import Shard, Task
from shoal.node.training.inner_step import InnerStep
from shoal.node.training.schedule import make_inner, make_scheduler
from shoal.node.verify.audit.errors import VerifyError
from shoal.swarm.manifest.outer import TrainSettings

State = dict[str, Tensor]
Condition = Callable[[], AbstractContextManager[Any]]
"""Context in which steps are done, such as another number of threads or another dtype of computing."""
MODEL, OPTIMIZER, AFTER, RANDOM = "model.", "optimizer.", "after.", "random"
HEADER = 256  # bytes that safetensors spends at most on a tensor beside its name
REFUSED = "The snapshot is not one of this task's model"


class NotAsClaimed(VerifyError):
    """A prover's bytes that are not what it claimed; a check makes a finding of it."""


def moving(model: nn.Module) -> State:
    """Return what training changes in ``model``, by name, not copied: trainable parameters, each once, and persistent buffers."""
    frozen = {name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    found: State = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if name not in frozen and isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            found[name] = value
    return found


def trainable(model: nn.Module) -> State:
    """Return the trainable parameters by name, each once, not copied."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def numbers_of(inner: torch.optim.Optimizer) -> State:
    """Return the optimizer's numbers, named by the parameter's place and their own name. Raises VerifyError for other values."""
    found: State = {}
    for index, state in inner.state_dict()["state"].items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                found[f"{index}.{name}"] = value
            elif isinstance(value, bool | int | float):
                found[f"{index}.{name}"] = torch.tensor(
                    value, dtype=torch.float64 if isinstance(value, float) else torch.int64, device="cpu"
                )
            elif value is not None:
                raise VerifyError(f"The task's optimizer keeps a {type(value).__name__}, {name!r}: its training cannot be audited.")
    return found


def copied(state: Mapping[str, Tensor]) -> State:
    """Copy ``state`` to the CPU, without shared memory."""
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in state.items()}


def before(model: nn.Module, inner: torch.optim.Optimizer) -> State:
    """Copy all on which the coming steps depend. Raises VerifyError if the optimizer's state is not all numbers."""
    return {
        **copied({MODEL + name: value for name, value in moving(model).items()}),
        **copied({OPTIMIZER + name: value for name, value in numbers_of(inner).items()}),
        RANDOM: torch.get_rng_state(),
    }


def weights_in(state: Mapping[str, Tensor], names: Sequence[str], prefix: str) -> list[Tensor]:
    """Return the tensors of ``names``, in that order."""
    return [state[prefix + name] for name in names]


def weights_hash(names: Sequence[str], weights: Sequence[Tensor]) -> bytes:
    """Return the SHA-256 of weights on the CPU, with their names, dtypes and shapes."""
    digest = hashlib.sha256(b"shoal weights 1\0")
    for name, tensor in zip(names, weights, strict=True):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


class Replica:
    """``task`` set up as the trainer does. Not for several threads at once.

    Making it draws from torch's global random numbers and restores them, so make it before training begins, or in a process of
    its own. If ``random``, the steps draw from them too (dropout): then ``replay`` must not run beside training either.

    Raises VerifyError if the optimizer's state is not all numbers.
    """

    def __init__(self, task: Task, train: TrainSettings, device: torch.device | None = None) -> None:
        self.task, self.train, self.device = task, train, device or torch.device("cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(train.seed)  # as the trainer does: untrained parameters are equal on all nodes
            self.model = task.model().to(self.device)
            self.names = list(trainable(self.model))
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self._inner_step = InnerStep(task, self.model, trained, self.device, clip=train.clip)
            inner, _ = self._fresh()
            self._moving = {MODEL + name: _kind(value) for name, value in moving(self.model).items()}
            kept = copied(moving(self.model))
            known = torch.get_rng_state()
            self._step(
                inner, next(iter(task.batches_from(Shard(0, 1, train.seed), 0)))
            )  # after one step the optimizer has all its numbers
            self.random = not torch.equal(known, torch.get_rng_state())
            self._load_model(kept)
        self._numbers = {OPTIMIZER + name: _kind(value) for name, value in numbers_of(inner).items()}
        self._whole = {key: dict(state) for key, state in inner.state_dict()["state"].items()}

    def most_bytes(self) -> int:
        """Return the size of the largest snapshot."""
        after = {AFTER + name: self._moving[MODEL + name] for name in self.names}
        every = {**self._moving, **self._numbers, **after, RANDOM: _kind(torch.get_rng_state())}
        sizes = (len(name.encode()) + HEADER + dtype.itemsize * shape.numel() for name, (dtype, shape) in every.items())
        return sum(sizes) + HEADER

    def open(self, snapshot: bytes, first: int) -> tuple[State, list[Tensor]]:
        """Return the state before step ``first`` and the weights after. NotAsClaimed unless it is complete, fits and is finite."""
        if len(snapshot) > self.most_bytes():
            raise NotAsClaimed(f"{REFUSED}: it has {len(snapshot)} bytes, and at most {self.most_bytes()} are possible")
        try:
            state = load(snapshot)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise NotAsClaimed(f"{REFUSED}: it cannot be read") from error
        expected = {**self._moving, RANDOM: _kind(torch.get_rng_state())}
        expected |= {AFTER + name: self._moving[MODEL + name] for name in self.names}
        expected |= self._numbers if first else {}
        for name in sorted(expected.keys() | state.keys()):
            if name not in expected or name not in state or _kind(state[name]) != expected[name]:
                raise NotAsClaimed(f"{REFUSED}: its {name[:80]!r} differs")
            if state[name].is_floating_point() and not bool(torch.isfinite(state[name]).all()):
                raise NotAsClaimed(f"The snapshot holds numbers that are not finite, in {name[:80]!r}")
        return state, [state.pop(AFTER + name) for name in self.names]

    def replay(self, state: State, shard: Shard, first: int, steps: int, condition: Condition = nullcontext) -> list[Tensor]:
        """Return the trainable weights after ``steps`` steps from ``state``, on the CPU. Passes on the task's errors.

        Raises NotAsClaimed if the task has no such batches, or the loss is not finite.
        """
        self._load_model({name.removeprefix(MODEL): value for name, value in state.items() if name.startswith(MODEL)})
        inner, scheduler = self._fresh()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the optimizer has not stepped yet
            for _ in range(first if scheduler is not None else 0):
                scheduler.step()
        if first:
            inner.load_state_dict({**inner.state_dict(), "state": self._structured(state)})
        known = torch.get_rng_state() if self.random else None
        try:
            if known is not None:
                torch.set_rng_state(state[RANDOM])
            with condition():
                for batch in self._batches(shard, first, steps):
                    loss = self._step(inner, batch)
                    if not bool(torch.isfinite(loss)):
                        raise NotAsClaimed("The loss of the steps is not finite when they are done again")
                    if scheduler is not None:
                        scheduler.step()
        finally:
            if known is not None:
                torch.set_rng_state(known)
        return [value.detach().to("cpu", copy=True) for value in trainable(self.model).values()]

    def _batches(self, shard: Shard, first: int, steps: int) -> Iterator[Any]:
        batches = iter(self.task.batches_from(shard, first))
        for number in range(steps):
            try:
                yield next(batches)
            except StopIteration:
                raise NotAsClaimed(f"The shard has no batch for step {first + number}") from None

    def _fresh(self) -> tuple[torch.optim.Optimizer, Any]:
        inner = make_inner(self.task, self.train, self.model)
        return inner, make_scheduler(self.task, self.train, inner)

    def _step(self, inner: torch.optim.Optimizer, batch: Any) -> Tensor:
        """Do one `Trainer.step` without exchanges."""
        loss = self._inner_step.gradients(to_device(batch, self.device))
        self._inner_step.step(inner)
        inner.zero_grad()
        return loss

    @torch.no_grad()
    def _load_model(self, state: State) -> None:
        for name, value in moving(self.model).items():
            value.copy_(state[name])

    def _structured(self, state: State) -> dict[Any, dict[str, Any]]:
        found: dict[Any, dict[str, Any]] = {}
        for index, template in self._whole.items():
            for name, like in template.items():
                # Cloned: an optimizer changes the tensors that it is given.
                value = None if like is None else state[f"{OPTIMIZER}{index}.{name}"].clone()
                found.setdefault(index, {})[name] = value if like is None or isinstance(like, Tensor) else type(like)(value)
        return found


def snapshot_of(state: State, names: Sequence[str], after: Sequence[Tensor]) -> bytes:
    """Encode the state before and the trainable weights ``names`` after."""
    return save({**state, **{AFTER + name: value for name, value in zip(names, after, strict=True)}})


def _kind(value: Tensor) -> tuple[torch.dtype, torch.Size]:
    return value.dtype, value.shape
