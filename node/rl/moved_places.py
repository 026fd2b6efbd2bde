"""Where in some completions an update of a policy moved its next token's log-probability most.

One token drawn at such a place shows whether it was drawn by the new weights. The completions that
an update was made from are those that it moves most; and a server may have cached them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.node.rl.newest_weights import EXACT_NATS

PLACES = 32
"""Twice what a conclusion takes (`newest_weights.FEWEST_COMPLETIONS`)."""
ROWS_AT_ONCE = 4
"""Completions whose logits are in memory together."""

Logits = Callable[[Sequence[str], Sequence[Sequence[int]]], tuple[Tensor, Tensor]]
"""Of the policy, as `shoal.node.rl.policy.Policy.logits`."""


@dataclass(frozen=True)
class Place:
    """A prompt with the beginning of a completion: its next token is asked for."""

    prompt: str
    prefix: tuple[int, ...]


@torch.no_grad()
def most_moved(
    logits: Logits,
    before: Callable[[], AbstractContextManager[None]],
    drawn: Sequence[tuple[str, Sequence[int]]],
) -> list[Place]:
    """Return at most `PLACES` different places in the completions ``drawn``, those first whose
    likeliest token moved most, in nats; those that did not move are left out.

    ``before``: makes a block in which the policy has its older weights.
    """
    movements: dict[Place, float] = {}
    for start in range(0, len(drawn), ROWS_AT_ONCE):
        part = drawn[start : start + ROWS_AT_ONCE]
        prompts = [prompt for prompt, _ in part]
        rows = [row for _, row in part]
        logs, mask = _log_softmax(logits, prompts, rows)
        likeliest = logs.argmax(-1, keepdim=True)
        now = logs.gather(-1, likeliest)
        with before():
            older, _ = _log_softmax(logits, prompts, rows)
        moved = (now - older.gather(-1, likeliest)).abs()[..., 0]
        moved = moved.masked_fill(~(mask & moved.isfinite()), 0.0)
        for (prompt, row), of_row in zip(part, moved.tolist(), strict=True):
            for length, nats in enumerate(of_row[: len(row)]):
                movements[Place(prompt, tuple(row[:length]))] = nats
    by_movement = sorted(movements, key=lambda place: -movements[place])
    return [place for place in by_movement[:PLACES] if movements[place] > EXACT_NATS]


def _log_softmax(
    logits: Logits, prompts: Sequence[str], rows: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    found, mask = logits(prompts, rows)
    return found.float().log_softmax(-1), mask
