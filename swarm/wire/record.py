"""The record of a node: every number that a node states of itself, with its unit, in small groups.

    {"progress": {"state": "training", "round": 12, "step": 300, ...},
     "exchanges": {"ended": 12, "with_partner": 11, ...},
     "link": {"bytes_sent": 1204224, "reach": "direct", ...},
     "loss": {"training": 2.31, "held_out": 2.4, ...},
     "faults": {"internal_errors": 0, ...}}

The directory's `Member`, the `Status` for watchers, ``shoal status --json``, ``metrics.jsonl``,
``result.json``, the measures of Prometheus and the page of ``shoal watch`` are made of these groups
and have no other names for what is in them. All fields have bounds, for the groups travel in
messages. Counts are of this run, from its start on, unless their line says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from shoal.swarm.wire.envelope import (
    FAILURES,
    MAX_BLAMED,
    Bytes,
    Count,
    Failure,
    Label,
    PeerId,
    Rate,
    Reach,
    Real,
    Reason,
    Seconds,
    ShortLabel,
)
from shoal.swarm.wire.envelope import Share as ShareOfOne

# Characters from the end of a peer id by which a partner is named.
TAIL = 8
# Partners of one exchange that are named.
MAX_PARTNERS = 8
# Banned peers that are named.
MAX_BANNED = 8
# Missing members that are named.
MAX_MISSING = 4
# Reasons for which groups of rollouts were of no use.
MAX_REASONS = 12

State = Literal["waiting", "training", "leaving", "done"]
GONE: tuple[State, ...] = ("leaving", "done")
"""States of a node that others forget."""
UnusedReason = Annotated[str, Field(pattern=r"^[a-z][a-z_-]{0,15}$")]
"""Why nobody learns from a group of rollouts (docs/rl.md)."""
Tail = Annotated[str, Field(pattern=r"^[1-9A-HJ-NP-Za-km-z]{8}$")]
Partnerless = tuple[Failure | Literal["nobody", "model", "taken"], Count]
"""Why the last rounds had no partner, and how many."""


class Group(BaseModel):
    """The base of the groups: frozen, with no other fields, and no number that is not finite."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Progress(Group):
    """How far training is, and how fast."""

    state: State = "waiting"
    finished: bool = False
    """Whether its last step is done, and it waits for the others to average once more."""
    doing: Label | None = None
    """What it does besides inner steps, such as evaluating."""
    round: Count = 0
    """Number of the swarm's exchange that comes next; of a round each fragment is one."""
    step: Count = 0
    """Inner steps done, with those before a resume."""
    tokens: Count = 0
    """Tokens trained on, with those before a resume."""
    steps_per_s: Rate = 0.0
    """Inner steps recently, without waiting for others."""
    tokens_per_s: Rate = 0.0
    """The same of tokens; 0 where none are counted."""
    mfu: ShareOfOne | None = None
    """Model FLOPs utilisation, of 1: the share of the device's published peak."""
    members: Count | None = None
    """Members of the swarm in view, with this node."""
    swarm_size: Count | None = None
    """About how many members the swarm has, where the node sees one bucket of it."""


class Exchanges(Group):
    """What became of the exchanges: in a round one for each fragment.

    ``ended`` is the sum of those with and without a partner, failed, and of those whose
    contribution was refused; a method without partners has none of these.
    """

    rounds: Count = 0
    """Rounds in which each fragment was exchanged, and the last average."""
    ended: Count = 0
    with_partner: Count = 0
    """Exchanges in which a partner's contribution was committed."""
    without_partner: Count = 0
    """Exchanges with nobody, for the reason ``why``."""
    failed: Count = 0
    """Exchanges that an error of this node's own code ended."""
    late: Count = 0
    """Exchanges that took more inner steps than their lag."""
    lag_steps: Count = 0
    """Inner steps for which training goes on during an exchange; 0: it waits."""
    lag_auto: bool = False
    """Whether the node chooses its lag itself."""
    exchange_s: Seconds = 0.0
    """Seconds of transfer in one exchange, recently."""
    wait_s: Seconds = 0.0
    """Seconds for which training stood still for the network, in all but the last average."""
    round_wait_s: Seconds = 0.0
    """The same in one exchange, recently."""
    why: Reason = ""
    """Why the newest exchange had no partner, for people; "" if it had one."""


class LinkUse(Group):
    """What the node moves over its link, and who reaches it."""

    bytes_sent: Bytes = 0
    bytes_received: Bytes = 0
    bytes_per_s: Rate = 0.0
    """What exchanges move each way; 0 where none was large enough to tell."""
    reach: Reach = "unknown"
    """Who can dial it, as peers found that it asked, and if nobody can, which way its exchanges
    take.
    """


class Loss(Group):
    """Losses, all in nats; None where there is none (yet)."""

    training: Real | None = None
    """Of the last half second or step; in reinforcement learning that of the policy."""
    held_out: Real | None = None
    """The newest; in reinforcement learning one less the mean reward."""
    held_out_first: Real | None = None
    """Before the first step; None at a newcomer to a swarm under way, which does not wait for it.
    """
    held_out_alone: Real | None = None
    """Of the same steps, shard and method without partners, where it was asked for."""


class Faults(Group):
    """What went wrong: at this node, with others, and in the network."""

    internal_errors: Count = 0
    """Errors of its own code that it survived, which no peer caused."""
    daemon_restarts: Count = 0
    """Restarts of the network daemon."""
    contributions_refused: Count = 0
    """Contributions that it refused because they lay too far away, or for their loss."""
    recent: Count = 0
    """The newest attempts, among which are ``failures``: those that are not over."""
    failures: Annotated[tuple[tuple[Failure, Count], ...], Field(max_length=len(FAILURES))] = ()
    """By kind."""
    blamed: Annotated[tuple[tuple[PeerId, Failure, Count], ...], Field(max_length=MAX_BLAMED)] = ()
    """The peers in most of them."""
    partnerless: Partnerless | None = None
    missing: Count = 0
    """Of ``missing_of`` members, lost sight of at about the same moment: a suspected partition."""
    missing_of: Count = 0
    missing_within_s: Seconds = 0.0
    missing_names: Annotated[tuple[ShortLabel, ...], Field(max_length=MAX_MISSING)] = ()


class Rollouts(Group):
    """Reinforcement learning: groups of completions of one question."""

    reward: Real | None = None
    """Mean of the own completions in the newest update."""
    groups_own: Count = 0
    """Groups learnt from that this node drew."""
    groups_foreign: Count = 0
    """Groups learnt from that others drew."""
    groups_seen: Count = 0
    """Groups that this node drew, or received and has learnt from or given up."""
    unused: Annotated[tuple[tuple[UnusedReason, Count], ...], Field(max_length=MAX_REASONS)] = ()
    """Those of them that were of no use to it, by reason, the most frequent first."""

    @property
    def unused_share(self) -> float | None:
        """The share of groups that were of no use; None before there are any."""
        if not self.groups_seen:
            return None
        return min(sum(count for _, count in self.unused) / self.groups_seen, 1.0)


class Checks(Group):
    """Verification: votes on what peers claim."""

    claims: Count = 0
    """Claims that this node made."""
    checked: Count = 0
    """Claims of others that it checked."""
    invalid: Count = 0
    """Claims among these that it found invalid."""
    banned: Annotated[tuple[PeerId, ...], Field(max_length=MAX_BANNED)] = ()
    """Peers that are banned now."""


class NodeRecord(Group):
    """All groups; ``rollouts`` and ``checks`` only where there are such."""

    progress: Progress = Progress()
    exchanges: Exchanges = Exchanges()
    link: LinkUse = LinkUse()
    loss: Loss = Loss()
    faults: Faults = Faults()
    rollouts: Rollouts | None = None
    checks: Checks | None = None


class Round(Group):
    """One exchange of a node. Bytes, seconds and loss are those since the exchange before."""

    round: Count
    """Its number in the swarm; in a round each fragment has one."""
    step: Count
    """Inner steps done when its mean was applied."""
    members: Annotated[int, Field(ge=1, le=1_000_000)]
    """Nodes in the mean, with this one; 1 when nobody answered."""
    partners: Annotated[tuple[Tail, ...], Field(max_length=MAX_PARTNERS)] = ()
    """The first of the others, by the ends of their peer ids."""
    bytes_sent: Bytes
    bytes_received: Bytes
    wait_s: Seconds
    """Seconds for which training stood still for the network."""
    loss: Real | None
    """Mean training loss, nats."""
