"""The device and the threads that a node computes with. torch is imported inside: it takes a second."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from shoal.node.config.settings import ConfigError

if TYPE_CHECKING:
    import torch


def resolve_device(text: str) -> torch.device:
    """Return the device that ``text`` names: auto, cpu, cuda, cuda:N or mps. Raises ConfigError."""
    import torch

    mps, count = torch.backends.mps.is_available(), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text == "auto":
        return torch.device("cuda", 0) if count else torch.device("mps" if mps else "cpu")
    found = re.fullmatch(r"cpu|mps|cuda(?::([0-9]{1,3}))?", text)
    if not found:
        raise ConfigError(f"There is no device {text!r}: choose auto, cpu, cuda, cuda:N or mps.")
    if text == "mps" and not mps:
        raise ConfigError("The device 'mps' is not available here: choose cpu or auto.")
    if text.startswith("cuda"):
        if not count:
            raise ConfigError(
                f"The device {text!r} is not available here: install a CUDA build of PyTorch and a driver, or choose cpu or auto."
            )
        index = int(found[1] or 0)
        if index >= count:
            raise ConfigError(f"There is no device {text!r}: this machine has cuda:0 to cuda:{count - 1}.")
        return torch.device("cuda", index)
    return torch.device(text)


def use_threads(count: int = 0, processes: int = 1) -> None:
    """Compute on the CPU with ``count`` threads; 0: half of the processors, shared by the ``processes`` of this node."""
    import torch

    # Threads that wait for a busy processor delay all others, and the daemon needs one too, so not all are used.
    torch.set_num_threads(count or max((os.cpu_count() or 2) // 2 // processes, 1))
