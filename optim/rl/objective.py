"""The number that an update minimises: a loss of each token, what is added to it, and their mean.

objective = Objective(LOSSES["gspo"], per="completion", kl_coef=0.001)
objective(batch).backward()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from shoal.optim.rl.completions import Completions, wide
from shoal.optim.rl.losses import DELTA, Per, TokenLoss, sapo


def policy_loss(
    batch: Completions,
    loss: TokenLoss = sapo,
    *,
    per: Per = "token",
    total: int | None = None,
    max_tokens: int | None = None,
) -> Tensor:
    """Return the scalar to minimise: the mean of ``loss`` over all tokens, or over completions.

    0 if no token counts.

    Args:
        batch: the completions.
        loss: one number for each token.
        per: "token" (SAPO's; DAPO's, 2503.14476, section 3.3): every token counts the same, so a
            long completion counts more. "completion" (GRPO's, 2402.03300, equation 3): the mean of
            each completion's mean; completions without a token do not count. "completion_sum"
            (LUSPO's, 2602.05261): the mean of each completion's sum. "max_tokens" (Dr. GRPO's,
            2503.20783): that by ``max_tokens``.
        total: tokens or completions to divide by, if not those of this batch: with the number in
            the whole update the losses of its micro-batches add up to the loss of the whole.
        max_tokens: the largest number of tokens of a completion.

    Raises:
        ValueError: another ``per``, or a ``total`` or ``max_tokens`` below 1.
    """
    if per not in get_args(Per):
        raise ValueError(f"per must be one of {', '.join(get_args(Per))}, got {per!r}")
    if total is not None and total < 1:
        raise ValueError(
            f"total must be at least 1, got {total}: it is the number of tokens or completions in "
            "the whole update"
        )
    divisor = 1
    if per == "max_tokens":
        if max_tokens is None or max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        divisor = max_tokens
    terms = loss(batch).masked_fill(~batch.mask, 0.0)
    count = batch.mask.sum(1)
    if per != "token":
        count = count > 0
    if per == "completion":
        terms = batch.mean(terms)
    if total is None:
        return terms.sum() / count.sum().clamp(min=1) / divisor
    return terms.sum() / total / divisor


def kl_to_reference(batch: Completions, cap: float = DELTA) -> Tensor:
    """Return the estimate of the KL divergence to the reference by each token, (B, T):

        min(new / writer, cap) (reference / new - log(reference / new) - 1)

    (GRPO, 2402.03300, equation 4; the ratio, which makes it unbiased, is DeepSeek-V3.2's,
    2512.02556.)
    """
    assert batch.reference is not None
    log = batch.log_ratio(batch.reference.detach(), batch.new)
    return batch.ratio_to_writer().clamp(max=cap) * (log.exp() - log - 1)


def kept_by_off_policy_mask(batch: Completions, threshold: float) -> Tensor:
    """Return which completions count, (B, 1): those with A >= 0, or with a mean of log(writer /
    new) of at most ``threshold`` (DeepSeek-V3.2, 2512.02556, equation 9).
    """
    divergence = batch.mean(batch.log_ratio(batch.writer, batch.new.detach()))[:, None]
    return (batch.gains >= 0) | (divergence <= threshold)


def mean_entropy(batch: Completions) -> Tensor:
    """Return the mean entropy of all tokens, in nats; 0 without a token."""
    assert batch.entropy is not None
    entropy = wide(batch.entropy).masked_fill(~batch.mask, 0.0)
    return entropy.sum() / batch.mask.sum().clamp(min=1)


@dataclass(frozen=True)
class Objective:
    """Maps `Completions` to the scalar to minimise: `policy_loss` of

        loss, 0 where the off-policy mask leaves a completion out, + kl_coef KL

    less entropy_coef times the mean entropy of all tokens.
    """

    loss: TokenLoss = sapo
    per: Per = "token"
    max_tokens: int | None = None
    """Of a completion, for ``per`` "max_tokens"."""
    kl_coef: float = 0.0
    """If it is not 0, the completions need a ``reference``."""
    kl_cap: float = DELTA
    """Largest ratio to the writer in it (`kl_to_reference`)."""
    entropy_coef: float = 0.0
    """If it is not 0, the completions need their ``entropy``."""
    off_policy_mask: float | None = None
    """Threshold of `kept_by_off_policy_mask`; None: all completions count."""

    def __call__(self, batch: Completions) -> Tensor:
        value = policy_loss(batch, self.terms, per=self.per, max_tokens=self.max_tokens)
        if self.entropy_coef:
            value = value - self.entropy_coef * mean_entropy(batch)
        return value

    def terms(self, batch: Completions) -> Tensor:
        """Return the loss of each token, (B, T), without the entropy."""
        terms = self.loss(batch)
        if self.off_policy_mask is not None:
            kept = kept_by_off_policy_mask(batch, self.off_policy_mask)
            terms = torch.where(kept, terms, 0.0)
        if self.kl_coef:
            terms = terms + self.kl_coef * kl_to_reference(batch, self.kl_cap)
        return terms
