"""A policy that computes with fewer bits than it says."""

import copy

import torch


def quantised(policy, bits=4):
    """A copy whose weights were rounded, each row to ``bits`` bits."""
    rounded = copy.deepcopy(policy)
    with torch.no_grad():
        for weight in rounded.module.parameters():
            if weight.ndim == 2:
                step = weight.abs().amax(1, keepdim=True).clamp_min(1e-8) / (2 ** (bits - 1) - 1)
                weight.copy_((weight / step).round() * step)
    return rounded
