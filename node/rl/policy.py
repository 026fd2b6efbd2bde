"""A policy writes completions and says how probable they are; what it is inside is its own affair.

Nodes of one swarm may have different policies. What they share is text; token ids and log-probabilities help only those whose
tokenizer is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from shoal.swarm.errors import ShoalError
from shoal.swarm.topics.rollout import Finish

Choose = Callable[[Tensor], Tensor]
"""From the logits (B, V) of one step to the token of each row, int64 (B,)."""


class PolicyError(ShoalError):
    """A policy cannot be made."""


@dataclass(frozen=True)
class Completion:
    """What a policy wrote in answer to a prompt."""

    text: str
    tokens: tuple[int, ...]
    """As drawn, the end token included if it came."""
    log_probs: tuple[float, ...]
    """Of each token, natural logarithm, under the distribution it was drawn from, temperature included."""
    finish: Finish
    """``stop`` if it ended by itself, ``length`` if it was cut off."""


class Policy(Protocol):
    """What reinforcement learning needs of a model."""

    tokenizer: str
    """Hex SHA-256 that is equal for policies whose token ids mean the same."""
    lr: float
    """A learning rate for AdamW that suits the model."""
    loss: str
    """The one of ``shoal.optim.rl.losses.LOSSES`` that suits it."""
    max_tokens: int
    """How long completions of this policy usually need to be."""
    vocabulary: int
    """Token ids are below it."""

    @property
    def module(self) -> nn.Module:
        """What is trained; it may be moved to another device, and the policy computes where its parameters are."""
        ...

    def generate(
        self, prompts: Sequence[str], count: int, *, temperature: float, max_tokens: int, seed: int, choose: Choose | None = None
    ) -> list[list[Completion]]:
        """``count`` completions of each prompt, at most ``max_tokens`` tokens long; greedy if ``temperature`` is 0.

        The same arguments and weights give the same completions on the same machine (CPU). ``choose`` takes the place of the draw
        with ``seed`` and is called once for each step, also for rows that have ended; of 16 prompts or fewer with the ``count`` 1
        it is given all at once, in their order if they are equal.
        """
        ...

    def ends(self, token: int) -> bool:
        """Whether a completion ends with this token."""
        ...

    def encode(self, completion: str, ended: bool) -> list[int]:
        """Token ids of a completion that somebody wrote; with the end token if it ``ended`` by itself."""
        ...

    def log_probs(self, prompts: Sequence[str], completions: Sequence[Sequence[int]], temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability of each token of each completion given its prompt, float (B, T) with gradient; and bool (B, T), its mask.

        Prompt number i belongs to completion number i. T is the length of the longest completion, the others are padded.
        """
        ...

    def logits(self, prompts: Sequence[str], completions: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """What each token of each completion was drawn from, floating (B, T, V), before the temperature; and bool (B, T), its mask.

        All in one call of the module, of which they are the last T positions; ``log_probs`` says the rest.
        """
        ...


def pad(rows: Sequence[Sequence[int]], filler: int, *, left: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of token ids as one int64 (B, T), T at least 1, and bool (B, T), where they are and not padding."""
    longest = max(1, *map(len, rows))
    tokens = torch.full((len(rows), longest), filler, dtype=torch.int64)
    mask = torch.zeros((len(rows), longest), dtype=torch.bool)
    for number, row in enumerate(rows):
        place = slice(longest - len(row), longest) if left else slice(0, len(row))
        tokens[number, place] = torch.tensor(list(row), dtype=torch.int64)
        mask[number, place] = True
    return tokens.to(device), mask.to(device)


def draw(logits: Tensor, temperature: float, generator: torch.Generator, choose: Choose | None = None) -> tuple[Tensor, Tensor]:
    """A token of each row of logits (B, V) and its log-probability, both (B,); the most likely one if ``temperature`` is 0.

    Drawn on the CPU, where the same seed gives the same numbers whatever the device is; or by ``choose``.
    """
    logs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    if choose is not None:
        chosen = choose(logits).to(logits.device)
    elif temperature == 0:
        chosen = logs.argmax(-1)
    else:
        chosen = torch.multinomial(logs.exp().cpu(), 1, generator=generator)[:, 0].to(logits.device)
    return chosen, logs.gather(-1, chosen[:, None])[:, 0]
