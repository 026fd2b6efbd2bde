"""In what the kinds of accelerators differ: streams, pinned memory, copies and memory figures.

Kinds are "cuda" (NVIDIA, and AMD by ROCm), "xpu" (Intel) and "mps" (Apple). `uncompiled` keeps a
function out of torch.compile.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

ALIGNED_BYTES = 64
"""In a piece of pinned memory (`pinned_like`) each tensor begins at a multiple of it."""
SMALL_BYTES = 1 << 20
"""What is left of tensors becomes one last piece if it is no more than this (`pieces`)."""


def copies_beside(device: torch.device) -> bool:
    """Return whether copies to and from pinned memory go on while the host does other work.

    On Apple's devices they do not.
    """
    return device.type in ("cuda", "xpu")


@functools.cache
def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for a device without it: Apple's, and some of Intel's."""
    try:
        torch.ones(2, dtype=torch.float64, device=device).sum()
    except (TypeError, RuntimeError) as error:
        if not any(name in str(error) for name in ("float64", "fp64")):
            raise
        return torch.float32
    return torch.float64


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait until all is done that these devices were given on this thread's stream, non-blocking
    copies too.
    """
    for device in {device for device in devices if copies_beside(device)}:
        torch.accelerator.current_stream(device).synchronize()


class Beside:
    """A second stream on ``device``, next to the one that is current in the thread that makes this.

    A device without streams (Apple's) has one for all.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams: tuple[torch.Stream, torch.Stream] | None = None
        if copies_beside(device):
            self._streams = (torch.accelerator.current_stream(device), torch.Stream(device))

    @contextmanager
    def before(self) -> Iterator[None]:
        """Compute on the first stream, in any thread: work queued on it later runs after this."""
        with nullcontext() if self._streams is None else self._streams[0]:
            yield

    @contextmanager
    def after(self) -> Iterator[None]:
        """Compute on the stream beside, once all is done that the first one has been given so far;
        wait for it at the end.
        """
        if self._streams is None:
            yield
            return
        first, beside = self._streams
        beside.wait_stream(first)
        try:
            with beside:
                yield
        finally:
            beside.synchronize()


def free_and_total(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes of an accelerator's memory that are free, and all; None where the kind does
    not tell.
    """
    if copies_beside(device):
        free, total = torch.get_device_module(device).mem_get_info(device)
        return int(free), int(total)
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.driver_allocated_memory(), total
    return None


def allocated(device: torch.device) -> int:
    """Return the bytes of an accelerator's memory that tensors of this process have."""
    if device.type == "mps":
        return torch.mps.current_allocated_memory()
    return int(torch.get_device_module(device).memory_allocated(device))


def peak(device: torch.device) -> int | None:
    """Return the most bytes that tensors of this process had on ``device`` since `forget_peak`;
    None where the kind does not tell.
    """
    if not copies_beside(device):
        return None
    return int(torch.get_device_module(device).max_memory_allocated(device))


def forget_peak(device: torch.device) -> None:
    if copies_beside(device):
        torch.get_device_module(device).reset_peak_memory_stats(device)


def device_setter() -> Callable[[], None]:
    """Return a function that, called in another thread, makes this thread's current accelerator
    current there too. A new thread starts on the first accelerator.
    """
    if not torch.accelerator.is_available():
        return lambda: None
    index = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(index)


def accelerator_of(tensors: Iterable[Tensor]) -> torch.device | None:
    """Return the accelerator on which all tensors are; None if there is none, or one is
    elsewhere.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        return None
    device = devices.pop()
    return None if device in (torch.device("cpu"), torch.device("meta")) else device


def pinned_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return uninitialised tensors of these shapes and dtypes in pinned memory, one behind the
    other in few pieces (`pieces`).
    """
    sizes = [-(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES for tensor in tensors]
    pinned: dict[int, Tensor] = {}
    for places in pieces(sizes):
        in_piece = [sizes[place] for place in places]
        memory = torch.empty(sum(in_piece), dtype=torch.uint8, device="cpu", pin_memory=True)
        for place, part in zip(places, torch.split(memory, in_piece), strict=True):
            like = tensors[place]
            pinned[place] = part[: like.nbytes].view(like.dtype).view(like.shape)
    return [pinned[place] for place in range(len(tensors))]


def pieces(sizes: Sequence[int]) -> list[list[int]]:
    """Return which of tensors of these sizes, in bytes, share a piece of memory.

    Torch rounds a piece of pinned memory up to a power of two. So each piece is filled up to the
    largest power of two within what is left. Two kinds may be of any size: a tensor that is larger
    than that, and the last piece.
    """
    found: list[list[int]] = []
    left = sorted(range(len(sizes)), key=lambda place: -sizes[place])
    while left:
        total = sum(sizes[place] for place in left)
        room = total
        if total > SMALL_BYTES:
            room = max(1 << (total.bit_length() - 1), sizes[left[0]])
        taken: list[int] = []
        used = 0
        for place in left:
            if used + sizes[place] <= room:
                taken.append(place)
                used += sizes[place]
        found.append(taken)
        gone = set(taken)
        left = [place for place in left if place not in gone]
    return found


def pinned_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that torch takes from the system for the pinned memory of ``tensors``: of
    each piece a power of two.
    """
    pieces = {}
    for tensor in tensors:
        if tensor.is_pinned():
            storage = tensor.untyped_storage()
            pieces[storage.data_ptr()] = storage.nbytes()
    return sum(1 << (size - 1).bit_length() for size in pieces.values() if size)


def give_freed_back() -> None:
    """Give main memory that was freed, and that the C library keeps for later, to the system, where
    it can do so (glibc).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def give_pinned_back() -> None:
    """Let torch give the pinned memory that nothing uses any more back to the system, which it does
    not by itself.
    """
    if hasattr(torch.accelerator, "empty_host_cache"):  # since 2.12
        torch.accelerator.empty_host_cache()


@torch.no_grad()
def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors on ``device``; those on the CPU go there together, and nothing waits for
    it where copies go on beside.
    """
    found = list(tensors)
    if device.type == "cpu":
        return [tensor.to(device) for tensor in found]
    here = [place for place, tensor in enumerate(found) if tensor.device.type == "cpu"]
    for dtype in {found[place].dtype for place in here}:
        places = [place for place in here if tensors[place].dtype == dtype]
        sizes = [tensors[place].numel() for place in places]
        # Torch takes this memory back once the copy has ended, not before.
        flat = torch.empty(sum(sizes), dtype=dtype, device="cpu", pin_memory=copies_beside(device))
        torch.cat([tensors[place].reshape(-1) for place in places], out=flat)
        flat = flat.to(device, non_blocking=copies_beside(device))
        for place, part in zip(places, torch.split(flat, sizes), strict=True):
            found[place] = part.view(tensors[place].shape)
    return [tensor.to(device) for tensor in found]


@torch.no_grad()
def to_host(tensors: Sequence[Tensor], *, waits: bool = True) -> list[Tensor]:
    """Return the tensors on the CPU, of the same shapes; those on the CPU already as they are.

    The others are joined by device and dtype: one copy, and at most one wait, for each group. While
    it is copied, a group takes as much device memory again. ``waits=False``: the copies may still
    be under way; call `wait_for` on the devices before reading.
    """
    found = list(tensors)
    groups: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            groups[tensor.device, tensor.dtype].append(place)
    for places in groups.values():
        flat = torch.cat([tensors[place].reshape(-1) for place in places])
        beside = not waits and copies_beside(flat.device)
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=beside)
        flat = host.copy_(flat, non_blocking=beside)
        sizes = [tensors[place].numel() for place in places]
        for place, part in zip(places, torch.split(flat, sizes), strict=True):
            found[place] = part.view(tensors[place].shape)
    return found


F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Return ``function`` so that ``torch.compile`` does not trace into it: it talks to threads, or
    counts, and has nothing to compile.

    torch's own decorator for this loads the compiler at the first call. So the decorated function
    is called only if the compiler is loaded already; otherwise the plain one is.
    """
    guarded = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return guarded(*arguments, **named)
        return function(*arguments, **named)

    return cast(F, call)
