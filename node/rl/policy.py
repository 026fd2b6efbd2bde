"""Protocol of policies, which write completions and compute their probabilities.

Nodes of one swarm may have different policies. They share text; token ids and log-probabilities are of use only to nodes with the
same tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from shoal.optim.device import to_device
from shoal.swarm.errors import ShoalError
from shoal.swarm.topics.rollout import Finish

LOOK = 8
BELOW = 1 - 2**-20
"""Keeps what is searched below the sum of all probabilities, whatever is rounded, so a token that cannot come is never drawn."""
Choose = Callable[[Tensor], Tensor]
"""Maps the logits (B, V) of one step to the token of each row, int64 (B,)."""


class PolicyError(ShoalError):
    """Policy that cannot be made."""


@dataclass(frozen=True)
class Completion:
    """Completion of a prompt by a policy."""

    text: str
    tokens: tuple[int, ...]
    """Tokens as drawn, with the end token if it came."""
    log_probs: tuple[float, ...]
    """Natural log-probability of each token under the distribution of its draw, with temperature."""
    finish: Finish
    """``stop`` if it ended by itself, ``length`` if it was cut off."""


class Policy(Protocol):
    """Interface of a model to reinforcement learning."""

    tokenizer: str
    """Hex SHA-256 that is equal for policies whose token ids mean the same."""
    lr: float
    """Learning rate for AdamW that suits the model."""
    loss: str
    """Member of ``shoal.optim.rl.LOSSES`` that suits it."""
    max_tokens: int
    """Usual length of completions of this policy."""
    vocabulary: int
    """Bound of token ids."""

    @property
    def module(self) -> nn.Module:
        """Trained module; it may be moved to another device, and the policy computes where its parameters are."""
        ...

    def generate(
        self, prompts: Sequence[str], count: int, *, temperature: float, max_tokens: int, seed: int, choose: Choose | None = None
    ) -> list[list[Completion]]:
        """Write ``count`` completions of each prompt, at most ``max_tokens`` tokens long; greedy if ``temperature`` is 0.

        The same arguments and weights give the same completions on the same machine (CPU). ``choose`` replaces the draw with
        ``seed`` and is called once for each step, also for rows that have ended; up to 16 prompts with the ``count`` 1 are passed
        all at once, in their order if they are equal.
        """
        ...

    def ends(self, token: int) -> bool: ...

    def encode(self, completion: str, ended: bool) -> list[int]:
        """Return the token ids of any completion, with the end token if it ``ended`` by itself."""
        ...

    def log_probs(self, prompts: Sequence[str], completions: Sequence[Sequence[int]], temperature: float) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each token of each completion, float (B, T) with gradient, and bool (B, T), its mask.

        Prompt number i belongs to completion number i. T is the length of the longest completion, the others are padded.
        """
        ...

    def logits(self, prompts: Sequence[str], completions: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return the logits of each token of each completion, floating (B, T, V), before the temperature, and bool (B, T), its
        mask.

        They are the last T positions of one call of the module; the rest is as for ``log_probs``.
        """
        ...


def pad(rows: Sequence[Sequence[int]], filler: int, *, left: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad rows of token ids to one int64 (B, T), T at least 1; also return bool (B, T), False at padding."""
    longest = max(1, *map(len, rows))
    tokens = torch.full((len(rows), longest), filler, dtype=torch.int64, device="cpu")
    mask = torch.zeros((len(rows), longest), dtype=torch.bool, device="cpu")
    for number, row in enumerate(rows):
        place = slice(longest - len(row), longest) if left else slice(0, len(row))
        tokens[number, place] = torch.tensor(list(row), dtype=torch.int64, device="cpu")
        mask[number, place] = True
    return tokens.to(device), mask.to(device)


def chances(generator: torch.Generator, tokens: int, rows: int, device: torch.device) -> Tensor:
    """Return uniform numbers (``tokens``, ``rows``) by which `draw` draws: the same for a seed, whatever the device is."""
    return to_device([torch.rand(tokens, rows, generator=generator, device="cpu")], device)[0]


def draw(logits: Tensor, temperature: float, chance: Tensor, choose: Choose | None = None) -> tuple[Tensor, Tensor]:
    """Draw a token of each row of logits (B, V); return it and its log-probability, both (B,). ``temperature`` 0: the likeliest.

    Drawn where the logits are, which nobody waits for: the first token whose cumulative probability is above ``chance``, (B,)
    in [0, 1). Or by ``choose``.
    """
    logs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    if choose is not None:
        chosen = choose(logits).to(logits.device)
    elif temperature == 0:
        chosen = logs.argmax(-1)
    else:
        sums = logs.exp().cumsum(-1)
        below = chance * sums[:, -1] * BELOW
        chosen = torch.searchsorted(sums, below[:, None], right=True)[:, 0].clamp(max=logits.shape[1] - 1)  # of NaN it is too large
    return chosen, logs.gather(-1, chosen[:, None])[:, 0]


def looks(token: int, device: torch.device) -> bool:
    """Return whether to look, after ``token`` tokens, if all rows have ended: rarely where that waits for an accelerator."""
    return device.type == "cpu" or token % LOOK == 0


def drawn(ids: list[Tensor], logs: list[Tensor]) -> Iterator[tuple[list[int], list[float]]]:
    """Yield each row's tokens and their log-probabilities, as `draw` returned them. PolicyError if these are not finite."""
    found = torch.stack(logs, 1).cpu()
    if not bool(found.isfinite().all()):
        raise PolicyError("The policy's probabilities are not finite any more: lower its learning rate, or clip its gradients.")
    yield from zip(torch.stack(ids, 1).tolist(), found.tolist(), strict=True)
