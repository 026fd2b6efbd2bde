"""A small task, its training by a node, and the plain loop that the steps are compared with."""

import math

import pytest
import torch

from shoal.node.config.train_settings import OwnTraining
from shoal.node.task import Shard, Task
from shoal.node.training.precision import check_precision
from shoal.node.training.trainer import Trainer
from shoal.node.training.training_error import TrainingError
from shoal.optim import Alone
from shoal.swarm.settings.training import TrainSettings
from tests.support.blocking import blocking

STEPS, CPU = 9, torch.device("cpu")


class Small(Task):
    """A model of two layers on batches of 8 rows."""

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))

    def batches(self, shard):
        generator = torch.Generator().manual_seed(shard.index)
        while True:
            yield {"x": torch.randn(8, 4, generator=generator), "scale": torch.tensor(2.0)}

    def loss(self, model, batch):
        return (
            (model(batch["x"]) - batch["scale"] * batch["x"].sum(1, keepdim=True)).square().mean()
        )

    @torch.no_grad()
    def evaluate(self, model):
        return float(self.loss(model, next(self.batches(Shard(7, 8, 0)))))


class Overflows(Small):
    """Some batches' gradients are not finite."""

    def __init__(self, bad=(2, 3)):
        self.bad = bad

    def batches(self, shard):
        for step, batch in enumerate(super().batches(shard)):
            yield batch | {"scale": torch.tensor(math.inf if step in self.bad else 2.0)}


def trainer(
    task=None, train=None, *, method="none", device=CPU, slow_on_device=False, offload=None, **own
):
    where = {"device": device, "slow_on_device": slow_on_device, "offload": offload}
    settings = train or TrainSettings(steps=STEPS, seed=1)
    made = Trainer(
        task or Small(), blocking(method=method, every=3), settings, own=OwnTraining(**own), **where
    )
    made.connect(Alone(), "run", Shard(0, 2, 1))
    return made


def run(*args, **kwargs):
    made = trainer(*args, **kwargs)
    made.run()
    return list(made.model.state_dict().values())


def plain(step, device=CPU, task=None, optimizer=None):
    """Return the weights after STEPS steps of a loop in which ``step(task, model, inner, batch)``
    is written out.
    """
    torch.manual_seed(1)
    task = task or Small()
    model = task.model().to(device)
    inner = optimizer(model.parameters()) if optimizer else task.inner_optimizer(model.parameters())
    batches = task.batches(Shard(0, 2, 1))
    for number in range(STEPS):
        batch = {name: value.to(device) for name, value in next(batches).items()}
        step(task, model, inner, batch, number)
        inner.zero_grad()
    return list(model.state_dict().values())


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def near(one, other, by=1e-6):
    return all(torch.allclose(a, b, rtol=0.0, atol=by) for a, b in zip(one, other, strict=True))


def float16(device):
    try:
        check_precision("float16", device)
    except TrainingError as error:
        pytest.skip(str(error))
    return device
