"""A task whose inner steps take as long as the options say: shard 0 is quick, every other one
slow.
"""

import threading

import torch

from shoal.node.task import Task

NOBODY = threading.Event()


class Uneven(Task):
    """Least squares in 64 dimensions; a step takes ``quick_s`` or ``slow_s`` seconds, in which the
    processor is free.
    """

    def __init__(self, quick_s=0.02, slow_s=0.2, data=""):
        self.quick_s, self.slow_s = (
            quick_s,
            slow_s,
        )  # data: the fixture hands some to every node; it is not read

    def model(self):
        return torch.nn.Linear(64, 1)

    def batches(self, shard):
        self.step_s = self.slow_s if shard.index else self.quick_s
        generator = torch.Generator().manual_seed(shard.index)
        while True:
            x = torch.randn(16, 64, generator=generator)
            yield x, x.sum(1, keepdim=True)

    def loss(self, model, batch):
        NOBODY.wait(self.step_s)
        return (model(batch[0]) - batch[1]).square().mean()

    @torch.no_grad()
    def evaluate(self, model):
        return float((model.weight - 1).square().mean())

    def inner_optimizer(self, params):
        return torch.optim.SGD(params, lr=0.01)
