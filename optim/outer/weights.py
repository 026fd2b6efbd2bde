"""The weights of a model as an outer optimizer sees them: slow ones, fast ones in staging, and
those in the model itself.

Of sharded parameters (FSDP2, tensor parallel) that is the local part only.

Sketches: a few numbers by which two peers compare their weights without sending them.

``sketch`` is made to find any difference at all; its sums are far from the norm where values have a
mean, as the gains of a norm layer do. In ``projection`` random signs take the mean out, so that
norms and distances are right on average.
"""

from __future__ import annotations

import functools
import math
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from shoal.optim.codecs.base import Shape, alike
from shoal.optim.device import copies_beside, pinned_like, to_host, wait_for
from shoal.optim.exchange.base import Exchange
from shoal.optim.outer.rule import State
from shoal.optim.schedule import RoundLength


def local(param: Tensor) -> Tensor:
    """Return the part of ``param`` in this process, sharing its memory; ``param`` itself if it is
    not sharded.

    Call it each time: FSDP2 may move the part. (A DTensor is recognised by its method: its module
    takes seconds to import.)
    """
    if not hasattr(param, "to_local"):
        return param
    with torch.no_grad():
        part: Tensor = param.to_local()
        return part


def reshard(model: nn.Module | None) -> None:
    """Make FSDP2 gather the weights again in the next forward pass; it may hold whole copies from
    the last one.
    """
    for module in model.modules() if model is not None else ():
        again = getattr(module, "reshard", None)
        if callable(again):
            again()


@torch.no_grad()
def sharded_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return this process's ``tensor`` as a part of a DTensor on the mesh of ``parameter``;
    ``tensor`` itself if that is whole.

    With the shape of the local part of ``parameter`` it has its placements. Another one, such as a
    scalar, is this process's own: then the DTensor has the mesh's shape in front, one entry a
    process. The memory is shared, on whatever device.
    """
    if not hasattr(parameter, "to_local"):
        return tensor
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    assert isinstance(parameter, DTensor)
    mesh, placements, shape, stride = (
        parameter.device_mesh,
        parameter.placements,
        parameter.shape,
        parameter.stride(),
    )
    if tensor.shape != local(parameter).shape:
        shape = torch.Size([*mesh.shape, *tensor.shape])
        stride = torch.empty(shape, device="meta").stride()
        placements = tuple(Shard(dimension) for dimension in range(mesh.ndim))
        tensor = tensor.reshape([1] * mesh.ndim + list(tensor.shape))
    # Not by from_local, which moves the tensor to the mesh's device: the slow weights are in main
    # memory.
    meta = TensorMeta(shape, stride, tensor.dtype)
    sharded: Tensor = DTensor(
        tensor, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False
    )  # type: ignore[no-untyped-call]
    return sharded


NUMBERS = 4
PROJECTED = 16  # the relative error of a distance of two peers is about 1 / sqrt(2 PROJECTED), 18 %
BLOCK = (
    1 << 16
    # values for which there are signs; the blocks after it have the same ones, some of the sums
    # turned
)
WIDTH, CHUNK = 1024, 1 << 20
"""Values in a row and in a chunk. A chunk has few enough rows to sum them in float32."""


def sketch(tensors: Iterable[Tensor]) -> tuple[float, ...]:
    """Return the sums over every fourth value of each tensor, one for each of the four starting
    positions, in float64.

    It is linear, so the distance of two sketches is the norm of the sketch of the difference, which
    is about the norm of the difference if its values are independent. Two machines that round
    differently differ by about 1e-7 of the weights; two swarms that learnt from different data, by
    as much as they have moved.
    """
    return total(sketches(tensors))


def total(rows: Iterable[Tensor]) -> tuple[float, ...]:
    """Return the sketch of several tensors from those of each, in their order."""
    sums = torch.zeros(NUMBERS, dtype=torch.float64, device="cpu")
    for row in rows:
        sums += row
    return tuple(sums.tolist())


def sketches(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the sums of each tensor, (4,) float64 on the CPU.

    A device is waited for once; it need not have float64.
    """
    chunks: list[list[Tensor]] = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        whole = flat.numel() // WIDTH * WIDTH
        rows = [chunk.view(-1, WIDTH).float().sum(0) for chunk in torch.split(flat[:whole], CHUNK)]
        chunks.append([*rows, flat[whole:]])
    read = iter(to_host([piece for pieces in chunks for piece in pieces]))
    found = []
    for pieces in chunks:
        mine = torch.zeros(NUMBERS, dtype=torch.float64, device="cpu")
        for _ in pieces[:-1]:
            mine += next(read).view(-1, NUMBERS).sum(0, dtype=torch.float64)
        rest = next(read)
        for place in range(NUMBERS):
            mine[place] += rest[place::NUMBERS].sum(dtype=torch.float64)
        found.append(mine)
    return found


def projection(tensors: Iterable[Tensor]) -> tuple[float, ...]:
    """Return `PROJECTED` sums of the values of ``tensors``, each value with a random sign, alike on
    every peer; and then the norm.

    The sums are linear, so the norm of the difference of two peers' sums estimates that of the
    difference of their weights.
    """
    found: list[Tensor] = []
    # One for all blocks: small results between fresh pieces would keep malloc from joining them,
    # and it would take more each time.
    rooms: dict[torch.device, Tensor] = {}
    for tensor in tensors:
        for block in torch.split(tensor.detach().reshape(-1), BLOCK):
            values, signs = block.float(), _signs(block.device)
            if block.device not in rooms:
                rooms[block.device] = torch.empty_like(signs)
            room = rooms[block.device]
            squares = torch.mul(values, values, out=room[: block.numel()]).sum()
            torch.mul(values, signs[: block.numel()], out=room[: block.numel()])
            padded = room[: -(-block.numel() // PROJECTED) * PROJECTED]
            padded[block.numel() :].zero_()
            found += [padded.view(-1, PROJECTED).sum(0), squares]
    read = to_host(found)
    sums, square = torch.zeros(PROJECTED, dtype=torch.float64, device="cpu"), 0.0
    for number, (row, squares) in enumerate(zip(read[::2], read[1::2], strict=True)):
        sums += row.double() * _turns(number)
        square += squares.item()
    return (*sums.tolist(), math.sqrt(square))


@functools.cache
def _signs(device: torch.device) -> Tensor:
    signs = (
        torch.randint(
            0, 2, (BLOCK,), generator=torch.Generator().manual_seed(0), device="cpu"
        ).float()
        * 2
        - 1
    )
    return signs.to(device)


def _turns(number: int) -> Tensor:
    """Return for the block of this number a sign for each sum, so that two blocks do not have the
    same signs.
    """
    drawn = random.Random(number).getrandbits(PROJECTED)
    return torch.tensor(
        [1.0 if drawn >> bit & 1 else -1.0 for bit in range(PROJECTED)],
        dtype=torch.float64,
        device="cpu",
    )


ALIGNED = 64  # bytes


def in_file(folder: Path, like: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros of the same types and shapes in a file of their own in ``folder``, which is made
    if it is missing.

    It is mapped into memory, and the system keeps there what there is room for. It has no name, so
    nothing is left of it when the tensors are gone, however the process ends.

    Raises:
        OSError: the folder cannot be written, or has no room for all of them.
    """
    sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in like]
    total = max(sum(sizes), ALIGNED)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, path = tempfile.mkstemp(prefix=".shoal-offload-", dir=folder)
    try:
        if hasattr(
            os, "posix_fallocate"
        ):  # a disk that fills up later would end the process without a word
            os.posix_fallocate(descriptor, 0, total)
        storage = torch.UntypedStorage.from_file(path, True, total)
    finally:
        os.close(descriptor)
        os.unlink(path)
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)  # type: ignore[arg-type]  # torch's own annotation is too narrow
    pieces = torch.split(flat, [*sizes, total - sum(sizes)])
    return [
        piece[: t.nbytes].view(t.dtype).view(t.shape)
        for piece, t in zip(pieces, like, strict=False)
    ]


T = TypeVar("T")


class ModelWeights:
    """Slow weights of a model's averaged parameters, and staging through which fast weights are
    read from it and written to it.

    Weights are float32 (float64 if a parameter is), on ``device``. ``part`` is always a sequence of
    positions in ``params``. A parameter of that dtype and on that device is its own staging, which
    takes no memory: reading and writing it copies nothing.

    Args:
        params: the averaged parameters, of any floating-point dtype and on any device.
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
        self.params, self.model = list(params), model
        self._place = place
        dtype = (
            torch.float64 if any(p.dtype == torch.float64 for p in self.params) else torch.float32
        )
        parts = (self.held(index) for index in self.everything)  # one at a time
        self.slow = [self._room(p.shape, dtype).copy_(p.detach()) for p in parts]
        self.shapes = self.shapes or [tuple(tensor.shape) for tensor in self.slow]
        self._staging: dict[int, Tensor] = {}
        self.fast = [self._staged(index) for index in self.everything]
        """Staging: the fast weights as last read, or to be written next."""
        self.rounding: dict[int, Tensor] = {}
        """Rounding error of a weight when it was copied into the model, if that weight was not the
        slow one.
        """

    def _staged(self, index: int) -> Tensor:
        """Return the parameter itself if it can be its own staging now, else a buffer that is
        reused each round.
        """
        slow, param = self.slow[index], local(self.params[index]).detach()
        if param.dtype == slow.dtype and param.device == slow.device and param.is_contiguous():
            return param
        return self._buffer(index)

    def _buffer(self, index: int) -> Tensor:
        if index not in self._staging:
            slow = self.slow[index]
            if isinstance(self._place, Path):
                self._staging[index] = self._room(slow.shape, slow.dtype)
            elif self._comes_beside(index):
                pending = [
                    index,
                    *(
                        i
                        for i in self.everything
                        if i not in self._staging and i != index and self._comes_beside(i)
                    ),
                ]
                self._staging |= dict(
                    zip(pending, pinned_like([self.slow[i] for i in pending]), strict=True)
                )
            else:
                self._staging[index] = torch.empty_like(slow)
        return self._staging[index]

    def _comes_beside(self, index: int) -> bool:
        """Return whether the weights come from an accelerator to main memory by way of pinned
        memory.
        """
        return self.slow[index].device.type == "cpu" and copies_beside(self.params[index].device)

    def stage(self, part: Sequence[int]) -> list[Tensor]:
        """Return the staging of ``part`` as it is now: a model may have been moved, or cut
        otherwise, since it was used last.
        """
        for index in part:
            self.fast[index] = self._staged(index)
        return [self.fast[index] for index in part]

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if isinstance(self._place, Path):
            return in_file(self._place, [torch.empty(shape, dtype=dtype, device="meta")])[0]
        return torch.empty(shape, dtype=dtype, device=self._place)

    def housed(self, state: State) -> State:
        """Return a rule's state in the place of the slow weights."""
        if not isinstance(self._place, Path):
            return state
        moved = {name: in_file(self._place, tensors) for name, tensors in state.items()}
        for name, tensors in state.items():
            for room, tensor in zip(moved[name], tensors, strict=True):
                room.copy_(tensor)
        return moved

    @property
    def everything(self) -> range:
        return range(len(self.params))

    # What follows is for peers of several processes, in which each has a part of the weights: here
    # one process has all.

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
        return ()

    def agreed(self, value: T) -> T:
        """Return the first process's value, in all of them."""
        return value

    def of_owners(self, part: Sequence[int], scalars: Sequence[Tensor]) -> list[Tensor]:
        """Return one scalar for each parameter of ``part`` as the process has it that owns the
        parameter.
        """
        return list(scalars)

    def whole(self, part: Sequence[int], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return tensors like those of a ``Rule`` with the parts of all processes, in the first
        one; those here are not copied.
        """
        return tensors

    def projection(self, part: Sequence[int]) -> tuple[float, ...]:
        return projection(self.slow[index] for index in part)

    def sketch(self, part: Sequence[int]) -> tuple[float, ...]:
        return sketch(self.slow[index] for index in part)

    @torch.no_grad()
    def read(self, part: Sequence[int]) -> None:
        """Copy the model's weights and their rounding errors into staging.

        A bfloat16 parameter cannot hold the float32 weights that it restarted from. Without the
        rounding error the slow weights would drift back to the model's coarse grid even when
        nothing is learnt.
        """
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
        """Copy staging into the model and note the rounding errors."""
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
                param.copy_(
                    weights[index].to(param.device, non_blocking=beside), non_blocking=beside
                )
        self._synchronize(part)
        reshard(self.model)

    def versions(self) -> list[int]:
        """Return how often each parameter was changed in place, by torch's own count: without a
        look at a value.
        """
        return [param._version for param in self.params]

    def holds_slow(self) -> bool:
        """Return True if the model holds the slow weights, as far as this process can tell without
        the others.
        """
        return self.dealt or all(
            torch.equal(part := local(param).detach(), slow.to(part))
            for param, slow in zip(self.params, self.slow, strict=True)
        )

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Copy the model into the slow weights; with several processes the owner's weights count,
        in all of them.
        """
        for index in self.everything:
            self.slow[index].copy_(self.held(index))
            self.stage([index])[0].copy_(self.slow[index])
        self.restart(self.everything)

    def coarse(self, index: int) -> bool:
        return self.params[index].dtype.itemsize < self.slow[index].dtype.itemsize

    def rounding_error(self, index: int) -> Tensor:
        """Return the rounding error of the model's starting point, which is the slow weight unless
        noted.
        """
        slow = self.slow[index]
        return (
            self.rounding[index]
            if index in self.rounding
            else slow - slow.to(self.params[index].dtype)
        )

    def keep_rounding(self, index: int) -> None:
        """Note the present rounding error, before the slow weight changes and the model does
        not.
        """
        if self.coarse(index):
            self.rounding[index] = self.rounding_error(index)

    @contextmanager
    def showing_slow(self) -> Iterator[None]:
        """Put the slow weights into the model within the block; afterwards the model's own are
        restored bit by bit.
        """
        with torch.no_grad():
            parts = [local(param).detach() for param in self.params]
            kept = [own.copy_(part) for own, part in zip(alike(parts), parts, strict=True)]
        self.write(self.everything, self.slow)
        try:
            yield
        finally:
            with torch.no_grad():
                for param, own in zip(self.params, kept, strict=True):
                    local(param).copy_(own)
            self._synchronize(self.everything)
            reshard(self.model)

    def waits(self, part: Sequence[int], others: Sequence[Tensor]) -> bool:
        """Return False if ``read`` of ``part`` waits for the device of all ``others`` too."""
        devices = {
            self.params[index].device
            for index in part
            if self.slow[index].device != self.params[index].device
        }
        return not {tensor.device for tensor in others} <= devices

    def _synchronize(self, part: Sequence[int]) -> None:
        """Wait for the copies between a device and main memory; on one device all is in order."""
        wait_for(
            self.params[index].device
            for index in part
            if self.slow[index].device != self.params[index].device
        )


class Processes(Protocol):
    """The processes of one peer (`shoal.optim.ranks`), each with an outer optimizer; all do the
    same in the same order.
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
