"""What bench/memory.py trains: the built-in GPT, as large as wanted, on random bytes, with batches
that take hardly any memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Shard, Task
from shoal.node.tasks.gpt import GPT

CONTEXT, HEADS, VOCABULARY = 16, 4, 256


class Bytes(Task):
    """Task with a GPT of ``layers`` and ``width``."""

    def __init__(self, layers: int = 2, width: int = 64) -> None:
        self.layers, self.width = layers, width

    def model(self) -> nn.Module:
        """Return the GPT."""
        return GPT(
            layers=self.layers,
            width=self.width,
            heads=HEADS,
            context=CONTEXT,
            vocabulary=VOCABULARY,
        )

    def batches(self, shard: Shard) -> Iterator[Tensor]:
        """Return random bytes, (1, CONTEXT + 1)."""
        draw = torch.Generator().manual_seed(shard.index)
        while True:
            yield torch.randint(VOCABULARY, (1, CONTEXT + 1), generator=draw)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        logits: Tensor = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def inner_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW with a rate at which nothing is learnt and nothing diverges."""
        return torch.optim.AdamW(params, lr=1e-5)

    def evaluate(self, model: nn.Module) -> float:
        """Return the loss of one batch."""
        with torch.no_grad():
            return float(self.loss(model, next(self.batches(Shard(0, 1, 0)))))
