"""Policies: what reinforcement learning needs of a model.

Nodes of one swarm may have different policies. They share text; token ids and log-probabilities are
of use only to nodes with the same tokenizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from shoal.swarm.errors import ShoalError
from shoal.swarm.topics.rollout import Finish

Choose = Callable[[Tensor], Tensor]
"""Maps the logits (B, V) of one step to the token of each row, int64 (B,)."""


class PolicyError(ShoalError):
    """A policy cannot be made, or cannot go on."""


@dataclass(frozen=True)
class Completion:
    """Completion of a prompt by a policy."""

    text: str
    tokens: tuple[int, ...]
    """Tokens as drawn, with the end token if it came."""
    log_probs: tuple[float, ...]
    """Natural log-probability of each token under the distribution of its draw, with temperature.
    """
    finish: Finish
    """``stop`` if it ended by itself, ``length`` if it was cut off."""


class Policy(Protocol):
    """Interface of a model to reinforcement learning."""

    tokenizer: str
    """Hex SHA-256 that is equal for policies whose token ids mean the same."""
    lr: float
    """Learning rate for AdamW that suits the model."""
    loss: str
    """Member of ``shoal.optim.rl.losses.LOSSES`` that suits it."""
    max_tokens: int
    """Usual length of completions of this policy."""
    vocabulary: int
    """Bound of token ids."""

    @property
    def module(self) -> nn.Module:
        """Trained module; it may be moved to another device, and the policy computes where its
        parameters are.
        """
        ...

    def generate(
        self,
        prompts: Sequence[str],
        count: int,
        *,
        temperature: float,
        max_tokens: int,
        seed: int,
        choose: Choose | None = None,
    ) -> list[list[Completion]]:
        """Write ``count`` completions of each prompt, at most ``max_tokens`` tokens long; greedy if
        ``temperature`` is 0.

        The same arguments and weights give the same completions on the same machine (CPU).
        ``choose`` replaces the draw with ``seed`` and is called once for each step, also for rows
        that have ended; up to 16 prompts with the ``count`` 1 are passed all at once, in their
        order if they are equal.
        """
        ...

    def ends(self, token: int) -> bool:
        """Return whether ``token`` ends a completion."""
        ...

    def encode(self, completion: str, ended: bool) -> list[int]:
        """Return the token ids of any completion, with the end token if it ``ended`` by itself."""
        ...

    def log_probs(
        self, prompts: Sequence[str], completions: Sequence[Sequence[int]], temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each token of each completion, float (B, T) with gradient,
        and bool (B, T), its mask.

        Prompt number i belongs to completion number i. T is the length of the longest completion,
        the others are padded.
        """
        ...

    def logits(
        self, prompts: Sequence[str], completions: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of each token of each completion, floating (B, T, V), before the
        temperature, and bool (B, T), its mask.

        They are the last T positions of one call of the module; the rest is as for ``log_probs``.
        """
        ...


def frozen_copy(policy: Policy) -> Policy:
    """Return a policy that stays as ``policy`` is now; what is not trained they have in common."""
    memo = {id(weight): weight for weight in policy.module.parameters() if not weight.requires_grad}
    made = copy.deepcopy(policy, memo)
    made.module.eval().requires_grad_(False)
    return made
