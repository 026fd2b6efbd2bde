"""Groups of completions of a question, and the update of a policy that is made from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoal.node.rl.policy import Policy
from shoal.optim.rl.advantages import Deviation, Scale, group_advantages
from shoal.optim.rl.completions import Completions
from shoal.optim.rl.effective_sample import effective_sample_size, log_weights
from shoal.optim.rl.objective import Objective

ENTROPY_ROWS = 16
"""Completions whose logits are in memory at once where the entropy counts."""


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


def make_update(
    groups: Sequence[RolloutGroup],
    *,
    scale: Scale = "group",
    deviation: Deviation = "population",
) -> Update | None:
    """Join the completions of ``groups``; return None if no gradient can come from them.

    ``scale`` and ``deviation`` are of `group_advantages`.
    """
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
        scale=scale,
        deviation=deviation,
    ).float()
    if not bool(advantages.any()):
        return None
    return Update(tuple(prompts), tuple(tokens), tuple(behaviour), advantages)


def completions_of(
    policy: Policy,
    update: Update,
    temperature: float,
    *,
    reference: Policy | None = None,
    with_entropy: bool = False,
) -> Completions:
    """Convert ``update`` for the losses.

    The own policy before the step is "old", also for others' completions (SAPO).
    """
    entropy = None
    if with_entropy:
        new, entropy, mask = _with_entropy(policy, update, temperature)
    else:
        new, mask = policy.log_probs(update.prompts, update.tokens, temperature)
    old = new.detach()
    # NaN: not known.
    told = torch.full(mask.shape, torch.nan, device="cpu")
    for row, logs in zip(told, update.behaviour, strict=True):
        if logs is not None:
            row[: len(logs)] = torch.tensor(logs[: len(row)], device="cpu")
    told = told.to(mask.device)
    behaviour = torch.where(mask & ~told.isnan(), told, old)
    referred = None
    if reference is not None:
        reference.module.to(mask.device)
        with torch.no_grad():
            referred, _ = reference.log_probs(update.prompts, update.tokens, temperature)
    advantages = update.advantages.to(new.device)
    return Completions(new, old, mask, advantages, behaviour, referred, entropy)


def _with_entropy(
    policy: Policy, update: Update, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's log-probability, entropy, both with gradient, and mask: (B, T).

    Logits of more than `ENTROPY_ROWS` completions are computed again in the backward pass.
    """
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for start in range(0, len(update.tokens), ENTROPY_ROWS):
        part = slice(start, start + ENTROPY_ROWS)
        given = policy, update.prompts[part], update.tokens[part], temperature
        parts.append(checkpoint(_read, *given, use_reentrant=False))
    longest = max(mask.shape[1] for _, _, mask in parts)
    whole: list[Tensor] = []
    for tensors in zip(*parts, strict=True):
        padded = [torch.nn.functional.pad(one, (0, longest - one.shape[1])) for one in tensors]
        whole.append(torch.cat(padded))
    new, entropy, mask = whole
    return new, entropy, mask


def _read(
    policy: Policy,
    prompts: Sequence[str],
    completions: Sequence[Sequence[int]],
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    logits, mask = policy.logits(prompts, completions)
    length = mask.shape[1]
    tokens = torch.zeros(mask.shape, dtype=torch.int64, device="cpu")
    for row, completion in zip(tokens, completions, strict=True):
        row[: len(completion)] = torch.tensor(completion[:length], device="cpu")
    logs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    new = logs.gather(-1, tokens.to(mask.device)[..., None])[..., 0]
    # A token that is excluded adds nothing, where -inf times 0 would be no number.
    finite = logs.clamp(min=torch.finfo(logs.dtype).min)
    return new, -(finite.exp() * finite).sum(-1), mask


def loss_of(
    policy: Policy,
    update: Update,
    objective: Objective,
    temperature: float,
    reference: Policy | None = None,
) -> tuple[Tensor, float | None]:
    """Return the scalar to minimise, and the effective sample size per foreign completion (None
    without log-probabilities).

    ``reference``: the policy that the KL divergence is to, where the objective has one.
    """
    batch = completions_of(
        policy,
        update,
        temperature,
        reference=reference,
        with_entropy=objective.entropy_coef > 0,
    )
    known = [number for number, row in enumerate(update.behaviour) if row is not None]
    worth = None
    if known:
        worth = float(effective_sample_size(log_weights(batch)[known])) / len(known)
    return objective(batch), worth
