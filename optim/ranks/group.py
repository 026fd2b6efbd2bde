"""The ranks of one peer as a group, and what they say to each other: over gloo, in main memory, whatever the training uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class RankLost(RuntimeError):
    """Error of a rank whose peer cannot go on: another rank died, failed or did not answer in time. The launcher restarts all."""


class RankGroup:
    """The ranks of a peer. Every method is for all of them, in the same order, in one thread.

    Tensors cross it in main memory, one at a time; a tensor on a GPU is copied there and back.

    Args:
        group: a gloo group of the ranks, best one that nothing else uses; None: all processes of the job, in a group of their own.
        timeout: seconds that a rank waits for another in each call, as in ``group`` if that is given.

    Raises:
        ValueError: torch.distributed is not initialised, or the group is not gloo's.
        RankLost: in each method, if another rank is gone or did not answer in time.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 300.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("torch.distributed is not initialised: call init_process_group first, under torchrun")
        if group is not None and dist.get_backend(group) != "gloo":
            raise ValueError(f"the group of a peer's ranks must be gloo's, this one is {dist.get_backend(group)}'s")
        self.timeout = timeout
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) if group is None else group
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)

    @property
    def first(self) -> bool:
        """True for rank 0, which speaks to the swarm."""
        return self.rank == 0

    def agreed(self, value: T) -> T:
        """Return rank 0's value, on all ranks. It is pickled by torch: ranks of one peer are one program and trust each other."""
        box: list[Any] = [value]
        with self.deadline():
            dist.broadcast_object_list(box, group_src=0, group=self._group)
        found: T = box[0]
        return found

    def tried(self, work: Callable[[], T]) -> T | None:
        """Return what ``work`` does on rank 0, and None on the others. All raise its ValueError, or RuntimeError for another."""
        found, problem = None, None
        if self.first:
            try:
                found = work()
            except Exception as error:
                problem = error
        said = self.agreed(None if problem is None else (isinstance(problem, ValueError), str(problem)))
        if problem is not None:
            raise problem
        if said is not None:
            raise ValueError(said[1]) if said[0] else RuntimeError(said[1])
        return found

    def give(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor to ``rank``, which takes it at the same time."""
        with self.deadline():
            dist.send(_plain(tensor), group_dst=rank, group=self._group)

    def take(self, into: Tensor, rank: int) -> Tensor:
        """Return ``into``, contiguous and on the CPU, filled with what ``rank`` gives."""
        with self.deadline():
            dist.recv(into, group_src=rank, group=self._group)
        return into

    def spread(self, tensor: Tensor, owner: int) -> Tensor:
        """Return the owner's tensor on all ranks, on the CPU; that of the others is overwritten if it is contiguous and there."""
        with self.deadline():
            plain = _plain(tensor)
            dist.broadcast(plain, group_src=owner, group=self._group)
        return plain

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks, on all of them, in a fresh tensor on the CPU."""
        with self.deadline():
            total = tensor.detach().to("cpu", copy=True).contiguous()
            dist.all_reduce(total, group=self._group)
        return total

    def barrier(self) -> None:
        """Return once all ranks have come here."""
        self.sum(torch.zeros(1, device="cpu"))

    @contextmanager
    def deadline(self) -> Iterator[None]:
        """Turn what gloo raises into one sentence."""
        try:
            yield
        except RankLost:
            raise
        except RuntimeError as error:
            first = str(error).split("\n")[0][:200]
            raise RankLost(
                f"a rank of this peer is gone, or did not answer for {self.timeout:g} s, so all of its ranks have to start again "
                f"from the last checkpoint (rank {self.rank} saw: {first})"
            ) from error


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous()
