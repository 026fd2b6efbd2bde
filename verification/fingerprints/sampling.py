"""Sampling that others repeat: a token is what logits and a seed give.

    tokens = draw_each(logits, seed, range(first, first + len(logits)))
    margins(Drawn(tokens, logits, seed, first=first))          # 0: each token won

Token t is argmax_v (logits_v / temperature + g(seed, t, v)), a draw from the softmax (the
Gumbel-max trick) with all randomness fixed by the seed. A verifier that has the logits sees how far
each token was from winning (as in Token-DiFR, 2511.20621). The seed must not be the prover's to
choose, or it could try many. Why activations alone are not enough: docs/internals.md,
"Fingerprints".
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.verification.fingerprints.fingerprint import Evidence, Feature

GOLDEN = 0x9E3779B97F4A7C15
"""Step between the numbers of words: SplitMix64's, 2^64 over the golden ratio."""
WINDOW = 32
"""Tokens of a window."""
MOST_TOKENS = 1 << 17
"""Tokens of a claim, at most."""
MOST_VOCABULARY = 1 << 20
"""Words of a vocabulary, at most."""
MOST_SEED = 64
"""Bytes of a seed, at most."""
AT_ONCE = 1 << 18
"""Scores at once: 2 MB, which stay in the cache; with eight times as many the noise takes three
times as long.
"""
FARTHEST = 10.0
"""Nats; a token that is further from winning than this tells no more."""


@dataclass(frozen=True)
class Drawn:
    """Tokens and the logits and seed from which they were drawn.

    ``tokens`` (n,) int64; ``logits`` (n, V) floating, those of banned tokens -inf; ``seed`` of at
    most 64 bytes, public; ``temperature`` >= 0, where 0 takes the largest logit and uses no noise.
    ``first`` is the position of the first token, for a completion that was drawn in parts.
    """

    tokens: Tensor
    logits: Tensor
    seed: bytes
    temperature: float = 1.0
    first: int = 0


def draw_each(logits: Tensor, seed: bytes, positions: range, temperature: float = 1.0) -> Tensor:
    """Draw a token for each row of ``logits`` (n, V), at the positions in ``positions``: (n,)
    int64. Of equals the smaller wins.
    """
    return torch.argmax(_scores(logits, seed, positions, temperature), dim=1)


def margins(drawn: Drawn) -> Tensor:
    """Return how far each token was from winning, (n,) float64, in units of logits over
    temperature; 0 for the winner, at most 10.

    Raises ``ValueError`` if the parts of ``drawn`` do not fit together or a row of logits allows no
    token.
    """
    tokens = drawn.tokens
    logits = drawn.logits
    fits = logits.dim() == 2 and tokens.shape == logits.shape[:1]
    if not fits or tokens.is_floating_point() or not logits.is_floating_point():
        raise ValueError(
            "logits must be floating numbers of shape (tokens, vocabulary), one row for each token"
        )
    is_known = 1 <= len(tokens) <= MOST_TOKENS and int(tokens.min()) >= 0
    if not is_known or int(tokens.max()) >= logits.shape[1]:
        raise ValueError(
            f"there must be 1 to {MOST_TOKENS} tokens, each of them in the vocabulary of "
            f"{logits.shape[1]}"
        )
    found = []
    at = 0
    many = max(1, AT_ONCE // logits.shape[1])
    for rows in torch.split(logits, many):
        first = drawn.first + at
        scores = _scores(rows, drawn.seed, range(first, first + len(rows)), drawn.temperature)
        own = tokens[at : at + many].to(logits.device).long().unsqueeze(1)
        chosen = scores.gather(1, own).squeeze(1)
        found.append((scores.amax(dim=1) - chosen).clamp_max(FARTHEST))
        at += many
    return torch.cat(found).cpu()


class SeededSampling:
    """A fingerprint of how tokens were drawn.

    It needs no proof: the claim names seed and temperature.

    Its features, over windows of 32 tokens: the share of tokens that did not win, and their mean
    distance from winning; and over the whole claim the largest distance, which an answer of one's
    own within an honest text moves, where the means hardly move.
    """

    name = "sampling"
    features = (
        Feature("share of tokens that the seed does not give", 0.01),
        Feature("distance of tokens from those that the seed gives (nats)", 0.01),
        Feature("largest distance of a token from the one that the seed gives (nats)", 0.01),
    )

    def measured(self, found: Tensor) -> Evidence:
        """Return the evidence in ``margins`` (n,) of several completions that were drawn apart."""
        windows = torch.split(found, WINDOW)
        largest = float(found.max())
        values = []
        for part in windows:
            share = float((part > 0).double().mean())
            values.append((share, float(part.mean()), largest))
        sizes = tuple(len(part) / WINDOW for part in windows)
        return Evidence(self.features, tuple(values), sizes)


def gumbel(
    seed: bytes, positions: range, vocabulary: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return Gumbel noise (positions, vocabulary) float64: the same bits everywhere, but for the
    last of two logarithms.

    SHA-256 of seed and position is the key; the words of the vocabulary are numbered and mixed with
    it by the finaliser of SplitMix64, twice. It need not keep a secret, as the seed has none: it
    must only be one function that all compute.
    """
    is_place = 0 <= positions.start < 1 << 62
    if not 1 <= vocabulary <= MOST_VOCABULARY or not is_place or len(seed) > MOST_SEED:
        raise ValueError(
            f"noise is for a position >= 0, at most {MOST_VOCABULARY} words, and a seed of at most "
            f"{MOST_SEED} bytes"
        )
    pairs = []
    for position in positions:
        digest = hashlib.sha256(b"shoal gumbel 1\0" + position.to_bytes(8, "big") + seed).digest()
        pairs.append(struct.unpack(">qq", digest[:16]))
    keys = torch.tensor(pairs, dtype=torch.int64, device=device)
    numbers = torch.arange(vocabulary, dtype=torch.int64, device=device)
    mixed = mix(mix(numbers * signed(GOLDEN) + keys[:, :1]) ^ keys[:, 1:])
    # In (0, 1), both ends excluded.
    uniform = ((mixed >> 12 & (1 << 52) - 1).double() + 0.5) / 2**52
    return -torch.log(-torch.log(uniform))


def _scores(logits: Tensor, seed: bytes, positions: range, temperature: float) -> Tensor:
    """Return the competing scores at each position, (n, V) float64: the noise has full weight, so
    all margins are in one unit.
    """
    if len(positions) != len(logits):
        raise ValueError(
            f"there must be a position for each of {len(logits)} rows of logits, not "
            f"{len(positions)}"
        )
    if not 0 <= temperature <= 1e6:
        raise ValueError(f"the temperature must be from 0 to a million, not {temperature}")
    rows = logits.detach().double()
    if bool(torch.isnan(rows).any()) or not bool(torch.isfinite(rows.amax(dim=1)).all()):
        raise ValueError("the logits of a position are not numbers, or allow no token")
    if not temperature:
        return rows
    return rows / temperature + gumbel(seed, positions, rows.shape[1], rows.device)


def mix(words: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64 to int64; products wrap around, and shifts do not extend
    the sign.
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> shift & (1 << 64 - shift) - 1)) * signed(factor)
    return words ^ (words >> 31 & (1 << 33) - 1)


def signed(word: int) -> int:
    """Return 64 bits as torch's int64 holds them."""
    return word - (1 << 64) if word >= 1 << 63 else word
