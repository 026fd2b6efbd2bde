"""The codec for pairs: weights in 4 bits a value, which the partner completes by its own weights.

    codec.expect("run:3:0", moved)           # sets the ranges: how far the own weights have moved
    message = codec.post(weights)            # message.payload is sent
    reading = message.read(payload)          # the partner's weights, read by the own ones
    moves = message.move(reading, refused)   # what to add to the own weights for the mean
    codec.learn(message, reading)            # the next ranges

Two peers' weights lie near each other, so the high part of a number need not be sent (Moniqua,
2002.11787). The formulas, and why the numbers below are as they are: docs/internals.md, "Weights
modulo a range".
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.optim.codecs.base import Codec, Shape, check_payload
from shoal.optim.codecs.bits import pack, packed_bytes, unpack
from shoal.optim.codecs.buffer_tail import BufferTailCodec
from shoal.optim.codecs.floats import FLOAT32
from shoal.optim.codecs.memory import buffer
from shoal.optim.codecs.quantized import blocks
from shoal.optim.device import to_host

BLOCK = 64
"""Values that have a range together."""
HALF = 32
"""Those of them in the lower halves of their bytes."""
BITS = 4
LEVELS = 16
SEED_BYTES = 8
BLOCK_BYTES = 2 + HALF
"""Of a payload: an exponent, a digest, and the codes."""

REACH_SIGMAS = 4.5
"""Half of a range (c): what is further away is read wrongly, so more would cost precision."""
MARGIN = 1.1
"""A range over the distance measured last: distances grow from round to round."""
FIRST_RHO = 1.5
"""Distance to the partner over the own way since the last mean, until one was measured."""
REFUSED_SIGMAS = 1.5
"""The distance that a refused block counts as: it is larger than was expected, nobody knows how
much."""
HEARD_PART = 0.7
"""Of the partner's expectation; times ``MARGIN`` it is below 1, so no range grows by hearsay."""
MOST_APART = 4.0
"""Times that rounds without a partner widen a range, at most."""
USUAL_PART = 0.25
"""Of an exchange, in the running mean of rms(w - slow)^2: after a jump it is half of it at once."""
NEAR_PART = 0.5
"""The narrowest range of a block, in the root mean square of its tensor's: rows of rare tokens."""
FAR_SIGMAS = 2.0
"""The distance beyond which the partner's block is refused: it would move this peer too far."""
FAR_PART = 0.5
"""The part of blocks refused beyond which a contribution is far as a whole."""
FINEST_STEP = 2.0**-20
"""The smallest step, in a block's largest value: z is exact in float32."""
LARGEST_EXPONENT = 127
"""The largest e; the least is -127."""
UNKNOWN = -128
"""Stands for the exponent of a distance that is not known."""
WIDE_POINT = 2.0**13
"""z from which a digest's 64 products, of factors up to 255 and z / 16, could exceed 2^24, up to
which float32 holds whole numbers."""
SLAB = 512
"""Blocks at a time, whose intermediate results stay in the cache; also the period of the dither."""


def _steps() -> Tensor:
    """Return D for each e from -128 to 127, by e + 128, with the same bits on every machine."""
    quarters = (1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429)
    steps = []
    for e in range(-128, 128):
        sigma = math.ldexp(quarters[e % 4], e // 4)
        steps.append(sigma * 2 * REACH_SIGMAS / LEVELS)
    return torch.tensor(steps, dtype=torch.float32, device="cpu")


STEPS = _steps()
SIGMAS = STEPS * (LEVELS / (2 * REACH_SIGMAS))


class Mod4Codec:
    """Codec of whole weights between two peers; ``post`` encodes, and what it returns reads the
    partner's payload.

    State: the measured distances, as exponents, rho and the usual way, so that a resumed run goes
    on with the same bits.
    """

    name = "mod4"
    displacement = False

    def __init__(self) -> None:
        self._measured: Tensor | None = None
        """Exponents of the distance measured last, int8, one a block."""
        self._moved: Tensor | None = None
        """Exponents of rms(w - slow) of the contribution to be sent, or in flight, scaled to the
        usual way.
        """
        self._usual = 0.0
        """The running mean of rms(w - slow)^2 over the whole contribution; 0 before the first."""
        self._rho = FIRST_RHO
        self._apart = 0
        """Rounds since the last with a partner."""
        self._far = False
        """True if the last partner's contribution was far as a whole."""
        self._seed = bytes(SEED_BYTES)
        self.pending = False

    def nbytes(self, shapes: Sequence[Shape]) -> int:
        return _body_bytes(_count(shapes))

    @torch.no_grad()
    def expect(self, exchange: str, moved: Sequence[Tensor]) -> None:
        """Prepare ``post`` for an exchange, whose name gives the dither; ``moved``: w - slow, or
        slow - w, of each parameter.

        Without it the weights themselves are taken for it, which is a range far too wide.
        """
        self._seed = hashlib.sha256(f"shoal/mod4/1:{exchange}".encode()).digest()[:SEED_BYTES]
        self._moved = None
        if moved:
            rows = [Rows([tensor]) for tensor in moved]
            way = torch.cat([_rms(part) for part in rows])
            way *= self._usual_over_last(way, torch.cat([part.sizes for part in rows]))
            self._moved = _exponents(way)

    def _usual_over_last(self, way: Tensor, sizes: Tensor) -> float:
        """Return by how much the way between two exchanges is usually longer than ``way``, the rms
        of blocks of these ``sizes``, and take ``way`` into account for the next.
        """
        square = float((sizes * way.double().square()).sum() / sizes.sum())
        if not 0 < square < math.inf:  # ``post`` refuses what is not finite
            return 1.0
        if not self._usual:
            self._usual = square
        self._usual += USUAL_PART * (square - self._usual)
        return math.sqrt(self._usual / square)

    def encode(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.post(tensors).payload

    @torch.no_grad()
    def post(self, tensors: Sequence[Tensor], tail: int = 0) -> PairMessage:
        """Return the message of tensors of which the last ``tail`` travel as float32, and which
        must stay as they are.

        Its bytes are written when they are first asked for, in any thread. ValueError for NaN,
        infinity, or values above 2^50.
        """
        shapes = [tuple(tensor.shape) for tensor in tensors]
        head = tensors[: len(tensors) - tail]
        own = Rows(head)
        exponents, moved = self._range(own)
        rest = [tensor.float().clone() for tensor in to_host(tensors[len(head) :])]
        self.pending = True
        return PairMessage(self._seed, own, exponents, moved, shapes, tail, rest)

    def decode(self, payload: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """Raise ValueError: what a payload means depends on who reads it (``PairMessage.read``)."""
        raise ValueError(
            "mod4 is for two peers, each of which reads it by its own weights: choose another "
            "codec for groups"
        )

    def fresh(self) -> Mod4Codec:
        return Mod4Codec()

    def learn(self, sent: PairMessage, read: Reading) -> None:
        """Note the distances that the partner's contribution showed; one that is far, after one
        that was not, shows none.
        """
        ignored = read.far and not self._far and self._measured is not None
        self._far = read.far
        if ignored:
            return
        sigma = _sigmas(sent.exponents)
        widest = REFUSED_SIGMAS * sigma
        # The narrower of both ranges becomes wider; what the other cannot read does not widen ours.
        of_refused = torch.where(sigma <= read.expected, widest, sigma / MARGIN)
        seen = torch.where(read.kept, read.distance, of_refused)
        heard = torch.minimum(HEARD_PART * read.expected, widest)
        self._measured = _exponents(torch.maximum(seen, heard), up=False)

        weights = sent.own.sizes * read.kept
        way = float((weights * _known(sent.moved).square()).sum(dtype=torch.float64))
        if way > 0:
            distance = float((weights * read.distance.square()).sum(dtype=torch.float64))
            self._rho = math.sqrt(distance / way)

    def _range(self, own: Rows) -> tuple[Tensor, Tensor]:
        """Return the exponents of the blocks, and those of rms(w - slow)."""
        if self._measured is not None and len(self._measured) != len(own):
            self._measured = None  # measured of other tensors: it says nothing about these
        moved = _exponents(_rms(own)) if self._moved is None else self._moved
        if len(moved) != len(own):  # several tensors a parameter
            moved = moved.repeat(len(own) // max(len(moved), 1))

        # n rounds without a partner are a random walk.
        apart = min(math.sqrt(1 + self._apart), MOST_APART)
        expected = _known(moved) * (self._rho * apart)
        if self._measured is not None:
            torch.maximum(expected, MARGIN * _known(self._measured), out=expected)
        _widen_to_tensors(expected, own)
        least = own.largest * (FINEST_STEP * LEVELS / (2 * REACH_SIGMAS))
        if not bool((least <= SIGMAS[-1]).all()):
            raise ValueError(
                "a tensor to be sent holds NaN, infinity or values too large: lower the learning "
                "rate or clip gradients"
            )
        exponents = _exponents(torch.maximum(expected, least))
        return exponents.clamp(min=-LARGEST_EXPONENT), moved

    # The outcome of a contribution (`Rejectable`, `Resendable`).

    @property
    def payload(self) -> Tensor | None:
        """None: what is in flight is encoded anew, with the same bits, from the saved state and the
        same tensors.
        """
        return None

    def accepted(self) -> None:
        self.pending = False
        self._apart = 0

    def rejected(self, applied: Sequence[Tensor] = ()) -> None:
        """Note that it is in none: the next partner is further away."""
        self.pending = False
        self._apart += 1

    def state_dict(self, unsent: Sequence[Tensor] | None = None) -> dict[str, Any]:
        """Return what was measured, what is needed to encode the contribution in flight again, and
        the codec's name.
        """
        in_flight = self.pending and unsent is None
        return {
            "codec": self.name,
            "measured": _text(self._measured),
            "moved": _text(self._moved if in_flight else None),
            "usual": self._usual,
            "rho": self._rho,
            "apart": self._apart,
            "far": self._far,
            "seed": self._seed.hex(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict.get("codec") != self.name:
            raise ValueError(
                f"the saved state is of the codec {state_dict.get('codec')}, not of {self.name}"
            )
        measured = _read_text(state_dict["measured"])
        moved = _read_text(state_dict["moved"])
        usual = float(state_dict.get("usual", 0))
        rho = float(state_dict["rho"])
        apart = int(state_dict["apart"])
        seed = bytes.fromhex(state_dict["seed"])
        known = 0 <= rho < math.inf and 0 <= usual < math.inf
        if not known or apart < 0 or len(seed) != SEED_BYTES:
            raise ValueError(
                "the saved state of mod4 has a range that no run measures: it was damaged"
            )
        self._measured = measured
        self._moved = moved
        self._usual = usual
        self._rho = rho
        self._apart = apart
        self._seed = seed
        self._far = bool(state_dict.get("far"))
        self.pending = False


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
        return _body_bytes(count) + _gap(count, self.tail) + FLOAT32.nbytes(self._tail_shapes)

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
            begin = _body_bytes(count)
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
        slabs = _together(self._points(dither), self._wide(self.exponents), codes, sums)
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
        near = distance <= FAR_SIGMAS * _sigmas(self.exponents)
        kept = (_digests(sums) == digests).logical_and_(near)
        if not bool(kept.all()):
            for own, found, good in _together(self.own.slabs(), values, kept):
                found[~good] = own[~good]
        tail = payload[payload.numel() - FLOAT32.nbytes(self._tail_shapes) :]
        rest = FLOAT32.decode(tail.clone(), self._tail_shapes)
        return Reading(values, kept, distance, _sigmas(exponents), rest)

    def _completed(
        self, seed: bytes, exponents: Tensor, codes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the partner's values w', the sums of which its digests should be made, and the rms
        distance of each block.
        """
        count = len(self.own)
        dither, odd = _stream(seed, count)
        dither.div_(LEVELS)
        step = STEPS[exponents.int() + 128].unsqueeze(1)
        scale = step.reciprocal().div_(LEVELS)
        step = step * LEVELS
        values = buffer(4 * BLOCK * count).view(torch.float32).view(count, BLOCK)
        sums = torch.empty(count, device="cpu")
        distance = torch.empty(count, device="cpu")
        # Memory of one slab, which each overwrites.
        high = torch.empty_like(dither)
        spare = torch.empty_like(dither)
        halves = torch.empty(2, len(dither), HALF, device="cpu")
        slabs = _together(
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
        step = STEPS[self.exponents.int() + 128].unsqueeze(1)
        for z, values, stepping in _together(self._points(dither), read.values, step):
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
        scale = STEPS[self.exponents.int() + 128].reciprocal().unsqueeze(1)
        room = torch.empty_like(dither)
        for own, scaling in _together(self.own.slabs(), scale):
            yield torch.addcmul(dither[: len(own)], own, scaling, out=room[: len(own)]).round_()

    def _wide(self, exponents: Tensor) -> list[bool]:
        """Return for each slab whether the sum of a digest needs its numbers modulo 256, for
        float32 to hold it.
        """
        points = self.own.largest * STEPS[exponents.int() + 128].reciprocal()
        return [bool((part >= WIDE_POINT).any()) for (part,) in _together(points)]

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


def for_pairs(codec: Codec) -> tuple[Mod4Codec, int] | None:
    """Return the codec for pairs in ``codec`` and how many tensors follow as float32, or None if it
    is another codec.
    """
    tail = 0
    if isinstance(codec, BufferTailCodec):
        tail = codec.count
        codec = codec.codec
    return (codec, tail) if isinstance(codec, Mod4Codec) else None


def check_no_pair(codec: Codec) -> None:
    """Raise ValueError if ``codec`` is for pairs; called by all exchanges whose groups may be
    larger.
    """
    if for_pairs(codec) is not None:
        raise ValueError(
            f"{codec.name} is for pairs that read each other by their own weights, not for groups: "
            "choose another codec"
        )


def _count(shapes: Sequence[Shape]) -> int:
    return sum(blocks(math.prod(shape), BLOCK) for shape in shapes)


def _body_bytes(count: int) -> int:
    """Return the bytes of a payload of that many blocks, without what follows as float32."""
    return SEED_BYTES + BLOCK_BYTES * count


def _gap(count: int, tail: int) -> int:
    """Return the zeros after which floats may begin; none if no floats follow."""
    return -_body_bytes(count) % 4 if tail else 0


class Rows:
    """Tensors as blocks of float32 values on the CPU, which are copied only where a slab is not all
    of one such tensor.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = to_host([tensor.detach() for tensor in tensors])
        self._flat = [tensor.reshape(-1) for tensor in self._tensors]
        self.counts = [blocks(tensor.numel(), BLOCK) for tensor in self._flat]
        self._ends = list(itertools.accumulate(self.counts))
        self.sizes = torch.full((len(self),), float(BLOCK), device="cpu")
        """Values in each block, float32."""
        self.short = set[int]()
        """The slabs in which a block is not full."""
        for end, flat in zip(self._ends, self._flat, strict=True):
            if flat.numel() % BLOCK:
                self.sizes[end - 1] = flat.numel() % BLOCK
                self.short.add((end - 1) // SLAB)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def tensors(self) -> list[Tensor]:
        return [tensor.float() for tensor in self._tensors]

    @functools.cached_property
    def largest(self) -> Tensor:
        """The largest magnitude of each block."""
        largest = torch.empty(len(self), device="cpu")
        room = torch.empty(min(len(self), SLAB), BLOCK, device="cpu")
        for part, found in _together(self.slabs(), largest):
            torch.amax(torch.abs(part, out=room[: len(part)]), dim=1, out=found)
        return largest

    def slabs(self) -> Iterator[Tensor]:
        """Yield (blocks, 64) of a slab after the other, short blocks filled with zeros; some in
        memory that the next overwrites.
        """
        room = torch.empty(min(len(self), SLAB), BLOCK, device="cpu")
        for first in range(0, len(self), SLAB):
            size = (min(first + SLAB, len(self)) - first) * BLOCK
            place = bisect_right(self._ends, first)
            begin = (first - self._ends[place] + self.counts[place]) * BLOCK
            part = self._flat[place][begin : begin + size]
            if part.numel() == size and part.dtype == torch.float32:
                yield part.view(-1, BLOCK)
            else:
                filled = room.view(-1)[:size].zero_()
                self._fill(filled, place, begin)
                yield filled.view(-1, BLOCK)

    def _fill(self, slab: Tensor, place: int, begin: int) -> None:
        """Write values into a flat slab, from those of the tensor ``place`` at ``begin`` on."""
        at = 0
        while at < slab.numel():
            part = self._flat[place][begin : begin + slab.numel() - at]
            slab[at : at + part.numel()] = part
            at += blocks(part.numel(), BLOCK) * BLOCK
            place += 1
            begin = 0


def _together(*parts: Tensor | Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield from all at once; of tensors, which have a row for each block, a slab after the
    other.
    """
    slabs: list[Iterable[Any]] = []
    for part in parts:
        if isinstance(part, Tensor):
            slabs.append(torch.split(part, SLAB) if len(part) else ())
        else:
            slabs.append(part)
    return zip(*slabs, strict=True)


def _widen_to_tensors(expected: Tensor, own: Rows) -> None:
    """Make the distance of each block at least a part of its tensor's, in place."""
    parts = torch.split(expected, own.counts)
    for part, size in zip(parts, torch.split(own.sizes, own.counts), strict=True):
        square = (size * part.square()).sum() / size.sum().clamp(min=1)
        part.clamp_(min=NEAR_PART * math.sqrt(float(square)))


def _rms(rows: Rows) -> Tensor:
    """Return the root of the mean square of each block; zeros fill a short one up."""
    norms = torch.empty(len(rows), device="cpu")
    for part, found in _together(rows.slabs(), norms):
        torch.linalg.vector_norm(part, dim=1, out=found)
    return norms.div_(rows.sizes.sqrt())


def _exponents(values: Tensor, *, up: bool = True) -> Tensor:
    """Return e with 2^(e/4) >= value (``up``) or nearest to it, int8; UNKNOWN for 0."""
    quarters = values.log2().mul_(4)
    quarters = quarters.ceil_() if up else quarters.round_()
    quarters.clamp_(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    return quarters.masked_fill_(values == 0, UNKNOWN).to(torch.int8)


def _sigmas(exponents: Tensor) -> Tensor:
    """Return 2^(e/4)."""
    return SIGMAS[exponents.int() + 128]


def _known(exponents: Tensor) -> Tensor:
    """Return 2^(e/4), and 0 for UNKNOWN."""
    return _sigmas(exponents).masked_fill_(exponents == UNKNOWN, 0.0)


def _parts(payload: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of the exponents, the digests and the codes, (count, 32)."""
    body = payload[SEED_BYTES : _body_bytes(count)]
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


def _text(exponents: Tensor | None) -> str | None:
    if exponents is None:
        return None
    return base64.b64encode(exponents.numpy().tobytes()).decode()


def _read_text(text: str | None) -> Tensor | None:
    if text is None:
        return None
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.int8)
