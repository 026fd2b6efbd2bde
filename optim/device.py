"""What a kind of device can do, and how tensors come from it.

The one place that knows the kinds of accelerators: "cuda" (NVIDIA, and AMD by ROCm), "xpu" (Intel) and "mps" (Apple).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor


def copies_beside(device: torch.device) -> bool:
    """Return whether copies to and from pinned memory go on beside the host, and can be awaited. Not those of Apple's devices."""
    return device.type in ("cuda", "xpu")


@functools.cache
def wide(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for a device without it: Apple's, and some of Intel's."""
    try:
        torch.ones(2, dtype=torch.float64, device=device).sum()
    except (TypeError, RuntimeError) as error:
        if not any(name in str(error) for name in ("float64", "fp64")):
            raise
        return torch.float32
    return torch.float64


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait until all that these devices were given is done, non-blocking copies too."""
    for device in {device for device in devices if copies_beside(device)}:
        torch.accelerator.synchronize(device)


def current_device() -> Callable[[], None]:
    """Return what makes the current accelerator of this thread that of another thread, where it is the first one until then."""
    if not torch.accelerator.is_available():
        return lambda: None
    index = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(index)


@torch.no_grad()
def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors on the CPU, of the same shapes; those of one device and dtype in one copy, the host's only wait for them.

    Those on the CPU are returned as they are. The device needs memory for another copy of the others.
    """
    found, groups = list(tensors), defaultdict[tuple[torch.device, torch.dtype], list[int]](list)
    for place, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            groups[tensor.device, tensor.dtype].append(place)
    for places in groups.values():
        flat = torch.cat([tensors[place].reshape(-1) for place in places]).cpu()
        for place, part in zip(places, torch.split(flat, [tensors[place].numel() for place in places]), strict=True):
            found[place] = part.view(tensors[place].shape)
    return found
