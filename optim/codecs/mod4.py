"""The codec for pairs: weights modulo a range in 4 bits a value, which the partner completes by its
own weights.

After Moniqua (2002.11787) and SwarmSGD's lattice coding: the weights of two peers lie near each
other, so the high part of a number need not be sent. Blocks of 64 consecutive values of one tensor,
whose last may be shorter, have a range each:

    sigma = 2^(e/4), the rms distance to the partner that the sender expects;
        D = 2 c sigma / 2^b,   b = 4, c = 4.5
    z = round(w / D + u);   code = z mod 2^b;   digest = sum r_i floor(z_i / 2^b) mod 256
    k = round((x / D + u - code) / 2^b);   w' = (code + 2^b k - u) D        with the receiver's own
                                           weights x, as it sent them

The dither u in [-1/2, 1/2) and the odd r follow from the payload's seed. Where |w - x| < c sigma
(1 - 2^-b), w' has the bits of the sender's lattice point (z - u) D. Elsewhere the digest differs
(but for 1 of 256), and the receiver refuses the block; so it does if w' is further away than twice
its own sigma, so no partner moves a peer by more than that expects. Both leave out what one
refuses:

    mean_i = w_i + s_j (w'_j - w'_i)        s_j: the partner's share in the mean, half of it between
                                            equals

so what one gains the other loses, to the last bit, and the own rounding never enters the own
weights.

The range is the larger of 1.1 times the distance measured last and rho rms(w - slow), where rho is
the measured distance over rms(w - slow) in the fragment's last exchange, 1.5 at first. It is at
least half of the tensor's, in the root mean square: where one peer alone has learnt, as in the rows
of rare tokens, the others know of no distance. D is at least 2^-20 of the largest value: z is exact
in float32.

* A refused block counts as 1.5 sigma if the partner expected no less, else as sigma: the narrower
  of both becomes wider, and what the other cannot read does not widen the own range. One in which
  the partner expected more counts as 0.7 of that, up to 1.5 sigma. Where one peer is far from all
  others the word spreads; else nobody would send it what it can read, and it would stay away for
  good.
* A contribution of which most blocks are refused shows nothing if that of the partner before was
  near: that peer is far from all, and would widen their ranges.
* n rounds without a partner make rms(w - slow) count sqrt(1 + n) times, at most 4: a random walk.

What is heard of others fades by 1.1 times 0.7, and nothing else makes a range wider: beyond 4 times
the true distance an exchange rounds more than it averages, so ranges that grow by themselves drive
the peers apart.

A payload is the seed (8 bytes), e of all blocks (1 byte each), the digests (1 byte each), and the
codes: 32 bytes a block, of which byte j has value j in its lower half and value j + 32 in its
higher one. Short blocks are filled up with zeros.
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

from shoal.optim.codecs.base import FLOAT32, BufferTailCodec, Codec, Shape, buffer, check_payload
from shoal.optim.codecs.quantized import blocks, pack, packed_bytes, unpack
from shoal.optim.device import to_host

BLOCK, HALF, BITS, LEVELS = 64, 32, 4, 16
REACH = 4.5
"""c: half of a range, in sigmas."""
GROWTH, FIRST, REFUSED, APART, WORD = 1.1, 1.5, 1.5, 4.0, 0.7
NEAR = 0.5
"""The narrowest range of a block, in those of its whole tensor, as root mean squares."""
FAR = 2.0
"""Own sigmas beyond which the partner's block is refused."""
MOST_REFUSED = 0.5
"""Of the blocks: beyond it a contribution is far as a whole."""
LARGEST, NONE = 127, -128
"""The largest e, and what stands for a distance that is not known; the least is -127."""
SEED = 8
WIDE = 2.0**13
"""z from which a digest's 64 products, of factors up to 255 and z / 2^b, could sum to more than
2^24.
"""
# blocks at a time, whose intermediate results stay in the cache; also the period of the dither
SLAB = 512


def _steps() -> Tensor:
    """Return D for each e from -128 to 127, by e + 128, with the same bits on every machine."""
    quarters = (1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429)
    steps = [math.ldexp(quarters[e % 4], e // 4) * 2 * REACH / LEVELS for e in range(-128, 128)]
    return torch.tensor(steps, dtype=torch.float32, device="cpu")


STEPS = _steps()
SIGMAS = STEPS * (LEVELS / (2 * REACH))


class Mod4Codec:
    """Codec of whole weights between two peers; ``post`` encodes, and what it returns reads the
    partner's payload.

    State: the measured distances, as exponents, and rho, so that a resumed run goes on with the
    same bits.
    """

    name, displacement = "mod4", False

    def __init__(self) -> None:
        self._measured: Tensor | None = None
        """Exponents of the distance measured last, int8, one a block."""
        self._moved: Tensor | None = None
        """Exponents of rms(w - slow) of the contribution to be sent, or in flight."""
        self._rho, self._apart, self._far = FIRST, 0, False
        self._seed = bytes(SEED)
        self.pending = False

    def nbytes(self, shapes: Sequence[Shape]) -> int:
        return SEED + (2 + HALF) * _count(shapes)

    @torch.no_grad()
    def expect(self, exchange: str, moved: Sequence[Tensor]) -> None:
        """Prepare ``post`` for an exchange, whose name gives the dither; ``moved``: w - slow, or
        slow - w, of each parameter.

        Without it the weights themselves are taken for it, which is a range far too wide.
        """
        self._seed = hashlib.sha256(f"shoal/mod4/1:{exchange}".encode()).digest()[:SEED]
        parts = [_rms(Rows([tensor])) for tensor in moved]
        self._moved = _exponents(torch.cat(parts)) if parts else None

    def encode(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.post(tensors).payload

    @torch.no_grad()
    def post(self, tensors: Sequence[Tensor], tail: int = 0) -> PairMessage:
        """Return the message of tensors of which the last ``tail`` travel as float32, and which
        must stay as they are.

        Its bytes are written when they are first asked for, in any thread. ValueError for NaN,
        infinity, or values above 2^50.
        """
        head = tensors[: len(tensors) - tail]
        shapes, own = [tuple(tensor.shape) for tensor in tensors], Rows(head)
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
        odd, self._far = read.far and not self._far and self._measured is not None, read.far
        if odd:
            return
        sigma = SIGMAS[sent.exponents.int() + 128]
        widest = REFUSED * sigma
        seen = torch.where(
            read.kept, read.distance, torch.where(sigma <= read.expected, widest, sigma / GROWTH)
        )
        self._measured = _exponents(
            torch.maximum(seen, torch.minimum(WORD * read.expected, widest)), up=False
        )
        weights = sent.own.sizes * read.kept
        moved = SIGMAS[sent.moved.int() + 128].masked_fill(sent.moved == NONE, 0.0)
        total = float((weights * moved.square()).sum(dtype=torch.float64))
        if total > 0:
            self._rho = math.sqrt(
                float((weights * read.distance.square()).sum(dtype=torch.float64)) / total
            )

    def _range(self, own: Rows) -> tuple[Tensor, Tensor]:
        """Return the exponents of the blocks, and those of rms(w - slow)."""
        if self._measured is not None and len(self._measured) != len(own):
            self._measured = (
                None  # other tensors than before: what was measured says nothing about them
            )
        moved = _exponents(_rms(own)) if self._moved is None else self._moved
        if len(moved) != len(own):  # several tensors a parameter
            moved = moved.repeat(len(own) // max(len(moved), 1))
        expected = _known(moved) * (self._rho * min(math.sqrt(1 + self._apart), APART))
        if self._measured is not None:
            torch.maximum(expected, GROWTH * _known(self._measured), out=expected)
        for part, size in zip(
            torch.split(expected, own.counts), torch.split(own.sizes, own.counts), strict=True
        ):
            part.clamp_(
                min=NEAR * math.sqrt(float((size * part.square()).sum() / size.sum().clamp(min=1)))
            )
        least = own.largest * (2.0**-20 * LEVELS / (2 * REACH))
        if not bool((least <= SIGMAS[-1]).all()):
            raise ValueError(
                "a tensor to be sent holds NaN, infinity or values too large: lower the learning "
                "rate or clip gradients"
            )
        return _exponents(torch.maximum(expected, least)).clamp(min=-LARGEST), moved

    # The outcome of a contribution (`Rejectable`, `Resendable`).

    @property
    def payload(self) -> Tensor | None:
        """None: what is in flight is encoded anew, with the same bits, from the saved state and the
        same tensors.
        """
        return None

    def accepted(self) -> None:
        self.pending, self._apart = False, 0

    def rejected(self, applied: Sequence[Tensor] = ()) -> None:
        """Note that it is in none: the next partner is further away."""
        self.pending, self._apart = False, self._apart + 1

    def state_dict(self, unsent: Sequence[Tensor] | None = None) -> dict[str, Any]:
        """Return the measured distances, what is needed to encode the contribution in flight again,
        and the codec's name.
        """
        kept = {
            "measured": self._measured,
            "moved": self._moved if self.pending and unsent is None else None,
        }
        texts = {name: None if found is None else _text(found) for name, found in kept.items()}
        return {
            "codec": self.name,
            **texts,
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
        measured, moved = (
            None if (text := state_dict[name]) is None else _read_text(text)
            for name in ("measured", "moved")
        )
        rho, apart, seed = (
            float(state_dict["rho"]),
            int(state_dict["apart"]),
            bytes.fromhex(state_dict["seed"]),
        )
        if not 0 <= rho < math.inf or apart < 0 or len(seed) != SEED:
            raise ValueError(
                "the saved state of mod4 has a range that no run measures: it was damaged"
            )
        self._measured, self._moved, self._rho, self._apart, self._seed = (
            measured,
            moved,
            rho,
            apart,
            seed,
        )
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
        return (
            SEED + (2 + HALF) * count + _gap(count, self.tail) + FLOAT32.nbytes(self._tail_shapes)
        )

    @functools.cached_property
    @torch.no_grad()
    def payload(self) -> Tensor:
        payload, count = buffer(self.nbytes), len(self.own)
        exponents, digests, codes = _parts(payload, count)
        payload[:SEED].numpy().data[:] = self.seed
        exponents.copy_(self.exponents.view(torch.uint8))
        dither, odd = _stream(self.seed, count)
        sums, spare = torch.empty(count, device="cpu"), torch.empty_like(dither)
        points, lower = (
            torch.empty_like(dither, dtype=torch.int16),
            torch.empty(len(dither), HALF, dtype=torch.int16, device="cpu"),
        )
        for z, wide, code, total in _together(
            self._points(dither), self._wide(self.exponents), codes, sums
        ):
            if wide:
                _modulo(z, LEVELS * 256, spare)
            whole, low = points[: len(z)].copy_(z), lower[: len(z)]
            torch.bitwise_and(whole[:, :HALF], LEVELS - 1, out=low)
            torch.mv(z.copy_(whole >> BITS), odd, out=total)
            code.copy_(low.bitwise_or_(whole[:, HALF:].bitwise_left_shift_(BITS)))
        digests.copy_(_digests(sums))
        at = SEED + (2 + HALF) * count
        if self.tail:
            payload[at : at + _gap(count, self.tail)] = 0
            payload[at + _gap(count, self.tail) :].copy_(FLOAT32.encode(self.rest))
        return payload

    @torch.no_grad()
    def read(self, payload: Tensor) -> Reading:
        """Read the partner's payload by the own values.

        ValueError unless it is one of these shapes.
        """
        payload, count = check_payload(payload, self.nbytes, "mod4"), len(self.own)
        exponents, digests, codes = _parts(payload, count)
        steps = exponents.view(torch.int8).int() + 128
        if bool((steps == 0).any()):
            raise ValueError("the payload has an exponent of -128, which none sends")
        dither, odd = _stream(bytes(payload[:SEED].tolist()), count)
        step = STEPS[steps].unsqueeze(1)
        scale, step = step.reciprocal().div_(LEVELS), step * LEVELS
        dither.div_(LEVELS)
        first, second = dither[:, :HALF], dither[:, HALF:]
        high, spare, halves = (
            torch.empty_like(dither),
            torch.empty_like(dither),
            torch.empty(2, len(dither), HALF, device="cpu"),
        )
        values = buffer(4 * BLOCK * count).view(torch.float32).view(count, BLOCK)
        sums, distance = torch.empty(count, device="cpu"), torch.empty(count, device="cpu")
        slabs = _together(
            self.own.slabs(),
            self._wide(exponents.view(torch.int8)),
            values,
            codes,
            scale,
            step,
            sums,
            distance,
        )
        for number, (own, wide, found, code, scaling, stepping, total, norm) in enumerate(slabs):
            k, (low, upper) = high[: len(own)], halves[:, : len(own)]
            torch.floor(low.copy_(code).mul_(1 / LEVELS), out=upper)
            torch.sub(
                first[: len(own)], low.sub_(upper), out=found[:, :HALF]
            )  # (u - code) / 2^b, exactly
            torch.sub(second[: len(own)], upper, alpha=1 / LEVELS, out=found[:, HALF:])
            torch.addcmul(found, own, scaling, out=k).round_()
            torch.sub(k, found, out=found).mul_(stepping)
            if wide:
                _modulo(k, 256, spare)
            torch.mv(k, odd, out=total)
            apart = torch.sub(found, own, out=k)
            if number in self.own.short:  # what fills short blocks up is read with its rounding
                span = slice(number * SLAB, number * SLAB + len(own))
                apart.masked_fill_(
                    torch.arange(BLOCK, device="cpu") >= self.own.sizes[span, None], 0
                )
            torch.linalg.vector_norm(apart, dim=1, out=norm)
        distance.div_(self.own.sizes.sqrt())
        kept = (_digests(sums) == digests).logical_and_(
            distance <= FAR * SIGMAS[self.exponents.int() + 128]
        )
        if not bool(kept.all()):
            for own, found, good in _together(self.own.slabs(), values, kept):
                found[~good] = own[~good]
        rest = FLOAT32.decode(
            payload[payload.numel() - FLOAT32.nbytes(self._tail_shapes) :].clone(),
            self._tail_shapes,
        )
        return Reading(values, kept, distance, SIGMAS[steps], rest)

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
        return [
            *self._cut(read.values),
            *(theirs - mine for theirs, mine in zip(read.rest, self.rest, strict=True)),
        ]

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
        scale, room = (
            STEPS[self.exponents.int() + 128].reciprocal().unsqueeze(1),
            torch.empty_like(dither),
        )
        for own, scaling in _together(self.own.slabs(), scale):
            yield torch.addcmul(dither[: len(own)], own, scaling, out=room[: len(own)]).round_()

    def _wide(self, exponents: Tensor) -> list[bool]:
        """Return for each slab whether the sum of a digest needs its numbers modulo 256, for
        float32 to hold it.
        """
        points = self.own.largest * STEPS[exponents.int() + 128].reciprocal()
        return [bool((part >= WIDE).any()) for (part,) in _together(points)]

    def _cut(self, rows: Tensor) -> list[Tensor]:
        """Return the tensors of the head from their blocks; views."""
        flat, at, tensors = rows.view(-1), 0, []
        for shape in self.shapes[: len(self.shapes) - self.tail]:
            tensors.append(flat[at : at + math.prod(shape)].view(shape))
            at += blocks(math.prod(shape), BLOCK) * BLOCK
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
        return self.refused_part > MOST_REFUSED

    @property
    def bits(self) -> bytes:
        """Which blocks are refused, one bit each, the first in the lowest bit of the first byte;
        empty if none is.
        """
        return (
            b""
            if bool(self.kept.all())
            else pack((~self.kept).view(torch.uint8), 1).numpy().tobytes()
        )


def for_pairs(codec: Codec) -> tuple[Mod4Codec, int] | None:
    """Return the codec for pairs in ``codec`` and how many tensors follow as float32, or None if it
    is another codec.
    """
    head, tail = (codec.codec, codec.count) if isinstance(codec, BufferTailCodec) else (codec, 0)
    return (head, tail) if isinstance(head, Mod4Codec) else None


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


def _gap(count: int, tail: int) -> int:
    return -(SEED + (2 + HALF) * count) % 4 if tail else 0


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
        largest, room = (
            torch.empty(len(self), device="cpu"),
            torch.empty(min(len(self), SLAB), BLOCK, device="cpu"),
        )
        for part, found in _together(self.slabs(), largest):
            torch.amax(torch.abs(part, out=room[: len(part)]), dim=1, out=found)
        return largest

    def slabs(self) -> Iterator[Tensor]:
        """Yield (blocks, 64) of a slab after the other, short blocks filled with zeros; some in
        memory that the next overwrites.
        """
        room = torch.empty(min(len(self), SLAB), BLOCK, device="cpu")
        for first in range(0, len(self), SLAB):
            size, place = (
                (min(first + SLAB, len(self)) - first) * BLOCK,
                bisect_right(self._ends, first),
            )
            begin = (first - self._ends[place] + self.counts[place]) * BLOCK
            part = self._flat[place][begin : begin + size]
            if part.numel() == size and part.dtype == torch.float32:
                yield part.view(-1, BLOCK)
                continue
            filled, at = room.view(-1)[:size].zero_(), 0
            while at < size:
                part = self._flat[place][begin : begin + size - at]
                filled[at : at + part.numel()] = part
                at, place, begin = at + blocks(part.numel(), BLOCK) * BLOCK, place + 1, 0
            yield filled.view(-1, BLOCK)


def _together(*parts: Tensor | Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield from all at once; of tensors, which have a row for each block, a slab after the
    other.
    """
    slabs = (
        (torch.split(part, SLAB) if len(part) else ()) if isinstance(part, Tensor) else part
        for part in parts
    )
    return zip(*slabs, strict=True)


def _rms(rows: Rows) -> Tensor:
    """Return the root of the mean square of each block; zeros fill a short one up."""
    norms = torch.empty(len(rows), device="cpu")
    for part, found in _together(rows.slabs(), norms):
        torch.linalg.vector_norm(part, dim=1, out=found)
    return norms.div_(rows.sizes.sqrt())


def _exponents(values: Tensor, *, up: bool = True) -> Tensor:
    """Return e with 2^(e/4) >= value (``up``) or nearest to it, int8; NONE for 0."""
    quarters = values.log2().mul_(4)
    quarters = quarters.ceil_() if up else quarters.round_()
    return quarters.clamp_(-LARGEST, LARGEST).masked_fill_(values == 0, NONE).to(torch.int8)


def _known(exponents: Tensor) -> Tensor:
    """Return 2^(e/4), and 0 for NONE."""
    return SIGMAS[exponents.int() + 128].masked_fill_(exponents == NONE, 0.0)


def _parts(payload: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of the exponents, the digests and the codes, (count, 32)."""
    exponents, digests, codes = torch.split(
        payload[SEED : SEED + (2 + HALF) * count], [count, count, HALF * count]
    )
    return exponents, digests, codes.view(count, HALF)


def _stream(seed: bytes, count: int) -> tuple[Tensor, Tensor]:
    """Return the dither of a slab's blocks, in steps of 2^-16, and the odd factors of a digest, up
    to 255; the same everywhere.

    Integer arithmetic alone, so all machines and all versions of torch get the same. Each slab has
    the same dither.
    """
    low, high = (int.from_bytes(seed[at : at + 4], "little") for at in (0, 4))
    x = torch.arange((min(count, SLAB) + 1) * BLOCK, dtype=torch.int64, device="cpu")
    x = mixed(((x ^ low) * 0x2C1B3C6D + high) & 0xFFFFFFFF)
    odd = (x[:BLOCK] & 254 | 1).float()
    return ((x[BLOCK:] >> 16).float() * 2.0**-16 - 0.5).view(-1, BLOCK), odd


def mixed(numbers: Tensor) -> Tensor:
    """Scramble 32-bit numbers (held in int64) by a bijection: two rounds of xorshift and
    multiply.
    """
    for factor in (0x7FEB352D, 0x68E31DA5):  # below 2^31, so that no product leaves int64
        numbers = ((numbers ^ (numbers >> 16)) * factor) & 0xFFFFFFFF
    return numbers ^ (numbers >> 15)


def _modulo(values: Tensor, number: int, room: Tensor) -> None:
    """Take whole numbers modulo a power of two, in place."""
    values.sub_(torch.mul(values, 1 / number, out=room[: len(values)]).floor_(), alpha=number)


def _digests(sums: Tensor) -> Tensor:
    """Return sum r_i high_i mod 256 of each block, uint8."""
    return sums.to(torch.int32).to(torch.uint8)


def _text(exponents: Tensor) -> str:
    return base64.b64encode(exponents.numpy().tobytes()).decode()


def _read_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.int8)
