"""The main memory of a node: what training needs is summed before it begins, and the budget sets
the size of queues.

    check(16.0, list(model.parameters()), method="noloco")     # MemoryBudgetError: it does not fit

That of a device is in `shoal.node.training.device_plan`.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from shoal.node.free_memory import free_memory
from shoal.optim.methods import DEFAULT, METHODS
from shoal.swarm.errors import ShoalError

if TYPE_CHECKING:
    from torch import Tensor

GB = 10**9
POOL_BYTES = 128 << 20
"""Others' rollouts that wait, without a budget."""
BODIES_BYTES = 64 << 20
"""Own bodies of rollouts that others fetch, without a budget."""
ADAM_TENSORS = 2
"""Tensors of a parameter's size that an inner optimizer keeps, as Adam: before the first step its
state is empty.
"""


class MemoryBudgetError(ShoalError):
    """The model does not fit into the memory that the node may use."""


def held() -> int:
    """Return the bytes of memory that this process has now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return most_held()


def most_held() -> int:
    """Return the most bytes of memory that this process has had."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def check(
    gigabytes: float,
    parameters: Sequence[Tensor],
    log: Callable[[str], None] = lambda text: None,
    *,
    method: str = DEFAULT,
    slow_here: bool = True,
    device: str | None = None,
    working: int = 0,
    own: bool = True,
) -> None:
    """Raise MemoryBudgetError, with the sum in one sentence, if training needs more main memory
    than ``gigabytes``.

    Without such a bound (0), ``log`` is called with a sentence if it needs more than there is, if
    the model is the user's ``own``; a stranger's is refused then. Call it before the optimizers'
    state is there.

    Args:
        parameters: those that are trained, or on the device meta those that will be, on one of the
            type ``device``.
        slow_here: the slow weights are in main memory. working: bytes of batches on the way.
    """
    parts = _needed(parameters, method, slow_here, device)
    parts["queues"] = sum(shares(gigabytes))
    if working and device == "cpu":
        parts["batch"] = working
    if device not in (None, "cpu"):
        # The model is made in main memory, and leaves it before the rest is made.
        rest = sum(parts.values()) - parts["model"]
        parts["model"] = max(0, parts["model"] - rest)
    if not parts["model"]:
        del parts["model"]
    parts = {"it holds": held(), **parts}
    total = sum(parts.values())
    listed = ", ".join(f"{name} {nbytes / GB:.2f}" for name, nbytes in parts.items())
    count = sum(parameter.numel() for parameter in parameters)
    need = (
        f"This node will need about {total / GB:.2f} GB of memory ({listed}) for {count:,} "
        "parameters"
    )
    if gigabytes:
        if total > gigabytes * GB:
            raise MemoryBudgetError(
                f"{need} and --ram allows {gigabytes:g}: allow more, pass --offload DIR, or train "
                "a smaller model."
            )
        return
    there = parts["it holds"] + free_memory()[0]
    if total <= there:
        return
    if not own:
        raise MemoryBudgetError(
            f"{need} and can have {there / GB:.2f}: end other programs, pass --offload DIR, or "
            "allow it by --ram all the same."
        )
    log(
        f"{need} and can have {there / GB:.2f}, so the system may end it without a word: end "
        "other programs, pass --offload DIR, or train a smaller model; with --ram it would not "
        "begin"
    )


def _needed(
    parameters: Sequence[Tensor], method: str, slow_here: bool, device: str | None
) -> dict[str, int]:
    """Return the bytes of main memory that training takes, by what they are for."""
    memory = METHODS[method].memory
    model = 0
    here = 0
    slow = 0
    staged = 0
    for parameter in parameters:
        place = parameter.device.type
        if parameter.is_meta:
            model += parameter.nbytes
            place = device or place
        if place == "cpu":
            here += parameter.nbytes
        slow += 4 * parameter.numel()
        if place != "cpu" or parameter.itemsize < 4:
            staged += 4 * parameter.numel()
    outer = 0
    if slow_here:
        outer = int(slow * (1 + memory.state)) + staged
    return {
        "model": model,
        "gradients": here,
        "inner optimizer": ADAM_TENSORS * here,
        "outer optimizer": outer,
        "exchange": int(memory.exchange * slow),
    }


def room(gigabytes: float) -> float:
    """Return the bytes that may still be taken: those up to the bound, or without one those that
    are free.
    """
    if not gigabytes:
        return free_memory()[0]
    return max(gigabytes * GB - held(), 0.0)


def room_for_copy(gigabytes: float) -> Callable[[int], bool]:
    """Return the function that decides whether a checkpoint may be written from a copy of so many
    bytes.

    With a bound (``gigabytes``) it may if this process stays within it, also in the next exchange,
    which takes what the last ones took; else if that takes a quarter of the free memory at most,
    for several nodes of one machine may ask at the same moment.
    """
    if gigabytes:
        return lambda nbytes: most_held() + nbytes <= gigabytes * GB
    return lambda nbytes: 4 * nbytes <= free_memory()[0]


def beyond(gigabytes: float) -> str:
    """Return a sentence if this process has had more memory than the bound, which is checked with
    an estimate; else nothing.
    """
    if not gigabytes or most_held() <= gigabytes * GB:
        return ""
    return (
        f"this node has held {most_held() / GB:.2f} GB of memory, where --ram allows "
        f"{gigabytes:g}: what steps take is not known before, so raise train.accumulate, set "
        "train.recompute, or allow more"
    )


def shares(gigabytes: float) -> tuple[int, int]:
    """Return the bytes for others' rollouts that wait to be learnt from, and for own bodies that
    others fetch.
    """
    if not gigabytes:
        return POOL_BYTES, BODIES_BYTES
    return min(POOL_BYTES, int(gigabytes * GB) // 32), min(BODIES_BYTES, int(gigabytes * GB) // 64)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
