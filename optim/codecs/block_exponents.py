"""Distances as exponents: 2^(e/4), in a byte, with the same bits on every machine.

    exponents_of(torch.tensor([1.0, 2.0]))       # [0, 4]
    sigmas_of(exponents)                         # the distances again, rounded up

What they are for: docs/internals.md, "Weights modulo a range".
"""

from __future__ import annotations

import base64
import math

import torch
from torch import Tensor

REACH_SIGMAS = 4.5
"""Half of a range (c): what is further away is read wrongly, so more would cost precision."""
LEVELS = 16
LARGEST_EXPONENT = 127
"""The largest e; the least is -127."""
UNKNOWN = -128
"""Stands for the exponent of a distance that is not known."""


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


def exponents_of(values: Tensor, *, up: bool = True) -> Tensor:
    """Return e with 2^(e/4) >= value (``up``) or nearest to it, int8; UNKNOWN for 0."""
    quarters = values.log2().mul_(4)
    quarters = quarters.ceil_() if up else quarters.round_()
    quarters.clamp_(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    return quarters.masked_fill_(values == 0, UNKNOWN).to(torch.int8)


def sigmas_of(exponents: Tensor) -> Tensor:
    """Return 2^(e/4)."""
    return SIGMAS[exponents.int() + 128]


def known_sigmas(exponents: Tensor) -> Tensor:
    """Return 2^(e/4), and 0 for UNKNOWN."""
    return sigmas_of(exponents).masked_fill_(exponents == UNKNOWN, 0.0)


def exponents_text(exponents: Tensor | None) -> str | None:
    if exponents is None:
        return None
    return base64.b64encode(exponents.numpy().tobytes()).decode()


def read_exponents(text: str | None) -> Tensor | None:
    if text is None:
        return None
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.int8)
