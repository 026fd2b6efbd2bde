"""Groups of completions of a question, and the update of a policy that is made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.node.rl.policy import Policy
from shoal.optim.rl import (
    Completions,
    TokenLoss,
    effective_sample_size,
    group_advantages,
    log_weights,
    policy_loss,
)


@dataclass(frozen=True)
class RolloutGroup:
    """Prompt of one question, and G completions of it with this node's rewards."""

    prompt: str
    tokens: tuple[tuple[int, ...], ...]
    """Tokens of each completion, as this node's policy encodes it."""
    rewards: tuple[float, ...]
    behaviour: tuple[tuple[float, ...] | None, ...]
    """Log-probability of each token under the policy that wrote it, where known."""


@dataclass(frozen=True)
class Update:
    """Data of one learning step: B completions of all groups together."""

    prompts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    behaviour: tuple[tuple[float, ...] | None, ...]
    advantages: Tensor
    """(B,) float32, on the CPU."""

    @property
    def length(self) -> int:
        return sum(map(len, self.tokens))


def make_update(groups: Sequence[RolloutGroup]) -> Update | None:
    """Join the completions of ``groups``; return None if no gradient can come from them."""
    prompts: list[str] = []
    tokens: list[tuple[int, ...]] = []
    behaviour: list[tuple[float, ...] | None] = []
    rewards: list[float] = []
    numbers: list[int] = []
    for number, group in enumerate(groups):
        prompts += [group.prompt] * len(group.tokens)
        tokens += group.tokens
        behaviour += group.behaviour
        rewards += group.rewards
        numbers += [number] * len(group.rewards)
    advantages = group_advantages(
        torch.tensor(rewards, dtype=torch.float64, device="cpu"),
        torch.tensor(numbers, dtype=torch.int64, device="cpu"),
    ).float()
    if not bool(advantages.any()):
        return None
    return Update(tuple(prompts), tuple(tokens), tuple(behaviour), advantages)


def completions_of(policy: Policy, update: Update, temperature: float) -> Completions:
    """Convert ``update`` for the losses.

    The own policy before the step is "old", also for others' completions (SAPO).
    """
    new, mask = policy.log_probs(update.prompts, update.tokens, temperature)
    old = new.detach()
    # NaN: not known.
    told = torch.full(mask.shape, torch.nan, device="cpu")
    for row, logs in zip(told, update.behaviour, strict=True):
        if logs is not None:
            row[: len(logs)] = torch.tensor(logs[: len(row)], device="cpu")
    told = told.to(mask.device)
    behaviour = torch.where(mask & ~told.isnan(), told, old)
    return Completions(new, old, mask, update.advantages.to(new.device), behaviour)


def loss_of(
    policy: Policy, update: Update, loss: TokenLoss, temperature: float
) -> tuple[Tensor, float | None]:
    """Return the scalar to minimise, and the effective sample size per foreign completion (None
    without log-probabilities).
    """
    batch = completions_of(policy, update, temperature)
    known = [number for number, row in enumerate(update.behaviour) if row is not None]
    worth = None
    if known:
        worth = float(effective_sample_size(log_weights(batch)[known])) / len(known)
    return policy_loss(batch, loss), worth
