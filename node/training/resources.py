"""The memory budget of a node: the needs of training are summed before it begins, and the budget sets the size of queues."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable

from torch import Tensor

from shoal.node.training.trainer import Trainer
from shoal.swarm.errors import ShoalError

GB = 10**9
POOL, BODIES = 128 << 20, 64 << 20  # bytes of others' rollouts that wait, and of own bodies to be fetched, without a budget
_INNER = 2  # times the parameters that an inner optimizer keeps: as Adam, because before the first step its state is empty
_EXCHANGE = 3  # of the slow weights' size: a contribution, and it and the partner's as they travel


class MemoryBudgetError(ShoalError):
    """The model does not fit into the memory that the node may use."""


def held() -> int:
    """Return the bytes of memory that this process has now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def check(gigabytes: float, trainer: Trainer) -> None:
    """Raise MemoryBudgetError, with the sum in one sentence, if training needs more main memory than ``gigabytes``; 0: no bound.

    Call it once the trainer is made, so that the model and the outer optimizer's state exist.
    """
    if not gigabytes:
        return
    model = sum(_bytes([parameter.data]) for parameter in trainer.params)
    here = sum(_bytes([parameter.data]) for parameter in trainer.params if parameter.device.type == "cpu")
    slow = _bytes(trainer.opt.slow)
    outer = slow + sum(map(_bytes, trainer.opt.rule_state.values()))
    queues = sum(shares(gigabytes))
    parts = {
        "it holds": held(),
        "gradients": here,
        "inner optimizer": _INNER * here,
        "the copy for checkpoints": model + _INNER * model + outer,
        "exchange": _EXCHANGE * slow,
        "queues": queues,
    }
    total = sum(parts.values())
    if total > gigabytes * GB:
        listed = ", ".join(f"{name} {nbytes / GB:.2f}" for name, nbytes in parts.items())
        raise MemoryBudgetError(
            f"This node will need about {total / GB:.2f} GB of memory ({listed}) and --ram allows {gigabytes:g}: allow more, or "
            "train a smaller model."
        )


def shares(gigabytes: float) -> tuple[int, int]:
    """Return the bytes for others' rollouts that wait to be learnt from, and for own bodies that others fetch."""
    if not gigabytes:
        return POOL, BODIES
    return min(POOL, int(gigabytes * GB) // 32), min(BODIES, int(gigabytes * GB) // 64)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
