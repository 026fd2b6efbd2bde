"""Links, and what a method makes of its time on each: computed, for one reference step, from the
bytes that the runs sent.

The models of these runs are small and a processor trains them slowly, so a link hardly matters to
them. What is computed is therefore for ``PARAMETERS`` and ``STEP_S``, those of bench/overlap.py,
where the formulas (``shoal.swarm.exchange.cost``) were held against real processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench._table.methods import RECIPES, TORCHFT, TUNED_PEERS, fragments, lag
from shoal.swarm.exchange.cost import AT_HAND, MEASURED, Costs, Forecast, Line, Work, forecast

LINKS = tuple((mbit, delay) for mbit in (1000, 100, 20) for delay in (0, 50, 200))
"""Mbit/s each way, and milliseconds one way."""
PARAMETERS, STEP_S = 10_000_000, 0.1
Curve = Sequence[tuple[int, float]]


def name(link: tuple[int, int]) -> str:
    return "/".join(map(str, link))


def work(
    method: str,
    codec: str,
    peers: int,
    every: int,
    bytes_per_param: float,
    back_per_param: float = 0.0,
) -> Work:
    """What a node does in a round, in which it hands ``bytes_per_param`` to the exchange, and
    averages come back in ``back_per_param`` (0: everybody gets whole contributions).

    What gloo sends (DDP, torchft) is counted at its best: a ring that takes the link's time and
    nothing else. DDP hides all of it behind one step of computing.
    """
    recipe = RECIPES[method]
    late = 1 if method == "ddp" else "auto" if recipe.overlap else lag(method, every)
    nbytes = math.ceil(bytes_per_param * PARAMETERS)
    group = "nobody" if peers == 1 else recipe.group
    assert group in ("pair", "everyone", "nobody")
    costs = MEASURED
    if method == "ddp" or method in TORCHFT:
        costs = Costs(
            round_trips=peers - 1,
            window=math.inf,
            handling=0,
            at_hand=0 if method == "ddp" else AT_HAND,
            paced=1,
            all_reduced=2,
        )
    return Work(
        group,  # type: ignore[arg-type]
        nbytes,
        PARAMETERS,
        peers,
        every,
        STEP_S,
        fragments(method, every),
        late,  # type: ignore[arg-type]
        sums=codec == "float32",
        back=math.ceil(back_per_param * PARAMETERS),
        costs=costs,
    )


def on(link: tuple[int, int], what: Work) -> Forecast:
    mbit, delay = link
    return forecast(what, Line(mbit * 1e6 / 8, 2 * delay / 1000))


def steps_in_time(steps: int, peers: int, utilisation: float) -> float:
    """Inner steps in the time in which peers that never wait make ``steps``.

    One peer that trains alone has all windows of a step to itself, as many machines' as the others
    are.
    """
    return steps * utilisation / (TUNED_PEERS if peers == 1 else 1)


def loss_at(curve: Curve, step: float) -> float | None:
    """The loss after so many steps, linear in their logarithm between two points of the curve; None
    before its first.
    """
    before = [point for point in curve if point[0] <= step]
    if not before:
        return None
    after = [point for point in curve if point[0] > step]
    if not after:
        return before[-1][1]
    (left, high), (right, low) = before[-1], after[0]
    part = math.log(step / left) / math.log(right / left) if left else 0.0
    return high + part * (low - high)


def marks(steps: int, every: int) -> list[int]:
    """Steps after which the loss is taken, each about a third more than the one before, at ends of
    rounds; less than ``steps``.
    """
    found, at = [], 8.0
    while at < steps:
        found.append(math.ceil(at / every) * every)
        at *= 1.35
    return [step for step in dict.fromkeys(found) if step < steps]
