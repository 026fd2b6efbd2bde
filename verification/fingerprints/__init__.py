"""Fingerprints of generated outputs: short proofs, and their distance from what another peer computes for the same input.

``ExactTokens`` and ``SeededSampling`` prove what was written and drawn, ``ActivationProof`` which model saw it; ``SimHash``,
``MinHashText`` and ``ImageHash`` find near-duplicates; ``WeightProjection`` is of changes of weights.
All implement ``Fingerprint``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from shoal.verification.fingerprints.activations import ActivationProof
from shoal.verification.fingerprints.fingerprint import Evidence, Feature, Fingerprint, ProofError
from shoal.verification.fingerprints.hidden import LastHidden, output_head, prefill_states
from shoal.verification.fingerprints.image import ImageHash
from shoal.verification.fingerprints.sampling import Drawn, SeededSampling, draw, draw_each, draw_rows, gumbel, margins
from shoal.verification.fingerprints.text import MinHashText, SimHash
from shoal.verification.fingerprints.tokens import Completion, ExactTokens
from shoal.verification.fingerprints.weights import WeightProjection

if TYPE_CHECKING:  # each keeps the protocol
    _KINDS: tuple[
        Fingerprint[Tensor], Fingerprint[Drawn], Fingerprint[Completion], Fingerprint[str], Fingerprint[str], Fingerprint[Tensor]
    ] = (ActivationProof(), SeededSampling(), ExactTokens(), SimHash(), MinHashText(), ImageHash())

__all__ = [
    "ActivationProof",
    "Completion",
    "Drawn",
    "Evidence",
    "ExactTokens",
    "Feature",
    "Fingerprint",
    "ImageHash",
    "LastHidden",
    "MinHashText",
    "ProofError",
    "SeededSampling",
    "SimHash",
    "WeightProjection",
    "draw",
    "draw_each",
    "draw_rows",
    "gumbel",
    "margins",
    "output_head",
    "prefill_states",
]
