"""Completions as a loss needs them, and the ratios of policies that losses are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG = 20.0
"""Logarithms of ratios are clamped to +-MAX_LOG, so that no ratio overflows: e^20 is far beyond
every clip and cap.
"""


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
    reference: Tensor | None = None
    """(B, T), float: the same under the policy that the KL divergence is to."""
    entropy: Tensor | None = None
    """(B, T), float: entropy of the distribution that each token was drawn from, in nats, under the
    policy that is being updated, with its gradient.
    """

    def __post_init__(self) -> None:
        shape = self.new.shape
        if len(shape) != 2 or self.mask.dtype != torch.bool:
            raise ValueError(
                f"new must be (B, T) and mask bool, got {tuple(shape)} and {self.mask.dtype}"
            )
        given = {"old": self.old, "mask": self.mask}
        for name in ("behaviour", "reference", "entropy"):
            tensor = getattr(self, name)
            if tensor is not None:
                given[name] = tensor
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

    @property
    def gains(self) -> Tensor:
        """The advantages as a column, (B, 1), at least float32."""
        return wide(self.advantages)[:, None]

    @property
    def writer(self) -> Tensor:
        """Log-probabilities (B, T) under the policy that wrote each token, or under the old one
        where that is not known.
        """
        return self.old if self.behaviour is None else self.behaviour

    def ratio(self) -> Tensor:
        """Return new over old policy, (B, T), at least float32; 1 where the mask is not set."""
        return self.log_ratio(self.new, self.old.detach()).exp()

    def ratio_to_writer(self) -> Tensor:
        """Return new policy over the one that wrote the token, (B, T)."""
        return self.log_ratio(self.new, self.writer.detach()).exp()

    def sequence_ratio(self) -> Tensor:
        """Return the geometric mean of each completion's ratios to the policy that wrote it,
        (B, 1); 1 without a token.
        """
        logs = self.log_ratio(self.new, self.writer.detach())
        return self.mean(logs)[:, None].exp()

    def weight(self) -> Tensor:
        """Return old policy over the one that wrote the token, (B, T), without gradient; 1 where
        the latter is not known.
        """
        return self.log_ratio(self.old, self.writer).detach().exp()

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of ``values`` (B, T), which are 0 at padding, over each completion's
        tokens, (B,).
        """
        return values.sum(1) / self.mask.sum(1).clamp(min=1)

    def log_ratio(self, above: Tensor, below: Tensor) -> Tensor:
        """Return the difference of log-probabilities (B, T), within `MAX_LOG`; 0 at padding."""
        # Both are masked before the subtraction: the padding may be infinite or NaN.
        above = wide(above).masked_fill(~self.mask, 0.0)
        below = wide(below).masked_fill(~self.mask, 0.0)
        return (above - below).clamp(-MAX_LOG, MAX_LOG)


def wide(tensor: Tensor) -> Tensor:
    """Convert to float32 at least: a ratio in bfloat16 has 8 bits, too coarse for the narrow
    clip.
    """
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
