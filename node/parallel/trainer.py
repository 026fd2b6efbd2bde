"""A trainer on several ranks: the node calls rank 0's, which has the other ranks make the same calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from shoal.node.parallel.layout import RanksLayout
from shoal.node.task import Shard, Task
from shoal.node.training.trainer import Trainer, TrainingError
from shoal.optim import Alone, Exchange, OuterOptimizer, RoundInfo
from shoal.optim.ranks.orders import Channel, LeadOptimizer, obey
from shoal.swarm.manifest.outer import OuterSettings, TrainSettings

DDP_UNUSED = "find_unused_parameters"  # in what DDP raises where the loss leaves parameters out


class RankTrainer(Trainer):
    """A trainer on one of several ranks.

    Its methods are rank 0's to call; each begins with an order, by which the others make the same call (`obey`).

    Args:
        layout: of the model, on these ranks.
        channel: carries the orders.
        on_round: as for ``Trainer``; only rank 0's is called, and the others wait for it.
        options: those of ``Trainer``.
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
        self._channel, self._after_round = channel, on_round
        super().__init__(task, outer, train, layout=layout, on_round=self._end_round, **options)
        self._ranks = layout
        self._real: Exchange = Alone()
        if layout.rank == 0:
            self.whole = cast(OuterOptimizer, LeadOptimizer(self.opt, channel))
        else:  # all have made the same model; what is drawn from now on, such as dropout, differs
            torch.manual_seed(train.seed + 1_000_003 * layout.rank)

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
        if name == "step":
            self.step()
        elif name == "evaluate":
            self.evaluate()
        elif name == "finish":
            self.finish()
        elif name == "state":
            self.state()
        elif name == "resume":
            self.resume({})
        elif name == "schedule_at":
            self.schedule_at(fields["step"])
        elif name == "connect":
            self.connect(Alone(), fields["run"], Shard(*fields["shard"]))
        else:
            obey(self.opt, name, fields)

    def connect(self, exchange: Exchange, run: str, shard: Shard) -> None:
        """Set the exchange of rank 0 with other peers, the run's id and the part of the data, which all ranks share."""
        self._order("connect", run=run, shard=[shard.index, shard.of, shard.seed])
        self._real = exchange
        shared = self._ranks.group.exchange(exchange)
        shared.attach(self.opt)
        super().connect(shared, run, shard)

    def _waited(self) -> float:
        return float(getattr(self._real, "waited", 0.0))

    def step(self) -> None:
        """Take one inner step with this rank's rows of the batch, and the outer step if it is due."""
        self._order("step")
        try:
            super().step()
        except RuntimeError as error:
            if DDP_UNUSED in str(error):
                raise TrainingError(
                    "Some parameters of the model have no part in the loss, with which DDP cannot go on: freeze them "
                    "(requires_grad = False), or pass --parallel fsdp."
                ) from error
            raise

    def evaluate(self) -> float | None:
        """Return the held-out loss: with DDP rank 0 computes it, with FSDP all do, each on the whole data."""
        self._order("evaluate")
        return super().evaluate()

    def finish(self) -> None:
        """Finish the exchanges in flight, and take the mean at the end if the swarm wants one."""
        self._order("finish")
        super().finish()

    def state(self) -> dict[str, Any]:
        """Return the state of one process, on rank 0."""
        self._order("state")
        return super().state()

    def resume(self, state: dict[str, Any]) -> bool:
        """Continue from the state of any layout, which rank 0 gives."""
        self._order("resume")
        return super().resume(state)

    def schedule_at(self, step: int) -> None:
        """Let the learning-rate schedule go on to ``step``."""
        self._order("schedule_at", step=step)
        super().schedule_at(step)
