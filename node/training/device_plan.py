"""What training will take of a device's memory: computed before the first step, and compared with
what that took.

    plan = DevicePlan(model, device, inner, method="noloco", slow_there=False, tries=False)
    ...                      # the first step
    print(plan.compared())

Nobody knows the activations before the first step, so they are measured in it.
"""

from __future__ import annotations

import torch
from torch import nn

from shoal.node.training.resources import ADAM_TENSORS, GB, MemoryBudgetError, bytes_of
from shoal.optim import device as of_device
from shoal.optim.methods import METHODS
from shoal.optim.outer.sharded import local

WRONG_FACTOR = 1.2
"""A plan is said to be wrong beyond this factor."""
LIBRARY_BYTES = 128 << 20
"""What libraries may keep beside the plan: cuBLAS keeps 70 MB."""


class DevicePlan:
    """The plan for one model on one device.

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
        memory = METHODS[method].memory
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        parts = [local(parameter) for parameter in trained]
        count = sum(parameter.numel() for parameter in trained)
        whole = bytes_of(map(local, (*model.parameters(), *model.buffers())))
        slow = 4 * count // ranks
        staged = False
        for part, parameter in zip(parts, trained, strict=True):
            if part.itemsize < 4 or part is not parameter:
                staged = True
        self._device = device
        self.lasting = {"model": whole, "inner optimizer": _state_bytes(inner)}
        """Bytes, by what they are for, that are taken after a step too."""
        self.passing = {"gradients": bytes_of(parts)}
        self._computing = {"others' parts": gathered}
        """What is taken beside the gradients, with the activations."""
        self._averaging: dict[str, int] = {}
        """What is taken beside the gradients when the activations are gone."""
        if slow_there:
            self.lasting["slow weights"] = int(slow * (1 + memory.state + staged))
            self._averaging["exchange"] = int(memory.exchange * slow)
        elif staged:
            self._averaging["staging"] = 4 * max(parameter.numel() for parameter in trained)
        if tries:
            self.lasting["trial of partners' weights"] = whole
        self._before = of_device.allocated(device) - whole
        self._room: int | None = None
        free = of_device.free_and_total(device)
        if free is not None:
            self._room = free[0] + whole
            total = sum(self._parts().values())
            if total > self._room:
                fits = int(count * self._room / total)
                raise MemoryBudgetError(
                    f"{self} and {self._room / GB:.2f} are free there: "
                    f"{_remedies(fits, slow_there=slow_there, is_shared=gathered > 0)}."
                )
        of_device.forget_peak(device)

    def _parts(self) -> dict[str, int]:
        beside = self._computing
        if sum(self._averaging.values()) > sum(beside.values()):
            beside = self._averaging
        return self.lasting | self.passing | beside

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
        taken = of_device.allocated(self._device) - self._before
        planned = sum(self.lasting.values())
        most = of_device.peak(self._device)
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
        if taken > WRONG_FACTOR * planned + LIBRARY_BYTES:
            said += (
                ": other parts of the task, or another optimizer than it seems, keep the rest, "
                "so less is left for activations"
            )
        elif WRONG_FACTOR * taken < planned:
            said += ": that is less, so a larger model or batch than the plan allows may fit"
        return said


def _remedies(fits: int, *, slow_there: bool, is_shared: bool) -> str:
    remedies = []
    if slow_there:
        remedies.append("leave --offload device out")
    if not is_shared:
        remedies.append("share the model among GPUs (--gpus all --parallel fsdp)")
    remedies.append(f"train a model of fewer than {fits:,} parameters, or end other programs")
    return ", ".join(remedies)


def _state_bytes(inner: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state after its first step, which its settings tell; else
    those of Adam.
    """
    total = 0
    for group in inner.param_groups:
        tensors = ADAM_TENSORS
        if group.get("amsgrad"):
            tensors = 3
        if "betas" not in group and "momentum" in group:
            tensors = int(bool(group["momentum"]))
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        total += tensors * bytes_of(map(local, trained))
    return total
