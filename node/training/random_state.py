"""The generators of random numbers that a task may use: torch's, also the device's, NumPy's and Python's global ones."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def saved(device: torch.device) -> dict[str, Any]:
    """Return the state of all generators: torch's as tensors, the others' as plain values."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "rng": torch.get_rng_state(),
        "rng_device": _of_device(device),
        "rng_numpy": (str(kind), np.asarray(keys).tolist(), *rest),
        "rng_python": random.getstate(),
    }


def restore(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators to ``state``; those that it lacks, as older checkpoints do, stay as they are."""
    torch.set_rng_state(state["rng"])
    on_device = state.get("rng_device")
    if device.type == "cuda" and on_device is not None:
        torch.cuda.set_rng_state(on_device, device)
    if device.type == "mps" and on_device is not None:
        torch.mps.set_rng_state(on_device)
    if "rng_numpy" in state:
        kind, keys, *rest = state["rng_numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    if "rng_python" in state:
        random.setstate(state["rng_python"])


def _of_device(device: torch.device) -> torch.Tensor | None:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.mps.get_rng_state() if device.type == "mps" else None
