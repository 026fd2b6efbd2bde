"""The same run without partners, to compare with (``--baseline``)."""

from __future__ import annotations

from collections.abc import Callable

from shoal.node.config.settings import Settings
from shoal.node.runtime.task_setup import make_task
from shoal.node.training.trainer import Trainer
from shoal.optim import Alone


def train_alone(settings: Settings, trainer: Trainer, stop: Callable[[], bool]) -> float | None:
    """Return the held-out loss of the same run without partners; None if it was stopped.

    The same model, seed, shard, steps and outer optimizer: every round is applied with this node's
    own contribution. So the difference to the run is what partners gave, and nothing else.

    ``trainer``, whose run is over, loses its gradients and the state of its inner optimizer: with
    both in memory a node that just fits its machine would not fit any more.
    """
    own = trainer.opt
    own.zero_grad()
    for state in own.inner.state.values():
        state.clear()
    alone = Trainer(
        make_task(settings),
        trainer.outer,
        settings.train,
        own=settings.train,
        device=trainer.inner_step.device,
        schedule_steps=trainer.schedule.length,
    )
    alone.connect(Alone(), "alone", trainer.shard)
    try:
        alone.run(stop=stop)
        return None if stop() else alone.evaluate()
    finally:
        alone.close()
