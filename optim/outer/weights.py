"""The weights of a model as an outer optimizer sees them.

    weights = ModelWeights(params, model, torch.device("cpu"))
    weights.read(part)        # model -> weights.fast
    ...                       # a rule moves weights.slow and weights.fast
    weights.restart(part)     # weights.fast -> model

The slow weights are float32, most often in main memory; the model's are of any type, on any device,
and maybe cut into shards, of which this has the local part. Why rounding errors are kept:
docs/internals.md, "Weights in bfloat16".
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from shoal.optim.codecs.base import Shape
from shoal.optim.codecs.memory import alike
from shoal.optim.device import copies_beside, pinned_like, to_host, wait_for
from shoal.optim.exchange.base import Exchange
from shoal.optim.outer.rule import State
from shoal.optim.outer.sharded import local, reshard
from shoal.optim.outer.sketch import projection, sketch
from shoal.optim.schedule.round_length import RoundLength

ALIGNED_BYTES = 64
"""Distance of the beginnings of two tensors in a file: a cache line."""

T = TypeVar("T")


class ModelWeights:
    """Slow weights of a model's averaged parameters, and staging for its fast ones.

    Fast weights are read from the model into staging, and written to it from there. A parameter
    that has the slow weights' type and device is its own staging: that copies nothing, and takes no
    memory. ``part`` is always a sequence of positions in ``params``.

    Args:
        params: the averaged parameters, of any floating-point type and on any device.
        model: the module, whose copies of weights FSDP2 must drop when they change; needed if a
            parameter is sharded.
        place: where slow weights and staging live: a device, or a folder for files that are mapped
            into memory.

    Raises:
        ValueError: a parameter is sharded and there is no model.
        OSError: the folder cannot be written, or has no room.
    """

    def __init__(
        self, params: Sequence[Tensor], model: nn.Module | None, place: torch.device | Path
    ) -> None:
        if model is None and any(hasattr(param, "to_local") for param in params):
            raise ValueError(
                "the parameters are cut into shards: hand in model=, or FSDP2 goes on with copies "
                "of weights that changed"
            )
        self.params = list(params)
        self.model = model
        self._place = place
        double = any(param.dtype == torch.float64 for param in self.params)
        dtype = torch.float64 if double else torch.float32
        self.slow: list[Tensor] = []
        for index in self.everything:
            own = self.held(index)
            self.slow.append(self._room(own.shape, dtype).copy_(own.detach()))
        self.shapes = self.shapes or [tuple(tensor.shape) for tensor in self.slow]
        self._staging: dict[int, Tensor] = {}
        """Staging of the parameters that cannot be their own."""
        self.fast = [self._staged(index) for index in self.everything]
        """Staging: the fast weights as last read, or to be written next."""
        self.rounding: dict[int, Tensor] = {}
        """By position: what the model's weight lost when it was copied there; where there is
        nothing, that weight was the slow one.
        """
        self.shows_slow = False
        """True within ``showing_slow``."""

    @property
    def everything(self) -> range:
        return range(len(self.params))

    @torch.no_grad()
    def read(self, part: Sequence[int]) -> None:
        """Copy the model's weights, with their rounding errors, into staging."""
        for index, fast in zip(part, self.stage(part), strict=True):
            param = self.held(index)
            if param.data_ptr() != fast.data_ptr():
                # Cast where it is: a copy that casts goes by way of memory that is not pinned.
                beside = copies_beside(param.device)
                fast.copy_(param.to(fast.dtype) if beside else param, non_blocking=beside)
        self._synchronize(part)
        for index in part:
            if self.coarse(index):
                self.fast[index].add_(self.rounding_error(index))

    @torch.no_grad()
    def restart(self, part: Sequence[int]) -> None:
        """Copy staging into the model, and note the rounding errors."""
        self.write(part, self.fast)
        coarse = [index for index in part if self.coarse(index)]
        same = to_host([torch.eq(self.fast[index], self.slow[index]).all() for index in coarse])
        for index in part:
            self.rounding.pop(index, None)
        for index, at_slow in zip(coarse, same, strict=True):
            if not at_slow:
                fast = self.fast[index]
                self.rounding[index] = fast - fast.to(self.params[index].dtype)

    @torch.no_grad()
    def write(self, part: Sequence[int], weights: Sequence[Tensor]) -> None:
        """Copy ``weights`` (of all parameters; those of ``part`` are used) into the model."""
        for index in part:
            param = local(self.params[index])
            if param.data_ptr() != weights[index].data_ptr():
                beside = copies_beside(param.device)
                there = weights[index].to(param.device, non_blocking=beside)
                param.copy_(there, non_blocking=beside)
        self._synchronize(part)
        reshard(self.model)

    def stage(self, part: Sequence[int]) -> list[Tensor]:
        """Return the staging of ``part`` as it is now.

        A model may have been moved, or cut otherwise, since it was used last.
        """
        for index in part:
            self.fast[index] = self._staged(index)
        return [self.fast[index] for index in part]

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Copy the model into the slow weights.

        With several processes the owner's weights count, in all of them.
        """
        for index in self.everything:
            self.slow[index].copy_(self.held(index))
            self.stage([index])[0].copy_(self.slow[index])
        self.restart(self.everything)

    @contextmanager
    def showing_slow(self) -> Iterator[None]:
        """Put the slow weights into the model within the block.

        Afterwards the model's own are restored bit by bit.
        """
        outside = self.shows_slow
        with torch.no_grad():
            parts = [local(param).detach() for param in self.params]
            kept = [own.copy_(part) for own, part in zip(alike(parts), parts, strict=True)]
        try:
            self.write(self.everything, self.slow)
            self.shows_slow = True
            yield
        finally:
            self.shows_slow = outside
            with torch.no_grad():
                for param, own in zip(self.params, kept, strict=True):
                    local(param).copy_(own)
            self._synchronize(self.everything)
            reshard(self.model)

    def coarse(self, index: int) -> bool:
        """Return True if the model's weight has fewer bits than the slow one."""
        return self.params[index].dtype.itemsize < self.slow[index].dtype.itemsize

    def rounding_error(self, index: int) -> Tensor:
        """Return the rounding error of the model's starting point."""
        if index in self.rounding:
            return self.rounding[index]
        slow = self.slow[index]
        return slow - slow.to(self.params[index].dtype)

    def keep_rounding(self, index: int) -> None:
        """Note the present rounding error, before the slow weight changes and the model's not."""
        if self.coarse(index):
            self.rounding[index] = self.rounding_error(index)

    def versions(self) -> list[int]:
        """Return torch's count of the changes in place of each parameter; no value is read."""
        return [param._version for param in self.params]

    def holds_slow(self) -> bool:
        """Return True if the model holds the slow weights.

        A process that has not all of them cannot tell, and returns True.
        """
        if self.dealt:
            return True
        for param, slow in zip(self.params, self.slow, strict=True):
            part = local(param).detach()
            if not torch.equal(part, slow.to(part)):
                return False
        return True

    def housed(self, state: State) -> State:
        """Return a rule's state in the place of the slow weights."""
        if not isinstance(self._place, Path):
            return state
        moved = {name: in_file(self._place, tensors) for name, tensors in state.items()}
        for name, tensors in state.items():
            for room, tensor in zip(moved[name], tensors, strict=True):
                room.copy_(tensor)
        return moved

    def waits(self, part: Sequence[int], others: Sequence[Tensor]) -> bool:
        """Return False if ``read`` of ``part`` waits for the device of all ``others`` too."""
        return not {tensor.device for tensor in others} <= self._devices(part)

    def _devices(self, part: Sequence[int]) -> set[torch.device]:
        """Return the devices between which and the slow weights' ``part`` is copied."""
        found: set[torch.device] = set()
        for index in part:
            if self.slow[index].device != self.params[index].device:
                found.add(self.params[index].device)
        return found

    def _synchronize(self, part: Sequence[int]) -> None:
        """Wait for the copies between a device and main memory; on one device all is in order."""
        wait_for(self._devices(part))

    def _staged(self, index: int) -> Tensor:
        """Return the parameter itself if it can be its own staging now, else a buffer for it."""
        slow = self.slow[index]
        param = local(self.params[index]).detach()
        if param.dtype == slow.dtype and param.device == slow.device and param.is_contiguous():
            return param
        return self._buffer(index)

    def _buffer(self, index: int) -> Tensor:
        if index not in self._staging:
            self._add_staging(index)
        return self._staging[index]

    def _add_staging(self, index: int) -> None:
        """Make a buffer that is used again each round.

        Pinned ones of all parameters are made at once, in one piece of memory.
        """
        slow = self.slow[index]
        if isinstance(self._place, Path):
            self._staging[index] = self._room(slow.shape, slow.dtype)
            return
        if not self._is_pinned(index):
            self._staging[index] = torch.empty_like(slow)
            return
        lacking = [index]
        for other in self.everything:
            if other != index and other not in self._staging and self._is_pinned(other):
                lacking.append(other)
        pinned = pinned_like([self.slow[other] for other in lacking])
        self._staging.update(zip(lacking, pinned, strict=True))

    def _is_pinned(self, index: int) -> bool:
        """Return True if the weights come from an accelerator by way of pinned memory."""
        return self.slow[index].device.type == "cpu" and copies_beside(self.params[index].device)

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if isinstance(self._place, Path):
            return in_file(self._place, [torch.empty(shape, dtype=dtype, device="meta")])[0]
        return torch.empty(shape, dtype=dtype, device=self._place)

    # Peers of several processes, each with a part of the weights, have others of what follows
    # (`shoal.optim.ranks.rank_weights.RankWeights`). Here one process has all.

    dealt = False
    """True if each of several processes has whole tensors of some parameters."""
    first = True
    """True in the process that speaks to other peers."""
    rank: list[int] | None = None
    """The rank of this process and the number of ranks, in a peer of several."""
    shapes: Sequence[Shape] = ()
    """The shapes of all parameters as the outer optimizer sees them; a tensor that another process
    has is empty in ``slow``.
    """

    def held(self, index: int) -> Tensor:
        """Return what this process keeps of a parameter, as it is in the model now."""
        return local(self.params[index])

    def sizes(self, part: Sequence[int]) -> Sequence[int]:
        """Return the numbers of values of whole parameters; nothing if all are here."""
        return ()

    def agreed(self, value: T) -> T:
        """Return the first process's value, in all of them."""
        return value

    def of_owners(self, part: Sequence[int], scalars: Sequence[Tensor]) -> list[Tensor]:
        """Return one scalar for each parameter of ``part`` as its owner has it."""
        return list(scalars)

    def whole(self, part: Sequence[int], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return tensors like those of a ``Rule`` with the parts of all processes.

        Only the first one gets them; those that are here are not copied.
        """
        return tensors

    def projection(self, part: Sequence[int]) -> tuple[float, ...]:
        return projection(self.slow[index] for index in part)

    def sketch(self, part: Sequence[int]) -> tuple[float, ...]:
        return sketch(self.slow[index] for index in part)


class Processes(Protocol):
    """The processes of one peer (`shoal.optim.ranks`), each with an outer optimizer.

    All make the same calls in the same order.
    """

    def weights(
        self, params: Sequence[Tensor], model: nn.Module | None, place: torch.device | Path
    ) -> ModelWeights:
        """Return this process's part of the model's slow weights."""
        ...

    def exchange(self, real: Exchange) -> Exchange:
        """Return an exchange by which one process, which has the ``real`` one, averages for all."""
        ...

    def length(self, real: RoundLength) -> RoundLength: ...


def in_file(folder: Path, like: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros of the same types and shapes, mapped into memory from a file in ``folder``.

    The folder is made if it is missing. The system keeps in memory what there is room for. The file
    has no name, so nothing is left of it when the tensors are gone, however the process ends.

    Raises:
        OSError: the folder cannot be written, or has no room for all of them.
    """
    sizes = [-(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES for tensor in like]
    total = max(sum(sizes), ALIGNED_BYTES)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, path = tempfile.mkstemp(prefix=".shoal-offload-", dir=folder)
    try:
        # A disk that fills up later would end the process without a word.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, total)
        storage = torch.UntypedStorage.from_file(path, True, total)
    finally:
        os.close(descriptor)
        os.unlink(path)
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    flat.set_(storage)  # type: ignore[arg-type]  # torch's own annotation is too narrow
    pieces = torch.split(flat, [*sizes, total - sum(sizes)])
    found: list[Tensor] = []
    for piece, tensor in zip(pieces, like, strict=False):
        found.append(piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
    return found
