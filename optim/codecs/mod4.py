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

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.optim.codecs.base import Codec, Shape
from shoal.optim.codecs.block_exponents import (
    LARGEST_EXPONENT,
    LARGEST_SIGMA,
    LEVELS,
    REACH_SIGMAS,
    exponents_from_text,
    exponents_of,
    exponents_text,
    known_sigmas,
    sigmas_of,
)
from shoal.optim.codecs.block_rows import Rows, rms_of
from shoal.optim.codecs.buffer_tail import BufferTailCodec
from shoal.optim.codecs.pair_message import (
    SEED_BYTES,
    PairMessage,
    Reading,
    block_count,
    body_bytes,
)
from shoal.optim.device import to_host

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
FINEST_STEP = 2.0**-20
"""The smallest step, in a block's largest value: z is exact in float32."""


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
        return body_bytes(block_count(shapes))

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
            way = torch.cat([rms_of(part) for part in rows])
            way *= self._usual_over_last(way, torch.cat([part.sizes for part in rows]))
            self._moved = exponents_of(way)

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
        sigma = sigmas_of(sent.exponents)
        widest = REFUSED_SIGMAS * sigma
        # The narrower of both ranges becomes wider; what the other cannot read does not widen ours.
        of_refused = torch.where(sigma <= read.expected, widest, sigma / MARGIN)
        seen = torch.where(read.kept, read.distance, of_refused)
        heard = torch.minimum(HEARD_PART * read.expected, widest)
        self._measured = exponents_of(torch.maximum(seen, heard), up=False)

        weights = sent.own.sizes * read.kept
        way = float((weights * known_sigmas(sent.moved).square()).sum(dtype=torch.float64))
        if way > 0:
            distance = float((weights * read.distance.square()).sum(dtype=torch.float64))
            self._rho = math.sqrt(distance / way)

    def _range(self, own: Rows) -> tuple[Tensor, Tensor]:
        """Return the exponents of the blocks, and those of rms(w - slow)."""
        if self._measured is not None and len(self._measured) != len(own):
            self._measured = None  # measured of other tensors: it says nothing about these
        moved = exponents_of(rms_of(own)) if self._moved is None else self._moved
        if len(moved) != len(own):  # several tensors a parameter
            moved = moved.repeat(len(own) // max(len(moved), 1))

        # n rounds without a partner are a random walk.
        apart = min(math.sqrt(1 + self._apart), MOST_APART)
        expected = known_sigmas(moved) * (self._rho * apart)
        if self._measured is not None:
            torch.maximum(expected, MARGIN * known_sigmas(self._measured), out=expected)
        _widen_to_tensors(expected, own)
        least = own.largest * (FINEST_STEP * LEVELS / (2 * REACH_SIGMAS))
        if not bool((least <= LARGEST_SIGMA).all()):
            raise ValueError(
                "a tensor to be sent holds NaN, infinity or values too large: lower the learning "
                "rate or clip gradients"
            )
        exponents = exponents_of(torch.maximum(expected, least))
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
            "measured": exponents_text(self._measured),
            "moved": exponents_text(self._moved if in_flight else None),
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
        measured = exponents_from_text(state_dict["measured"])
        moved = exponents_from_text(state_dict["moved"])
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


def _widen_to_tensors(expected: Tensor, own: Rows) -> None:
    """Make the distance of each block at least a part of its tensor's, in place."""
    parts = torch.split(expected, own.counts)
    for part, size in zip(parts, torch.split(own.sizes, own.counts), strict=True):
        square = (size * part.square()).sum() / size.sum().clamp(min=1)
        part.clamp_(min=NEAR_PART * math.sqrt(float(square)))
