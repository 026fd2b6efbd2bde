"""The training of one trial: a task alone, on all of its data, from the first weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.node.runtime.task_setup import make_task
from shoal.node.task import Shard
from shoal.node.training.trainer import Trainer
from shoal.node.training.training_error import BatchesEndedError, DivergedError
from shoal.optim import Alone
from shoal.optim.methods import ALONE
from shoal.swarm.settings.outer import OuterSettings

if TYPE_CHECKING:
    import torch

    from shoal.node.config.settings import Settings

WARM_STEPS = 2
"""Before the speed is measured: the first ones compile, and allocate."""
MEASURE_S = 1.0
"""For which the speed is measured, at least."""
MEASURED_STEPS = 10_000
"""The length of the schedule meanwhile, which some need; it is never reached."""


@dataclass(frozen=True)
class Outcome:
    """How a trial ended."""

    steps: int
    loss: float | None
    """Held-out, nats; None: it was not finite any more."""
    batches_ended: bool = False


@dataclass
class Speed:
    """What trials with one batch size take, seconds."""

    fixed_s: float
    """For making the model and evaluating it."""
    step_s: float

    def steps_in(self, seconds: float) -> int:
        return max(0, int((seconds - self.fixed_s) / self.step_s))


def train(
    settings: Settings, steps: int, device: torch.device, stop: Callable[[], bool]
) -> Outcome:
    """Train for ``steps`` and evaluate. ``stop`` may raise.

    Raises BatchesEndedError if there is no batch at all, and as `Trainer` and the task.
    """
    with closing(_trainer(settings, steps, device)) as trainer:
        ended = False
        try:
            trainer.run(stop=stop)
            trainer.round_loss()
        except DivergedError:
            return Outcome(trainer.opt.steps, None)
        except BatchesEndedError:
            ended = True
            if not trainer.opt.steps:
                raise
        return Outcome(trainer.opt.steps, trainer.evaluate(), ended)


def measure(settings: Settings, device: torch.device, clock: Callable[[], float]) -> Speed:
    """Return what trials of ``settings`` take. Raises as `train`."""
    began = clock()
    with closing(_trainer(settings, MEASURED_STEPS, device)) as trainer:
        trainer.evaluate()
        fixed_s = clock() - began
        with suppress(DivergedError, BatchesEndedError):
            trainer.run(stop=lambda: trainer.opt.steps >= WARM_STEPS)
        warm = trainer.opt.steps
        began = clock()
        with suppress(DivergedError, BatchesEndedError):
            trainer.run(stop=lambda: trainer.opt.steps > warm and clock() - began >= MEASURE_S)
        steps = max(1, trainer.opt.steps - warm)
        return Speed(fixed_s, max(1e-6, (clock() - began) / steps))


def _trainer(settings: Settings, steps: int, device: torch.device) -> Trainer:
    train = settings.train.model_copy(update={"steps": steps})
    trainer = Trainer(
        make_task(settings), OuterSettings(method=ALONE).resolved(), train, own=train, device=device
    )
    trainer.connect(Alone(), "tune", Shard(0, 1, train.seed))
    return trainer
