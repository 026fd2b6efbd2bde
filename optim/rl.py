"""Losses of SAPO (2509.08721): a policy learns from its own and from others' completions as if it
had written them all.

    # recomputed here, for own and foreign groups alike
    rewards = torch.tensor([...])
    batch = Completions(new, old, mask, group_advantages(rewards, group))
    # or policy_loss(batch, LOSSES["decoupled"])
    policy_loss(batch).backward()

A group is one question with its G completions. The paper's loss is GRPO's with an asymmetric clip
and without a KL term, in which "old" is the receiver's own policy at the start of the update, also
for foreign completions. Four more losses correct for the policy that wrote a completion; any
function of `Completions` that returns one number per token can be used instead.

Not to be confused with Soft Adaptive Policy Optimization (2511.20347), which has the same short
name.

Random selection of the foreign groups that a node learns from in a round (SAPO, 2509.08721).

    picked = select(candidates, count=4, seed=secret, round=7, max_age=1, per_sender=2)
    groups = [pool[place] for place in picked.places]

The caller recomputes the rewards; records and their transport belong to the network. There is no
random state: the order follows from (seed, round, key), whatever the order in which records
arrived.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOW, HIGH = 0.2, 0.28
"""The ratio of new to old policy is clipped to [1 - LOW, 1 + HIGH] (SAPO; the asymmetry is DAPO's,
2503.14476, section 3.1).
"""
EPSILON = 1e-4
"""Added to the standard deviation of a group's rewards, as in trl: rewards that differ by rounding
alone then give no advantage.
"""
MAX_LOG = 20.0
"""Logarithms of ratios are clamped to +-MAX_LOG, so that no ratio overflows: e^20 is far beyond
every clip and cap.
"""


def group_advantages(rewards: Tensor, group: Tensor) -> Tensor:
    """Return each completion's advantage over its group: (reward - mean) / (standard deviation +
    1e-4).

    ``rewards``: float (B,); ``group``: int64 (B,), any numbers, equal within a group; groups may
    differ in size. The result is (B,) of the rewards' dtype, computed in float64. The standard
    deviation is the population's (GRPO, 2402.03300, section 4.1; some implementations take the
    sample's, which only scales by sqrt(1 - 1/G)). A group of equal rewards gets exactly 0, so it
    adds nothing to any gradient, though its tokens count in the mean. ValueError if shapes differ
    or a reward is not finite.
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

    A row for which it is not known
    (a sender with another tokenizer) must hold ``old``. None: known for no row, as in the paper."""

    def __post_init__(self) -> None:
        shape = self.new.shape
        if len(shape) != 2 or self.mask.dtype != torch.bool:
            raise ValueError(
                f"new must be (B, T) and mask bool, got {tuple(shape)} and {self.mask.dtype}"
            )
        given = {"old": self.old, "mask": self.mask} | (
            {} if self.behaviour is None else {"behaviour": self.behaviour}
        )
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
        difference = _wide(above).masked_fill(~self.mask, 0.0) - _wide(below).masked_fill(
            ~self.mask, 0.0
        )
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
    """Return -min(ratio A, clip(ratio, 1 - low, 1 + high) A) per token (PPO, 1707.06347, eq. 7):
    (B, T) and (B,) to (B, T).
    """
    gain = advantages[:, None].to(ratio.dtype)
    return -torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)


def sapo(batch: Completions, low: float = LOW, high: float = HIGH) -> Tensor:
    """Return the paper's loss: clipped around the own old policy, whichever policy wrote the
    completion.
    """
    return clipped(batch.ratio(), batch.advantages, low, high)


def tis(batch: Completions, cap: float = 2.0, low: float = LOW, high: float = HIGH) -> Tensor:
    """Return `sapo` times min(old / behaviour, cap) per token: truncated importance sampling.

    Tokens that are less probable under the own policy count less in proportion; others count at
    most ``cap`` times (the truncation of IMPALA, 1802.01561, section 4.1). Without ``behaviour`` it
    equals `sapo`.
    """
    return batch.weight().clamp(max=cap) * sapo(batch, low, high)


def decoupled(batch: Completions, cap: float = 5.0, low: float = LOW, high: float = HIGH) -> Tensor:
    """Return `sapo` times old / behaviour per token, without tokens of a weight above ``cap``:
    decoupled PPO.

    AReaL (2505.24298), section 5.2. Its equation has no cap, ``cap=inf`` here; its code leaves out
    tokens above one, usually 5, as this does, because an estimate that rests on a token of such
    weight is worth little. Without ``behaviour`` it equals `sapo`.
    """
    weight = batch.weight()
    return torch.where(weight <= cap, weight, 0.0) * sapo(batch, low, high)


def positive(batch: Completions, low: float = LOW, high: float = HIGH) -> Tensor:
    """Return `sapo` with negative advantages set to 0, so only completions better than their group
    have a gradient.

    After A-LoL (2305.14718), which trains on the part of foreign data that has a positive
    advantage. Lowering the probability of an improbable completion moves the policy in no
    particular direction; raising that of a right answer moves it there. Differences from the paper:
    the ratio is per token and to the own old policy; completions left out still count in the mean,
    so that a step shrinks with the number of those that it rests on.
    """
    return clipped(batch.ratio(), batch.advantages.clamp(min=0), low, high)


def prime(
    batch: Completions,
    token: tuple[float, float] = (0.125, 8.0),
    geometric: tuple[float, float] = (0.1, 10.0),
    penalty: float = 1e-3,
    scale: float = 1.0,
) -> Tensor:
    """Return -ratio x ``scale`` x A + ``penalty`` x log(ratio)^2 per token, the ratio being new /
    behaviour, after prime-rl.

    Tokens whose ratio is outside ``token`` are left out, as are completions whose geometric mean is
    outside ``geometric``. Masks and scale (adv_tau) are those of prime-rl's loss by ratios, the
    penalty (kl_tau) is that of its later one. There the penalty holds for masked tokens too; here a
    masked token has no gradient, because strangers state its log-probability.
    """
    ratio = batch.ratio_to_writer()
    log = ratio.log()
    mean = (log.detach().sum(1) / batch.mask.sum(1).clamp(min=1)).exp()[:, None]
    seen = ratio.detach()
    kept = (seen >= token[0]) & (seen <= token[1]) & (mean >= geometric[0]) & (mean <= geometric[1])
    terms = penalty * log.square() - scale * ratio * batch.advantages[:, None].to(ratio.dtype)
    return torch.where(kept, terms, 0.0)


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

    ``per="token"`` (SAPO's; DAPO's, 2503.14476, section 3.3): every token counts the same, so a
    long completion counts more. ``per="completion"`` (GRPO's, 2402.03300, equation 3): the mean of
    each completion's mean; completions without a token do not count. ``total``: the tokens or
    completions to divide by, if not those of this batch: with the number in the whole update the
    losses of its micro-batches add up to the loss of the whole. 0 if no token counts. ValueError
    for another ``per`` or a ``total`` below 1.
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
        terms, length = terms.sum(1) / length.clamp(min=1), length > 0
    return terms.sum() / (length.sum().clamp(min=1) if total is None else total)


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


REASONS = ("duplicate", "stale", "off_policy", "no_spread", "over_quota", "not_drawn")
"""Reasons for not picking a candidate, in the order of the checks."""


@dataclass(frozen=True)
class Candidate:
    """Foreign group, with the properties that the selection depends on."""

    key: str
    """Hash of its content, which identifies the group."""
    sender: str
    """Peer id of the signer."""
    round: int
    """This node's round when it arrived; not one stated by the sender, who could state any."""
    rewards: tuple[float, ...]
    """Rewards of its completions, recomputed by this node."""
    behind: int = 0
    """Versions of its sender's policy from the one that wrote it to the sender's newest."""


@dataclass(frozen=True)
class Picked:
    """Outcome of `select`."""

    places: tuple[int, ...]
    """Indices of the picked candidates, in the order in which they were drawn."""
    left: dict[str, int]
    """Number of candidates left out for each of `REASONS`; all are keys."""


def has_spread(rewards: Sequence[float]) -> bool:
    """Return True if the rewards of a group differ, so that there is an advantage to learn from."""
    return len(rewards) > 0 and min(rewards) < max(rewards)


def select(
    candidates: Sequence[Candidate],
    count: int,
    *,
    seed: int,
    round: int,
    max_age: int,
    per_sender: int | None = None,
    max_behind: int | None = None,
) -> Picked:
    """Pick ``count`` candidates (or all, if fewer), uniformly among the eligible ones.

    A group is eligible if it is no copy of another one (same key), arrived at most ``max_age``
    rounds ago, is at most ``max_behind`` versions of its sender's policy behind (None: any number;
    prime-rl's max_off_policy_steps), has rewards that differ, and does not exceed its sender's
    quota: of each sender at most ``per_sender`` remain, drawn uniformly too (None: all). Public
    code (genrl) takes the groups with the highest reward instead, often of equal rewards; this
    follows the paper's rule.

    ``seed``: the node's own, and secret: a sender who knew it could vary its groups until they come
    first. ``round``: the present one. A candidate of a later round, left by a node that went back
    to a checkpoint, counts as of this one. ValueError if ``count``, ``max_age`` or ``max_behind``
    is below 0 or ``per_sender`` below 1.
    """
    if max_behind is not None and max_behind < 0:
        raise ValueError(f"max_behind must be at least 0, got {max_behind}")
    if count < 0 or max_age < 0 or (per_sender is not None and per_sender < 1):
        raise ValueError(
            f"count and max_age must be at least 0 and per_sender at least 1, got {count}, "
            f"{max_age} and {per_sender}"
        )
    left = dict.fromkeys(REASONS, 0)
    keys: set[str] = set()
    taken: Counter[str] = Counter()
    places: list[int] = []
    for place in sorted(
        range(len(candidates)), key=lambda place: _order(candidates[place], seed, round)
    ):
        candidate = candidates[place]
        if candidate.key in keys:
            left["duplicate"] += 1
            continue
        keys.add(candidate.key)
        if round - candidate.round > max_age:
            left["stale"] += 1
        elif max_behind is not None and candidate.behind > max_behind:
            left["off_policy"] += 1
        elif not has_spread(candidate.rewards):
            left["no_spread"] += 1
        elif per_sender is not None and taken[candidate.sender] >= per_sender:
            left["over_quota"] += 1
        else:
            taken[candidate.sender] += 1
            if len(places) < count:
                places.append(place)
            else:
                left["not_drawn"] += 1
    return Picked(tuple(places), left)


def _order(
    candidate: Candidate, seed: int, round: int
) -> tuple[bytes, int, str, tuple[float, ...]]:
    digest = hashlib.sha256(f"shoal/rollouts/1:{seed}:{round}:{candidate.key}".encode()).digest()
    # Beyond the digest, uniform and new each round, it decides which of several copies counts: the
    # oldest, so that resending does not make a group younger.
    return digest, candidate.round, candidate.sender, candidate.rewards
