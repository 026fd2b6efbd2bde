"""The ranks of one peer as a group, and what they say to each other.

    group = RankGroup()                        # gloo, in main memory, whatever the training uses
    if group.first: ...
    group.agreed(value)                        # rank 0's, on all ranks

How the weights of a model are shared out to them is in `shoal.optim.ranks.rank_weights`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.optim.ranks.lost_rank import RankFailed, RankLost, lost

T = TypeVar("T")


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
