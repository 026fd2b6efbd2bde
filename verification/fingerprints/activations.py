"""Proofs of which model saw which tokens, from the last hidden state (TOPLOC, 2501.16007), in plain
torch.

    proof = ActivationProof().make(states)             # 8.06 bytes a token
    evidence = ActivationProof().compare(proof, own_states)

A window is 32 tokens. Of its 32 x width values, rounded to bfloat16, the 128 of largest magnitude
are kept with their places, as one polynomial: 2 + 2 * 128 = 258 bytes. A last, shorter window keeps
4 values a token. The verifier computes the states itself, takes its own largest values, and looks
each of them up in the polynomial. What is TOPLOC's and what is not: docs/internals.md,
"Fingerprints".
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shoal.verification.fingerprints.fingerprint import Evidence, Feature, ProofError
from shoal.verification.fingerprints.polynomial import (
    MOST_POINTS,
    PRIME,
    SMALLEST_MODULUS,
    evaluate,
    injective_modulus,
    interpolate,
)

WINDOW = 32
"""Tokens of a window."""
TOP = 128
"""Values that are kept of a window: 4 a token."""
MOST_TOKENS = 1 << 17
"""Tokens of a proof, at most."""
MOST_WIDTH = 1 << 16
"""Width of hidden states, at most."""
BATCH = 16
"""Windows at once: 2 MB of quotients, which stay in the cache."""
OCTAVE = 128
"""Ulps between a value and its double: a place whose error is more than that is not on the
polynomial.
"""


class ActivationProof:
    """Fingerprint of hidden states (tokens, width), floating, finite; at most 131,072 tokens and a
    width of 65,536.

    Its features, over a window's points: the share that is not on the polynomial at all; the mean
    error of the others, in ulp; and their error per channel, in ulp: the root mean square, over
    points, of the mean signed error of the point's channel. Rounding errs to either side and
    averages out there, other weights do not.
    """

    name = "activations"
    features = (
        Feature("share of values that are missing", 0.002),
        Feature("error of values (ulp)", 0.02),
        Feature("error of channels (ulp)", 0.02),
    )

    def __init__(self, window: int = WINDOW, top: int = TOP) -> None:
        if not 1 <= window <= 4096 or not window <= top <= MOST_POINTS or top % window:
            raise ValueError(
                f"top must be a multiple of the window, and at most {MOST_POINTS}; not {top} and "
                f"{window}"
            )
        self.window = window
        self.top = top

    def make(self, states: Tensor) -> bytes:
        """Return a proof of 8.06 bytes a token.

        Raises ``ValueError`` if ``states`` are not as above.
        """
        proof = bytearray()
        for group, top in self._windows(states):
            for part in torch.split(group, BATCH):
                places, bits = largest(part, top)
                proof += encode(places, bits).numpy().tobytes()
        return bytes(proof)

    def proof_bytes(self, tokens: int, width: int) -> int:
        """Return the only length that a proof of that many tokens can have."""
        whole, rest = divmod(tokens, self.window)
        size = whole * (2 + 2 * self._top(self.window, width))
        if rest:
            size += 2 + 2 * self._top(rest, width)
        return size

    def compare(self, proof: bytes, states: Tensor) -> Evidence:
        """Measure how far ``proof`` is from the own ``states``.

        Raises ``ValueError`` only if those are not as above.
        """
        try:
            pairs = self._pairs(proof, states)
        except ProofError as error:
            return Evidence(self.features, fault=str(error))
        width = states.shape[1]
        whole = self._top(self.window, width)
        rows: list[tuple[float, ...]] = []
        sizes: list[float] = []
        for theirs, own, places in pairs:
            rows += map(tuple, _measure(theirs, own, places % width, width).tolist())
            sizes += [own.shape[1] / whole] * len(own)
        return Evidence(self.features, tuple(rows), tuple(sizes))

    def _pairs(self, proof: bytes, states: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return bits in the proof, own bits and places, (W, K) each, of some windows at a time."""
        groups = self._windows(states)
        tokens, width = states.shape
        expected = self.proof_bytes(tokens, width)
        if len(proof) != expected:
            raise ProofError(
                f"the proof has {len(proof)} bytes, but one of {tokens} tokens has {expected}"
            )
        data = torch.frombuffer(bytearray(proof), dtype=torch.uint8)
        found = []
        at = 0
        for group, top in groups:
            for part in torch.split(group, BATCH):
                size = len(part) * (2 + 2 * top)
                moduli, coefficients = decode(data[at : at + size].view(len(part), 2 + 2 * top))
                at += size
                places, own = largest(part, top)
                found.append((evaluate(coefficients, places % moduli.unsqueeze(1)), own, places))
        return found

    def _top(self, tokens: int, width: int) -> int:
        return min(self.top // self.window, width) * tokens

    def _windows(self, states: Tensor) -> list[tuple[Tensor, int]]:
        """Return the whole windows and then the rest, as rows (W, values) bfloat16, each with how
        many values a row keeps.
        """
        if states.dim() != 2 or not states.is_floating_point():
            raise ValueError("hidden states must be floating numbers of shape (tokens, width)")
        tokens, width = states.shape
        if not 1 <= tokens <= MOST_TOKENS or not 1 <= width <= MOST_WIDTH:
            raise ValueError(
                f"hidden states must have 1 to {MOST_TOKENS} tokens and a width of 1 to "
                f"{MOST_WIDTH}"
            )
        rounded = states.detach().to(torch.bfloat16)
        if not bool(torch.isfinite(rounded).all()):
            raise ValueError(
                "the hidden states are not all finite: the model computes nonsense for these tokens"
            )
        whole = tokens - tokens % self.window
        groups = []
        if whole:
            rows = rounded[:whole].reshape(whole // self.window, -1)
            groups.append((rows, self._top(self.window, width)))
        if tokens > whole:
            row = rounded[whole:].reshape(1, -1)
            groups.append((row, self._top(tokens - whole, width)))
        return groups


def largest(rows: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return places and bits, (W, top) int64 on the CPU, of the values of largest magnitude in
    ``rows`` (W, n) bfloat16.

    Of equal magnitudes, common with 8 bits, the first places count, so that every device chooses
    the same.
    """
    bits = rows.contiguous().view(torch.int16).long() & 0xFFFF
    count = rows.shape[1]
    # One key for both: magnitude first, then the place from the end.
    key = (bits & 0x7FFF) * count + torch.arange(count - 1, -1, -1, device=rows.device)
    places = torch.topk(key, top, dim=1).indices
    return places.cpu(), bits.gather(1, places).cpu()


def encode(places: Tensor, bits: Tensor) -> Tensor:
    """Encode windows as bytes (W, 2 + 2K) uint8: the modulus, then the coefficients, the high byte
    of each first.
    """
    chosen = [injective_modulus(row) for row in places]
    moduli = torch.tensor(chosen, dtype=torch.int64, device="cpu").unsqueeze(1)
    numbers = torch.cat((moduli, interpolate(places % moduli, bits)), dim=1)
    return torch.from_numpy(numbers.numpy().astype(">u2").view(np.uint8))


def decode(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Decode moduli (W,) and coefficients (W, K), int64, from bytes (W, 2 + 2K) uint8.

    ``ProofError`` if one is out of range.
    """
    pairs = rows.long().view(len(rows), -1, 2)
    numbers = pairs[:, :, 0] << 8 | pairs[:, :, 1]
    moduli = numbers[:, 0]
    coefficients = numbers[:, 1:]
    if bool(((moduli <= SMALLEST_MODULUS) | (moduli > PRIME)).any()):
        raise ProofError("the proof has a window whose modulus is out of range")
    if bool((coefficients >= PRIME).any()):
        raise ProofError("the proof has a coefficient that is out of range")
    return moduli, coefficients


def _ordered(bits: Tensor) -> Tensor:
    """Map the bits of a bfloat16 to a number such that neighbours differ by one, and both zeros are
    0.
    """
    magnitude = bits & 0x7FFF
    return torch.where(bits >= 0x8000, -magnitude, magnitude)


def _measure(theirs: Tensor, own: Tensor, channels: Tensor, width: int) -> Tensor:
    """Compute the features (W, 3) float64 from bits and channels (W, K)."""
    # An error away from zero is positive, so that a channel's errors have one sign when its values
    # change theirs.
    error = (_ordered(theirs) - _ordered(own)).double() * torch.where(own >= 0x8000, -1.0, 1.0)
    near = error.abs() <= OCTAVE
    missing = 1 - near.double().mean(dim=1)
    error = torch.where(near, error, 0.0)
    count = near.double().sum(dim=1).clamp_min(1)
    sums = torch.zeros((len(own), width), dtype=torch.float64, device="cpu")
    sums.scatter_add_(1, channels, error)
    many = torch.zeros_like(sums).scatter_add_(1, channels, near.double())
    # Of n independent errors of variance s the squared sum is n s: what is over that is consistent.
    # n = 1 tells nothing.
    squares = torch.zeros_like(sums).scatter_add_(1, channels, error.square())
    shared = many > 1
    consistent = (sums.square() - squares) / (many - 1).clamp_min(1)
    excess = torch.where(shared, consistent, 0.0).sum(dim=1)
    points = torch.where(shared, many, 0.0).sum(dim=1).clamp_min(1)
    channel = (excess / points).clamp_min(0).sqrt()
    return torch.stack((missing, error.abs().sum(dim=1) / count, channel), dim=1)
