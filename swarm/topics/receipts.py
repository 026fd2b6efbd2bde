"""Receipts: what a node signs that it took from others, in all.

    exchanges that committed, rollouts that it learnt from, votes on its claims

The sums only grow, so the newest receipt of a partner holds all earlier ones, and one that comes
again adds nothing. `confirmed` has what of it counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Annotated, NamedTuple

from pydantic import Field, model_validator

from shoal.swarm.wire.envelope import KIB, MAX_COUNT, Count, Message, Moment, PeerId, SwarmId

MAX_PEERS_NAMED = 12
"""Peers in one record."""
MAX_TOKEN_RATIO = 4.0
"""Times this node's own tokens that a partner's count: weights in a mean differ by no more
(`shoal.optim.exchange.weighted_mean`).
"""

Amount = Annotated[float, Field(ge=0, le=MAX_COUNT)]
Reward = Annotated[float, Field(ge=-MAX_COUNT, le=MAX_COUNT)]


class Work(NamedTuple):
    """Work that one peer took from another, in all.

    ``exchanges``: committed with both in them. ``rounds``: the same, of a group each of n - 1
    others counts as one part of n - 1. ``tokens``: those parts of the tokens that the signer itself
    trained for the round. ``rollouts``: groups that it learnt from; ``reward``: the sum of their
    mean rewards, as it judged them. ``votes``: on its claims.
    """

    exchanges: int = 0
    rounds: float = 0.0
    tokens: float = 0.0
    rollouts: int = 0
    reward: float = 0.0
    votes: int = 0

    def plus(self, other: Work) -> Work:
        """Return the sum, each number within what a message can hold."""
        sums = [one + two for one, two in zip(self, other, strict=True)]
        return Work._make(min(max(each, -MAX_COUNT), MAX_COUNT) for each in sums)


def total(works: Iterable[Work]) -> Work:
    return functools.reduce(Work.plus, works, Work())


def confirmed(signed: Work, own: Work, rollouts: float = math.inf, votes: float = math.inf) -> Work:
    """Return what counts of the work that a partner ``signed``.

    ``own``: what the other side took from that partner; both sides count the same exchanges, and
    their tokens differ by no more than weights in a mean may. ``rollouts``, ``votes``: those that
    the other side ever made; each is of use to a partner once.
    """
    groups = int(min(signed.rollouts, rollouts))
    return Work(
        min(signed.exchanges, own.exchanges),
        min(signed.rounds, own.rounds),
        min(signed.tokens, MAX_TOKEN_RATIO * own.tokens),
        groups,
        signed.reward * groups / max(signed.rollouts, 1),
        int(min(signed.votes, votes)),
    )


class Receipts(Message):
    """What ``peer`` took from others in all, by ``issued`` (Unix seconds): (peer id, the numbers of
    `Work`).
    """

    KIND = "receipts"
    LIMIT = 2 * KIB
    AUTHOR = "peer"
    swarm: SwarmId
    peer: PeerId
    issued: Moment
    work: Annotated[
        tuple[tuple[PeerId, Count, Amount, Amount, Count, Reward, Count], ...],
        Field(min_length=1, max_length=MAX_PEERS_NAMED),
    ]

    @model_validator(mode="after")
    def _of_others(self) -> Receipts:
        if self.of(self.peer) is not None:
            raise ValueError("names its signer")
        return self

    def of(self, peer: str) -> Work | None:
        """Return what the signer took from ``peer``, by the first place that names it; None if none
        does.
        """
        for named, *numbers in self.work:
            if named == peer:
                return Work(*numbers)  # type: ignore[arg-type]
        return None
