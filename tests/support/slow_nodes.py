"""Nodes with a task of least squares whose steps take a while, as commands start them."""

SLOW = '''
import time
from pathlib import Path
import torch
from shoal.node.task import Task

WIDTH = {width}

class Slow(Task):
    """A least-squares fit with a step that takes a while, as real ones do."""

    def model(self):
        return torch.nn.Linear(WIDTH, 1)

    def batches(self, shard):
        generator = torch.Generator().manual_seed(shard.index)
        while True:
            Path(__file__).with_name("drawing").touch()  # in a step
            time.sleep({seconds})
            yield torch.randn(8, WIDTH, generator=generator)

    def loss(self, model, batch):
        return (model(batch).squeeze(1) - batch.sum(1)).square().mean()

    @torch.no_grad()
    def evaluate(self, model):
        return float(self.loss(model, torch.ones(4, WIDTH)))

    def inner_optimizer(self, params):
        return torch.optim.SGD(params, lr=0.01)
'''


def hooks(shoal, folder="task", width=4, seconds=0.02):
    path = shoal.home / folder / "slow.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(SLOW.format(width=width, seconds=seconds))
    return f"{path}:Slow"


def create(shoal, name, *arguments, seconds=0.02, **how):
    """A swarm of one node that trains until it is stopped; returns its node."""
    task, outer = {"hooks": hooks(shoal, seconds=seconds)}, {"every": 5, "wait_s": 5.0}
    file = shoal.toml(task=task, outer=outer, train={"steps": 0})
    return shoal.start("up", file, *shoal.own(name), *arguments, **how)


def joiner(shoal, link, name, *arguments, task=None):
    return shoal.start("join", link, *shoal.own(name), "--task", task or hooks(shoal), *arguments)
