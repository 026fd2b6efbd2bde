"""A custom task: an MLP learns the labels of a fixed random network.

    shoal demo --task examples/custom_model.py:Teacher

Each shard has a few hundred examples: a peer alone memorises them, together they generalise.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Shard, Task

Batch = dict[str, Tensor]


class Teacher(Task):
    """Classification of points in 16 dimensions into the teacher's 8 classes."""

    def __init__(self, width: int = 64, examples: int = 512, lr: float = 2e-3) -> None:
        self.width, self.examples, self.lr = width, examples, lr
        self.teacher = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))

    def draw(self, count: int, seed: int) -> Batch:
        """Return ``count`` labelled points: x float32 (count, 16), y int64 (count,)."""
        x = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
        return {"x": x, "y": (x.sin() @ self.teacher).argmax(1)}

    def model(self) -> nn.Module:
        """Return an MLP with two hidden layers."""
        w = self.width
        return nn.Sequential(
            nn.Linear(16, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 8)
        )

    def batches(self, shard: Shard) -> Iterator[Batch]:
        """Yield batches of 32 of the shard's own examples, without end."""
        data = self.draw(self.examples, seed=100 + shard.index)
        order = torch.Generator().manual_seed(shard.seed)
        while True:
            rows = torch.randint(self.examples, (32,), generator=order)
            yield {"x": data["x"][rows], "y": data["y"][rows]}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy in nats."""
        return F.cross_entropy(model(batch["x"]), batch["y"])

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the cross-entropy on points that are in no shard, the same on every peer."""
        device = next(model.parameters()).device
        return float(
            self.loss(model, {k: v.to(device) for k, v in self.draw(2000, seed=0).items()})
        )

    def inner_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(params, lr=self.lr)
