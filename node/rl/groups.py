"""A question with its completions, and what an update of the policy is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.node.rl.policy import Policy
from shoal.optim.rl.losses import Completions, TokenLoss, effective_sample_size, group_advantages, log_weights, policy_loss


@dataclass(frozen=True)
class Group:
    """One question's prompt, and G completions of it with the rewards that this node gives them."""

    prompt: str
    tokens: tuple[tuple[int, ...], ...]
    """Of each completion, as this node's policy encodes it."""
    rewards: tuple[float, ...]
    behaviour: tuple[tuple[float, ...] | None, ...]
    """Log-probability of each token under the policy that wrote it, where that is known."""


@dataclass(frozen=True)
class Update:
    """What one step learns from: B completions of all groups together."""

    prompts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    behaviour: tuple[tuple[float, ...] | None, ...]
    advantages: Tensor
    """(B,) float32, on the CPU."""

    @property
    def length(self) -> int:
        """The number of tokens in it."""
        return sum(map(len, self.tokens))


def make_update(groups: Sequence[Group]) -> Update | None:
    """All completions of ``groups``; None if there is nothing in them that a gradient could come from."""
    rewards = torch.tensor([reward for group in groups for reward in group.rewards], dtype=torch.float64)
    numbers = torch.tensor([number for number, group in enumerate(groups) for _ in group.rewards], dtype=torch.int64)
    advantages = group_advantages(rewards, numbers).float()
    if not bool(advantages.any()):
        return None
    return Update(
        tuple(group.prompt for group in groups for _ in group.tokens),
        tuple(row for group in groups for row in group.tokens),
        tuple(row for group in groups for row in group.behaviour),
        advantages,
    )


def completions_of(policy: Policy, update: Update, temperature: float) -> Completions:
    """The update as the losses want it. The own policy before the step is "old", also for what others wrote (SAPO)."""
    new, mask = policy.log_probs(update.prompts, update.tokens, temperature)
    old = new.detach()
    logs, known = pad_floats(update.behaviour, mask)
    return Completions(new, old, mask, update.advantages.to(new.device), torch.where(known, logs, old))


def pad_floats(rows: Sequence[Sequence[float] | None], mask: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 rows laid into the shape of ``mask`` (B, T), and bool, where they are; None stands for not known."""
    values = torch.zeros(mask.shape)
    known = torch.zeros(mask.shape, dtype=torch.bool)
    for number, row in enumerate(rows):
        if row is not None:
            length = min(len(row), mask.shape[1])
            values[number, :length] = torch.tensor(list(row[:length]))
            known[number, :length] = True
    return values.to(mask.device), known.to(mask.device) & mask


def loss_of(policy: Policy, update: Update, loss: TokenLoss, temperature: float) -> tuple[Tensor, float | None]:
    """The scalar to minimise, and the effective sample size per foreign completion (None: of none the writer's view is known)."""
    batch = completions_of(policy, update, temperature)
    return policy_loss(batch, loss), _worth(batch, update)


def _worth(batch: Completions, update: Update) -> float | None:
    known = [number for number, row in enumerate(update.behaviour) if row is not None]
    if not known:
        return None
    return float(effective_sample_size(log_weights(batch)[known])) / len(known)
