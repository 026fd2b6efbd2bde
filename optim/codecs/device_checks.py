"""Encoding on an accelerator without waiting for it: what must hold is asked with the payload.

    checks = Checks()
    payload = codec.packed(tensors, checks)      # on the device
    checks.read(payload)                         # on the CPU, or the ValueError

A codec that can do so has ``Packs``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from shoal.optim.codecs.base import Codec, Shape, all_finite
from shoal.optim.codecs.memory import buffer
from shoal.optim.device import accelerator_of


class Checks:
    """Conditions on tensors of an accelerator, asked of it all at once, with the payload that they
    are about.

    What is on the CPU is asked at once. ``later=False``: so is what is not.
    """

    ROOM = 16
    """Bytes behind a ``payload`` for the answers: conditions of more texts than that there are not.
    """

    def __init__(self, later: bool = True) -> None:
        self._later = later
        self._conditions: dict[str, Tensor] = {}
        self._after: list[Callable[[], None]] = []
        self._values: Tensor | None = None

    def require(self, holds: Tensor, text: str) -> None:
        """Raise ValueError with ``text``, here or in ``read``, unless ``holds``, a bool scalar, is
        true.
        """
        if holds.device.type == "cpu" or not self._later:
            if not bool(holds):
                raise ValueError(text)
        elif text in self._conditions:
            self._conditions[text] = self._conditions[text] & holds
        else:
            self._conditions[text] = holds

    def then(self, do: Callable[[], None]) -> None:
        """Call ``do`` once all conditions are known to hold."""
        self._after.append(do)

    def values(self, values: Tensor, take: Callable[[list[float]], None]) -> None:
        """Call ``take`` with numbers of the device that come with the payload, before what is done
        `then`.
        """
        self._values = values
        self._take = take

    @staticmethod
    def payload(nbytes: int, device: torch.device | str) -> Tensor:
        """Return zeroed bytes, with room for answers behind them."""
        return torch.zeros(nbytes + Checks.ROOM, dtype=torch.uint8, device=device)[:nbytes]

    def read(self, payload: Tensor) -> Tensor:
        """Return ``payload``, made by `payload`, on the CPU.

        ValueError with the first text whose condition does not hold.
        """
        host = payload
        answers = list(self._conditions.values())
        values = self._values
        if payload.device.type != "cpu":
            host, answers, values = self._copied(payload, answers, values)
        for text, holds in zip(self._conditions, answers, strict=True):
            if not bool(holds):
                raise ValueError(text)
        if values is not None:
            self._take(values.tolist())
        for do in self._after:
            do()
        return host

    @staticmethod
    def _copied(
        payload: Tensor, answers: list[Tensor], values: Tensor | None
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Return all three on the CPU, after one wait for the accelerator."""
        sizes = [payload.numel(), len(answers), 0 if values is None else values.nbytes]
        whole = payload.as_strided((payload.numel() + len(answers),), (1,))
        if answers:
            whole[payload.numel() :] = torch.stack(answers)
        if values is not None:
            whole = torch.cat([whole, values.view(torch.uint8)])
        host, held, rest = torch.split(buffer(sum(sizes)).copy_(whole), sizes)
        if values is not None:
            values = rest.clone().view(values.dtype)
        return host, list(held), values


@runtime_checkable
class Packs(Protocol):
    """``Codec`` that computes on the tensors' accelerator, and makes nobody wait for it."""

    def packed(self, tensors: Sequence[Tensor], checks: Checks) -> Tensor:
        """Return ``encode``'s payload by `Checks.payload`, on the device of the tensors.

        What it would raise is in ``checks``.
        """
        ...

    def unpacked(self, payload: Tensor, shapes: Sequence[Shape], checks: Checks) -> list[Tensor]:
        """Return what ``decode`` does of a payload of one's own."""
        ...


def encoded(codec: Packs, tensors: Sequence[Tensor]) -> Tensor:
    """Return ``packed``'s payload on the CPU. What it raises is raised here."""
    checks = Checks()
    return checks.read(codec.packed(tensors, checks))


def packed(codec: Codec, tensors: Sequence[Tensor], checks: Checks) -> Tensor:
    """Return the payload on the tensors' accelerator, if there is one and ``codec`` computes there,
    else on the CPU.
    """
    if isinstance(codec, Packs) and accelerator_of(tensors) is not None:
        return codec.packed(tensors, checks)
    return codec.encode(tensors)


def unpacked(
    codec: Codec, payload: Tensor, shapes: Sequence[Shape], checks: Checks
) -> list[Tensor]:
    """Return the tensors of a payload; on an accelerator what ``decode`` would ask of it is in
    ``checks``.
    """
    if isinstance(codec, Packs) and payload.device.type != "cpu":
        return codec.unpacked(payload, shapes, checks)
    return codec.decode(payload, shapes)


def finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether no value is NaN or infinity, on the tensors' device."""
    if accelerator_of(tensors) is None:
        return torch.tensor(all_finite(tensors), device="cpu")
    return torch.stack([tensor.isfinite().all() for tensor in tensors]).all()
