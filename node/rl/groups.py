"""Groups of completions of a question, and updates of the policy made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.node.rl.policy import Policy
from shoal.optim.rl.losses import Completions, TokenLoss, effective_sample_size, group_advantages, log_weights, policy_loss


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
    rewards = torch.tensor([reward for group in groups for reward in group.rewards], dtype=torch.float64, device="cpu")
    numbers = torch.tensor([number for number, group in enumerate(groups) for _ in group.rewards], dtype=torch.int64, device="cpu")
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
    """Convert ``update`` for the losses. The own policy before the step is "old", also for others' completions (SAPO)."""
    new, mask = policy.log_probs(update.prompts, update.tokens, temperature)
    old = new.detach()
    logs, known = pad_floats(update.behaviour, mask)
    return Completions(new, old, mask, update.advantages.to(new.device), torch.where(known, logs, old))


def pad_floats(rows: Sequence[Sequence[float] | None], mask: Tensor) -> tuple[Tensor, Tensor]:
    """Pad float32 rows to the shape of ``mask`` (B, T); also return bool (B, T), where they are. None: not known."""
    values = torch.zeros(mask.shape, device="cpu")
    known = torch.zeros(mask.shape, dtype=torch.bool, device="cpu")
    for number, row in enumerate(rows):
        if row is not None:
            length = min(len(row), mask.shape[1])
            values[number, :length] = torch.tensor(list(row[:length]), device="cpu")
            known[number, :length] = True
    return values.to(mask.device), known.to(mask.device) & mask


def loss_of(policy: Policy, update: Update, loss: TokenLoss, temperature: float) -> tuple[Tensor, float | None]:
    """Return the scalar to minimise, and the effective sample size per foreign completion (None without log-probabilities)."""
    batch = completions_of(policy, update, temperature)
    return policy_loss(batch, loss), _worth(batch, update)


def _worth(batch: Completions, update: Update) -> float | None:
    known = [number for number, row in enumerate(update.behaviour) if row is not None]
    if not known:
        return None
    return float(effective_sample_size(log_weights(batch)[known])) / len(known)
