"""Proofs of which model saw which tokens, from the last hidden state (TOPLOC, 2501.16007), in plain
torch.

A window is 32 tokens. Of its 32 x width values, rounded to bfloat16, the 128 of largest magnitude
are kept with their places, as one polynomial (`polynomial`): 2 + 2 * 128 = 258 bytes. A last,
shorter window keeps 4 values a token. The verifier computes the states itself, in one call of the
model, takes its own largest values, and looks each of them up in the polynomial.

The bytes of a window are TOPLOC's. What is measured is not: an error is counted in units of the
last place (ulp) of bfloat16, so that a value beside a power of two is near its neighbour on the
other side, and the paper's fixed thresholds, which pass int8 weights on a small model, are replaced
by what honest peers show (``verification.calibration``).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from shoal.verification.fingerprints.fingerprint import Evidence, Feature, ProofError

# Points as a polynomial modulo a prime, which can be looked up without listing their x (TOPLOC,
# 2501.16007, section 4).
#
# K points (x, y) are the values of one polynomial of degree K - 1 over the integers modulo 65,497,
# so K coefficients of 16 bits hold them all, without the x. A verifier that knows an x evaluates
# the polynomial there and gets its y; at any other x it gets noise.
#
# The interpolation is Lagrange's. With M(x) = prod (x - x_i) and w_i = y_i / M'(x_i), it is sum_i
# w_i M(x) / (x - x_i), and Horner's rule at x_i divides M by (x - x_i) and ends in M'(x_i).
# Everything is float64, exactly: factors are below 2^16, and sums of at most 1,024 of their
# products below 2^42.

PRIME = 65497
SMALLEST_MODULUS = 2**15
MOST_POINTS = 1024
Floats = npt.NDArray[np.float64]
"""Here in numpy: the arrays are small, and each of its calls costs a third of one of torch's."""


def injective_modulus(indices: Tensor) -> int:
    """Return the largest number up to ``PRIME`` modulo which the ``indices`` (K,) int64 are all
    different.

    Raises ``ValueError`` if there is none above 32,768; with 128 of 262,144 places it is the first
    or second nearly always.
    """
    for modulus in range(PRIME, SMALLEST_MODULUS, -1):
        if len(set((indices % modulus).tolist())) == len(indices):
            return modulus
    raise ValueError("no modulus keeps the indices apart: are there duplicates among them?")


def interpolate(x: Tensor, y: Tensor) -> Tensor:
    """Return the coefficients (W, K) int64, constant first, of polynomials through ``x``, ``y`` (W,
    K) int64 in [0, ``PRIME``).

    All x of one row must differ. Raises ``ValueError`` on other shapes, values out of range, or
    equal x.
    """
    if x.shape != y.shape or x.dim() != 2 or not 0 < x.shape[1] <= MOST_POINTS:
        raise ValueError(
            f"x and y must be equally many rows of 1 to {MOST_POINTS} points, not {tuple(x.shape)} "
            f"and {tuple(y.shape)}"
        )
    _check_range(x, "x")
    _check_range(y, "y")
    places, count = _floats(x), x.shape[1]
    master = np.zeros((len(places), count + 1))  # highest first
    master[:, 0] = 1
    for root in range(count):
        master[:, 1 : root + 2] = _reduced(
            master[:, 1 : root + 2] + (PRIME - places[:, root : root + 1]) * master[:, : root + 1]
        )
    quotients, slope = (
        np.ones((count, *places.shape)),
        np.ones_like(places),
    )  # (power from the highest, W, root); M' at each root
    for power in range(1, count):
        quotients[power] = _reduced(master[:, power : power + 1] + places * quotients[power - 1])
        slope = _reduced(slope * places + quotients[power])
    if not slope.all():
        raise ValueError("two points of one polynomial have the same x")
    inverse = np.array([pow(int(value), -1, PRIME) for value in slope.flat]).reshape(slope.shape)
    found = np.einsum("wi,jwi->wj", _reduced(_floats(y) * inverse), quotients)
    return torch.from_numpy(_reduced(found)[:, ::-1].astype(np.int64))


def evaluate(coefficients: Tensor, x: Tensor) -> Tensor:
    """Return the values (W, P) int64 of the polynomials ``coefficients`` (W, K) at ``x`` (W, P)
    int64, both in [0, ``PRIME``).
    """
    _check_range(coefficients, "coefficients")
    _check_range(x, "x")
    places, found = _floats(x), np.zeros(tuple(x.shape))
    for column in _floats(coefficients).T[::-1]:
        found = _reduced(found * places + column[:, None])
    return torch.from_numpy(found.astype(np.int64))


def _check_range(values: Tensor, name: str) -> None:
    if values.is_floating_point() or (
        values.numel() and not 0 <= int(values.min()) <= int(values.max()) < PRIME
    ):
        raise ValueError(f"{name} must be whole numbers from 0 to {PRIME - 1}")


def _floats(values: Tensor) -> Floats:
    return values.numpy(force=True).astype(np.float64)


def _reduced(values: Floats) -> Floats:
    """Reduce ``values`` modulo the prime, in place, for whole numbers in [0, 2^43): faster than the
    remainder.

    A quotient is rounded at 2^-26 of a unit there, and is at least 1 / ``PRIME`` below the next
    whole number: its floor is right.
    """
    quotients = values / PRIME
    np.floor(quotients, out=quotients)
    quotients *= PRIME
    values -= quotients
    return values


# Recorder of the last hidden state of any torch module: a hook on the input of the layer that makes
# the logits.


def output_head(model: nn.Module) -> nn.Module:
    """Return the layer that turns the last hidden state into logits: what
    ``model.get_output_embeddings()`` returns, as with Hugging Face's models, or else the
    ``nn.Linear`` that was registered last. Raises ``ValueError`` if there is none.
    """
    getter = getattr(model, "get_output_embeddings", None)
    found = getter() if callable(getter) else None
    if isinstance(found, nn.Module):
        return found
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ValueError(
            "the model has no linear layer: let its get_output_embeddings() return the layer that "
            "makes the logits"
        )
    return linear[-1]


class LastHidden:
    """Recorder of the last hidden state while it is open: ``with LastHidden(model) as hidden:
    model(tokens)``.

    With ``every=False`` only the last position of each call is kept. That is what a generation
    needs that makes one token a call, with a KV cache or without: state i is the one that token i
    was drawn from. With ``every=True`` all positions of all calls are kept, for the one call of a
    prefill. States are kept in their dtype, on their device, outside the graph.

    ``dtype`` is the coarsest that the calls computed in, as seen at the head: of its weights, its
    input, and autocast around it.
    """

    def __init__(self, model: nn.Module, every: bool = False) -> None:
        self._head = output_head(model)
        self._every = every
        self._kept: list[Tensor] = []
        self._hook: torch.utils.hooks.RemovableHandle | None = None
        self._dtypes = {each.dtype for each in self._head.parameters() if each.is_floating_point()}

    def __enter__(self) -> LastHidden:
        self._hook = self._head.register_forward_pre_hook(self._keep)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _keep(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        state = inputs[0].detach() if inputs and isinstance(inputs[0], Tensor) else None
        if state is None or state.dim() not in (2, 3):
            raise ValueError(
                "the layer that makes the logits was not given states of shape (batch, positions, "
                "width)"
            )
        state = (
            state.unsqueeze(1) if state.dim() == 2 else state
        )  # some models pass the last position alone
        self._dtypes.add(state.dtype)
        kind = state.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            self._dtypes.add(torch.get_autocast_dtype(kind))
        # A view of the last position would keep the whole prompt's states alive.
        self._kept.append(state.clone() if self._every else state[:, -1:].clone())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the computation. Raises ``ValueError`` if no call was recorded."""
        if not self._kept:
            raise ValueError("the model was not called while its hidden states were recorded")
        return max(self._dtypes, key=lambda dtype: (torch.finfo(dtype).eps, str(dtype)))

    def states(self) -> Tensor:
        """Return the states (batch, positions, width) of all calls so far.

        Raises ``ValueError`` if there were none.
        """
        if not self._kept:
            raise ValueError("the model was not called while its hidden states were recorded")
        return torch.cat(self._kept, dim=1)


WINDOW, TOP = 32, 128
MOST_TOKENS, MOST_WIDTH = 1 << 17, 1 << 16
BATCH = 16  # windows at once: 2 MB of quotients, which stay in the cache
# ulps between a value and its double: a place whose error is more than that is not on the
# polynomial
OCTAVE = 128


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
        self.window, self.top = window, top

    def make(self, states: Tensor) -> bytes:
        """Return a proof of 8.06 bytes a token.

        Raises ``ValueError`` if ``states`` are not as above.
        """
        return b"".join(
            encode(*largest(part, top)).numpy().tobytes()
            for group, top in self._windows(states)
            for part in torch.split(group, BATCH)
        )

    def proof_bytes(self, tokens: int, width: int) -> int:
        """Return the only length that a proof of that many tokens can have."""
        whole, rest = divmod(tokens, self.window)
        return whole * (2 + 2 * self._top(self.window, width)) + (
            2 + 2 * self._top(rest, width) if rest else 0
        )

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
        rows = [
            row
            for theirs, own, places in pairs
            for row in _measure(theirs, own, places % width, width).tolist()
        ]
        sizes = [own.shape[1] / whole for _, own, _ in pairs for _ in own]
        return Evidence(self.features, tuple(map(tuple, rows)), tuple(sizes))

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
        found, at = [], 0
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
            groups.append(
                (rounded[:whole].reshape(whole // self.window, -1), self._top(self.window, width))
            )
        if tokens > whole:
            groups.append((rounded[whole:].reshape(1, -1), self._top(tokens - whole, width)))
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
    moduli = torch.tensor(
        [injective_modulus(row) for row in places], dtype=torch.int64, device="cpu"
    ).unsqueeze(1)
    numbers = torch.cat((moduli, interpolate(places % moduli, bits)), dim=1)
    return torch.from_numpy(numbers.numpy().astype(">u2").view(np.uint8))


def decode(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Decode moduli (W,) and coefficients (W, K), int64, from bytes (W, 2 + 2K) uint8.

    ``ProofError`` if one is out of range.
    """
    pairs = rows.long().view(len(rows), -1, 2)
    numbers = pairs[:, :, 0] << 8 | pairs[:, :, 1]
    moduli, coefficients = numbers[:, 0], numbers[:, 1:]
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
    sums = torch.zeros((len(own), width), dtype=torch.float64, device="cpu").scatter_add_(
        1, channels, error
    )
    many = torch.zeros_like(sums).scatter_add_(1, channels, near.double())
    # Of n independent errors of variance s the squared sum is n s: what is over that is consistent.
    # n = 1 tells nothing.
    squares = torch.zeros_like(sums).scatter_add_(1, channels, error.square())
    shared = many > 1
    excess = torch.where(shared, (sums.square() - squares) / (many - 1).clamp_min(1), 0.0).sum(
        dim=1
    )
    channel = (excess / torch.where(shared, many, 0.0).sum(dim=1).clamp_min(1)).clamp_min(0).sqrt()
    return torch.stack((missing, error.abs().sum(dim=1) / count, channel), dim=1)
