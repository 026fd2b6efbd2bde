"""A node's trial of its partners' weights (`shoal.swarm.training.loss_trial`), on batches of its task."""

from __future__ import annotations

from collections.abc import Callable

from shoal.node.batch import to_device
from shoal.node.task import Shard, iterator_of
from shoal.node.training.trainer import Trainer
from shoal.swarm.exchange.loss_check import LossCheck
from shoal.swarm.exchange.robust import DistanceScreen
from shoal.swarm.training.loss_trial import LossTrial

OTHER_SEED = 7_919
"""Added to the shard's seed, so that a trial's batches are others than those that are trained on at that time."""


def try_partners(trainer: Trainer, screen: DistanceScreen, log: Callable[[str], None]) -> None:
    """Let ``screen`` try what partners send, if the swarm's settings ask for it (``outer.check_loss``) and this node can.

    ``trainer`` has its shard.
    """
    if not trainer.outer.check_loss:
        return
    task, shard = trainer.task, trainer.shard
    why = "the batches of its task are made with the model" if task.draws_with_model else ""
    if trainer.layout.ranks > 1:
        why = "its model is trained by several processes"
    if why:
        log(f"this node counts partners' weights untried (outer.check_loss), for {why}")
        return
    other = Shard(shard.index, shard.of, shard.seed + OTHER_SEED)
    batches = (to_device(batch, trainer.device) for batch in iterator_of(task.batches(other), other))
    screen.loss_check = LossCheck(LossTrial(task.loss, batches, trainer.model, trainer.whole, log, trainer.inner_step.autocast))
