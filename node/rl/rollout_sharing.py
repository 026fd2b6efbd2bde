"""The rollouts of a node's task on the network, and what the node reports of its rounds."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from shoal.node.rl.task import RLRound, RLTask
from shoal.node.task import Task
from shoal.node.training.resources import shares
from shoal.swarm.membership.membership import Membership
from shoal.swarm.topics.held_rollouts import PoolLimits
from shoal.swarm.topics.rollout_pool import RolloutPool

TTL_S = 120.0
"""No record is of use that was issued longer ago, unless rounds are longer."""
LEAVE_S = 3.0
"""That the last rollouts have to leave a node that ends."""
NOTIFY_S = 10.0
"""Between two lines for people."""


class RolloutSharing:
    """Sharing of the rollouts of ``task``.

    Each round is passed to ``write(event, **fields)``, some to ``notify``.
    """

    def __init__(
        self,
        task: Task,
        membership: Membership,
        write: Callable[..., None],
        notify: Callable[[str], None],
        ram: float,
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
        task.connect(self._pool, me, self._on_round)

    def _on_round(self, round: RLRound) -> None:
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
        )
        if time.monotonic() - self._quiet >= NOTIFY_S:
            self._quiet = time.monotonic()
            reward = "-" if round.reward is None else f"{round.reward:.3f}"
            self._notify(
                f"round {round.round}: reward {reward}, learnt from {round.own} own and "
                f"{len(round.used)} foreign groups"
            )

    def report(self, loss_first: float | None, loss_last: float | None) -> dict[str, Any]:
        """Return the report, once the last rollouts have left, or after `LEAVE_S`.

        Rewards are means over completions (cumulative: summed over the rounds) or held-out
        questions.
        """
        self._pool.topic.flush(LEAVE_S)
        task = self._task
        counts = self._pool.counts
        learnt = task.foreign
        dropped = {name: counts[name] for name in ("expired", "displaced", "banned")}
        # Some reasons are of several parts: ``banned`` of the network and of the pool.
        parts = counts["rejected"], dropped, learnt.rejected
        names = dict.fromkeys(itertools.chain(*parts))
        return {
            "env": task.env.label,
            "policy": task.settings.policy,
            "rounds": task.rounds,
            "held_out": task.settings.held_out,
            "first_reward": None if loss_first is None else 1.0 - loss_first,
            "final_reward": None if loss_last is None else 1.0 - loss_last,
            "cumulative_reward": task.cumulative,
            "effective_sample_size": task.worth,
            **{name: counts[name] for name in ("sent", "unsent", "received", "accepted")},
            "used": learnt.used,
            "waiting": counts["held"] + learnt.waiting,
            "bytes_sent": self._pool.bytes_sent,
            "bytes_received": self._pool.bytes_received,
            # Refused by the network, dropped by the pool, or not learnt from.
            "rejected": {name: sum(part.get(name, 0) for part in parts) for name in names},
        }

    def close(self) -> None:
        self._pool.topic.close()
