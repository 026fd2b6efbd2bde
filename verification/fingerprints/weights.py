"""Locality-sensitive fingerprints of a change of weights: a random projection of a pseudo-gradient (verification.md, section 6).

A count sketch (Charikar, Chen, Farach-Colton 2002): value i is added with a random sign to one of ``dims`` sums, both from a public
seed. It is linear, and inner products of sketches are those of the vectors up to a share of about 1 / sqrt(dims) (feature hashing,
Weinberger et al. 2009, lemma 2), so two changes that are near have near sketches. It needs one pass and no matrix.

Soundness: a prover that knows the seed can make other weights with the same sketch: ``dims`` equations, millions of unknowns. So
the seed must follow from the weights that it is to judge, as in `shoal.node.verify.training`: it hashes, among others, the hash of
the weights after. A fake then fits only if its own hash gives the projection in which it fits. And a sketch alone does not show
which weights it is of: a prover may train rightly, publish that sketch, and go on from other weights. Whoever has the weights (an
auditor that fetches them, a partner in an exchange) must make the sketch again and compare the bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.verification.fingerprints.fingerprint import Evidence, Feature, ProofError
from shoal.verification.fingerprints.mixing import numbers, words

DIMS, MOST_DIMS = 256, 1 << 14
MOST_SEED = 1 << 63
PART = 1 << 18  # values at once: 2 MB of mixed words, which stay in the cache


class WeightProjection:
    """Fingerprint of a pseudo-gradient: tensors of any shapes and floating dtypes, taken as one float32 vector, finite and not 0.

    The proof is its norm and its sketch, 4 * (1 + dims) bytes of little-endian float32: the same bits on every machine for the same
    values, since each sum is taken in float64 and in order. ``seed``: 0 <= seed < 2**63, public. ``dims``: a power of two.
    """

    name = "weights"
    features = (
        Feature("1 - cosine of the changes of weights", 1e-8),
        Feature("difference of the changes' norms (log)", 1e-5),
    )

    def __init__(self, seed: int, dims: int = DIMS) -> None:
        if not 0 <= seed < MOST_SEED or not 16 <= dims <= MOST_DIMS or dims & (dims - 1):
            raise ValueError(f"dims must be a power of two from 16 to {MOST_DIMS}, and the seed below 2**63; not {dims} and {seed}")
        self.dims = dims
        self._key = b"shoal projection 1\0" + struct.pack(">qI", seed, dims)
        self._format = struct.Struct(f"<{1 + dims}f")

    @property
    def proof_bytes(self) -> int:
        """The only length that a proof can have."""
        return self._format.size

    def make(self, output: Sequence[Tensor]) -> bytes:
        """Return the proof. Raises ``ValueError`` if ``output`` is not finite, or is 0 or beyond what float32 can hold."""
        sums, squares, count = (
            torch.zeros(self.dims, dtype=torch.float64, device="cpu"),
            torch.zeros(self.dims, dtype=torch.float64, device="cpu"),
            0,
        )
        for part in _parts(output):
            mixed = words(self._key, numbers(count, len(part)))
            places, values = mixed & self.dims - 1, part.double()
            # bincount adds one value after the other; other sums are taken in an order that differs between machines.
            sums += torch.bincount(places, torch.where(mixed < 0, -values, values), self.dims)
            squares += torch.bincount(places, values.square(), self.dims)
            count += len(part)
        norm = math.sqrt(math.fsum(squares.tolist()))
        if not math.isfinite(norm):
            raise ValueError("a change of weights must be finite to have a fingerprint")
        try:
            proof = self._format.pack(norm, *sums.tolist())
            self._read(proof)
        except (OverflowError, ProofError):
            raise ValueError(f"a change of weights of norm {norm:.3g} is too small or too large to have a fingerprint") from None
        return proof

    def compare(self, proof: bytes, output: Sequence[Tensor]) -> Evidence:
        """Measure how far ``proof`` is from the own change. Raises ``ValueError`` only if that has no fingerprint."""
        own_norm, own = self._read(self.make(output))
        try:
            norm, sketch = self._read(proof)
        except ProofError as error:
            return Evidence(self.features, fault=str(error))
        size, own_size = float(sketch.norm()), float(own.norm())
        # Half the squared distance of the directions, which does not cancel where they are nearly equal.
        turned = float((sketch / size - own / own_size).square().sum()) / 2
        # A proof whose norm fits but whose sketch is longer or shorter is not a sketch of one vector.
        longer = max(abs(math.log(norm / own_norm)), abs(math.log(size / own_size)))
        return Evidence.single(self.features, turned, longer)

    def _read(self, proof: bytes) -> tuple[float, Tensor]:
        """Return the norm and the sketch (dims,) float64. Raises ``ProofError``."""
        if len(proof) != self._format.size:
            raise ProofError(f"the proof has {len(proof)} bytes, but a projection to {self.dims} numbers has {self._format.size}")
        norm, *sums = self._format.unpack(proof)
        if not all(map(math.isfinite, (norm, *sums))):
            raise ProofError("the proof has values that are not finite numbers")
        if norm <= 0 or not any(sums):
            raise ProofError("the proof is of no change of weights at all")
        return norm, torch.tensor(sums, dtype=torch.float64, device="cpu")


def _parts(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield all values in order, in parts, float32 on the CPU."""
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ValueError(f"a change of weights must be of floating numbers, not {tensor.dtype}")
        yield from torch.split(tensor.detach().to("cpu", torch.float32).reshape(-1), PART)
