"""A node's status for watchers: its newest rounds, with whom, how fast, and what went wrong.

Nothing depends on it: a reader learns what the author claims, and no more.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from shoal.swarm.wire.envelope import KIB, Message
from shoal.swarm.wire.fields import Address, Bytes, Count, Label, Moment, PeerId, Rate, Reach, Real, Seconds, Share, SwarmId, Token

ROUNDS = 6  # in one status, so that a watcher who misses some still sees every round
PARTNERS = 8  # of a round that are named
ADDRESSES = 4
BANNED = 8
FAULTS = 12
PER_SECOND = 10.0  # statuses of all nodes together, about: in a larger swarm each sends fewer
PROJECTED = 16  # sums in a projection
TAIL = 8  # characters from the end of a peer id by which a partner is named

Tail = Annotated[str, Field(pattern=r"^[1-9A-HJ-NP-Za-km-z]{8}$")]


def lag_label(lag: int, auto: bool, late: int) -> str:
    """Return the inner steps that training goes on during an exchange, for people; - where it waits for each."""
    return "-" if not lag else f"{lag}" + (" auto" if auto else "") + (f", {late} late" if late else "")


def reach_label(reach: str, throughput: float) -> str:
    """Return how a node is reached, and what its exchanges move, for people."""
    return reach + (f", {throughput / 1e6:.3g} MB/s" if throughput else "")


class RoundStatus(BaseModel):
    """One round of a node: ``sent`` and ``received`` bytes, ``loss`` in nats (mean over its inner steps), ``wait_s`` seconds.

    ``members`` are in the mean, with the node itself; ``partners`` names the first of the others by the end of their peer ids.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    round: Count
    step: Count
    loss: Real | None
    members: Annotated[int, Field(ge=1, le=1_000_000)]
    partners: Annotated[tuple[Tail, ...], Field(max_length=PARTNERS)] = ()
    sent: Bytes
    received: Bytes
    wait_s: Seconds


class Status(Message):
    """One node, now. ``issued`` in Unix seconds; ``sent`` and ``received`` are the bytes of its whole run; ``doing``: evaluating.

    ``tokens_per_s``, ``mfu``, ``lag``, ``lag_auto``, ``late``, ``reach`` and ``throughput``: see `shoal.swarm.wire.member.Member`.

    ``rounds``: its newest, oldest first. ``reward``, ``rollouts_own`` and ``rollouts_foreign`` (groups learnt from, in all) are of
    reinforcement learning, ``claims``, ``checked``, ``invalid`` and ``banned`` of verification; None where there is none.
    ``faults``: kind of fault -> count. ``projection``: the number of a recent exchange, and of the slow weights
    after it the norm and a random projection (`shoal.optim.outer.sketch`). ``peers``: about how many members the swarm has, where
    the author sees one bucket of it.
    """

    KIND, LIMIT, AUTHOR = "status", 8 * KIB, "peer"
    swarm: SwarmId
    peer: PeerId
    name: Label
    addresses: Annotated[tuple[Address, ...], Field(max_length=ADDRESSES)]
    state: Literal["waiting", "training", "leaving", "done"]
    doing: Label | None = None
    round: Count
    step: Count
    loss: Real | None
    steps_per_s: Rate
    sent: Bytes
    received: Bytes
    rounds: Annotated[tuple[RoundStatus, ...], Field(max_length=ROUNDS)] = ()
    reward: Real | None = None
    rollouts_own: Count | None = None
    rollouts_foreign: Count | None = None
    claims: Count | None = None
    checked: Count | None = None
    invalid: Count | None = None
    banned: Annotated[tuple[PeerId, ...], Field(max_length=BANNED)] = ()
    faults: Annotated[tuple[tuple[Token, Count], ...], Field(max_length=FAULTS)] = ()
    issued: Moment
    version: Label
    tokens_per_s: Rate = 0.0
    mfu: Share | None = None
    lag: Count = 0
    lag_auto: bool = False
    late: Count = 0
    projection: tuple[Count, Real, Annotated[tuple[Real, ...], Field(min_length=PROJECTED, max_length=PROJECTED)]] | None = None
    peers: Count | None = None
    reach: Reach = "unknown"
    throughput: Rate = 0.0
