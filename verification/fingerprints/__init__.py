"""Fingerprints of generated outputs: short proofs, and their distance from what another peer computes for the same input.

``SeededSampling`` proves what was drawn, ``ActivationProof`` which model saw it. Both implement ``Fingerprint``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from shoal.verification.fingerprints.activations import ActivationProof, LastHidden, output_head, prefill_states
from shoal.verification.fingerprints.fingerprint import (
    Drawn,
    Evidence,
    Feature,
    Fingerprint,
    ProofError,
    SeededSampling,
    draw,
    draw_each,
    draw_rows,
    gumbel,
    margins,
)

if TYPE_CHECKING:  # each keeps the protocol
    _KINDS: tuple[Fingerprint[Tensor], Fingerprint[Drawn]] = (ActivationProof(), SeededSampling())

__all__ = [
    "ActivationProof",
    "Drawn",
    "Evidence",
    "Feature",
    "Fingerprint",
    "LastHidden",
    "ProofError",
    "SeededSampling",
    "draw",
    "draw_each",
    "draw_rows",
    "gumbel",
    "margins",
    "output_head",
    "prefill_states",
]
