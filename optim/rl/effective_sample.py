"""What foreign completions are worth: the effective sample size of their importance weights."""

from __future__ import annotations

from torch import Tensor

from shoal.optim.rl.completions import Completions, wide


def effective_sample_size(logs: Tensor) -> Tensor:
    """Return (sum w)^2 / sum w^2, the number of equally weighted samples of the same worth (Kish,
    Survey Sampling, 1965).

    ``logs``: (N,), natural logarithms of the weights, -inf for a weight of 0; only their
    differences matter. The result is a scalar in [1, N], or 0 without a weight above 0. For
    `log_weights` of foreign completions: the number of own ones that they replace.
    """
    if logs.numel() == 0 or bool(logs.isneginf().all()):
        return wide(logs).new_zeros(())
    weights = (wide(logs) - logs.max()).exp()
    return weights.sum().square() / weights.square().sum()


def log_weights(batch: Completions) -> Tensor:
    """Return the sum of log(old / behaviour) over each completion's tokens, (B,), without gradient;
    0 where that is not known.
    """
    return batch.weight().log().sum(1)
