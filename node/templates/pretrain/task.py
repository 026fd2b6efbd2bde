"""Pretraining a small language model on text, byte by byte. Change what you like: the model, the data, the loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.node.task import Shard, Task
from shoal.node.tasks.corpus import DataError, Document, read_documents


class Model(nn.Module):
    """A transformer over bytes: int64 (batch, time) to logits (batch, time, 256)."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        """No byte sees a later one."""
        time = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=x.device)
        hidden = self.bytes(x) + self.places(torch.arange(time, device=x.device))
        logits: Tensor = self.out(self.blocks(hidden, mask=mask, is_causal=True))
        return logits


class Pretrain(Task):
    """``data``: files or folders of text; empty: the Python standard library. The rest is the size of the model and its steps."""

    def __init__(
        self, data: str = "", width: int = 64, layers: int = 2, context: int = 64, batch: int = 8, lr: float = 2e-3
    ) -> None:
        self.width, self.layers, self.context, self.batch, self.lr = width, layers, context, batch, lr
        self.data = data

    @cached_property
    def documents(self) -> list[Document]:
        """All text, read when it is wanted first."""
        return read_documents(self.data, max_bytes=32 * 2**20)

    def text(self, shard: Shard | None) -> Tensor:
        """The bytes of a shard; None: the held-out ones, one document in 16, chosen by its name and so the same on every peer."""
        held = [document for document in self.documents if crc32(document.name.encode()) % 16 == 0]
        training = [document for document in self.documents if crc32(document.name.encode()) % 16]
        text = b"\n".join(document.content for document in (training[shard.index :: shard.of] if shard else held))
        if len(text) <= self.context:
            raise DataError(f"Only {len(text)} bytes of text are in this part: name more with --data, or use fewer shards.")
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def draw(self, text: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """``count`` windows from random places, int64 (count, context + 1)."""
        places = torch.randint(len(text) - self.context, (count, 1), generator=generator)
        return text[places + torch.arange(self.context + 1)].long()

    def model(self) -> nn.Module:
        """All peers begin with the same weights: torch's seed is set before."""
        return Model(self.width, self.layers, self.context)

    def batches(self, shard: Shard) -> Iterator[Tensor]:
        """Endless, and a function of the shard alone, so that a resumed run goes on where it was."""
        text, generator = self.text(shard), torch.Generator().manual_seed(1000 * shard.seed + shard.index)
        while True:
            yield self.draw(text, self.batch, generator)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Cross-entropy of the next byte, in nats."""
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """The same loss on held-out text."""
        batch = self.draw(self.text(None), 128, torch.Generator().manual_seed(0))
        return float(self.loss(model, batch.to(next(model.parameters()).device)))

    def inner_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW, for the steps between two exchanges."""
        return torch.optim.AdamW(params, lr=self.lr, betas=(0.9, 0.99))
