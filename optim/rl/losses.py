"""Losses of tokens: the table `LOSSES`, one function a loss.

Each has a docstring with its formula and its paper. "Old" is the own policy at the start of the
update, "writer" the one that wrote the token, where that is known. Why they differ:
docs/internals.md, "Losses of reinforcement learning".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from shoal.optim.rl.completions import Completions, wide

LOW = 0.2
"""The ratio of new to old policy is clipped from below to 1 - LOW (SAPO)."""
HIGH = 0.28
"""And from above to 1 + HIGH (SAPO; the asymmetry is DAPO's, 2503.14476, section 3.1)."""
DELTA = 4.0
"""Largest ratio to the writer that counts where A < 0 (INTELLECT-2, 2505.07291), because strangers
state the writer's log-probability, and could state any.
"""
CAP = 8.0
"""The same for the losses of prime-rl, which leave out what is above it."""

Per = Literal["token", "completion", "completion_sum", "max_tokens"]
"""What a mean is over (`policy_loss`)."""

TokenLoss = Callable[[Completions], Tensor]
"""Returns (B, T), one loss per token; values where the mask is not set do not matter and are not
differentiated.
"""


def clipped(
    ratio: Tensor,
    advantages: Tensor,
    low: float = LOW,
    high: float = HIGH,
    delta: float | None = None,
) -> Tensor:
    """Return -min(ratio A, clip(ratio, 1 - low, 1 + high) A) per token (PPO, 1707.06347, equation
    7): (B, T) of ratios and (B,) of advantages to (B, T).

    ``delta``: the unclipped ratio counts at most so much, which bounds the loss where A < 0.
    """
    gain = advantages[:, None].to(ratio.dtype)
    held = ratio.clamp(1 - low, 1 + high) * gain
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    return -torch.minimum(ratio * gain, held)


def sapo(
    batch: Completions, low: float = LOW, high: float = HIGH, delta: float | None = None
) -> Tensor:
    """Return SAPO's loss (2509.08721): GRPO's with an asymmetric clip and without a KL term,

        clipped(new / old, A)

    around the own old policy, whichever policy wrote the completion.
    """
    return clipped(batch.ratio(), batch.advantages, low, high, delta)


def grpo(
    batch: Completions, low: float = LOW, high: float = LOW, delta: float | None = DELTA
) -> Tensor:
    """Return GRPO's loss (2402.03300, equation 3): clipped(new / writer, A)."""
    return clipped(batch.ratio_to_writer(), batch.advantages, low, high, delta)


def dapo(
    batch: Completions, low: float = LOW, high: float = HIGH, delta: float | None = DELTA
) -> Tensor:
    """Return DAPO's loss (2503.14476): `grpo` with an asymmetric clip."""
    return grpo(batch, low, high, delta)


def gspo(
    batch: Completions, low: float = 3e-4, high: float = 4e-4, delta: float | None = DELTA
) -> Tensor:
    """Return GSPO's loss (2507.18071): clipped(s, A), with s the geometric mean of
    new / writer over the completion.
    """
    loss = clipped(batch.sequence_ratio(), batch.advantages, low, high, delta)
    return loss.expand_as(batch.new)


def luspo(
    batch: Completions, low: float = 2e-3, high: float = 2.5e-3, delta: float | None = DELTA
) -> Tensor:
    """Return LUSPO's loss (2602.05261): that of `gspo`, times the length (`MEANS`)."""
    return gspo(batch, low, high, delta)


def cispo(batch: Completions, cap: float = 5.0) -> Tensor:
    """Return CISPO's loss (MiniMax-M1, 2506.13585; the cap is ScaleRL's, 2510.13786):

        -min(new / writer, cap) A log(new)        with no gradient through the ratio

    0 for a token that the policy excludes by now.
    """
    weight = batch.ratio_to_writer().detach().clamp(max=cap)
    new = wide(batch.new)
    new = new.masked_fill(new.isneginf() | ~batch.mask, 0.0)
    return -weight * batch.gains * new


def soft_gate(batch: Completions, up: float = 1.0, down: float = 1.05) -> Tensor:
    """Return the loss of Soft Adaptive Policy Optimization (2511.20347), which others
    call sapo:

        -4 / t sigmoid(t (new / writer - 1)) A        t = up where A > 0, else down
    """
    sharpness = torch.where(batch.gains > 0, up, down)
    gate = torch.sigmoid(sharpness * (batch.ratio_to_writer() - 1)) * 4 / sharpness
    return -gate * batch.gains


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
    """Return prime-rl's earlier loss, with ratio = new / behaviour:

        -scale ratio A + penalty log(ratio)^2

    0 for tokens whose ratio is outside ``token``, and for completions whose ratios' geometric mean
    is outside ``geometric``.
    """
    ratio = batch.ratio_to_writer()
    log = ratio.log()
    mean = batch.sequence_ratio().detach()
    seen = ratio.detach()
    token_kept = (seen >= token[0]) & (seen <= token[1])
    completion_kept = (mean >= geometric[0]) & (mean <= geometric[1])
    gain = ratio * batch.advantages[:, None].to(ratio.dtype)
    terms = penalty * log.square() - scale * gain
    return torch.where(token_kept & completion_kept, terms, 0.0)


def dppo(
    batch: Completions,
    low: float = 0.2,
    high: float = 0.2,
    penalty: float = 1e-3,
    scale: float = 1.0,
    cap: float = CAP,
) -> Tensor:
    """Return prime-rl's default loss (DPPO, 2602.04879, with the penalty of Kimi K2.5, 2602.02276):

        -scale ratio A + penalty log(ratio)^2        ratio = new / writer

    Without the first term for tokens that went far enough: where A > 0 new - writer > high, else
    new - writer < -low, in probability; and where the ratio is above ``cap``.
    """
    moved = _moved(batch)
    kept = torch.where(batch.gains > 0, moved <= high, moved >= -low)
    return _penalised(batch, kept, penalty, scale, cap)


def ipo(
    batch: Completions,
    threshold: float = 0.1,
    penalty: float = 1e-3,
    scale: float = 1.0,
    cap: float = CAP,
) -> Tensor:
    """Return prime-rl's loss "ipo": as `dppo`, but without the first term where new and writer
    differ by more than ``threshold``, in probability.
    """
    return _penalised(batch, _moved(batch).abs() <= threshold, penalty, scale, cap)


def _moved(batch: Completions) -> Tensor:
    """Return by how much each token's probability is above the writer's, without gradient."""
    return wide(batch.new.detach()).exp() - wide(batch.writer.detach()).exp()


def _penalised(
    batch: Completions, kept: Tensor, penalty: float, scale: float, cap: float
) -> Tensor:
    """Return prime-rl's loss with the first term for the tokens ``kept``."""
    ratio = batch.ratio_to_writer()
    kept = kept & (ratio.detach() <= cap)
    gain = torch.where(kept, ratio * batch.gains, 0.0)
    return penalty * ratio.log().square() - scale * gain


LOSSES: dict[str, TokenLoss] = {
    "sapo": sapo,
    "tis": tis,
    "decoupled": decoupled,
    "positive": positive,
    "grpo": grpo,
    "dr_grpo": grpo,
    "dapo": dapo,
    "gspo": gspo,
    "luspo": luspo,
    "cispo": cispo,
    "soft_gate": soft_gate,
    "dppo": dppo,
    "ipo": ipo,
    "prime": prime,
}
"""Losses by the names used in settings (``rl.loss``).

For other parameters use ``functools.partial(tis, cap=4.0)``.
"""

UNCORRECTED = frozenset({"sapo", "positive"})
"""Losses without a ratio to the writer, for which a completion is as good as how near its writer's
policy is.
"""

MEANS: dict[str, Per] = {
    "grpo": "completion",
    "dr_grpo": "max_tokens",
    "gspo": "completion",
    "luspo": "completion_sum",
    "soft_gate": "completion",
}
"""What the paper of a loss takes the mean over; the others: tokens."""
