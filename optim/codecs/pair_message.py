"""A contribution of ``mod4``, and the partner's as it is read by the own one.

    message = codec.post(weights)
    reading = message.read(payload)
    moves = message.move(reading, refused)       # what to add to the own weights for the mean

The formulas: docs/internals.md, "Weights modulo a range".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.optim.codecs.base import Shape, check_payload
from shoal.optim.codecs.bits import pack, packed_bytes, unpack
from shoal.optim.codecs.block_exponents import LEVELS, UNKNOWN, sigmas_of, steps_of
from shoal.optim.codecs.block_rows import BLOCK, SLAB, Rows, together
from shoal.optim.codecs.floats import FLOAT32
from shoal.optim.codecs.memory import buffer
from shoal.optim.codecs.quantized import blocks

BITS = 4
"""Of a code."""
HALF = 32
"""Values of a block in the lower halves of their bytes."""
SEED_BYTES = 8
BLOCK_BYTES = 2 + HALF
"""Of a payload: an exponent, a digest, and the codes."""
FAR_SIGMAS = 2.0
"""The distance beyond which the partner's block is refused: it would move this peer too far."""
FAR_PART = 0.5
"""The part of blocks refused beyond which a contribution is far as a whole."""
WIDE_POINT = 2.0**13
"""z from which a digest's 64 products, of factors up to 255 and z / 16, could exceed 2^24, up to
which float32 holds whole numbers."""


@dataclass(frozen=True)
class PairMessage:
    """A contribution as it is sent to a partner, and what is needed to read the partner's."""

    seed: bytes
    own: Rows
    exponents: Tensor
    """e of each block, int8."""
    moved: Tensor
    shapes: Sequence[Shape]
    """Those of all tensors, the ``tail`` ones at the end, which travel as float32."""
    tail: int
    rest: Sequence[Tensor]

    def tensors(self) -> list[Tensor]:
        return [*self.own.tensors(), *self.rest]

    @property
    def nbytes(self) -> int:
        count = len(self.own)
        return body_bytes(count) + _gap(count, self.tail) + FLOAT32.nbytes(self._tail_shapes)

    @functools.cached_property
    @torch.no_grad()
    def payload(self) -> Tensor:
        count = len(self.own)
        payload = buffer(self.nbytes)
        exponents, digests, codes = _parts(payload, count)
        payload[:SEED_BYTES].numpy().data[:] = self.seed
        exponents.copy_(self.exponents.view(torch.uint8))
        sums = self._write_codes(codes)
        digests.copy_(_digests(sums))
        if self.tail:
            begin = body_bytes(count)
            end = begin + _gap(count, self.tail)
            payload[begin:end] = 0
            payload[end:].copy_(FLOAT32.encode(self.rest))
        return payload

    def _write_codes(self, codes: Tensor) -> Tensor:
        """Write the codes of all blocks; return the sums of which their digests are made."""
        dither, odd = _stream(self.seed, len(self.own))
        sums = torch.empty(len(self.own), device="cpu")
        # Memory of one slab, which each overwrites.
        spare = torch.empty_like(dither)
        points = torch.empty_like(dither, dtype=torch.int16)
        lower = torch.empty(len(dither), HALF, dtype=torch.int16, device="cpu")
        slabs = together(self._points(dither), self._wide(self.exponents), codes, sums)
        for z, wide, code, total in slabs:
            if wide:
                _modulo(z, LEVELS * 256, spare)
            whole = points[: len(z)].copy_(z)
            low = lower[: len(z)]
            torch.bitwise_and(whole[:, :HALF], LEVELS - 1, out=low)
            torch.mv(z.copy_(whole >> BITS), odd, out=total)
            high = whole[:, HALF:].bitwise_left_shift_(BITS)
            code.copy_(low.bitwise_or_(high))
        return sums

    @torch.no_grad()
    def read(self, payload: Tensor) -> Reading:
        """Read the partner's payload by the own values.

        ValueError unless it is one of these shapes.
        """
        payload = check_payload(payload, self.nbytes, "mod4")
        unsigned, digests, codes = _parts(payload, len(self.own))
        exponents = unsigned.view(torch.int8)
        if bool((exponents == UNKNOWN).any()):
            raise ValueError("the payload has an exponent of -128, which none sends")
        seed = bytes(payload[:SEED_BYTES].tolist())
        values, sums, distance = self._completed(seed, exponents, codes)
        near = distance <= FAR_SIGMAS * sigmas_of(self.exponents)
        kept = (_digests(sums) == digests).logical_and_(near)
        if not bool(kept.all()):
            for own, found, good in together(self.own.slabs(), values, kept):
                found[~good] = own[~good]
        tail = payload[payload.numel() - FLOAT32.nbytes(self._tail_shapes) :]
        rest = FLOAT32.decode(tail.clone(), self._tail_shapes)
        return Reading(values, kept, distance, sigmas_of(exponents), rest)

    def _completed(
        self, seed: bytes, exponents: Tensor, codes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the partner's values w', the sums of which its digests should be made, and the rms
        distance of each block.
        """
        count = len(self.own)
        dither, odd = _stream(seed, count)
        dither.div_(LEVELS)
        step = steps_of(exponents).unsqueeze(1)
        scale = step.reciprocal().div_(LEVELS)
        step = step * LEVELS
        values = buffer(4 * BLOCK * count).view(torch.float32).view(count, BLOCK)
        sums = torch.empty(count, device="cpu")
        distance = torch.empty(count, device="cpu")
        # Memory of one slab, which each overwrites.
        high = torch.empty_like(dither)
        spare = torch.empty_like(dither)
        halves = torch.empty(2, len(dither), HALF, device="cpu")
        slabs = together(
            self.own.slabs(), self._wide(exponents), values, codes, scale, step, sums, distance
        )
        for number, (own, wide, found, code, scaling, stepping, total, norm) in enumerate(slabs):
            rows = len(own)
            k = high[:rows]
            low, upper = halves[:, :rows]
            torch.floor(low.copy_(code).mul_(1 / LEVELS), out=upper)
            # found = (u - code) / 2^b, exactly
            torch.sub(dither[:rows, :HALF], low.sub_(upper), out=found[:, :HALF])
            torch.sub(dither[:rows, HALF:], upper, alpha=1 / LEVELS, out=found[:, HALF:])
            torch.addcmul(found, own, scaling, out=k).round_()
            torch.sub(k, found, out=found).mul_(stepping)
            if wide:
                _modulo(k, 256, spare)
            torch.mv(k, odd, out=total)
            apart = torch.sub(found, own, out=k)
            if number in self.own.short:  # what fills short blocks up is read with its rounding
                sizes = self.own.sizes[number * SLAB : number * SLAB + rows, None]
                apart.masked_fill_(torch.arange(BLOCK, device="cpu") >= sizes, 0)
            torch.linalg.vector_norm(apart, dim=1, out=norm)
        return values, sums, distance.div_(self.own.sizes.sqrt())

    def move(self, read: Reading, refused: bytes) -> list[Tensor]:
        """Return w'_j - w'_i, of all tensors, and 0 where the block was refused here or, by
        ``refused``, there.

        ``read`` is used up.
        """
        dither, _ = _stream(self.seed, len(self.own))
        step = steps_of(self.exponents).unsqueeze(1)
        for z, values, stepping in together(self._points(dither), read.values, step):
            values.sub_(z.sub_(dither[: len(z)]).mul_(stepping))
        read.values[~read.kept | self.refused(refused)] = 0
        moves = self._cut(read.values)
        for theirs, mine in zip(read.rest, self.rest, strict=True):
            moves.append(theirs - mine)
        return moves

    def seen(self, read: Reading) -> list[Tensor]:
        """Return the partner's tensors, with the own values where the block was refused here."""
        return [*self._cut(read.values), *read.rest]

    def refused(self, bits: bytes) -> Tensor:
        """Return which blocks the partner refused, bool.

        ValueError unless ``bits`` are those of ``Reading.bits``.
        """
        count = len(self.own)
        if not bits:
            return torch.zeros(count, dtype=torch.bool, device="cpu")
        if len(bits) != packed_bytes(count, 1):
            raise ValueError(
                f"{len(bits)} bytes name the refused blocks, {packed_bytes(count, 1)} are needed "
                f"for {count}"
            )
        return unpack(torch.frombuffer(bytearray(bits), dtype=torch.uint8), 1, count).bool()

    @property
    def _tail_shapes(self) -> Sequence[Shape]:
        return self.shapes[len(self.shapes) - self.tail :]

    def _points(self, dither: Tensor) -> Iterator[Tensor]:
        """Yield z of a slab after the other, in memory that the next one overwrites."""
        scale = steps_of(self.exponents).reciprocal().unsqueeze(1)
        room = torch.empty_like(dither)
        for own, scaling in together(self.own.slabs(), scale):
            yield torch.addcmul(dither[: len(own)], own, scaling, out=room[: len(own)]).round_()

    def _wide(self, exponents: Tensor) -> list[bool]:
        """Return for each slab whether the sum of a digest needs its numbers modulo 256, for
        float32 to hold it.
        """
        points = self.own.largest * steps_of(exponents).reciprocal()
        return [bool((part >= WIDE_POINT).any()) for (part,) in together(points)]

    def _cut(self, rows: Tensor) -> list[Tensor]:
        """Return the tensors of the head from their blocks; views."""
        flat = rows.view(-1)
        at = 0
        tensors = []
        for shape in self.shapes[: len(self.shapes) - self.tail]:
            size = math.prod(shape)
            tensors.append(flat[at : at + size].view(shape))
            at += blocks(size, BLOCK) * BLOCK
        return tensors


@dataclass(frozen=True)
class Reading:
    """A partner's contribution, read by the own one."""

    values: Tensor
    """(blocks, 64), float32; the own ones where they are refused here."""
    kept: Tensor
    """Which blocks are not refused, bool."""
    distance: Tensor
    """The rms distance of each block to the own one."""
    expected: Tensor
    """The partner's sigma of each block."""
    rest: Sequence[Tensor]

    @property
    def refused_part(self) -> float:
        return 1 - float(self.kept.float().mean()) if len(self.kept) else 0.0

    @property
    def far(self) -> bool:
        return self.refused_part > FAR_PART

    @property
    def bits(self) -> bytes:
        """Which blocks are refused, one bit each, the first in the lowest bit of the first byte;
        empty if none is.
        """
        if bool(self.kept.all()):
            return b""
        return pack((~self.kept).view(torch.uint8), 1).numpy().tobytes()


def block_count(shapes: Sequence[Shape]) -> int:
    return sum(blocks(math.prod(shape), BLOCK) for shape in shapes)


def body_bytes(count: int) -> int:
    """Return the bytes of a payload of that many blocks, without what follows as float32."""
    return SEED_BYTES + BLOCK_BYTES * count


def _gap(count: int, tail: int) -> int:
    """Return the zeros after which floats may begin; none if no floats follow."""
    return -body_bytes(count) % 4 if tail else 0


def _parts(payload: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of the exponents, the digests and the codes, (count, 32)."""
    body = payload[SEED_BYTES : body_bytes(count)]
    exponents, digests, codes = torch.split(body, [count, count, HALF * count])
    return exponents, digests, codes.view(count, HALF)


def _stream(seed: bytes, count: int) -> tuple[Tensor, Tensor]:
    """Return the dither of a slab's blocks, in steps of 2^-16, and the odd factors of a digest, up
    to 255; the same everywhere.

    Integer arithmetic alone, so all machines and all versions of torch get the same. Each slab has
    the same dither.
    """
    low = int.from_bytes(seed[:4], "little")
    high = int.from_bytes(seed[4:8], "little")
    x = torch.arange((min(count, SLAB) + 1) * BLOCK, dtype=torch.int64, device="cpu")
    x = mixed(((x ^ low) * 0x2C1B3C6D + high) & 0xFFFFFFFF)
    odd = (x[:BLOCK] & 254 | 1).float()
    dither = (x[BLOCK:] >> 16).float() * 2.0**-16 - 0.5
    return dither.view(-1, BLOCK), odd


def mixed(numbers: Tensor) -> Tensor:
    """Scramble 32-bit numbers (held in int64) by a bijection: two rounds of xorshift and
    multiply.
    """
    for factor in (0x7FEB352D, 0x68E31DA5):  # below 2^31, so that no product leaves int64
        numbers = ((numbers ^ (numbers >> 16)) * factor) & 0xFFFFFFFF
    return numbers ^ (numbers >> 15)


def _modulo(values: Tensor, number: int, room: Tensor) -> None:
    """Take whole numbers modulo a power of two, in place."""
    quotients = torch.mul(values, 1 / number, out=room[: len(values)]).floor_()
    values.sub_(quotients, alpha=number)


def _digests(sums: Tensor) -> Tensor:
    """Return sum r_i high_i mod 256 of each block, uint8."""
    return sums.to(torch.int32).to(torch.uint8)
