"""Advantages: by how much the reward of a completion is above or below the mean of its group."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Scale = Literal["group", "batch", "none"]
"""Rewards of which the standard deviation divides an advantage; "none" divides it by nothing."""

Deviation = Literal["population", "sample"]
"""Whether a sum of n squares is divided by n, or by n - 1."""

STD_EPSILON = 1e-4
"""Added to the standard deviation, as in Hugging Face's TRL: rewards that differ only by rounding
then give an advantage near 0, and not near 1.
"""


def group_advantages(
    rewards: Tensor,
    group: Tensor,
    *,
    scale: Scale = "group",
    deviation: Deviation = "population",
) -> Tensor:
    """Return each completion's advantage over its group, the completions of one question (GRPO,
    arXiv 2402.03300, section 4.1):

        A = (reward - mean of the group) / (standard deviation + STD_EPSILON)

    It is exactly 0 where all rewards of a group are equal, or the group is of one. Only its own
    node computes it, so no other needs the same bits.

    Args:
        rewards: (B,) of a floating-point dtype, one for each of B completions.
        group: int64 (B,), which group each completion is of: any numbers, in any order.
        scale: "group": the deviation of the group's rewards; "batch": of all rewards (arXiv
            2508.08221); "none": A = reward - mean (Dr. GRPO, arXiv 2503.20783).
        deviation: "population" as in GRPO's paper, or "sample" as in TRL.

    Returns:
        (B,) of the rewards' dtype, computed in float64.

    Raises:
        ValueError: shapes differ, or a reward is not finite.
    """
    if rewards.ndim != 1 or rewards.shape != group.shape:
        raise ValueError(
            "rewards and group must both be of the shape (B,), got "
            f"{tuple(rewards.shape)} and {tuple(group.shape)}"
        )
    if not bool(rewards.isfinite().all()):
        raise ValueError(
            "a reward is not finite: the environment must return a finite number for every "
            "completion"
        )
    values = rewards.double()
    ids, index = torch.unique(group, return_inverse=True)
    per_group = values.new_zeros(ids.numel())
    count = per_group.index_add(0, index, torch.ones_like(values))
    difference = values - (per_group.index_add(0, index, values) / count)[index]
    correction = 1 if deviation == "sample" else 0
    advantages = difference
    if scale == "group":
        sum_of_squares = per_group.index_add(0, index, difference.square())
        std = (sum_of_squares / (count - correction).clamp(min=1)).sqrt()
        advantages = difference / (std[index] + STD_EPSILON)
    elif scale == "batch":
        # About the mean of the batch, and not of each group.
        sum_of_squares = (values - values.mean()).square().sum()
        std = (sum_of_squares / max(values.numel() - correction, 1)).sqrt()
        advantages = difference / (std + STD_EPSILON)
    # Not by std > 0: the computed mean of eight rewards of 0.1 is not 0.1.
    lowest = per_group.scatter_reduce(0, index, values, "amin", include_self=False)
    highest = per_group.scatter_reduce(0, index, values, "amax", include_self=False)
    return torch.where((lowest < highest)[index], advantages, 0.0).to(rewards.dtype)
