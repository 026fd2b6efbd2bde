"""Sigma of each block, the rms distance of its values to the partner's, as an exponent in a byte:
2^(e/4).

    exponents_of(torch.tensor([1.0, 2.0]))       # [0, 4]
    sigmas_of(exponents)                         # the distances again, or up to 19 % more
    steps_of(exponents)                          # the step at which such a block is quantised

The sender states the exponents, and every machine decodes them to the same bits. What they are for:
docs/internals.md, "Weights modulo a range". Everything here is part of the codec's format.
"""

from __future__ import annotations

import base64
import math

import torch
from torch import Tensor

REACH_SIGMAS = 4.5
"""Half of a range, in sigmas (c in internals.md): a value that is further away wraps around and is
refused, and a wider range makes the step coarser.
"""
LEVELS = 16
"""Codes in a range, of 4 bits; a power of two."""
LARGEST_EXPONENT = 127
"""The largest e; the least is -127."""
UNKNOWN = -128
"""In place of an exponent: the distance is 0, or none was measured yet."""


def _steps() -> Tensor:
    """Return the step (D) of each exponent e, at the index e + 128; UNKNOWN's means nothing."""
    # 2^(0/4) to 2^(3/4), written out: a power may differ in its last bit between machines.
    quarters = (1.0, 1.189207115002721, 1.4142135623730951, 1.681792830507429)
    steps = []
    for e in range(-128, 128):
        sigma = math.ldexp(quarters[e % 4], e // 4)
        steps.append(sigma * 2 * REACH_SIGMAS / LEVELS)
    return torch.tensor(steps, dtype=torch.float32, device="cpu")


_STEPS = _steps()
_SIGMAS = _STEPS * (LEVELS / (2 * REACH_SIGMAS))
LARGEST_SIGMA = float(_SIGMAS[-1])


def exponents_of(values: Tensor, *, up: bool = True) -> Tensor:
    """Return e, int8, of finite ``values`` of at least 0: the least with 2^(e/4) >= value, or, if
    not ``up``, the nearest in log2; within -127 to 127, and UNKNOWN for 0.
    """
    exponents = values.log2().mul_(4)
    exponents = exponents.ceil_() if up else exponents.round_()
    exponents.clamp_(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    return exponents.masked_fill_(values == 0, UNKNOWN).to(torch.int8)


def steps_of(exponents: Tensor) -> Tensor:
    """Return the quantisation step of each exponent, float32; none may be UNKNOWN."""
    return _STEPS[exponents.int() + 128]


def sigmas_of(exponents: Tensor) -> Tensor:
    """Return 2^(e/4), float32; none may be UNKNOWN."""
    return _SIGMAS[exponents.int() + 128]


def known_sigmas(exponents: Tensor) -> Tensor:
    """Return 2^(e/4), and 0 for UNKNOWN."""
    return sigmas_of(exponents).masked_fill_(exponents == UNKNOWN, 0.0)


def exponents_text(exponents: Tensor | None) -> str | None:
    """Return the exponents, on the CPU, as base64 for a state dict."""
    if exponents is None:
        return None
    return base64.b64encode(exponents.numpy().tobytes()).decode()


def exponents_from_text(text: str | None) -> Tensor | None:
    """Return the exponents that `exponents_text` wrote, as one row; the caller checks how many."""
    if text is None:
        return None
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.int8)
