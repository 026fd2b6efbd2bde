"""A task as users write it: groups with and without decay, tied and frozen weights, buffers."""

import time

import torch
from torch import nn

from shoal import Task

STEP_S = 0.02
"""At least, as steps of real models take a while: so that a node can be killed between two."""
WORDS = 32
WIDTH = 16
CONTEXT = 8


class Model(nn.Module):
    """Predicts a word by the mean of those before it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words):
        x = self.embed(words).mean(1)
        x = self.norm(x + self.hidden(self.frozen(x)).relu())
        return self.head(x)


class Words(Task):
    """Counts upwards from a number that each row draws."""

    def model(self):
        return Model()

    def inner_optimizer(self, params):
        params = list(params)
        decay = [param for param in params if param.ndim > 1]
        rest = [param for param in params if param.ndim <= 1]
        # Without decay first: the groups' order is not the model's.
        groups = [
            {"params": rest, "weight_decay": 0.0},
            {"params": decay, "weight_decay": 0.1},
        ]
        return torch.optim.AdamW(groups, lr=0.01)

    def batches(self, shard):
        draw = torch.Generator().manual_seed(shard.index)
        while True:
            yield self.draw(32, draw)

    @staticmethod
    def draw(rows, draw):
        begin = torch.randint(WORDS, (rows, 1), generator=draw)
        return (begin + torch.arange(CONTEXT + 1)) % WORDS

    def loss(self, model, batch):
        if model.training:
            time.sleep(STEP_S)
        return nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])

    @torch.no_grad()
    def evaluate(self, model):
        batch = self.draw(64, torch.Generator().manual_seed(-1))
        return self.loss(model, batch).item()
