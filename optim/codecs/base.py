"""The ``Codec`` protocol: tensors to bytes on the wire, and back.

    payload = codec.encode(tensors)
    assert payload.numel() == codec.nbytes(shapes)
    tensors = codec.decode(payload, shapes)

The size of a payload follows from the shapes alone. What a codec may depend on, where its memory is
and when it waits for an accelerator: docs/internals.md, "Codecs".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

Shape = tuple[int, ...]
S = TypeVar("S")

NOT_FINITE = "holds NaN or infinity: lower the learning rate or clip gradients"


class Codec(Protocol):
    """Conversion of a list of tensors into one flat buffer of bytes, and back.

    ``decode`` depends on the payload and the shapes alone; ``encode`` may keep state (``fresh``).
    """

    @property
    def name(self) -> str:
        """The name that both partners must agree on; ``codec_named`` parses it."""
        ...

    @property
    def displacement(self) -> bool:
        """True if the codec is too lossy for whole weights: only displacements (pseudo-gradients)
        may be sent.
        """
        ...

    def nbytes(self, shapes: Sequence[Shape]) -> int:
        """Return the exact size in bytes of the payload for tensors of these shapes."""
        ...

    def encode(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a fresh uint8 tensor on the CPU of ``nbytes`` elements; it never shares memory
        with ``tensors``.

        ValueError if a value cannot be sent (NaN or infinity, except with plain floats); no state
        has changed then.
        """
        ...

    def decode(self, payload: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """Return float32 tensors of the given shapes, on the payload's device; they may be views
        into ``payload``.

        ValueError if the size is wrong or the bytes are not those of an ``encode``. Nothing larger
        than the shapes is allocated.
        """
        ...

    def fresh(self) -> Codec:
        """Return the same codec without its state, for another fragment or peer; itself if it has
        none.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which a restarted node goes on bit-identically; empty if there is
        none.
        """
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned.

        ValueError for another codec's state; nothing is changed then.
        """
        ...


class Stateless:
    """Implementation of the state methods of ``Codec`` for codecs without state."""

    def fresh(self: S) -> S:
        return self

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            raise ValueError(
                f"a codec without state was given the state of {state_dict.get('codec', 'another')}"
            )


def padded(size: int) -> int:
    """Return the next multiple of 4 bytes, at which floats may begin."""
    return (size + 3) // 4 * 4


def check_payload(payload: Tensor, expected: int, name: str) -> Tensor:
    """Return ``payload``, aligned so that it can be viewed as wider numbers.

    ValueError unless it is ``expected`` bytes long.
    """
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise ValueError(
            f"a payload is a flat tensor of bytes, this one is {payload.dtype} of shape "
            f"{tuple(payload.shape)}"
        )
    if payload.numel() != expected:
        raise ValueError(
            f"payload has {payload.numel()} bytes, these shapes need {expected} in {name}"
        )
    at_float = payload.data_ptr() % 4 == 0 and payload.storage_offset() % 4 == 0
    if payload.stride(0) == 1 and at_float:
        return payload
    return torch.empty(expected, dtype=torch.uint8, device=payload.device).copy_(payload)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no value is NaN or infinity."""
    for tensor in tensors:
        # The sum is finite unless a value is not, or the sum overflows; only then is the slower
        # exact check needed.
        if not bool(tensor.sum().isfinite()) and not bool(tensor.isfinite().all()):
            return False
    return True


def check_finite(tensors: Sequence[Tensor], what: str) -> None:
    """Raise ValueError, with ``what`` as its subject, if a value is NaN or infinity."""
    if not all_finite(tensors):
        raise ValueError(f"{what} {NOT_FINITE}")


def check_sends_weights(codec: Codec, method: str) -> None:
    """Raise ValueError if ``codec`` is for displacements only; called for every method that sends
    whole weights.
    """
    if codec.displacement:
        raise ValueError(
            f"{method} sends whole weights, of which the codec {codec.name} loses too much: choose "
            "float32, bfloat16, float16 or int8, or a method that sends pseudo-gradients"
        )


@runtime_checkable
class Rejectable(Protocol):
    """Codec with error feedback, which must be given the outcome of the contribution that it
    encoded last.
    """

    @property
    def pending(self) -> bool:
        """True between ``encode`` and ``accepted`` or ``rejected``."""
        ...

    def accepted(self) -> None:
        """Note that the contribution is in a mean."""
        ...

    def rejected(self, applied: Sequence[Tensor]) -> None:
        """Put a contribution that is in no mean, less ``applied`` (given to the rule in its place),
        back into the residual.
        """
        ...

    def state_dict(self, unsent: Sequence[Tensor] | None = None) -> dict[str, Any]:
        """Return the state; with ``unsent`` as ``rejected(unsent)`` would leave it."""
        ...


@runtime_checkable
class Resendable(Rejectable, Protocol):
    """Codec with error feedback whose contribution in flight can be saved, and sent again as it
    was.
    """

    @property
    def payload(self) -> Tensor | None:
        """What was encoded and awaits its outcome."""
        ...
