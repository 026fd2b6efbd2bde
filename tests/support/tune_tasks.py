"""Tasks whose best learning rate is known, and whose steps take time of a clock of the test's."""

import math
from itertools import islice

import torch

from shoal.node.task import Task
from tests.support.clock import Clock

CLOCK = Clock()
STEP_S = 0.05
"""Of the clock, for each row of a batch."""


class Slope(Task):
    """Two weights that are to become 1, one by a slope that is a hundredth as steep: the higher the
    rate the better, below 1, where the steep one does not come nearer; above it diverges.
    """

    def __init__(self, lr=0.25):
        self.lr = lr

    def model(self):
        made = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(made.weight)
        return made

    def batches(self, shard):
        while True:
            yield torch.ones(1, 1)

    def loss(self, model, batch):
        CLOCK.now += STEP_S * len(batch)
        return self.distance(model) * batch.mean()

    def distance(self, model):
        away = (model.weight - 1).flatten()
        if away.abs().max() > 100:
            return away.sum() * math.nan
        return (away * torch.tensor([1.0, 0.1])).square().sum()

    @torch.no_grad()
    def evaluate(self, model):
        return float(self.distance(model))

    def inner_optimizer(self, params):
        return torch.optim.SGD(params, lr=self.lr)


class Reading(Slope):
    """The same, with a folder of data that it does not look into."""

    def __init__(self, lr=0.25, data=""):
        super().__init__(lr)
        self.data = data


class Batched(Slope):
    """The same, with more rows that cost more time and bring nothing."""

    def __init__(self, lr=0.25, batch=4):
        super().__init__(lr)
        self.batch = batch

    def batches(self, shard):
        while True:
            yield torch.ones(self.batch, 1)


class Hungry(Batched):
    """Memory is too small for more than 4 rows."""

    def loss(self, model, batch):
        if len(batch) > 4:
            raise MemoryError
        return super().loss(model, batch)


class Ends(Slope):
    def batches(self, shard):
        return islice(super().batches(shard), 30)


class Never(Slope):
    """Every rate diverges."""

    def loss(self, model, batch):
        return super().loss(model, batch) * math.nan


class Unrated(Slope):
    def __init__(self):
        super().__init__()


class Stopped(Slope):
    """Ctrl-C comes in the second rung, of which the first trial has begun."""

    def loss(self, model, batch):
        if CLOCK.now > 12.0:
            raise KeyboardInterrupt
        return super().loss(model, batch)


class Slowing(Slope):
    """From a moment on another program slows the steps down."""

    def __init__(self, lr=0.25, from_s=12.0):
        super().__init__(lr)
        self.from_s = from_s

    def loss(self, model, batch):
        if CLOCK.now > self.from_s:
            CLOCK.now += 1.0
        return super().loss(model, batch)


class Unevaluated:
    """Lacks evaluate()."""

    model = Slope.model
    batches = Slope.batches
    loss = Slope.loss
