"""Training alone, to compare: the memory of the run that is over is given back first."""

from pathlib import Path

import torch

from shoal.node.config.settings import load
from shoal.node.runtime.door import make_task
from shoal.node.runtime.training_node import train_alone
from shoal.node.task import Shard
from shoal.node.training.trainer import Trainer
from shoal.optim import Alone

TEACHER = f"{Path(__file__).parents[3] / 'examples' / 'custom_model.py'}:Teacher"


def test_the_run_that_is_over_gives_back_gradients_and_optimizer_state_and_keeps_its_weights():
    settings = load(None, {"task.hooks": TEACHER, "train.steps": 3, "outer.every": 2})
    task = make_task(settings)
    trainer = Trainer(task, settings.outer, settings.train, own=settings.train)
    shard, stop = Shard(0, 2, 0), lambda: False
    trainer.connect(Alone(), "run", shard)
    trainer.run()
    trainer.params[0].grad = torch.ones_like(trainer.params[0])
    assert any(trainer.opt.inner.state.values())
    before = [parameter.detach().clone() for parameter in trainer.params]
    assert train_alone(settings, trainer, stop) is not None
    assert not any(trainer.opt.inner.state.values())
    assert all(parameter.grad is None for parameter in trainer.params)
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.params, strict=True))
    trainer.close()
