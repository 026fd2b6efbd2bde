"""The rollouts of a node's task on the network, and what the node reports of its rounds."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.node.config.rl_settings import CREATOR
from shoal.node.rl.task import RLRound, RLTask
from shoal.node.task import Task
from shoal.node.training.resources import shares
from shoal.swarm.membership.membership import Membership
from shoal.swarm.topics.held_rollouts import PoolLimits
from shoal.swarm.topics.policy_versions import PolicyFollower, PolicyPublisher, PolicyRelay
from shoal.swarm.topics.rollout_pool import RolloutPool

TTL_S = 120.0
"""No record is of use that was issued longer ago, unless rounds are longer."""
LEAVE_S = 3.0
"""That the last rollouts have to leave a node that ends."""
NOTIFY_S = 10.0
"""Between two lines for people."""
MOST_SAID = 4
"""Reasons in such a line."""
CHOICE_CONTEXT = "shoal/rl/choice/1"
"""Of the signature, never sent, from which the choice among others' groups follows."""
OWN_WITHOUT_SPREAD = "own_no_spread"
"""The reason of own groups with equal rewards: there is nothing to learn from them for anybody."""


class RolloutSharing:
    """Sharing of the rollouts of ``task``.

    Each round is passed to ``write(event, **fields)``, some to ``notify``. ``folder``: the node's.
    """

    def __init__(
        self,
        task: Task,
        membership: Membership,
        write: Callable[..., None],
        notify: Callable[[str], None],
        ram: float,
        folder: Path | None = None,
    ) -> None:
        assert isinstance(task, RLTask)
        self._task = task
        self._write = write
        self._notify = notify
        self._quiet = time.monotonic()
        limits = PoolLimits(ttl=TTL_S, nbytes=shares(ram)[0])
        now = membership.directory.now
        barred = membership.directory.is_barred
        self._pool = RolloutPool(
            membership.gossip, task.env.knows, limits=limits, clock=now, barred=barred
        )
        me = f"{membership.swarm}:{membership.host.peer_id}"
        self._versions = self._make_versions(membership)
        # Only this node can make it, and a resumed run makes the same.
        signature = membership.identity.sign(CHOICE_CONTEXT, membership.swarm.encode())
        choice_seed = int.from_bytes(signature, "big")
        task.connect(self._pool, me, self._on_round, folder, self._versions, choice_seed)

    def _make_versions(
        self, membership: Membership
    ) -> PolicyPublisher | PolicyFollower | PolicyRelay:
        """Return where the policy goes or comes from, by the settings."""
        settings = self._task.settings
        gossip = membership.gossip
        host = membership.host
        now = membership.directory.now
        if settings.publish:
            return PolicyPublisher(gossip, host, clock=now)
        if settings.follow is None:
            return PolicyRelay(gossip)
        leader = settings.follow
        if leader == CREATOR:
            leader = membership.manifest.creator
        return PolicyFollower(
            gossip,
            host,
            leader,
            membership.directory.addresses,
            now,
            always=settings.only == "share",
            say=self._notify,
        )

    def _on_round(self, round: RLRound) -> None:
        seen, unused = self._seen()
        self._write(
            "rl",
            round=round.round,
            reward=round.reward,
            own=round.own,
            foreign=len(round.used),
            worth=round.worth,
            loss=round.loss,
            used=round.used,
            shared=self._pool.counts["sent"],
            seen=seen,
            unused=unused,
        )
        if time.monotonic() - self._quiet >= NOTIFY_S:
            self._quiet = time.monotonic()
            reward = "-" if round.reward is None else f"{round.reward:.3f}"
            self._notify(
                f"round {round.round}: reward {reward}, learnt from {round.own} own and "
                f"{len(round.used)} foreign groups{unused_said(seen, unused)}"
            )

    def _seen(self) -> tuple[int, dict[str, int]]:
        """Return how many groups this node drew, or received and is done with, and how many of
        them were of no use to it, by reason, the most frequent first.
        """
        counts = Counter(self._rejected())
        seen = self._task.totals.written + self._task.foreign.used + counts.total()
        counts[OWN_WITHOUT_SPREAD] = self._task.totals.without_spread
        return seen, {reason: count for reason, count in counts.most_common() if count}

    def _rejected(self) -> dict[str, int]:
        """Return how many groups were refused by the network, dropped by the pool or not learnt
        from, by reason.
        """
        counts = self._pool.counts
        dropped = {name: counts[name] for name in ("expired", "displaced", "banned")}
        # Some reasons are of several parts: ``banned`` of the network and of the pool.
        parts = counts["rejected"], dropped, self._task.foreign.rejected
        names = dict.fromkeys(itertools.chain(*parts))
        return {name: sum(part.get(name, 0) for part in parts) for name in names}

    def report(self, loss_first: float | None, loss_last: float | None) -> dict[str, Any]:
        """Return the report, once the last rollouts have left, or after `LEAVE_S`.

        Rewards are means over completions (cumulative: summed over the rounds) or held-out
        questions.
        """
        self._pool.topic.flush(LEAVE_S)
        task = self._task
        counts = self._pool.counts
        learnt = task.foreign
        return {
            "env": task.env.label,
            "policy": task.settings.policy,
            "rounds": task.totals.rounds,
            "held_out": task.settings.held_out,
            "first_reward": None if loss_first is None else 1.0 - loss_first,
            "final_reward": None if loss_last is None else 1.0 - loss_last,
            "cumulative_reward": task.totals.reward,
            "effective_sample_size": task.totals.mean_worth(),
            **{name: counts[name] for name in ("sent", "unsent", "received", "accepted")},
            "used": learnt.used,
            "waiting": counts["held"] + learnt.waiting,
            "bytes_sent": self._pool.bytes_sent,
            "bytes_received": self._pool.bytes_received,
            "own_without_spread": task.totals.without_spread,
            "rejected": self._rejected(),
            **self._followed(),
        }

    def _followed(self) -> dict[str, Any]:
        """Return what was taken over of another's policy, if this node follows one."""
        versions = self._versions
        if not isinstance(versions, PolicyFollower):
            return {}
        return {"followed": {"version": versions.version, **versions.counts}}

    def close(self) -> None:
        self._versions.close()
        self._pool.topic.close()


def unused_said(seen: int, unused: Mapping[str, int]) -> str:
    """Return the share of groups that were of no use, by reason, as the end of a sentence."""
    if not unused:
        return ""
    shares = [f"{reason} {100 * count / seen:.0f} %" for reason, count in unused.items()]
    return (
        f"; of {seen} groups so far {100 * sum(unused.values()) / seen:.0f} % were of no use "
        f"({', '.join(shares[:MOST_SAID])})"
    )
