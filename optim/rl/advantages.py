"""Advantages: by how much a completion is better than the others of its group."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

EPSILON = 1e-4
"""Added to the standard deviation of rewards, as in trl: rewards that differ by rounding alone then
give no advantage.
"""

Scale = Literal["group", "batch", "none"]
Deviation = Literal["population", "sample"]


def group_advantages(
    rewards: Tensor,
    group: Tensor,
    *,
    scale: Scale = "group",
    deviation: Deviation = "population",
) -> Tensor:
    """Return each completion's advantage over its group (GRPO, 2402.03300, section 4.1):

        A = (reward - mean) / (standard deviation + 1e-4)

    exactly 0 in a group of equal rewards, or of one; its tokens still count in the mean.

    Args:
        rewards: float (B,).
        group: int64 (B,), any numbers, equal within a group; groups may differ in size.
        scale: "group": the deviation of the group's rewards; "batch": of all rewards
            (2508.08221); "none": A is not divided (Dr. GRPO, 2503.20783).
        deviation: "population" divides squares by their number, "sample" by one less, as trl does.

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
    difference = values - (zeros.index_add(0, place, values) / count)[place]
    fewer = 1 if deviation == "sample" else 0
    advantages = difference
    if scale == "group":
        squares = zeros.index_add(0, place, difference.square())
        std = (squares / (count - fewer).clamp(min=1)).sqrt()
        advantages = difference / (std[place] + EPSILON)
    elif scale == "batch":
        squares = (values - values.mean()).square().sum()
        std = (squares / max(values.numel() - fewer, 1)).sqrt()
        advantages = difference / (std + EPSILON)
    # Not by std > 0: the mean of eight times 0.1 is not 0.1, and equal rewards are to give exactly
    # 0.
    least = zeros.scatter_reduce(0, place, values, "amin", include_self=False)
    most = zeros.scatter_reduce(0, place, values, "amax", include_self=False)
    return torch.where((least < most)[place], advantages, 0.0).to(rewards.dtype)
