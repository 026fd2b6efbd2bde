"""Losses of SAPO (2509.08721): a policy learns from its own and from others' completions as if it
had written them all.

    rewards = torch.tensor([...])                   # recomputed here, for foreign groups too
    batch = Completions(new, old, mask, group_advantages(rewards, group))
    policy_loss(batch).backward()                   # or policy_loss(batch, LOSSES["decoupled"])

A group is one question with its completions. Not to be confused with Soft Adaptive Policy
Optimization (2511.20347), which has the same short name. How the losses differ:
docs/internals.md, "Losses of reinforcement learning".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOW = 0.2
"""The ratio of new to old policy is clipped from below to 1 - LOW (SAPO)."""
HIGH = 0.28
"""And from above to 1 + HIGH (SAPO; the asymmetry is DAPO's, 2503.14476, section 3.1)."""
EPSILON = 1e-4
"""Added to the standard deviation of a group's rewards, as in trl: rewards that differ by rounding
alone then give no advantage.
"""
MAX_LOG = 20.0
"""Logarithms of ratios are clamped to +-MAX_LOG, so that no ratio overflows: e^20 is far beyond
every clip and cap.
"""


def group_advantages(rewards: Tensor, group: Tensor) -> Tensor:
    """Return each completion's advantage over its group (GRPO, 2402.03300, section 4.1):

        A = (reward - mean) / (standard deviation + 1e-4)

    of the population; exactly 0 in a group of equal rewards, whose tokens still count in the mean.

    Args:
        rewards: float (B,).
        group: int64 (B,), any numbers, equal within a group; groups may differ in size.

    Returns:
        (B,) of the rewards' dtype, computed in float64.

    Raises:
        ValueError: shapes differ, or a reward is not finite.
    """
    if rewards.ndim != 1 or rewards.shape != group.shape:
        raise ValueError(
            f"rewards and group must be two equally long rows, got {tuple(rewards.shape)} and "
            f"{tuple(group.shape)}"
        )
    if not bool(rewards.isfinite().all()):
        raise ValueError(
            "a reward is not finite: the environment must return a finite number for every "
            "completion"
        )
    values = rewards.double()
    ids, place = torch.unique(group, return_inverse=True)
    zeros = values.new_zeros(ids.numel())
    count = zeros.index_add(0, place, torch.ones_like(values))
    deviation = values - (zeros.index_add(0, place, values) / count)[place]
    std = (zeros.index_add(0, place, deviation.square()) / count).sqrt()
    # Not by std > 0: the mean of eight times 0.1 is not 0.1, and equal rewards are to give exactly
    # 0.
    least = zeros.scatter_reduce(0, place, values, "amin", include_self=False)
    most = zeros.scatter_reduce(0, place, values, "amax", include_self=False)
    advantages = torch.where((least < most)[place], deviation / (std[place] + EPSILON), 0.0)
    return advantages.to(rewards.dtype)


@dataclass(frozen=True)
class Completions:
    """Completions of an update as a loss needs them: B of them, padded to T tokens, on either side.

    ValueError if shapes do not fit or where the mask is set a number is not finite (in ``new`` -inf
    is allowed: a token that the policy excludes by now).
    """

    new: Tensor
    """(B, T), float: log-probability of each token under the policy that is being updated; the
    gradient flows through it.
    """
    old: Tensor
    """(B, T), float: the same under the own policy at the start of the update (AReaL's proximal
    policy).
    """
    mask: Tensor
    """(B, T), bool: true for the tokens of a completion, its end token included.

    Values elsewhere never matter.
    """
    advantages: Tensor
    """(B,), float."""
    behaviour: Tensor | None = None
    """(B, T), float: the same under the policy that wrote the token, at its sampling temperature.

    A row for which it is not known (a sender with another tokenizer) must hold ``old``. None: known
    for no row, as in the paper.
    """

    def __post_init__(self) -> None:
        shape = self.new.shape
        if len(shape) != 2 or self.mask.dtype != torch.bool:
            raise ValueError(
                f"new must be (B, T) and mask bool, got {tuple(shape)} and {self.mask.dtype}"
            )
        given = {"old": self.old, "mask": self.mask}
        if self.behaviour is not None:
            given["behaviour"] = self.behaviour
        for name, tensor in given.items():
            if tensor.shape != shape:
                raise ValueError(
                    f"{name} must have the shape of new, {tuple(shape)}, got {tuple(tensor.shape)}"
                )
        if self.advantages.shape != shape[:1]:
            raise ValueError(
                f"advantages must be one number per completion, ({shape[0]},), got "
                f"{tuple(self.advantages.shape)}"
            )
        if not bool((self.new.detach() < math.inf).logical_or(~self.mask).all()):
            raise ValueError(
                "new holds NaN or infinity: the policy that is updated has diverged, so lower its "
                "learning rate"
            )
        for name, tensor in {**given, "advantages": self.advantages[:, None]}.items():
            if not bool((tensor.isfinite() | ~self.mask).all()):
                raise ValueError(
                    f"{name} holds a number that is not finite: leave that completion out"
                )

    def ratio(self) -> Tensor:
        """Return new over old policy, (B, T), at least float32; 1 where the mask is not set."""
        return self._ratio(self.new, self.old.detach())

    def ratio_to_writer(self) -> Tensor:
        """Return new policy over the one that wrote the token, (B, T), or over the old one where
        that is not known.
        """
        return self._ratio(self.new, self._writer().detach())

    def weight(self) -> Tensor:
        """Return old policy over the one that wrote the token, (B, T), without gradient; 1 where
        the latter is not known.
        """
        return self._ratio(self.old, self._writer()).detach()

    def _writer(self) -> Tensor:
        return self.old if self.behaviour is None else self.behaviour

    def _ratio(self, above: Tensor, below: Tensor) -> Tensor:
        # Both are masked before the subtraction: the padding may be infinite or NaN.
        above = _wide(above).masked_fill(~self.mask, 0.0)
        below = _wide(below).masked_fill(~self.mask, 0.0)
        difference = above - below
        return difference.clamp(-MAX_LOG, MAX_LOG).exp()


def _wide(tensor: Tensor) -> Tensor:
    """Convert to float32 at least: a ratio in bfloat16 has 8 bits, too coarse for the narrow
    clip.
    """
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


TokenLoss = Callable[[Completions], Tensor]
"""Returns (B, T), one loss per token; values where the mask is not set do not matter and are not
differentiated.
"""


def clipped(ratio: Tensor, advantages: Tensor, low: float = LOW, high: float = HIGH) -> Tensor:
    """Return -min(ratio A, clip(ratio, 1 - low, 1 + high) A) per token (PPO, 1707.06347, equation
    7): (B, T) of ratios and (B,) of advantages to (B, T).
    """
    gain = advantages[:, None].to(ratio.dtype)
    return -torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)


def sapo(batch: Completions, low: float = LOW, high: float = HIGH) -> Tensor:
    """Return SAPO's loss (2509.08721): GRPO's with an asymmetric clip and without a KL term,

        clipped(new / old, A)

    around the own old policy, whichever policy wrote the completion.
    """
    return clipped(batch.ratio(), batch.advantages, low, high)


def tis(batch: Completions, cap: float = 2.0, low: float = LOW, high: float = HIGH) -> Tensor:
    """Return truncated importance sampling (the truncation is IMPALA's, 1802.01561, section 4.1):

        min(old / behaviour, cap) sapo

    Without ``behaviour`` it equals `sapo`.
    """
    return batch.weight().clamp(max=cap) * sapo(batch, low, high)


def decoupled(batch: Completions, cap: float = 5.0, low: float = LOW, high: float = HIGH) -> Tensor:
    """Return decoupled PPO (AReaL, 2505.24298, section 5.2; its code has the cap):

        old / behaviour sapo        where old / behaviour <= cap, else 0

    Without ``behaviour`` it equals `sapo`.
    """
    weight = batch.weight()
    return torch.where(weight <= cap, weight, 0.0) * sapo(batch, low, high)


def positive(batch: Completions, low: float = LOW, high: float = HIGH) -> Tensor:
    """Return `sapo` of max(A, 0), so only completions better than their group have a gradient
    (after A-LoL, 2305.14718, section 3).
    """
    return clipped(batch.ratio(), batch.advantages.clamp(min=0), low, high)


def prime(
    batch: Completions,
    token: tuple[float, float] = (0.125, 8.0),
    geometric: tuple[float, float] = (0.1, 10.0),
    penalty: float = 1e-3,
    scale: float = 1.0,
) -> Tensor:
    """Return prime-rl's loss by ratios, with ratio = new / behaviour:

        -scale ratio A + penalty log(ratio)^2

    0 for tokens whose ratio is outside ``token``, and for completions whose ratios' geometric mean
    is outside ``geometric``.
    """
    ratio = batch.ratio_to_writer()
    log = ratio.log()
    mean = (log.detach().sum(1) / batch.mask.sum(1).clamp(min=1)).exp()[:, None]
    seen = ratio.detach()
    token_kept = (seen >= token[0]) & (seen <= token[1])
    completion_kept = (mean >= geometric[0]) & (mean <= geometric[1])
    gain = ratio * batch.advantages[:, None].to(ratio.dtype)
    terms = penalty * log.square() - scale * gain
    return torch.where(token_kept & completion_kept, terms, 0.0)


LOSSES: dict[str, TokenLoss] = {
    loss.__name__: loss for loss in (sapo, tis, decoupled, positive, prime)
}
"""Losses by the names used in settings (``rl.loss``).

For other parameters use ``functools.partial(tis, cap=4.0)``.
"""


def policy_loss(
    batch: Completions, loss: TokenLoss = sapo, *, per: str = "token", total: int | None = None
) -> Tensor:
    """Return the scalar to minimise: the mean of ``loss`` over all tokens, or over completions.

    0 if no token counts.

    Args:
        batch: the completions.
        loss: one number for each token.
        per: "token" (SAPO's; DAPO's, 2503.14476, section 3.3): every token counts the same, so a
            long completion counts more. "completion" (GRPO's, 2402.03300, equation 3): the mean of
            each completion's mean; completions without a token do not count.
        total: tokens or completions to divide by, if not those of this batch: with the number in
            the whole update the losses of its micro-batches add up to the loss of the whole.

    Raises:
        ValueError: another ``per``, or a ``total`` below 1.
    """
    if per not in ("token", "completion"):
        raise ValueError(f'per must be "token" or "completion", got {per!r}')
    if total is not None and total < 1:
        raise ValueError(
            f"total must be at least 1, got {total}: it is the number of tokens or completions in "
            "the whole update"
        )
    terms = loss(batch).masked_fill(~batch.mask, 0.0)
    length = batch.mask.sum(1)
    if per == "completion":
        terms = terms.sum(1) / length.clamp(min=1)
        length = length > 0
    if total is None:
        return terms.sum() / length.sum().clamp(min=1)
    return terms.sum() / total


def effective_sample_size(logs: Tensor) -> Tensor:
    """Return (sum w)^2 / sum w^2, the number of equally weighted samples of the same worth (Kish,
    Survey Sampling, 1965).

    ``logs``: (N,), natural logarithms of the weights, -inf for a weight of 0; only their
    differences matter. The result is a scalar in [1, N], or 0 without a weight above 0. For
    `log_weights` of foreign completions: the number of own ones that they replace.
    """
    if logs.numel() == 0 or bool(logs.isneginf().all()):
        return _wide(logs).new_zeros(())
    weights = (_wide(logs) - logs.max()).exp()
    return weights.sum().square() / weights.square().sum()


def log_weights(batch: Completions) -> Tensor:
    """Return the sum of log(old / behaviour) over each completion's tokens, (B,), without gradient;
    0 where that is not known.
    """
    return batch.weight().log().sum(1)
