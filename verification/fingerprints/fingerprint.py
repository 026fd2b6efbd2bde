"""The evidence of comparing a proof with an output, and sampling that others repeat: a token is
what logits and a seed give.

A proof of activations shows which model *saw* a text, not which model *wrote* it: text of a cheap
model, passed through the right one, has the right activations. Here token t is argmax_v (logits_v /
temperature + g(seed, t, v)), which is a draw from the softmax (the Gumbel-max trick) with all
randomness fixed by the seed. A verifier that has the logits can see, token by token, how far the
chosen one was from winning: hardly at all for the model that drew it, far for one that drew from
other logits (Token-DiFR, 2511.20621, measures the same).

The seed must not be the prover's to choose (a hash of the claim's round and prompt, for instance),
or it could try many.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_WINDOWS = 1 << 20


class ProofError(ValueError):
    """Invalid proof: of the wrong length, out of range, or about something else.

    One sentence says which.
    """


@dataclass(frozen=True)
class Feature:
    """Measure of how a proof may differ from an output.

    ``name`` says what is measured, in words that fit into a sentence; larger is further away, 0 is
    equal. ``grain`` is the difference, in the same unit, that other hardware may make although a
    calibration did not show it.
    """

    name: str
    grain: float


@dataclass(frozen=True)
class Evidence:
    """Result of a comparison.

    ``values[w][f]`` is feature f in window w, and ``sizes[w]`` how much of a whole window w is, in
    (0, 1]. ``fault`` is empty, or one sentence saying why the proof cannot be one of this output;
    then there are no windows.
    """

    features: tuple[Feature, ...]
    values: tuple[tuple[float, ...], ...] = ()
    sizes: tuple[float, ...] = ()
    fault: str = ""

    def __post_init__(self) -> None:
        if (
            bool(self.fault) == bool(self.values)
            or len(self.values) != len(self.sizes)
            or len(self.sizes) > MOST_WINDOWS
        ):
            raise ValueError("evidence is either a fault or windows, each of them with its size")
        if any(
            len(row) != len(self.features) or not all(map(math.isfinite, row))
            for row in self.values
        ):
            raise ValueError(
                f"each window of evidence must have {len(self.features)} finite values"
            )
        if not all(0 < size <= 1 for size in self.sizes):
            raise ValueError("a window's size must be above 0 and at most 1")

    @property
    def size(self) -> float:
        return math.fsum(self.sizes)

    def means(self) -> tuple[float, ...]:
        """Return the mean of each feature, weighted by the windows' sizes.

        Raises ``ValueError`` if there is a fault instead.
        """
        if self.fault:
            raise ValueError(f"there is nothing to measure: {self.fault}")
        total = self.size
        return tuple(
            math.fsum(s * v for s, v in zip(self.sizes, column, strict=True)) / total
            for column in zip(*self.values, strict=True)
        )


GOLDEN = 0x9E3779B97F4A7C15


def signed(word: int) -> int:
    """Return 64 bits as torch's int64 holds them."""
    return word - (1 << 64) if word >= 1 << 63 else word


def mix(words: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64 to int64; products wrap around, and shifts do not extend
    the sign.
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> shift & (1 << 64 - shift) - 1)) * signed(factor)
    return words ^ (words >> 31 & (1 << 33) - 1)


WINDOW = 32
MOST_TOKENS, MOST_VOCABULARY, MOST_SEED = 1 << 17, 1 << 20, 64
AT_ONCE = (
    1 << 18
    # scores: 2 MB, which stay in the cache; with eight times as many the noise takes three times as
    # long
)
FARTHEST = 10.0  # nats; a token that is further from winning than this tells no more


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


def gumbel(
    seed: bytes, positions: range, vocabulary: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return Gumbel noise (positions, vocabulary) float64: the same bits everywhere, but for the
    last of two logarithms.

    SHA-256 of seed and position is the key; the words of the vocabulary are numbered and mixed with
    it by the finaliser of SplitMix64, twice. It need not keep a secret, as the seed has none: it
    must only be one function that all compute.
    """
    if (
        not 1 <= vocabulary <= MOST_VOCABULARY
        or not 0 <= positions.start < 1 << 62
        or len(seed) > MOST_SEED
    ):
        raise ValueError(
            f"noise is for a position >= 0, at most {MOST_VOCABULARY} words, and a seed of at most "
            f"{MOST_SEED} bytes"
        )
    digests = [
        hashlib.sha256(b"shoal gumbel 1\0" + position.to_bytes(8, "big") + seed).digest()
        for position in positions
    ]
    keys = torch.tensor(
        [struct.unpack(">qq", digest[:16]) for digest in digests], dtype=torch.int64, device=device
    )
    numbers = torch.arange(vocabulary, dtype=torch.int64, device=device)
    mixed = mix(mix(numbers * signed(GOLDEN) + keys[:, :1]) ^ keys[:, 1:])
    uniform = (
        (mixed >> 12 & (1 << 52) - 1).double() + 0.5
    ) / 2**52  # in (0, 1), both ends excluded
    return -torch.log(-torch.log(uniform))


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
    tokens, logits = drawn.tokens, drawn.logits
    if (
        logits.dim() != 2
        or tokens.shape != logits.shape[:1]
        or tokens.is_floating_point()
        or not logits.is_floating_point()
    ):
        raise ValueError(
            "logits must be floating numbers of shape (tokens, vocabulary), one row for each token"
        )
    if (
        not 1 <= len(tokens) <= MOST_TOKENS
        or int(tokens.min()) < 0
        or int(tokens.max()) >= logits.shape[1]
    ):
        raise ValueError(
            f"there must be 1 to {MOST_TOKENS} tokens, each of them in the vocabulary of "
            f"{logits.shape[1]}"
        )
    found, at, many = [], 0, max(1, AT_ONCE // logits.shape[1])
    for rows in torch.split(logits, many):
        scores = _scores(
            rows,
            drawn.seed,
            range(drawn.first + at, drawn.first + at + len(rows)),
            drawn.temperature,
        )
        chosen = scores.gather(
            1, tokens[at : at + many].to(logits.device).long().unsqueeze(1)
        ).squeeze(1)
        found.append((scores.amax(dim=1) - chosen).clamp_max(FARTHEST))
        at += many
    return torch.cat(found).cpu()


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


class SeededSampling:
    """A fingerprint of how tokens were drawn.

    It needs no proof: the claim names seed and temperature.

    Its features, over windows of 32 tokens: the share of tokens that did not win, and their mean
    distance from winning; and over the whole claim the largest distance. Who puts one answer of its
    own into an honest text moves the means hardly, but that.
    """

    name = "sampling"
    features = (
        Feature("share of tokens that the seed does not give", 0.01),
        Feature("distance of tokens from those that the seed gives (nats)", 0.01),
        Feature("largest distance of a token from the one that the seed gives (nats)", 0.01),
    )

    def measured(self, found: Tensor) -> Evidence:
        """Return the evidence in ``margins`` (n,) of several completions that were drawn apart."""
        windows, largest = torch.split(found, WINDOW), float(found.max())
        values = tuple(
            (float((part > 0).double().mean()), float(part.mean()), largest) for part in windows
        )
        return Evidence(self.features, values, tuple(len(part) / WINDOW for part in windows))
