"""What `bench/cities.py` trains: a GPT of 1.06 M parameters whose inner steps take .25 s, and a
note of when each began.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Shard, Task
from shoal.node.tasks.gpt import GPT

STEP_S = 0.25  # for most of it the processor is free, so that four nodes fit onto two cores
CONTEXT, VOCABULARY = 128, 256


class Noted(Task):
    """Task on random bytes.

    Each step writes the time (Unix seconds) into the file of the environment's CITIES_STEPS, if
    any.
    """

    def __init__(self) -> None:
        self._due = 0.0
        path = os.environ.get("CITIES_STEPS")
        self._file = open(path, "a", buffering=1) if path else None  # noqa: SIM115

    def model(self) -> nn.Module:
        """Return the GPT."""
        return GPT(layers=5, width=128, heads=4, context=CONTEXT, vocabulary=VOCABULARY)

    def batches(self, shard: Shard) -> Iterator[Tensor]:
        """Return random bytes, (1, CONTEXT + 1)."""
        draw = torch.Generator().manual_seed(shard.index)
        while True:
            yield torch.randint(VOCABULARY, (1, CONTEXT + 1), generator=draw)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy, once the step before has had its time."""
        time.sleep(max(self._due - time.monotonic(), 0.0))
        self._due = time.monotonic() + STEP_S
        if self._file is not None:
            self._file.write(f"{time.time():.3f}\n")
        logits: Tensor = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def inner_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW with a rate at which nothing diverges."""
        return torch.optim.AdamW(params, lr=1e-5)

    def evaluate(self, model: nn.Module) -> float:
        """Return the loss of one batch."""
        batch = next(self.batches(Shard(0, 1, 0)))
        with torch.no_grad():
            return float(
                F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            )
