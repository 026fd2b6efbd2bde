"""How much a contribution counts in the mean, by the tokens and inner steps since it was sent last.

    opt = DiLoCo(inner, exchange, weight=by_tokens)
    ... opt.count(batch.numel()); opt.step()

All peers must use the same function. A weight of 0 keeps a peer out of the mean for that round, as
if it were absent: nobody waits for it, and it receives nothing. ``OuterOptimizer.listen`` takes
part without counting. Why the default is `equal`: docs/internals.md, "How much a peer counts".
"""

from __future__ import annotations

from collections.abc import Callable

Weight = Callable[[int, int], float]
"""(tokens, steps) -> weight, at least 0 and finite."""


def equal(tokens: int, steps: int) -> float:
    """Weigh all peers equally."""
    return 1.0


def by_steps(tokens: int, steps: int) -> float:
    """Weigh a contribution by its inner steps."""
    return float(steps)


def by_tokens(tokens: int, steps: int) -> float:
    """Weigh a contribution by its tokens; ValueError if none were counted."""
    _check_counted(tokens, steps)
    return float(tokens)


def by_rate(tokens: int, steps: int) -> float:
    """Weigh by tokens^2 / steps, so tokens times batch size (Decoupled DiLoCo, 2604.21428).

    ValueError if none were counted.
    """
    _check_counted(tokens, steps)
    return tokens * tokens / steps if steps else 0.0


def _check_counted(tokens: int, steps: int) -> None:
    if steps > 0 and tokens == 0:
        raise ValueError(
            "no tokens were counted: call opt.count(tokens) before each opt.step(), or weigh by "
            "steps"
        )
