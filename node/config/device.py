"""The device and the threads that a node computes with. torch is imported inside: it takes a
second.

Kinds of devices go through ``torch.accelerator``: cuda (NVIDIA, and AMD by ROCm), xpu (Intel), mps
(Apple). A build of PyTorch has one of them at most.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from shoal.node.config.settings import ConfigError

if TYPE_CHECKING:
    import torch

CHOICES = "auto, cpu, cuda, cuda:N (of NVIDIA or AMD), xpu, xpu:N (Intel) or mps (Apple)"
NO_DRIVER = "Found no NVIDIA driver"
"""How torch's words begin where there is no NVIDIA GPU."""
MAX_REASON_CHARS = 200


def resolve_device(text: str) -> torch.device:
    """Return the device that ``text`` names: auto, cpu, or a kind of accelerator with or without a
    number. Raises ConfigError.
    """
    import torch

    found = re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(?::([0-9]{1,3}))?", text)
    if not found:
        raise ConfigError(f"There is no device {text!r}: choose {CHOICES}.")
    if text == "cpu":
        return torch.device("cpu")
    kind, count = accelerator()
    if text == "auto" and not count:
        return torch.device("cpu")
    wanted = kind if text == "auto" else found[1] or text
    if not count or wanted != kind:
        raise _unavailable(text, kind, count)
    if kind == "mps":
        return torch.device(kind)
    index = int(found[2] or 0)
    if index >= count:
        there = f"{kind}:0 to {kind}:{count - 1}" if count > 1 else f"{kind}:0 only"
        raise ConfigError(f"There is no device {text!r}: this machine has {there}.")
    return torch.device(kind, index)


def _unavailable(text: str, kind: str, count: int) -> ConfigError:
    """Return the error of a device of another kind than the ``count`` of ``kind`` that are here."""
    there = f"there is {kind}"
    if not count:
        there = trouble() or "this build of PyTorch has no accelerator"
    return ConfigError(
        f"The device {text!r} is not available here ({there}): install its driver and a PyTorch "
        "for it, or choose auto."
    )


def accelerator() -> tuple[str, int]:
    """Return the kind of accelerator that this build of PyTorch can use here, and how many there
    are; "cpu" and 0 without one.
    """
    import torch

    if not torch.accelerator.is_available():
        return "cpu", 0
    found = torch.accelerator.current_accelerator()
    if found is None:
        return "cpu", 0
    return found.type, torch.accelerator.device_count()


def trouble() -> str:
    """Return why the accelerator of this build of PyTorch cannot be used, in the driver's words;
    empty if the build has none.
    """
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        first = next(iter(str(error).splitlines()), "")
        return first[:MAX_REASON_CHARS].rstrip(" .:")
    return ""


def make_current(device: torch.device) -> None:
    """Let this thread compute on ``device`` where none is named, as in a user's ``.cuda()``; else
    that is the first of its kind.
    """
    import torch

    if device.index is not None and device.type != "cpu":
        torch.accelerator.set_device_index(device)


def usable_processors() -> int:
    """Return the number of processors that this process may use: a container or a scheduler may
    have given it a few.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 2


def use_threads(count: int = 0, processes: int = 1) -> None:
    """Compute on the CPU with ``count`` threads; 0: half of the processors, shared by the
    ``processes`` of this node.
    """
    import torch

    # Threads that wait for a busy processor delay all others, and the daemon needs one too, so not
    # all are used.
    torch.set_num_threads(count or max(usable_processors() // 2 // processes, 1))
