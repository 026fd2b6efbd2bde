"""The ``Codec`` protocol (tensors to bytes on the wire, and back), and the codecs of plain floats.

    payload = BFLOAT16.encode(tensors)
    assert payload.numel() == BFLOAT16.nbytes(shapes)
    tensors = BFLOAT16.decode(payload, shapes)

The size of a payload follows from the shapes alone. What a codec may depend on, where its memory is
and when it waits for an accelerator: docs/internals.md, "Codecs".
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from shoal.optim.device import accelerator_of

Shape = tuple[int, ...]
S = TypeVar("S")

NOT_FINITE = "holds NaN or infinity: lower the learning rate or clip gradients"
SMALL = 1 << 20
"""Bytes below which it does not matter what malloc keeps."""
ALIGNMENT = 8
"""Bytes at whose multiples values of every type may begin."""


def buffer(nbytes: int) -> Tensor:
    """Return an uninitialised uint8 tensor on the CPU of ``nbytes`` elements, in memory that
    nothing else uses, and that goes back to the system with the last tensor in it.
    """
    if nbytes < SMALL:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {nbytes} bytes") from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return uninitialised tensors of the same types, shapes and devices, contiguous; those on the
    CPU are in one ``buffer``.
    """
    sizes = []
    for tensor in tensors:
        here = tensor.device.type == "cpu"
        sizes.append(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT if here else 0)
    pieces = torch.split(buffer(sum(sizes)), sizes)
    rooms = []
    for tensor, piece, size in zip(tensors, pieces, sizes, strict=True):
        if size:
            room = piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        else:
            room = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        rooms.append(room)
    return rooms


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


@dataclass(frozen=True)
class FloatCodec(Stateless):
    """Codec that sends each value as one little-endian float of ``dtype``, tensor after tensor in
    row-major order.

    float16 ends at 65,504 and is meant for pseudo-gradients; for whole weights bfloat16 keeps the
    range of float32 with 8 bits of precision. A finite value that would become infinite is refused,
    as it is by the other codecs: the mean of all would be lost.
    """

    name: str
    dtype: torch.dtype

    @property
    def displacement(self) -> bool:
        return False

    def nbytes(self, shapes: Sequence[Shape]) -> int:
        return sum(math.prod(shape) for shape in shapes) * self.dtype.itemsize

    def encode(self, tensors: Sequence[Tensor]) -> Tensor:
        """Copy the tensors, rounded to ``dtype``, into one flat buffer.

        ValueError for a finite value too large for ``dtype``.
        """
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if accelerator_of(tensors) is not None:
            try:
                return encoded(self, tensors)
            except ValueError:
                self.check_range(tensors)  # says which value it was
                raise
        flat = buffer(self.nbytes(shapes)).view(self.dtype)
        offset = 0
        for tensor in tensors:
            flat[offset : offset + tensor.numel()].copy_(tensor.detach().reshape(-1))
            offset += tensor.numel()
        if not all_finite([flat]):
            self.check_range(tensors)
        return flat.view(torch.uint8)

    @torch.no_grad()
    def packed(self, tensors: Sequence[Tensor], checks: Checks) -> Tensor:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        payload = Checks.payload(self.nbytes(shapes), tensors[0].device)
        flat = payload.view(self.dtype)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        fits = []
        for tensor, part in zip(tensors, parts, strict=True):
            values = tensor.detach().reshape(-1)
            part.copy_(values)
            if self.dtype != torch.float32:  # NaN and infinity are sent as they are
                fits.append(~(values.isfinite() & part.isinf()).any())
        if fits:
            checks.require(
                torch.stack(fits).all(), f"a value to be sent is too large for {self.name}"
            )
        return payload

    def unpacked(self, payload: Tensor, shapes: Sequence[Shape], checks: Checks) -> list[Tensor]:
        return self.decode(payload, shapes)

    def check_range(self, tensors: Sequence[Tensor]) -> None:
        """Raise ValueError for a finite value that ``dtype`` cannot hold."""
        for tensor in tensors:
            over = tensor.isfinite() & tensor.to(self.dtype).isinf()
            if bool(over.any()):
                raise ValueError(
                    f"a value of {float(tensor[over][0]):.6g} is too large for {self.name}, which "
                    f"ends at {torch.finfo(self.dtype).max:.6g}: choose float32 (or bfloat16), "
                    "lower the learning rate, or clip gradients"
                )

    def decode(self, payload: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """Decode as float32: views into the payload if that is float32, else fresh copies."""
        payload = check_payload(payload, self.nbytes(shapes), self.name)
        flat = payload.view(self.dtype).to(torch.float32)
        parts = torch.split(flat, [math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


FLOAT32 = FloatCodec("float32", torch.float32)
FLOAT16 = FloatCodec("float16", torch.float16)
BFLOAT16 = FloatCodec("bfloat16", torch.bfloat16)


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


@dataclass(frozen=True)
class BufferTailCodec:
    """Codec that sends the last ``count`` tensors as float32, since averaged buffers stand no loss,
    and the rest by ``codec``.
    """

    codec: Codec
    count: int

    @property
    def name(self) -> str:
        """Both codecs' names, since both partners must send the same tail."""
        return f"{self.codec.name},{self.count}xfloat32"

    @property
    def displacement(self) -> bool:
        return self.codec.displacement

    def nbytes(self, shapes: Sequence[Shape]) -> int:
        head, tail = self._cut(shapes)
        return padded(self.codec.nbytes(head)) + FLOAT32.nbytes(tail)

    def encode(self, tensors: Sequence[Tensor]) -> Tensor:
        """Encode the head, zeros up to a multiple of 4 bytes, and the tail."""
        return encoded(self, tensors)

    def packed(self, tensors: Sequence[Tensor], checks: Checks) -> Tensor:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        device = accelerator_of(tensors) or torch.device("cpu")
        payload = Checks.payload(self.nbytes(shapes), device)
        size = self.codec.nbytes(shapes[: -self.count])
        payload[:size] = packed(self.codec, list(tensors[: -self.count]), checks)
        payload[padded(size) :] = packed(FLOAT32, list(tensors[-self.count :]), checks)
        return payload

    def decode(self, payload: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        if payload.numel() != self.nbytes(shapes):
            raise ValueError(
                f"payload has {payload.numel()} bytes, these shapes need {self.nbytes(shapes)} in "
                f"{self.name}"
            )
        return self.unpacked(payload, shapes, Checks(later=False))

    def unpacked(self, payload: Tensor, shapes: Sequence[Shape], checks: Checks) -> list[Tensor]:
        head, tail = self._cut(shapes)
        size = self.codec.nbytes(head)
        parts = unpacked(self.codec, payload[:size], head, checks)
        return parts + FLOAT32.decode(payload[padded(size) :].clone(), tail)

    def fresh(self) -> BufferTailCodec:
        return BufferTailCodec(self.codec.fresh(), self.count)

    def state_dict(self) -> dict[str, Any]:
        return self.codec.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.codec.load_state_dict(state_dict)

    def _cut(self, shapes: Sequence[Shape]) -> tuple[Sequence[Shape], Sequence[Shape]]:
        return shapes[: -self.count], shapes[-self.count :]
