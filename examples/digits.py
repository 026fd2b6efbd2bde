"""Handwritten digits, a small MNIST: 1797 images of 8 x 8 that come with scikit-learn, divided
among the peers.

    shoal demo --task examples/digits.py:Digits
    shoal up --task examples/digits.py:Digits --set swarm.shards=4

A fifth of the images is held out. Each of the others belongs to one shard, so a single peer has
only some handwritings.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from shoal import Shard, Task

Batch = tuple[Tensor, Tensor]


class Digits(Task):
    """Classification of digits by a convolution and two layers."""

    def __init__(self, width: int = 32, batch: int = 32, lr: float = 3e-3) -> None:
        self.width, self.batch, self.lr = width, batch, lr

    @cached_property
    def images(self) -> Batch:
        """Images, float32 (1797, 1, 8, 8) from 0 to 1, and digits, int64 (1797,), in an order that
        all peers share.
        """
        raw = load_digits()
        order = torch.randperm(len(raw.target), generator=torch.Generator().manual_seed(0))
        return torch.tensor(raw.images, dtype=torch.float32)[order].unsqueeze(1) / 16, torch.tensor(
            raw.target
        )[order]

    def model(self) -> nn.Module:
        """Return a model that maps images (B, 1, 8, 8) to logits (B, 10)."""
        w = self.width
        return nn.Sequential(
            nn.Conv2d(1, w, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(16 * w, w), nn.ReLU(), nn.Linear(w, 10),
        )  # fmt: skip

    def batches(self, shard: Shard) -> Iterator[Batch]:
        """Yield batches of the shard's own images, without end."""
        images, digits = self.images
        own = torch.arange(len(digits) // 5, len(digits))[shard.index :: shard.of]
        random = torch.Generator().manual_seed(shard.seed)
        while True:
            rows = own[torch.randint(len(own), (self.batch,), generator=random)]
            yield images[rows], digits[rows]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy in nats."""
        return F.cross_entropy(model(batch[0]), batch[1])

    def tokens(self, batch: Batch) -> int:
        """Return the number of images, by which peers are weighed."""
        return len(batch[1])

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the cross-entropy on the fifth that is held out."""
        device, count = next(model.parameters()).device, len(self.images[1]) // 5
        return float(
            self.loss(model, (self.images[0][:count].to(device), self.images[1][:count].to(device)))
        )

    def inner_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(params, lr=self.lr)
