"""The ranks of one peer as a group, what they say to each other, and how a model's weights are
shared out to them.

    group = RankGroup()                        # gloo, in main memory, whatever the training uses
    if group.first: ...
    group.agreed(value)                        # rank 0's, on all ranks

Each rank has the slow weights and the outer state of the parameters that ``deal`` gives it. Of the
others it keeps empty tensors of shape (0,), on which every rule is a no-op, so any rule works on
whole tensors, whatever the training does with the model (DDP, FSDP2, or both).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.optim.codecs.base import Shape
from shoal.optim.outer.sharded import local, reshard
from shoal.optim.outer.sketch import sketches, total
from shoal.optim.outer.weights import ModelWeights

T = TypeVar("T")
_LOST = ("third_party/gloo", "[gloo", "nccl error", "ncclremoteerror")
"""In what a collective raises, in lower case, where another rank is gone."""


class RankLost(RuntimeError):
    """Error of a rank whose peer cannot go on: another rank died, failed or did not answer in time.

    The launcher restarts all.
    """


class RankFailed(RuntimeError):
    """Error of a rank whose peer cannot go on, because of what ``rank`` raised: ``said``."""

    def __init__(self, rank: int, said: str) -> None:
        super().__init__(f"rank {rank} of this peer failed: {said}")
        self.rank = rank
        self.said = said


def lost(error: BaseException) -> str | None:
    """Return the first line of what a collective raised because another rank is gone; None for
    another error.

    The error's causes count: what a collective raised in the user's loss() is not the user's error.
    """
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        kinds = {kind.__name__ for kind in type(cause).__mro__}
        text = str(cause)
        known = bool(kinds & {"DistError", "RankLost", "RankFailed"})
        if known or any(word in text.lower() for word in _LOST):
            return next(iter(text.strip().splitlines()), type(cause).__name__)[:200]
        cause = cause.__cause__
    return None


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Begin ``work`` in a thread that does not outlive the process; return its outcome."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="shoal-rank-wait", daemon=True).start()
    return future


class RankGroup:
    """The ranks of a peer. Every method is for all of them, in the same order, in one thread.

    Tensors cross it in main memory, one at a time; a tensor on a GPU is copied there and back.

    Args:
        group: a gloo group of the ranks, best one that nothing else uses; None: all processes of
            the job, in a group of their own.
        timeout: seconds that a rank waits for another in each call, as in ``group`` if that is
            given.

    Raises:
        ValueError: torch.distributed is not initialised, or the group is not gloo's.
        RankLost: in each method, if another rank is gone or did not answer in time.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 300.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "torch.distributed is not initialised: call init_process_group first, under "
                "torchrun"
            )
        if group is not None and dist.get_backend(group) != "gloo":
            raise ValueError(
                "the group of a peer's ranks must be gloo's, this one is "
                f"{dist.get_backend(group)}'s"
            )
        self.timeout = timeout
        self.rank = dist.get_rank() if group is None else dist.get_rank(group)
        self._group = self.joined(timeout) if group is None else group
        self.size = dist.get_world_size(self._group)

    def joined(self, timeout: float) -> dist.ProcessGroup:
        """Return another gloo group of the ranks, in which a call takes at most ``timeout``
        seconds.
        """
        group = getattr(self, "_group", None)
        ranks = None if group is None else dist.get_process_group_ranks(group)
        limit = timedelta(seconds=timeout)
        made: dist.ProcessGroup = self._all(
            lambda: dist.new_group(
                ranks, backend="gloo", timeout=limit, use_local_synchronization=ranks is not None
            )
        )
        return made

    @property
    def first(self) -> bool:
        return self.rank == 0

    def agreed(self, value: T) -> T:
        """Return rank 0's value, on all ranks.

        It is pickled by torch: ranks of one peer are one program and trust each other.
        """
        box: list[Any] = [value]
        self._all(lambda: dist.broadcast_object_list(box, group_src=0, group=self._group))
        value_of_first: T = box[0]
        return value_of_first

    def alike(self, work: Callable[[], T]) -> T:
        """Return what ``work`` does on this rank, once it is done on all.

        RankFailed if it raised on another one.

        ``work`` calls no collective, unless it can raise nothing before its last one.
        """
        found = None
        problem = None
        try:
            found = work()
        except Exception as error:
            problem = error
        said: list[Any] = [None] * self.size
        own = None if problem is None else str(problem)
        self._all(lambda: dist.all_gather_object(said, own, group=self._group))
        if problem is not None:
            raise problem
        for rank, text in enumerate(said):
            if text is not None:
                raise RankFailed(rank, text)
        return cast(T, found)

    def tried(self, work: Callable[[], T]) -> T | None:
        """Return what ``work`` does on rank 0, and None on the others.

        All raise its ValueError, or RuntimeError for another.
        """
        found = None
        problem = None
        if self.first:
            try:
                found = work()
            except Exception as error:
                problem = error
        said = None
        if problem is not None:
            said = (isinstance(problem, ValueError), str(problem))
        said = self.agreed(said)
        if problem is not None:
            raise problem
        if said is not None:
            is_value_error, text = said
            raise ValueError(text) if is_value_error else RuntimeError(text)
        return found

    def give(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor to ``rank``, which takes it at the same time."""
        plain = _plain(tensor)
        self._all(lambda: dist.send(plain, group_dst=rank, group=self._group))

    def take(self, into: Tensor, rank: int) -> Tensor:
        """Return ``into``, contiguous and on the CPU, filled with what ``rank`` gives."""
        self._all(lambda: dist.recv(into, group_src=rank, group=self._group))
        return into

    def spread(self, tensor: Tensor, owner: int) -> Tensor:
        """Return the owner's tensor on all ranks, on the CPU; that of the others is overwritten if
        it is contiguous and there.
        """
        plain = _plain(tensor)
        self._all(lambda: dist.broadcast(plain, group_src=owner, group=self._group))
        return plain

    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().to("cpu", copy=True).contiguous()
        self._all(lambda: dist.all_reduce(total, group=self._group))
        return total

    def barrier(self) -> None:
        self.sum(torch.zeros(1, device="cpu"))

    def _all(self, work: Callable[[], T]) -> T:
        """Return what ``work`` does, in which all ranks take part; what gloo raises becomes one
        sentence.
        """
        try:
            # Signals act meanwhile, though it waits in C++, where Python handles none.
            if threading.current_thread() is threading.main_thread():
                return in_thread(work).result()
            return work()
        except RuntimeError as error:
            raise self._lost(str(error).split("\n")[0][:200]) from error

    def explain(self, error: BaseException) -> None:
        """Raise RankLost if ``error`` is what a collective of the training raised because another
        rank is gone.
        """
        if isinstance(error, (RankLost, RankFailed)):
            return
        first = lost(error)
        if first is not None:
            raise self._lost(first) from error

    def _lost(self, first: str) -> RankLost:
        return RankLost(
            f"a rank of this peer is gone, or did not answer for {self.timeout:g} s, so all of its "
            f"ranks have to start again from the last checkpoint (rank {self.rank} saw: {first})"
        )


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous()


def deal(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that owns each parameter, given their numbers of values: the largest first,
    each to the least loaded rank.

    It depends on the arguments alone, so all ranks agree. A rank has at most the mean load plus the
    largest parameter.
    """
    loads = [0] * ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owner = min(range(ranks), key=lambda rank: (loads[rank], rank))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


class RankWeights(ModelWeights):
    """One rank's part of a model's slow weights.

    All ranks make it, and call each method in the same order.

    A sharded parameter is gathered, one at a time, and kept by its owner alone. If all ranks have
    it (DDP), the owner's counts.
    """

    dealt = True

    def __init__(
        self,
        params: Sequence[Tensor],
        model: nn.Module | None,
        place: torch.device | Path,
        group: RankGroup,
    ) -> None:
        self.group = group
        self.first = group.first
        self.rank = [group.rank, group.size]
        self.shapes = [tuple(param.shape) for param in params]
        self.owners = deal([param.numel() for param in params], group.size)
        super().__init__(params, model, place)

    def owns(self, index: int) -> bool:
        return self.owners[index] == self.group.rank

    def held(self, index: int) -> Tensor:
        """Return the whole parameter if this rank owns it, else an empty tensor."""
        param = self.params[index]
        if hasattr(param, "full_tensor"):
            with torch.no_grad():
                param = param.full_tensor()  # all ranks take part
        return param if self.owns(index) else param.new_empty(0)

    def _staged(self, index: int) -> Tensor:
        whole = self.owns(index) and not hasattr(self.params[index], "full_tensor")
        return super()._staged(index) if whole else self._buffer(index)

    @torch.no_grad()
    def write(self, part: Sequence[int], weights: Sequence[Tensor]) -> None:
        """Copy the owners' ``weights`` into the model, in all ranks, one parameter at a time."""
        for index in part:
            param = self.params[index]
            if self.owns(index):
                mine = weights[index].to(param.dtype)
            else:
                mine = torch.empty(self.shapes[index], dtype=param.dtype, device="cpu")
            given = self.group.spread(mine, self.owners[index])
            if local(param).data_ptr() != weights[index].data_ptr():
                if hasattr(param, "device_mesh"):
                    given = local(cut_like(given, param))
                local(param).copy_(given)
        self._synchronize(part)
        reshard(self.model)

    def sizes(self, part: Sequence[int]) -> Sequence[int]:
        return [self.params[index].numel() for index in part]

    def agreed(self, value: T) -> T:
        return self.group.agreed(value)

    def of_owners(self, part: Sequence[int], scalars: Sequence[Tensor]) -> list[Tensor]:
        """Return one scalar for each parameter of ``part`` (or several rows of them) as its owner
        has it, on all ranks.
        """
        own = []
        for place, scalar in enumerate(scalars):
            owned = self.owns(part[place % len(part)])
            own.append(scalar if owned else scalar.new_zeros(()))
        if not own:
            return []
        # Adding zeros changes no value.
        return list(self.group.sum(torch.stack(own)).to(own[0].device))

    def whole(self, part: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return whole tensors like those of a ``Rule`` on rank 0, its own ones not copied; an
        empty list on the others.
        """
        tensors = list(tensors)  # those computed on demand, once
        return self.gather(part, tensors, self.shapes_of(part, tensors))

    def projection(self, part: Sequence[int]) -> tuple[float, ...]:
        """Return nothing: it is for who watches, and not worth a collective of all ranks in every
        round.
        """
        return ()

    def sketch(self, part: Sequence[int]) -> tuple[float, ...]:
        """Return the sketch with the bits that one process would have, on all ranks."""
        # Of what this rank does not own they are 0.
        rows = sketches(self.slow[index] for index in part)
        return total(self.group.sum(torch.stack(rows)))

    def shapes_of(self, part: Sequence[int], tensors: Sequence[Tensor]) -> list[Shape]:
        """Return the whole shapes of tensors like those of a ``Rule``: tensor i has that of
        parameter i % n of ``part``, or ().
        """
        shapes: list[Shape] = []
        for place, tensor in enumerate(tensors):
            whole = self.shapes[part[place % len(part)]]
            shapes.append(() if tensor.dim() == 0 else whole)
        return shapes

    def gather(
        self, part: Sequence[int], tensors: Sequence[Tensor], shapes: Sequence[Shape]
    ) -> list[Tensor]:
        """Return on rank 0 the owners' tensors of these whole shapes, taken one at a time; an empty
        list on the others.
        """
        numbers: list[Tensor] = []
        indices: list[int] = []
        for place, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
            if shape == ():
                numbers.append(tensor if tensor.dim() == 0 else tensor.new_zeros(()))
                indices.append(part[place % len(part)])
        scalars = iter(self.of_owners(indices, numbers))
        found: list[Tensor] = []
        for place, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
            owner = self.owners[part[place % len(part)]]
            if shape == ():
                tensor = next(scalars)
            elif self.first and owner != 0:
                room = torch.empty(shape, dtype=tensor.dtype, device="cpu")
                tensor = self.group.take(room, owner)
            elif owner == self.group.rank != 0:
                self.group.give(tensor, 0)
            if self.first:
                found.append(tensor)
        return found

    def scatter(
        self,
        part: Sequence[int],
        whole: Sequence[Tensor],
        shapes: Sequence[Shape],
        mine: Sequence[Shape],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Return each owner's tensors of those that rank 0 has, on the CPU, and empty ones for the
        rest.

        ``shapes`` are those of ``whole``, ``mine`` those that this rank gave in their place: a
        scalar goes to all that gave one.
        """
        numbers = [place for place, shape in enumerate(shapes) if shape == ()]
        packed = torch.empty(len(numbers), dtype=dtype, device="cpu")
        if self.first and numbers:
            torch.stack([whole[place].to(packed) for place in numbers], out=packed)
        scalars = iter(self.group.spread(packed, 0).unbind() if numbers else ())
        found: list[Tensor] = []
        for place, shape in enumerate(shapes):
            owner = self.owners[part[place % len(part)]]
            tensor = torch.empty(0, dtype=dtype, device="cpu")
            if shape == ():
                number = next(scalars)
                if mine[place] == ():
                    tensor = number
            elif self.first and owner != 0:
                self.group.give(whole[place].to(dtype), owner)
            elif self.first:
                tensor = whole[place]
            elif owner == self.group.rank:
                room = torch.empty(shape, dtype=dtype, device="cpu")
                tensor = self.group.take(room, 0)
            found.append(tensor)
        return found


def cut_like(whole: Tensor, param: Any) -> Tensor:
    """Return ``whole`` as this rank has ``param``: a copy, or cut in the same way, without a
    message.
    """
    if not hasattr(param, "device_mesh"):
        return whole.clone()
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
