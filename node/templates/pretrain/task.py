"""Pretraining a small language model on text, byte by byte.

Change the model, the data and the loss as you like.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Shard, Task
from shoal.node.data.source import DataError, Document
from shoal.node.tasks.documents import read_documents

HELD_OUT_ONE_IN = 16
"""One document in so many is never trained on."""


class Model(nn.Module):
    """Transformer over bytes: int64 (batch, time) to logits (batch, time, 256)."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits; no byte attends to a later one."""
        time = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=x.device)
        hidden = self.bytes(x) + self.places(torch.arange(time, device=x.device))
        logits: Tensor = self.out(self.blocks(hidden, mask=mask, is_causal=True))
        return logits


class Pretrain(Task):
    """Task with ``data``: files or folders of text; empty: the Python standard library.

    The other options size model and steps.
    """

    def __init__(
        self,
        data: str = "",
        width: int = 64,
        layers: int = 2,
        context: int = 64,
        batch: int = 8,
        lr: float = 2e-3,
    ) -> None:
        self.width = width
        self.layers = layers
        self.context = context
        self.batch = batch
        self.lr = lr
        self.data = data

    @cached_property
    def documents(self) -> list[Document]:
        """All text, read on first use."""
        return read_documents(self.data, max_bytes=32 * 2**20)

    def text(self, shard: Shard | None) -> Tensor:
        """Return the bytes of a shard; None: of the held-out documents, one in 16, chosen by name
        and so the same on every node.
        """
        held_out: list[Document] = []
        training: list[Document] = []
        for document in self.documents:
            is_held_out = crc32(document.name.encode()) % HELD_OUT_ONE_IN == 0
            (held_out if is_held_out else training).append(document)
        chosen = training[shard.index :: shard.of] if shard else held_out
        text = b"\n".join(document.content for document in chosen)
        if len(text) <= self.context:
            raise DataError(
                f"Only {len(text)} bytes of text are in this part: name more with --data, or use "
                "fewer shards."
            )
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def draw(self, text: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Return ``count`` windows from random places, int64 (count, context + 1)."""
        places = torch.randint(len(text) - self.context, (count, 1), generator=generator)
        return text[places + torch.arange(self.context + 1)].long()

    def model(self) -> nn.Module:
        """Return the model. All nodes begin with the same weights: torch's seed is set before."""
        return Model(self.width, self.layers, self.context)

    def batches(self, shard: Shard) -> Iterator[Tensor]:
        """Yield batches without end.

        They depend on the shard only, so that a resumed run goes on where it was.
        """
        text = self.text(shard)
        generator = torch.Generator().manual_seed(1000 * shard.seed + shard.index)
        while True:
            yield self.draw(text, self.batch, generator)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the cross-entropy of the next byte, in nats."""
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the same loss on held-out text."""
        batch = self.draw(self.text(None), 128, torch.Generator().manual_seed(0))
        return float(self.loss(model, batch.to(next(model.parameters()).device)))

    def inner_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW, for the steps between two exchanges."""
        return torch.optim.AdamW(params, lr=self.lr, betas=(0.9, 0.99))
