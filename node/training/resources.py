"""The memory budget of a node: what training will take is summed before it begins, and the size of queues follows from it."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable

from torch import Tensor

from shoal.node.training.trainer import Trainer
from shoal.swarm.errors import ShoalError

GB = 10**9
POOL, SHELF = 128 << 20, 64 << 20  # bytes of others' rollouts that wait, and of own ones that are handed out, without a budget
_INNER = 2  # times the parameters that an inner optimizer keeps: as Adam does, for before its first step nothing is to be seen
_EXCHANGE = 3  # of the slow weights' size: a contribution, and it and the partner's as they travel


class MemoryBudgetError(ShoalError):
    """The model does not fit into the memory that the node may use."""


def held() -> int:
    """Bytes of memory that this process has now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def check(gigabytes: float, trainer: Trainer) -> None:
    """MemoryBudgetError, with the sum in one sentence, if training needs more main memory than ``gigabytes``; 0: no bound.

    To be asked when the trainer was made, and so the model and the outer optimizer's state are there.
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
    """Bytes for the rollouts of others that wait to be learnt from, and for own bodies that are handed out."""
    if not gigabytes:
        return POOL, SHELF
    return min(POOL, int(gigabytes * GB) // 32), min(SHELF, int(gigabytes * GB) // 64)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
