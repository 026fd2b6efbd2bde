"""The memory budget of a node: the needs of training are summed before it begins, and the budget
sets the size of queues.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from shoal.node.console import free_memory
from shoal.optim.methods import DEFAULT, METHODS
from shoal.swarm.errors import ShoalError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

GB = 10**9
POOL, BODIES = (
    128 << 20,
    64 << 20,
)  # bytes of others' rollouts that wait, and of own bodies to be fetched, without a budget
# times the parameters that an inner optimizer keeps: as Adam, because before the first step its
# state is empty
_INNER = 2
EXCESS, LIBRARIES = (
    1.2,
    128 << 20,
)  # a device's memory is planned wrong beyond this factor and these bytes: cuBLAS keeps 70 MB


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
    places = [
        (device if parameter.is_meta and device else parameter.device.type, parameter)
        for parameter in parameters
    ]
    model = sum(_bytes([parameter]) for parameter in parameters if parameter.is_meta)
    here = sum(_bytes([parameter]) for place, parameter in places if place == "cpu")
    slow = 4 * sum(parameter.numel() for parameter in parameters)
    staged = 4 * sum(
        parameter.numel() for place, parameter in places if place != "cpu" or parameter.itemsize < 4
    )
    outer = int(slow * (1 + METHODS[method].memory.state)) + staged
    parts = {
        "it holds": held(),
        "model": model,
        "gradients": here,
        "inner optimizer": _INNER * here,
        "outer optimizer": outer if slow_here else 0,
        "exchange": int(METHODS[method].memory.exchange * slow),
        "queues": sum(shares(gigabytes)),
        "batch": working if device == "cpu" else 0,
    }
    if device not in (
        None,
        "cpu",
    ):  # the model is made in main memory, and leaves it before the rest is made
        parts["model"] = max(0, 2 * model + parts["it holds"] - sum(parts.values()))
    parts = {
        name: nbytes for name, nbytes in parts.items() if nbytes or name not in ("model", "batch")
    }
    total = sum(parts.values())
    listed = ", ".join(f"{name} {nbytes / GB:.2f}" for name, nbytes in parts.items())
    need = (
        f"This node will need about {total / GB:.2f} GB of memory ({listed}) for {slow // 4:,} "
        "parameters"
    )
    if gigabytes and total > gigabytes * GB:
        raise MemoryBudgetError(
            f"{need} and --ram allows {gigabytes:g}: allow more, pass --offload DIR, or train a "
            "smaller model."
        )
    there = parts["it holds"] + free_memory()[0]
    if not gigabytes and total > there:
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


class DevicePlan:
    """What training will take of a device's memory: computed before the first step, and compared
    with what that took.

    Nobody knows the activations before the first step, so they are measured in it.

    Args:
        model: on the device already, of several ranks this rank's part.
        inner: the optimizer of the inner steps, which has no state yet.
        method: of the outer optimizer, whose slow weights are there if ``slow_there``, dealt to
            ``ranks``.
        tries: another copy of the model tries partners' weights.
        gathered: bytes of what a rank gathers of others' parts while it computes.

    Raises MemoryBudgetError: it does not fit, with what would.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        inner: torch.optim.Optimizer,
        *,
        method: str,
        slow_there: bool,
        tries: bool,
        ranks: int = 1,
        gathered: int = 0,
    ) -> None:
        from shoal.optim import device as of_device  # here, because it imports torch
        from shoal.optim.outer.sharded import local

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        parts = [local(parameter) for parameter in trained]
        own, whole = _bytes(parts), _bytes(map(local, (*model.parameters(), *model.buffers())))
        slow = 4 * sum(parameter.numel() for parameter in trained) // ranks
        staged = any(
            part.itemsize < 4 or part is not parameter
            for part, parameter in zip(parts, trained, strict=True)
        )
        self._of_device = of_device
        self._device = device
        self.lasting = {"model": whole, "inner optimizer": _kept(inner, local)}
        """Bytes, by what they are for, that are taken after a step too."""
        self.passing = {"gradients": own}
        self._computing, self._averaging = {"others' parts": gathered}, dict[str, int]()
        """What is taken beside the gradients, with the activations, and when these are gone."""
        if slow_there:
            self.lasting["slow weights"] = int(slow * (1 + METHODS[method].memory.state + staged))
            self._averaging["exchange"] = int(METHODS[method].memory.exchange * slow)
        elif staged:
            self._averaging["staging"] = 4 * max(parameter.numel() for parameter in trained)
        if tries:
            self.lasting["trial of partners' weights"] = whole
        self._before = of_device.allocated(device) - whole
        memory, total = of_device.free_and_total(device), sum(self._parts().values())
        self._room = None if memory is None else memory[0] + whole
        if self._room is not None and total > self._room:
            fits = int(sum(parameter.numel() for parameter in trained) * self._room / total)
            remedies = ["leave --offload device out"] if slow_there else []
            remedies += (
                [] if gathered else ["share the model among GPUs (--gpus all --parallel fsdp)"]
            )
            remedies += [f"train a model of fewer than {fits:,} parameters, or end other programs"]
            raise MemoryBudgetError(
                f"{self} and {self._room / GB:.2f} are free there: {', '.join(remedies)}."
            )
        of_device.forget_peak(device)

    def _parts(self) -> dict[str, int]:
        computing = self._computing
        averaging = self._averaging
        return (
            self.lasting
            | self.passing
            | (computing if sum(computing.values()) >= sum(averaging.values()) else averaging)
        )

    def __str__(self) -> str:
        parts = self._parts()
        listed = ", ".join(f"{name} {nbytes / GB:.2f}" for name, nbytes in parts.items() if nbytes)
        return (
            f"Training will take about {sum(parts.values()) / GB:.2f} GB of {self._device} "
            f"without activations ({listed})"
        )

    def compared(self) -> str:
        """Return a sentence after the first step: how far off the plan was, and what is taken with
        the activations.
        """
        taken, planned = (
            self._of_device.allocated(self._device) - self._before,
            sum(self.lasting.values()),
        )
        most = self._of_device.peak(self._device)
        said = (
            f"after its first step this node holds {taken / GB:.2f} GB of {self._device}, where "
            f"{planned / GB:.2f} were planned"
        )
        if most is not None:
            # The inner optimizer's state came after the backward pass, which has the most from now
            # on too.
            averaging = taken + sum({**self.passing, **self._averaging}.values())
            later = max(most - self._before + self.lasting["inner optimizer"], averaging)
            said += (
                "; with activations, gradients and exchange the next ones will take up to "
                f"{later / GB:.2f}"
            )
            if self._room is not None and later > self._room:
                said += (
                    f", more than the {self._room / GB:.2f} that are there, so raise "
                    "train.accumulate, or set train.recompute"
                )
        if taken > EXCESS * planned + LIBRARIES:
            said += (
                ": other parts of the task, or another optimizer than it seems, keep the rest, "
                "so less is left for activations"
            )
        elif EXCESS * taken < planned:
            said += ": that is less, so a larger model or batch than the plan allows may fit"
        return said


def room(gigabytes: float) -> float:
    """Return the bytes that may still be taken: those up to the bound, or without one those that
    are free.
    """
    return max(gigabytes * GB - held(), 0.0) if gigabytes else free_memory()[0]


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
        return POOL, BODIES
    return min(POOL, int(gigabytes * GB) // 32), min(BODIES, int(gigabytes * GB) // 64)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _kept(inner: torch.optim.Optimizer, local: Callable[[Tensor], Tensor]) -> int:
    """Return the bytes of an optimizer's state after its first step, which its settings tell; else
    those of Adam.
    """
    total = 0
    for group in inner.param_groups:
        times = 3 if group.get("amsgrad") else _INNER
        if "betas" not in group and "momentum" in group:
            times = int(bool(group["momentum"]))
        total += times * _bytes(
            local(parameter) for parameter in group["params"] if parameter.requires_grad
        )
    return total
