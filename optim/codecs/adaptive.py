"""A codec that chooses another codec for each tensor, so that a payload of a given size has the
least error.

    codec = AutoCodec(2, (INT8, E3M0, SIGN))     # 2 bits a value
    codec.encode(tensors)
    codec.choice                                 # ["int8", "sign", ...]

After L-GreCo (2210.17357), reversed: docs/internals.md, "Codecs".
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.optim.codecs.allocation import allocate
from shoal.optim.codecs.base import NOT_FINITE, Codec, Shape, check_payload, padded
from shoal.optim.codecs.device_checks import Checks, encoded, finite, packed, unpacked
from shoal.optim.device import accelerator_of, to_device, widest_float

REFRESH_ROUNDS = 20
"""Rounds after which the errors are measured again."""


class AutoCodec:
    """Codec that spends ``bits`` a value on average, more on the tensors whose error falls more by
    it.

    Every ``every`` rounds each candidate encodes each tensor to be sent, and ``allocate`` finds the
    choice with the least sum of squared errors, which is that of the next round. Wrapped in error
    feedback ("auto:2+ef") it measures the sum of tensor and residual.

    A payload names the choice, one byte a tensor, the index of the candidate; then the candidates'
    payloads, each beginning at a multiple of 4 bytes; then zeros up to the size that follows from
    the shapes: the budget, or the sum of the smallest candidates if that is more.

    Raises:
        ValueError: ``bits`` is not in (0, 32].
    """

    displacement = True

    def __init__(
        self, bits: float, candidates: Sequence[Codec], every: int = REFRESH_ROUNDS
    ) -> None:
        if not 0 < bits <= 32:
            raise ValueError(f"auto takes the bits a value, above 0 and up to 32, got {bits:g}")
        self.bits = bits
        self.candidates = tuple(candidates)
        self.every = every
        self._shapes: list[Shape] = []
        self._choice: list[int] = []
        self._age = 0
        self._last: tuple[Callable[[], Tensor | None], list[int]] = (lambda: None), []
        """The last payload that was made on a device, and its choice."""

    @property
    def name(self) -> str:
        return f"auto:{self.bits:g}"

    @property
    def choice(self) -> list[str]:
        """The name of the codec chosen for each tensor of the next ``encode``, if the shapes are
        the same.
        """
        return [self.candidates[index].name for index in self._choice]

    def nbytes(self, shapes: Sequence[Shape]) -> int:
        return padded(len(shapes)) + self._budget(shapes)

    @torch.no_grad()
    def encode(self, tensors: Sequence[Tensor]) -> Tensor:
        """Measure the candidates if that is due, then encode. ValueError for NaN or infinity."""
        return encoded(self, tensors)

    @torch.no_grad()
    def packed(self, tensors: Sequence[Tensor], checks: Checks) -> Tensor:
        """Encode on the device of the tensors, which is waited for where there is no choice yet."""
        device = accelerator_of(tensors) or torch.device("cpu")
        shapes = [tuple(tensor.shape) for tensor in tensors]
        tensors = [tensor.to(device) for tensor in tensors]
        checks.require(finite(tensors), f"a tensor to be sent {NOT_FINITE}")
        first = shapes != self._shapes
        due = self._age >= self.every
        choice = self._choice
        if first:
            choice = self._chosen(self._errors(tensors, shapes).tolist(), shapes)
        found = choice
        payload = Checks.payload(self.nbytes(shapes), device)
        self._last = weakref.ref(payload), choice
        named = torch.tensor(choice, dtype=torch.uint8, device="cpu")
        payload[: len(shapes)] = to_device([named], device)[0]
        offset = padded(len(shapes))
        for tensor, index in zip(tensors, choice, strict=True):
            part = packed(self.candidates[index], [tensor], checks)
            payload[offset : offset + part.numel()] = part
            offset += padded(part.numel())
        age = 1 if first or due else self._age + 1

        def measured(errors: list[float]) -> None:
            nonlocal found
            found = self._chosen(errors, shapes)

        def keep() -> None:
            self._shapes = shapes
            self._choice = found
            self._age = age

        if due and not first:
            checks.values(self._errors(tensors, shapes), measured)
        checks.then(keep)
        return payload

    def unpacked(self, payload: Tensor, shapes: Sequence[Shape], checks: Checks) -> list[Tensor]:
        """Decode by the choice that the payload names; that of the last one of ``packed`` is known
        without a look at it.
        """
        last, choice = self._last
        if last() is not payload:
            choice = payload[: len(shapes)].tolist()
        return self._restored(payload, shapes, choice, checks)

    def decode(self, payload: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """Decode by the choice that the payload names.

        ValueError if it names none, or one that does not fit.
        """
        payload = check_payload(payload, self.nbytes(shapes), self.name)
        choice = payload[: len(shapes)].tolist()
        if max(choice, default=0) >= len(self.candidates):
            raise ValueError(
                f"the payload names codec {max(choice)}, there are {len(self.candidates)}"
            )
        return self._restored(payload, shapes, choice, Checks(later=False))

    def _restored(
        self, payload: Tensor, shapes: Sequence[Shape], choice: Sequence[int], checks: Checks
    ) -> list[Tensor]:
        offset = padded(len(shapes))
        tensors = []
        for shape, index in zip(shapes, choice, strict=True):
            codec = self.candidates[index]
            size = codec.nbytes([shape])
            if offset + size > payload.numel():
                raise ValueError("the payload names codecs that need more bytes than it has")
            tensors += unpacked(codec, payload[offset : offset + size], [shape], checks)
            offset += padded(size)
        return tensors

    def fresh(self) -> AutoCodec:
        return AutoCodec(self.bits, self.candidates, self.every)

    def state_dict(self) -> dict[str, Any]:
        return {
            "codec": self.name,
            "shapes": list(self._shapes),
            "choice": list(self._choice),
            "age": self._age,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        choice = [int(index) for index in state_dict.get("choice", [])]
        is_known = all(0 <= index < len(self.candidates) for index in choice)
        if state_dict.get("codec") != self.name or not is_known:
            raise ValueError(
                f"the saved state is of the codec {state_dict.get('codec')}, not of {self.name}"
            )
        self._shapes = [tuple(shape) for shape in state_dict["shapes"]]
        self._choice = choice
        self._age = int(state_dict["age"])

    def _sizes(self, shapes: Sequence[Shape]) -> list[list[int]]:
        return [[padded(codec.nbytes([shape])) for codec in self.candidates] for shape in shapes]

    def _budget(self, shapes: Sequence[Shape]) -> int:
        requested = math.floor(self.bits * sum(map(math.prod, shapes)) / 32) * 4
        return max(requested, sum(map(min, self._sizes(shapes))))

    def _errors(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> Tensor:
        """Return the squared error of each tensor by each candidate, one after the other, on the
        device.
        """
        errors: list[Tensor] = []
        for tensor, shape in zip(tensors, shapes, strict=True):
            for codec in self.candidates:
                payload = packed(codec, [tensor], Checks())
                (decoded,) = unpacked(codec, payload, [shape], Checks())
                lost = tensor.float() - decoded.to(tensor.device)
                errors.append(lost.to(widest_float(tensor.device)).square().sum())
        return torch.stack(errors) if errors else torch.empty(0, device="cpu")

    def _chosen(self, errors: list[float], shapes: Sequence[Shape]) -> list[int]:
        """Return the choice of the least sum of the errors. ValueError for NaN or infinity."""
        width = len(self.candidates)
        rows = [errors[first : first + width] for first in range(0, len(errors), width)]
        if not all(math.isfinite(row[0]) for row in rows):  # of float32, which loses nothing else
            raise ValueError(f"a tensor to be sent {NOT_FINITE}")
        return allocate(rows, self._sizes(shapes), self._budget(shapes))
