"""Batches of a task through torchdata's StatefulDataLoader: drawn in the training process, or ahead
of it by worker processes.

The sequence is the same either way, and so is the position that a checkpoint holds: it is the
task's own, without a trace of the workers. Of a dataset with numbered batches several workers draw
at once. An iterator cannot be split: whoever wants its fourth batch has to draw the three before
it, so several workers would each do all of the work. There one draws ahead, in place of any number.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data._utils import signal_handling
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.worker import _AckStartup

from shoal.node.batch_contents import mapped
from shoal.node.batches import Batches, NumberedBatches
from shoal.node.task import Task
from shoal.node.user_code import UserCodeError, summary
from shoal.swarm.errors import ShoalError

POSITION = "position of the task"
MAX_SPAN_RATIO = 2
"""A tensor's strides are sent as they are if they span at most this many times its elements."""
IN_PROCESS = (
    "draw batches in the training process (--set train.workers=0; num_workers=0 in a DataLoader of "
    "the task's own)"
)
OTHERS = f"{IN_PROCESS}, or yield dicts, lists or dataclasses of tensors"
ROOM = (
    f"if memory is short, in /dev/shm too, {IN_PROCESS}, make them smaller, or give a container "
    "more (docker run --shm-size 2g)"
)
_PR_SET_PDEATHSIG = 1
"""Linux's prctl: "send me this signal when my parent is gone"."""


class LoadingError(ShoalError):
    """Worker processes cannot draw the batches."""


class Loader(Iterator[Any]):
    """Iterator over the batches of ``task``, without end if they have none.

    Args:
        batches: the task's, at the place to begin (``shoal.node.batches.iterator_of``).
        workers: processes that draw ahead; 0: the training process draws each batch when it is
            needed.
        pin: put batches into pinned memory, from which a GPU copies them while it computes.
        seed: of the workers' global random numbers, so that they are the same in each run.

    Raises:
        LoadingError: the task or this system cannot have workers, or one died.
        UserCodeError: the user's code failed, in whatever process.
    """

    def __init__(
        self,
        task: Task,
        batches: Iterator[Any],
        *,
        workers: int = 0,
        pin: bool = False,
        seed: int = 0,
    ) -> None:
        if workers and task.draws_with_model:
            raise LoadingError(
                "This task draws its batches with the model, which workers do not have: set "
                "train.workers to 0."
            )
        # On macOS a fork of a process with threads may crash in the system's libraries.
        if workers and sys.platform != "linux":
            raise LoadingError(
                "Workers are forked, which is safe on Linux alone: set train.workers to 0."
            )
        # Else torch takes SIGCHLD, also for DataLoaders in the task, and raises the error of a
        # worker that died wherever the main thread is, as in the middle of an outer step. It finds
        # dead workers without the signal too, when a batch is drawn.
        signal_handling._SIGCHLD_handler_set = True
        self._batches = batches
        self._taken = 0
        is_numbered = isinstance(batches, NumberedBatches)
        own = getattr(batches, "own_workers", None)
        if own is not None:
            workers = 0
            given = own.multiprocessing_context or multiprocessing.get_context()
            own.multiprocessing_context = _telling(given)
        self.workers = workers if is_numbered else min(workers, 1)
        """Processes of this loader: none where the task's own DataLoader has some."""
        ahead = self.workers > 0
        dataset: Dataset[Any]
        sampler = None
        if isinstance(batches, NumberedBatches):
            dataset = _Numbered(batches, ahead)
            sampler = itertools.count(batches.next_number)
        else:
            dataset = _Sequence(batches, ahead)
        context = _telling(multiprocessing.get_context("fork")) if ahead else None
        in_main_thread = threading.current_thread() is threading.main_thread()
        with warnings.catch_warnings():
            # Of torchdata 0.11 with torch 2.13.
            warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
            self._loader: Any = StatefulDataLoader(
                dataset,
                batch_size=None,
                sampler=sampler,
                num_workers=self.workers,
                collate_fn=_in_pieces if pin else lambda batch: batch,
                pin_memory=pin,
                multiprocessing_context=context,
                worker_init_fn=partial(_begin_worker, os.getpid(), in_main_thread),
                # By default it takes a number of the global generator, and those are the model's.
                generator=torch.Generator().manual_seed(seed),
            )
        self._inner: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._loader is None:
            raise StopIteration
        try:
            if self._inner is None:
                self._inner = iter(self._loader)
            batch = next(self._inner)
        except (StopIteration, ShoalError):
            raise
        except Exception as error:
            if not self.workers or str(error).startswith("Caught "):  # in the worker's own code
                raise
            self.close()
            what = "A batch of a worker cannot be taken"
            remedy = OTHERS
            if isinstance(error, OSError | EOFError) or "DataLoader worker" in str(error):
                what = "A worker that draws batches was ended"
                remedy = ROOM
            raise LoadingError(f"{what} ({summary(error)}): {remedy}.") from error
        if isinstance(batch, ShoalError):
            self.close()
            raise batch
        self._taken += 1
        return batch

    def state_dict(self) -> dict[str, Any] | None:
        """Return the task's own position after the last batch, whatever workers have drawn since;
        None if it saves none.
        """
        if not isinstance(self._batches, Batches):
            return None
        if not self.workers or not self._taken:
            return self._batches.state_dict()
        position: Any = _find(self._loader.state_dict())
        if isinstance(position, ShoalError):
            raise position
        found: dict[str, Any] = position
        return found

    def close(self) -> None:
        """End the workers; a second call does nothing."""
        # Torch ends them when these are gone.
        self._inner = None
        self._loader = None


def _sendable(error: ShoalError) -> ShoalError:
    """Return what a worker sends in place of a batch, or of a position, that could not be had:
    other errors cannot be pickled.
    """
    if isinstance(error, UserCodeError):
        return UserCodeError(str(error), error.trace)
    return LoadingError(str(error))


class _Unsent(ExceptionWrapper):
    """What takes the place of something that could not be sent; torch raises it where that is
    received.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def reraise(self) -> None:
        raise LoadingError(self.text)


class _Telling(Queue):  # type: ignore[type-arg]
    """A queue of which the receiver hears when something cannot be sent; else it would wait without
    end.

    Pickling happens in a thread of the queue's, whose errors are printed and forgotten.
    """

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        place, content = item
        names_memory = "shm" in str(error) or "/torch_" in str(error)
        remedy = OTHERS
        if isinstance(error, OSError | RuntimeError) and names_memory:
            remedy = ROOM
        unsent = _Unsent(f"A worker cannot send what it drew ({summary(error)}): {remedy}.")
        if isinstance(content, _AckStartup):
            self.put((place, replace(content, initial_state=unsent)))
        elif isinstance(content, tuple) and len(content) == 3:  # torchdata's: batch, worker, state
            self.put((place, (unsent, content[1], None)))
        else:
            self.put((place, unsent))


def _telling(like: Any) -> Any:
    """Return a context of processes that are started as those of ``like`` are, and of queues that
    tell.
    """
    context = copy.copy(like)
    context.Queue = partial(_Telling, ctx=context)
    return context


class _Sequence(IterableDataset[Any]):
    """Batches one after another, with their position."""

    def __init__(self, batches: Iterator[Any], ahead: bool) -> None:
        self._batches = batches
        self._ahead = ahead

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._ahead:
            return _sent(self._batches.__next__)
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in a list, into which torchdata does not look: it sends only what has
        changed in dicts.
        """
        if not isinstance(self._batches, Batches):
            return {}
        try:
            return {POSITION: [copy.deepcopy(self._batches.state_dict())]}
        except ShoalError as error:
            return {POSITION: [_sendable(error)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse: the batches are at their place before they come here."""
        raise NotImplementedError("the task's own batches are put in their place")


class _Numbered(Dataset[Any]):
    """Batches by number."""

    def __init__(self, batches: NumberedBatches, ahead: bool) -> None:
        self._batches = batches
        self._ahead = ahead

    def __getitem__(self, number: int) -> Any:
        if self._ahead:
            return _sent(lambda: self._batches.batch(number))
        return self._batches.batch(number)


def _sent(draw: Callable[[], Any]) -> Any:
    """Return a batch that a worker may send, or the failure: torch would wrap the error in its own
    words.

    Its tensors are copied, strides and all: it is sent while the next one is drawn, perhaps into
    the same memory; and of a view, torch would send the whole storage.
    """
    try:
        return mapped(draw(), _copied, anew=True)
    except ShoalError as error:
        return _sendable(error)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if not isinstance(leaf, torch.Tensor):
        return leaf
    count = leaf.numel()
    if leaf.layout is not torch.strided or not count <= _span(leaf) <= MAX_SPAN_RATIO * count:
        return leaf.detach().clone()
    room = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
    return room.copy_(leaf.detach())


def _span(tensor: torch.Tensor) -> int:
    """Return how many elements the tensor's strides reach over."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _in_pieces(batch: Any) -> Any:
    """Return ``batch`` with each tensor in one piece of memory: of a view with gaps the copy to a
    GPU would be waited for.
    """

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return leaf
        return leaf if _span(leaf) == leaf.numel() else leaf.contiguous()

    return mapped(batch, whole)


def _find(state: Any) -> Any:
    """Return the position in torchdata's state, wherever that has it."""
    if not isinstance(state, dict):
        return None
    if POSITION in state:
        return state[POSITION][0]
    for item in state.values():
        found = _find(item)
        if found is not None:
            return found
    return None


def _begin_worker(parent: int, lasting: bool, worker: int) -> None:
    """Begin as a worker of process ``parent``; ``lasting``: the thread that made it lives as long
    as the process.

    Signals from the terminal are the node's to handle, which ends its workers, and a worker ends
    when the node is gone, however it ended: else it would keep the lock of the node's folder.
    Elsewhere than on Linux torch looks after that every five seconds.
    """
    signal.set_wakeup_fd(-1)  # of the node's event loop
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The kernel takes the end of the thread for that of the parent.
    if sys.platform == "linux" and lasting:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)
