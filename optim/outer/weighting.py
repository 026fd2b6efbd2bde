"""How much a peer's contribution counts in the mean: a function of the tokens and inner steps since it last sent that fragment.

    opt = DiLoCo(inner, exchange, weight=by_tokens)
    ... opt.count(batch.numel()); opt.step()

Unless a function is given every peer counts the same, also where tokens were counted: whether peers are weighted decides what
some methods send (NoLoCo), so it must not depend on what a loop happens to call. A node of a swarm weighs by tokens where rounds
are seconds. All peers must use the same function. A weight of 0 keeps a peer out of the mean for that round, as if it were absent:
nobody waits for it, and it hears nothing. To take part without counting is ``OuterOptimizer.listen``.
"""

from __future__ import annotations

from collections.abc import Callable

Weight = Callable[[int, int], float]
"""(tokens, steps) -> weight, at least 0 and finite."""


def equal(tokens: int, steps: int) -> float:
    """Every peer counts the same."""
    return 1.0


def by_steps(tokens: int, steps: int) -> float:
    """As many as the inner steps."""
    return float(steps)


def by_tokens(tokens: int, steps: int) -> float:
    """As many as the tokens. ValueError if none were counted."""
    _check_counted(tokens, steps)
    return float(tokens)


def by_rate(tokens: int, steps: int) -> float:
    """tokens^2 / steps, so tokens times the batch size (Decoupled DiLoCo, 2604.21428). ValueError if no tokens were counted."""
    _check_counted(tokens, steps)
    return tokens * tokens / steps if steps else 0.0


def _check_counted(tokens: int, steps: int) -> None:
    if steps > 0 and tokens == 0:
        raise ValueError("no tokens were counted: call opt.count(tokens) before each opt.step(), or weigh by steps")
