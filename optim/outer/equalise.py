"""Equal slow weights again, after a round that some peers missed.

Rules that send displacements (`Anchored`) rely on equal slow weights, of which nothing is sent. So each contribution goes with a
``sketch`` of them. If the sketches of a round's members differ, its members average once more, before they apply the mean: the slow
weights and the shared state of those that are right, with weight 1; the others take the result with weight 0.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from shoal.optim.exchange.base import ComparesStates, Mean, RoundKey
from shoal.optim.outer.sketch import distance
from shoal.optim.outer.state import OuterState

logger = logging.getLogger(__name__)

SAME = 1e-6
"""Distance of two sketches, in parts of their largest number, up to which they differ by rounding alone."""


def sources(states: Mapping[str, Sequence[float]], *, first: bool = False) -> list[str]:
    """Return the peers whose slow weights all others should take the mean of; none if all hold the same.

    Of those that hold the same, the largest part is right: one of it stands for it. Among several parts of that size none is
    nearer to the truth. After a round that failed for everyone each peer has gone on alone, and the mean of their slow weights is
    what that round would have given (exactly so under a linear rule). ``first``: nothing was averaged yet, so there is nothing in
    common; then the first part is right, since a mean of independent initial weights is worse than any.
    """
    parts: list[list[str]] = []
    for peer in sorted(states):
        for part in parts:
            here, there = states[peer], states[part[0]]
            if distance(here, there) <= SAME * max(map(abs, (*here, *there))):
                part.append(peer)
                break
        else:
            parts.append([peer])
    if len(parts) < 2:
        return []
    most = max(map(len, parts))
    largest = [part[0] for part in parts if len(part) == most]
    return largest[:1] if first else largest


def equalise(opt: OuterState, exchange: ComparesStates, key: RoundKey, mean: Mean) -> None:
    """Equalise the slow weights and the shared state of the fragment ``key.fragment`` among those that take the mean.

    The fast weights move with the slow ones, so that progress since the last send is kept. What a peer of a smaller part learnt
    while it was apart is lost. If this exchange has no partner either, nothing changes, and the next round tries again.
    """
    part = opt.positions(key.fragment)
    right = sources(mean.states, first=opt.applied[key.fragment] < 0)
    if not right:
        return
    held = [opt.slow, *opt.shared.values()]
    mine = [tensors[index].float() for tensors in held for index in part]
    outcome = exchange.among(key, mean.states, mine, float(exchange.peer in right)).result()
    if outcome is None:
        return
    logger.info(
        "round %d, fragment %d: the slow weights of %s differed; all have those of %s now.",
        key.round, key.fragment, ", ".join(sorted(mean.states)), ", ".join(right),
    )  # fmt: skip
    rows = [outcome.tensors[start : start + len(part)] for start in range(0, len(mine), len(part))]
    for index, slow in zip(part, rows[0], strict=True):
        opt.move(index, slow)
    for tensors, row in zip(opt.shared.values(), rows[1:], strict=True):
        for index, tensor in zip(part, row, strict=True):
            tensors[index].copy_(tensor)
