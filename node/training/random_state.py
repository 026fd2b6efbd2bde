"""The state of all random generators of a process, for a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all generators: torch's as tensors, the others' as plain values."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    on_device = None
    if device.type != "cpu":
        on_device = torch.get_device_module(device).get_rng_state(*_at(device))
    return {
        "rng": torch.get_rng_state(),
        "rng_device": on_device,
        "rng_device_kind": device.type,
        "rng_numpy": (str(kind), np.asarray(keys).tolist(), *rest),
        "rng_python": random.getstate(),
    }


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators to ``state``.

    The device's stays as it is if the device is of another kind now: each has a form of its own.
    """
    torch.set_rng_state(state["rng"])
    on_device = state["rng_device"]
    if on_device is not None and device.type == state["rng_device_kind"]:
        torch.get_device_module(device).set_rng_state(on_device, *_at(device))
    kind, keys, *rest = state["rng_numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    random.setstate(state["rng_python"])


def _at(device: torch.device) -> tuple[torch.device, ...]:
    """Return what says which generator is meant: of Apple's devices there is one."""
    return () if device.type == "mps" else (device,)
