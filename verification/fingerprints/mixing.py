"""Public hash from (key, number) to 64 mixed bits, in int64 tensors, the same on all machines.

It need not keep a secret, as its key has none: SHA-256 makes the key, and the finaliser of SplitMix64, twice, spreads numbers.
"""

from __future__ import annotations

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15


def signed(word: int) -> int:
    """Return 64 bits as torch's int64 holds them."""
    return word - (1 << 64) if word >= 1 << 63 else word


def mix(words: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64 to int64; products wrap around, and shifts do not extend the sign."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> shift & (1 << 64 - shift) - 1)) * signed(factor)
    return words ^ (words >> 31 & (1 << 33) - 1)
