"""SAPO (2509.08721): a policy learns from its own completions and from those of others, as if it had written them all.

    rewards = torch.tensor([...])                                   # recomputed here, for own and foreign groups alike
    batch = Completions(new, old, mask, group_advantages(rewards, group))
    policy_loss(batch).backward()                                   # or policy_loss(batch, LOSSES["decoupled"])

A group is one question with its G completions. The paper's loss is GRPO's with an asymmetric clip and without a KL term, in which
"old" is the receiver's own policy at the start of the update, also for foreign completions. Three more losses take into account
who wrote a completion, and when; any function of `Completions` that gives one number per token can stand in their place.
Which foreign groups are learnt from is decided in `optim/rollouts.py`.

Not to be confused with Soft Adaptive Policy Optimization (2511.20347), which has the same short name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOW, HIGH = 0.2, 0.28
"""The ratio of new to old policy is clipped to [1 - LOW, 1 + HIGH] (SAPO; the asymmetry is DAPO's, 2503.14476, section 3.1)."""
EPSILON = 1e-8
"""Added to the spread of a group's rewards."""
MOST = 20.0
"""Logarithms of ratios are held within +-MOST, so that no ratio overflows: e^20 is far beyond every clip and cap."""


def group_advantages(rewards: Tensor, group: Tensor) -> Tensor:
    """How much better than its group each completion is: (reward - mean) / (spread + 1e-8), over the completions of its group.

    ``rewards``: float (B,); ``group``: int64 (B,), any numbers, equal within a group; groups may differ in size. Returns (B,) of
    the rewards' dtype, computed in float64. The spread is the population's standard deviation (GRPO, 2402.03300, section 4.1; some
    implementations take the sample's, which only scales by sqrt(1 - 1/G)). A group whose rewards are all equal gets exactly 0, so
    it adds nothing to any gradient, though its tokens count in the mean. ValueError if shapes differ or a reward is not finite.
    """
    if rewards.ndim != 1 or rewards.shape != group.shape:
        raise ValueError(f"rewards and group must be two equally long rows, got {tuple(rewards.shape)} and {tuple(group.shape)}")
    if not bool(rewards.isfinite().all()):
        raise ValueError("a reward is not finite: the environment must return a finite number for every completion")
    values = rewards.double()
    names, place = torch.unique(group, return_inverse=True)
    zeros = values.new_zeros(names.numel())
    count = zeros.index_add(0, place, torch.ones_like(values))
    away = values - (zeros.index_add(0, place, values) / count)[place]
    spread = (zeros.index_add(0, place, away.square()) / count).sqrt()
    # Not by spread > 0: the mean of eight times 0.1 is not 0.1, and divided by 1e-8 that difference would become an advantage.
    least = zeros.scatter_reduce(0, place, values, "amin", include_self=False)
    most = zeros.scatter_reduce(0, place, values, "amax", include_self=False)
    advantages = torch.where((least < most)[place], away / (spread[place] + EPSILON), 0.0)
    return advantages.to(rewards.dtype)


@dataclass(frozen=True)
class Completions:
    """What a loss needs to know of the completions of an update: B of them, padded to T tokens, on either side.

    ValueError if shapes do not fit or a number that no gradient flows through is not finite where the mask is set.
    """

    new: Tensor
    """(B, T), float: log-probability of each token under the policy that is being updated; the gradient flows through it."""
    old: Tensor
    """(B, T), float: the same under the own policy at the start of the update (AReaL calls it the proximal policy)."""
    mask: Tensor
    """(B, T), bool: true for the tokens of a completion, its end token included. What stands elsewhere never matters."""
    advantages: Tensor
    """(B,), float."""
    behaviour: Tensor | None = None
    """(B, T), float: the same under the policy that wrote the token, at the temperature it wrote with. Put ``old`` into a row for
    which it is not known (a sender with another tokenizer). None: known for no row, as in the paper."""

    def __post_init__(self) -> None:
        shape = self.new.shape
        if len(shape) != 2 or self.mask.dtype != torch.bool:
            raise ValueError(f"new must be (B, T) and mask bool, got {tuple(shape)} and {self.mask.dtype}")
        given = {"old": self.old, "mask": self.mask} | ({} if self.behaviour is None else {"behaviour": self.behaviour})
        for name, tensor in given.items():
            if tensor.shape != shape:
                raise ValueError(f"{name} must have the shape of new, {tuple(shape)}, got {tuple(tensor.shape)}")
        if self.advantages.shape != shape[:1]:
            raise ValueError(f"advantages must be one number per completion, ({shape[0]},), got {tuple(self.advantages.shape)}")
        for name, tensor in {**given, "advantages": self.advantages[:, None]}.items():
            if not bool((tensor.isfinite() | ~self.mask).all()):
                raise ValueError(f"{name} holds a number that is not finite: leave that completion out")

    def ratio(self) -> Tensor:
        """(B, T): new over old policy, 1 where the mask is not set; at least float32."""
        return self._ratio(self.new, self.old.detach())

    def weight(self) -> Tensor:
        """(B, T), without gradient: old policy over the one that wrote the token; 1 where that is not known."""
        return self._ratio(self.old, self.old if self.behaviour is None else self.behaviour).detach()

    def _ratio(self, above: Tensor, below: Tensor) -> Tensor:
        # Both are masked before they are subtracted: what stands in the padding may be infinite or not a number.
        difference = _wide(above).masked_fill(~self.mask, 0.0) - _wide(below).masked_fill(~self.mask, 0.0)
        return difference.clamp(-MOST, MOST).exp()


def _wide(tensor: Tensor) -> Tensor:
    """At least float32: a ratio in bfloat16 has 8 bits, as coarse as the clip is narrow."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


TokenLoss = Callable[[Completions], Tensor]
"""Gives (B, T), one loss per token; what it gives where the mask is not set does not matter, and is not differentiated."""


def clipped(ratio: Tensor, advantages: Tensor, low: float = LOW, high: float = HIGH) -> Tensor:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A) per token (PPO, 1707.06347, equation 7). (B, T) and (B,) to (B, T)."""
    gain = advantages[:, None].to(ratio.dtype)
    return -torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)


def sapo(batch: Completions, low: float = LOW, high: float = HIGH) -> Tensor:
    """The paper's: clipped around the own old policy, whoever wrote the completion, and whenever."""
    return clipped(batch.ratio(), batch.advantages, low, high)


def tis(batch: Completions, cap: float = 2.0, low: float = LOW, high: float = HIGH) -> Tensor:
    """Truncated importance sampling: `sapo` times min(old / behaviour, cap) per token.

    Tokens that the own policy would hardly have written count less, by as much; others count at most ``cap`` times (the truncation
    of IMPALA, 1802.01561, section 4.1). Without ``behaviour`` it equals `sapo`.
    """
    return batch.weight().clamp(max=cap) * sapo(batch, low, high)


def decoupled(batch: Completions, cap: float = 5.0, low: float = LOW, high: float = HIGH) -> Tensor:
    """Decoupled PPO: `sapo` times old / behaviour per token; a token whose weight is above ``cap`` is left out.

    AReaL (2505.24298), section 5.2. Its equation has no cap, ``cap=inf`` here; its code leaves out what exceeds one, usually 5, and
    that is followed, because no estimate is worth much that rests on a token of such weight. Without ``behaviour``: `sapo`.
    """
    weight = batch.weight()
    return torch.where(weight <= cap, weight, 0.0) * sapo(batch, low, high)


def positive(batch: Completions, low: float = LOW, high: float = HIGH) -> Tensor:
    """Only completions better than their group: `sapo` with negative advantages set to 0.

    After A-LoL (2305.14718), which trains on the part of foreign data that has a positive advantage. Pushing down what one would
    never have written moves the policy anywhere; pulling up a right answer moves it there. Differences from the paper: the ratio is
    per token and to the own old policy; what is left out still counts in the mean, so that a step shrinks with what it rests on.
    """
    return clipped(batch.ratio(), batch.advantages.clamp(min=0), low, high)


LOSSES: dict[str, TokenLoss] = {"sapo": sapo, "tis": tis, "decoupled": decoupled, "positive": positive}
"""By the name that settings use. Other parameters: ``functools.partial(tis, cap=4.0)``."""


def policy_loss(batch: Completions, loss: TokenLoss = sapo, *, per: str = "token", total: int | None = None) -> Tensor:
    """The number to minimise: the mean of ``loss`` over all tokens, or over completions.

    ``per="token"`` (SAPO's; DAPO's, 2503.14476, section 3.3): every token counts the same, so a long completion counts more.
    ``per="completion"`` (GRPO's, 2402.03300, equation 3): the mean of each completion's mean; completions without a token do not
    count. ``total``: the tokens or completions to divide by, if not those of this batch: with the number in the whole update the
    losses of its micro-batches add up to the loss of the whole. Returns a scalar, 0 if nothing counts. ValueError for another
    ``per`` or a ``total`` below 1.
    """
    if per not in ("token", "completion"):
        raise ValueError(f'per must be "token" or "completion", got {per!r}')
    if total is not None and total < 1:
        raise ValueError(f"total must be at least 1, got {total}: it is the number of tokens or completions in the whole update")
    terms = loss(batch).masked_fill(~batch.mask, 0.0)
    length = batch.mask.sum(1)
    if per == "completion":
        terms, length = terms.sum(1) / length.clamp(min=1), length > 0
    return terms.sum() / (length.sum().clamp(min=1) if total is None else total)


def effective_sample_size(logs: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2 (Kish, Survey Sampling, 1965): how many equally weighted samples the weighted ones are worth.

    ``logs``: (N,), natural logarithms of the weights, -inf for a weight of 0; only their differences matter. Returns a scalar in
    [1, N], or 0 if there is no weight above 0. With `log_weights` of foreign completions: how many own ones they replace.
    """
    if logs.numel() == 0 or bool(logs.isneginf().all()):
        return _wide(logs).new_zeros(())
    weights = (_wide(logs) - logs.max()).exp()
    return weights.sum().square() / weights.square().sum()


def log_weights(batch: Completions) -> Tensor:
    """(B,), without gradient: log of old / behaviour of whole completions, the sum over their tokens; 0 where that is not known."""
    return batch.weight().log().sum(1)
