"""Error feedback: the part that a codec loses in one round is added to the tensors of the next.

    codec = ErrorFeedback(SIGN, beta=0.95)
    payload = codec.encode(tensors)
    codec.accepted()                    # or codec.rejected(applied), if it is in no mean

What is kept after each outcome, and why: docs/internals.md, "Error feedback".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.optim.codecs.base import NOT_FINITE, Codec, Shape, check_finite
from shoal.optim.codecs.device_checks import Checks, encoded, finite, packed, unpacked


class ErrorFeedback:
    """Codec with error feedback.

    With g the tensors to send, e the residual (0 at first) and Q the wrapped codec:

        a = beta e + g;   sent = Q(a);   e <- a - sent

    With beta = 1 nothing is lost: the sum of all sent values plus e equals the sum of all g. For
    displacements only. e belongs to one peer and one fragment: give every fragment its own instance
    (``fresh``). NaN and infinity never enter e: ``encode`` raises before anything has changed.

    Raises:
        ValueError: beta is not in [0, 1], or the codec has error feedback already.
    """

    displacement = True
    residuals = 1
    """Tensors that its saved state keeps for each one sent."""

    def __init__(self, codec: Codec, beta: float = 1.0) -> None:
        if not 0 <= beta <= 1:
            raise ValueError(f"the factor of error feedback must lie in [0, 1], got {beta:g}")
        if isinstance(codec, ErrorFeedback):
            raise ValueError(f"the codec {codec.name} has error feedback already")
        self.codec = codec
        self.beta = beta
        self.error: list[Tensor] | None = None
        """e, of the shapes of the last ``encode``; None before the first."""
        self.payload: Tensor | None = None
        """What awaits its outcome: with it under "payload", a loaded state goes on as if it had
        been encoded there.
        """
        self._again = False
        """True if the next ``encode`` is of what was encoded before the state was saved: it was in
        flight.
        """

    @property
    def name(self) -> str:
        return f"{self.codec.name}+ef" + ("" if self.beta == 1 else f":{self.beta:g}")

    def nbytes(self, shapes: Sequence[Shape]) -> int:
        return self.codec.nbytes(shapes)

    @torch.no_grad()
    def encode(self, tensors: Sequence[Tensor]) -> Tensor:
        """Encode the tensors plus the residual.

        ValueError for NaN, infinity, or shapes other than before.

        After ``load_state_dict`` of a state with a payload the first call returns that payload, and
        nothing changes.
        """
        return encoded(self, tensors)

    @torch.no_grad()
    def packed(self, tensors: Sequence[Tensor], checks: Checks) -> Tensor:
        """Encode on the device of the tensors, where the payload is kept too."""
        if self._again and self.payload is not None:
            self._again = False
            return Checks.payload(self.payload.numel(), tensors[0].device).copy_(self.payload)
        total = self._total(tensors)
        payload = packed(self.codec, total, checks)
        error = []
        for a, sent in zip(total, self._decoded(payload, total), strict=True):
            error.append(torch.sub(a, sent, out=a))
        checks.require(finite(error), f"a tensor to be sent, or its decoded form, {NOT_FINITE}")

        def keep() -> None:
            self.error = error
            self.payload = payload.clone()

        checks.then(keep)
        return payload

    def _total(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors plus the residual, in memory of their own."""
        if self.error is None:
            return [tensor.detach().to(torch.float32, copy=True) for tensor in tensors]
        total = [tensor.detach().float() for tensor in tensors]
        kept = [tuple(tensor.shape) for tensor in self.error]
        given = [tuple(tensor.shape) for tensor in total]
        if kept != given:
            raise ValueError(
                f"error feedback is kept for {len(kept)} tensors of {sum(map(math.prod, kept))} "
                f"values, got {len(given)} of {sum(map(math.prod, given))}: use fresh() for each "
                "fragment or model"
            )
        sums = []
        for g, e in zip(total, self.error, strict=True):
            sums.append(torch.add(g, e.to(g.device), alpha=self.beta))
        return sums

    def unpacked(self, payload: Tensor, shapes: Sequence[Shape], checks: Checks) -> list[Tensor]:
        return unpacked(self.codec, payload, shapes, checks)

    def decode(self, payload: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        return self.codec.decode(payload, shapes)

    def fresh(self) -> ErrorFeedback:
        return ErrorFeedback(self.codec.fresh(), self.beta)

    def sent(self) -> list[Tensor]:
        """Return the decoded values of the last ``encode``, on the devices of its tensors.

        ValueError if none awaits an outcome.
        """
        if self.payload is None or self.error is None:
            raise ValueError("nothing has been sent since the last outcome")
        return self._decoded(self.payload.clone(), self.error)

    @property
    def pending(self) -> bool:
        return self.payload is not None

    def accepted(self) -> None:
        self.payload = None
        self._again = False

    @torch.no_grad()
    def rejected(self, applied: Sequence[Tensor] = ()) -> None:
        """Take back the last ``encode``, which counted nowhere: e <- e + sent, less ``applied``,
        the values applied in its place.

        ValueError if there was no ``encode`` since the last outcome.
        """
        self.error = self._taken_back(applied)
        self.payload = None
        self._again = False

    def _taken_back(self, applied: Sequence[Tensor]) -> list[Tensor]:
        """Return the residual with what was sent, less ``applied``."""
        error = []
        for e, decoded in zip(self.error or [], self.sent(), strict=True):
            error.append(torch.add(e, decoded, out=decoded))
        for e, g in zip(error, applied, strict=False):
            e.sub_(g.to(e.device))
        return error

    @torch.no_grad()
    def state_dict(self, unsent: Sequence[Tensor] | None = None) -> dict[str, Any]:
        """Return the codec's name, e, and the wrapped codec's state; with ``unsent``, e as
        ``rejected(unsent)`` would leave it.
        """
        if unsent is not None:
            error: list[Tensor] | None = self._taken_back(unsent)
        elif self.error is not None:
            error = [tensor.clone() for tensor in self.error]
        else:
            error = None
        return {"codec": self.name, "error": error, "inner": self.codec.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned.

        ValueError for another codec's state or one not finite; nothing is changed then.
        """
        if state_dict.get("codec") != self.name:
            raise ValueError(
                f"the saved error feedback is of the codec {state_dict.get('codec')}, not of "
                f"{self.name}"
            )
        error: list[Tensor] | None = state_dict["error"]
        payload: Tensor | None = state_dict.get("payload")
        check_finite(error or [], "the saved error feedback")
        if payload is not None:
            size = self.nbytes([tuple(tensor.shape) for tensor in error or []])
            if payload.dtype != torch.uint8 or payload.shape != (size,):
                raise ValueError(
                    f"the saved payload of {self.name} has not the {size} bytes of its tensors"
                )
            payload = payload.clone()
        self.codec.load_state_dict(state_dict["inner"])
        if error is not None:
            error = [tensor.to(torch.float32, copy=True) for tensor in error]
        self.error = error
        self.payload = payload
        self._again = payload is not None

    def _decoded(self, payload: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """Return the values of one's own payload, on the devices of ``like``."""
        devices = {tensor.device for tensor in like}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        shapes = [tuple(tensor.shape) for tensor in like]
        # Nothing is asked of one's own payload.
        decoded = unpacked(self.codec, payload.to(device), shapes, Checks())
        return [values.to(tensor.device) for values, tensor in zip(decoded, like, strict=True)]
