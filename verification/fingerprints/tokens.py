"""Fingerprint of exact tokens: equal or not. The cheapest test, for peers whose hardware and dtype agree.

Greedy text of two dtypes differs soon, honestly.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.verification.fingerprints.fingerprint import Evidence, Feature

MOST_TOKENS, MOST_MODEL = 1 << 20, 256


@dataclass(frozen=True)
class Completion:
    """Answer of ``model`` (its id, at most 256 bytes of UTF-8) to ``prompt``; both are token ids in [0, 2^32)."""

    model: str
    prompt: Sequence[int]
    tokens: Sequence[int]


class ExactTokens:
    """Fingerprint of a completion: SHA-256 of model, prompt and tokens, in 32 bytes."""

    name = "tokens"
    features = (Feature("difference of tokens", 0.0),)

    def make(self, output: Completion) -> bytes:
        """Return 32 bytes. Raises ``ValueError`` if ``output`` is too large or holds what is not a token."""
        model = output.model.encode()
        if len(model) > MOST_MODEL or len(output.prompt) + len(output.tokens) > MOST_TOKENS:
            raise ValueError(f"a completion has at most {MOST_TOKENS} tokens, and a model's id at most {MOST_MODEL} bytes")
        digest = hashlib.sha256(b"shoal tokens 1\0")
        # Lengths first, so that no token can move from one part to the next.
        digest.update(struct.pack(">III", len(model), len(output.prompt), len(output.tokens)) + model)
        for part in (output.prompt, output.tokens):
            try:
                digest.update(struct.pack(f">{len(part)}I", *part))
            except struct.error:
                raise ValueError("tokens must be whole numbers from 0 to 4294967295") from None
        return digest.digest()

    def compare(self, proof: bytes, output: Completion) -> Evidence:
        """Return a fault unless ``proof`` is of exactly this ``output``; else a difference of 0."""
        own = self.make(output)
        if len(proof) != len(own):
            return Evidence(self.features, fault=f"the proof has {len(proof)} bytes, but one of tokens has {len(own)}")
        if proof != own:
            return Evidence(self.features, fault="the tokens, the prompt or the model is another one")
        return Evidence.single(self.features, 0.0)
