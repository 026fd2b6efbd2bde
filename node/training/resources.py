"""The memory budget of a node: the needs of training are summed before it begins, and the budget sets the size of queues."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from shoal.node.memory import free_memory
from shoal.swarm.errors import ShoalError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

GB = 10**9
POOL, BODIES = 128 << 20, 64 << 20  # bytes of others' rollouts that wait, and of own bodies to be fetched, without a budget
_INNER = 2  # times the parameters that an inner optimizer keeps: as Adam, because before the first step its state is empty
EXCESS = 1.2  # times the planned memory of a device from which on a node says that it holds more
_EXCHANGE = {"noloco": 1, "local": 1, "diloco": 1, "diloco-hb": 1, "none": 0, "sparta": 0.1}
"""Of the slow weights' size, what an exchange takes: the partner's contribution, in which the mean is computed."""
_OTHER_EXCHANGE = 2.0
"""The same with the other methods, whose own contribution is held too."""
_STATE = {
    "noloco": 1, "gasloc": 1, "diloco": 1, "diloco-hb": 1, "streaming": 1, "decoupled": 1, "eager": 3, "co2": 2, "sparseloco": 1
}  # fmt: skip
"""Of the slow weights' size, what the outer rule and the codec remember."""


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


def check(
    gigabytes: float,
    parameters: Sequence[Tensor],
    log: Callable[[str], None] = lambda text: None,
    *,
    method: str = "noloco",
    slow_here: bool = True,
    device: str | None = None,
    working: int = 0,
    own: bool = True,
) -> None:
    """Raise MemoryBudgetError, with the sum in one sentence, if training needs more main memory than ``gigabytes``.

    Without such a bound (0), ``log`` is called with a sentence if it needs more than there is, if the model is the user's ``own``;
    a stranger's is refused then. Call it before the optimizers' state is there.

    Args:
        parameters: those that are trained, or on the device meta those that will be, on one of the type ``device``.
        slow_here: the slow weights are in main memory. working: bytes of batches on the way.
    """
    places = [(device if parameter.is_meta and device else parameter.device.type, parameter) for parameter in parameters]
    model = sum(_bytes([parameter]) for parameter in parameters if parameter.is_meta)
    here = sum(_bytes([parameter]) for place, parameter in places if place == "cpu")
    slow = 4 * sum(parameter.numel() for parameter in parameters)
    staged = 4 * sum(parameter.numel() for place, parameter in places if place != "cpu" or parameter.itemsize < 4)
    outer = slow * (1 + _STATE.get(method, 0)) + staged
    parts = {
        "it holds": held(),
        "model": model,
        "gradients": here,
        "inner optimizer": _INNER * here,
        "outer optimizer": outer if slow_here else 0,
        "exchange": int(_EXCHANGE.get(method, _OTHER_EXCHANGE) * slow),
        "queues": sum(shares(gigabytes)),
        "batch": working if device == "cpu" else 0,
    }
    if device not in (None, "cpu"):  # the model is made in main memory, and leaves it before the rest is made
        parts["model"] = max(0, 2 * model + parts["it holds"] - sum(parts.values()))
    parts = {name: nbytes for name, nbytes in parts.items() if nbytes or name not in ("model", "batch")}
    total = sum(parts.values())
    listed = ", ".join(f"{name} {nbytes / GB:.2f}" for name, nbytes in parts.items())
    need = f"This node will need about {total / GB:.2f} GB of memory ({listed}) for {slow // 4:,} parameters"
    if gigabytes and total > gigabytes * GB:
        raise MemoryBudgetError(f"{need} and --ram allows {gigabytes:g}: allow more, pass --offload DIR, or train a smaller model.")
    there = parts["it holds"] + free_memory()[0]
    if not gigabytes and total > there:
        if not own:
            raise MemoryBudgetError(
                f"{need} and can have {there / GB:.2f}: end other programs, pass --offload DIR, or allow it by --ram all the same."
            )
        log(
            f"{need} and can have {there / GB:.2f}, so the system may end it without a word: end other programs, "
            "pass --offload DIR, or train a smaller model; with --ram it would not begin"
        )


class DevicePlan:
    """What training will take of a device's memory, beside the activations, which nobody knows before the first step.

    Args:
        model: on the device already.
        method: of the outer optimizer, whose slow weights are there if ``slow_there``.
        tries: another copy of the model tries partners' weights.

    Raises MemoryBudgetError: it does not fit, with what would.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, method: str, slow_there: bool, tries: bool) -> None:
        from shoal.optim.device import allocated, free_and_total  # here, because it imports torch

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        own, whole = _bytes(trained), _bytes([*model.parameters(), *model.buffers()])
        slow = 4 * sum(parameter.numel() for parameter in trained)
        coarse = any(parameter.itemsize < 4 for parameter in trained)
        self._device = device
        self.lasting = {"model": whole, "inner optimizer": _INNER * own}
        """Bytes, by what they are for, that are taken after a step too."""
        self.passing = {"gradients": own}
        if slow_there:
            self.lasting["slow weights"] = slow * (1 + _STATE.get(method, 0) + coarse)
            self.passing["exchange"] = int(_EXCHANGE.get(method, _OTHER_EXCHANGE) * slow)
        elif coarse:
            self.passing["staging"] = 4 * max(parameter.numel() for parameter in trained)
        if tries:
            self.lasting["trial of partners' weights"] = whole
        self._before = allocated(device) - whole
        memory, total = free_and_total(device), sum({**self.lasting, **self.passing}.values())
        if memory is not None and total > memory[0] + whole:
            remedies = ["leave node.slow_on_device out"] if slow_there else []
            remedies += ["share the model among GPUs (--gpus all --parallel fsdp)", "train a smaller model, or end other programs"]
            raise MemoryBudgetError(f"{self} and {(memory[0] + whole) / GB:.2f} are free there: {', '.join(remedies)}.")

    def __str__(self) -> str:
        parts = {**self.lasting, **self.passing}
        listed = ", ".join(f"{name} {nbytes / GB:.2f}" for name, nbytes in parts.items() if nbytes)
        return f"Training will take about {sum(parts.values()) / GB:.2f} GB of {self._device} without activations ({listed})"

    def compared(self) -> str | None:
        """Return a sentence if after the first step a fifth more is taken than was planned."""
        from shoal.optim.device import allocated

        taken, planned = allocated(self._device) - self._before, sum(self.lasting.values())
        if taken <= EXCESS * planned:
            return None
        return (
            f"after its first step this node holds {taken / GB:.2f} GB of {self._device}, where {planned / GB:.2f} were planned: "
            "other parts of the task, or another optimizer than Adam, keep the rest, so less is left for activations"
        )


def room(gigabytes: float) -> float:
    """Return the bytes that may still be taken: those up to the bound, or without one those that are free."""
    return max(gigabytes * GB - held(), 0.0) if gigabytes else free_memory()[0]


def room_for_copy(gigabytes: float) -> Callable[[int], bool]:
    """Return the function that decides whether a checkpoint may be written from a copy of so many bytes.

    With a bound (``gigabytes``) it may if this process stays within it; else if that takes half of the free memory at most.
    """
    if gigabytes:
        return lambda nbytes: held() + nbytes <= gigabytes * GB
    return lambda nbytes: 2 * nbytes <= free_memory()[0]


def shares(gigabytes: float) -> tuple[int, int]:
    """Return the bytes for others' rollouts that wait to be learnt from, and for own bodies that others fetch."""
    if not gigabytes:
        return POOL, BODIES
    return min(POOL, int(gigabytes * GB) // 32), min(BODIES, int(gigabytes * GB) // 64)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
