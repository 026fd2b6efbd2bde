"""A trainer on several ranks: the node calls rank 0's, which has the other ranks make the same
calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from shoal.node.parallel.layouts import RanksLayout, check_one_form
from shoal.node.task import Shard, Task
from shoal.node.training.trainer import Trainer
from shoal.optim import Alone, Exchange, OuterOptimizer, RoundInfo
from shoal.optim.ranks.orders import Channel, LeadOptimizer, obey
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.training.last_average import LastAverage

SEED_STEP = 1_000_003
"""Between the seeds of two ranks."""


class RankTrainer(Trainer):
    """A trainer on one of several ranks.

    Its methods are rank 0's to call; each begins with an order on ``channel``, by which the others
    make the same call (`obey`). ``on_round`` is rank 0's: the others wait for it.
    """

    def __init__(
        self,
        task: Task,
        outer: OuterSettings,
        train: TrainSettings,
        *,
        layout: RanksLayout,
        channel: Channel,
        on_round: Callable[[RoundInfo], None] = lambda info: None,
        **options: Any,
    ) -> None:
        self._channel = channel
        self._after_round = on_round
        super().__init__(task, outer, train, layout=layout, on_round=self._end_round, **options)
        self._ranks = layout
        self._real: Exchange = Alone()
        self._lead = cast(OuterOptimizer, LeadOptimizer(self.opt, channel))
        if layout.rank != 0:
            # All have made the same model; what is drawn from now on, such as dropout, differs.
            torch.manual_seed(train.seed + SEED_STEP * layout.rank)

    @property
    def whole(self) -> OuterOptimizer:
        return self._lead if self.layout.rank == 0 else self.opt

    def _order(self, name: str, **fields: Any) -> None:
        if self.layout.rank == 0:
            self._channel.send(name, **fields)

    def _end_round(self, info: RoundInfo) -> None:
        if self.layout.rank == 0:
            with self._channel.leading():
                self._after_round(info)
        else:
            self._channel.follow(self.obey)

    def obey(self, name: str, fields: dict[str, Any]) -> None:
        """Do what rank 0 has ordered and does itself."""
        if name in ("step", "evaluate", "finish", "state"):
            getattr(self, name)()
        elif name == "resume":
            self.resume({})
        elif name == "schedule_at":
            self.schedule_at(fields["step"])
        elif name == "change":
            self.change(**fields)
        elif name == "end_with":
            self.end_with(None)
        elif name == "connect":
            self.connect(Alone(), fields["run"], Shard(*fields["shard"]))
        else:
            obey(self.opt, name, fields)

    def connect(self, exchange: Exchange, run: str, shard: Shard) -> None:
        """Set the exchange of rank 0 with other peers, the run's id and the part of the data, which
        all ranks share.
        """
        self._order("connect", run=run, shard=[shard.index, shard.of, shard.seed])
        self._real = exchange
        shared = self._ranks.group.exchange(exchange)
        shared.attach(self.opt)
        super().connect(shared, run, shard)

    def end_with(self, last: LastAverage | None) -> None:
        """Set the exchange of the last average, which rank 0 has."""
        self._order("end_with")
        super().end_with(last)

    def _waited(self) -> float:
        return float(getattr(self._real, "waited", 0.0))

    def step(self) -> None:
        """Take one inner step with this rank's rows of the batch, and the outer step if it is
        due.
        """
        self._order("step")
        super().step()
        if self.opt.steps == 1:
            for state in self.opt.inner.state.values():
                check_one_form("inner optimizer", state.values())

    def evaluate(self) -> float | None:
        """Return the held-out loss: with DDP rank 0 computes it, with FSDP all do, each on the
        whole data.
        """
        self._order("evaluate")
        return super().evaluate()

    def finish(self) -> None:
        self._order("finish")
        super().finish()

    def state(self) -> dict[str, Any]:
        self._order("state")
        return super().state()

    def resume(self, state: dict[str, Any]) -> bool:
        self._order("resume")
        return super().resume(state)

    def schedule_at(self, step: int) -> None:
        self._order("schedule_at", step=step)
        super().schedule_at(step)

    def change(self, *, lr: float | None, steps: int, length: int) -> None:
        self._order("change", lr=lr, steps=steps, length=length)
        super().change(lr=lr, steps=steps, length=length)
