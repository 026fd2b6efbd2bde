"""The built-in task ``text``: a byte-level language model on files that every machine has.

Without ``data`` the text is the sources of the Python standard library, so a demo needs no download. A document is
a file (or a piece of one, where there are few files). One document in ten, chosen by the hash of its relative path,
is held out: nobody trains on it. The others are dealt to the shards in the order of their hashes, so that shards hold
different documents. Peers that hold the same files agree on all of this wherever the files lie.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from node.corpus import DataError, Document, read_documents
from node.gpt import GPT
from node.task import Shard, Task

HELD_OUT_ONE_IN = 10
EVALUATION_BYTES = 32 * 1024  # on windows of the default context this keeps the sampling noise near 0.5 %
EVALUATION_BATCH = 8 * 1024  # bytes at once, which bounds the logits to 8 MB


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big")


class TextTask(Task):
    """Byte-level GPT on text.

    Options:
        data: files or folders, separated by commas or the path separator; empty: the Python standard library.
        layers, width, heads, context: the model. batch: windows a step. max_bytes: how much text is read at most.
        lr, warmup: AdamW's peak learning rate and the steps that lead up to it; a cosine then leads down to 10 %.

    Raises:
        DataError: an option is out of range, or (on first use of the data) the text is missing or too short.
    """

    def __init__(
        self,
        *,
        data: str = "",
        layers: int = 2,
        width: int = 64,
        heads: int = 4,
        context: int = 64,
        batch: int = 8,
        lr: float = 1.2e-2,
        warmup: int = 50,
        max_bytes: int = 32 * 2**20,
    ) -> None:
        for name, value in [
            ("layers", layers),
            ("width", width),
            ("heads", heads),
            ("context", context),
            ("batch", batch),
            ("max_bytes", max_bytes),
        ]:
            if not isinstance(value, int) or value < 1:
                raise DataError(f"The text option {name}={value!r} must be a whole number of at least 1.")
        if width % heads:
            raise DataError(f"The text option width={width} must be a multiple of heads={heads}.")
        if not (isinstance(lr, int | float) and 0 < lr < math.inf) or not isinstance(warmup, int) or warmup < 0:
            raise DataError(f"The text options lr={lr!r} and warmup={warmup!r} must be a positive number and a whole one.")
        self.data, self.max_bytes = data, max_bytes
        self.layers, self.width, self.heads, self.context = layers, width, heads, context
        self.batch, self.lr, self.warmup = batch, lr, warmup

    @cached_property
    def documents(self) -> list[Document]:
        """All documents, sorted by relative path. Raises DataError."""
        return read_documents(self.data, self.max_bytes)

    def held_out(self) -> list[Document]:
        """The documents that nobody trains on."""
        return [d for d in self.documents if _digest(d.name) % HELD_OUT_ONE_IN == 0]

    def shard_documents(self, shard: Shard) -> list[Document]:
        """The documents of one shard; those of two shards with equal ``of`` are disjoint."""
        training = [d for d in self.documents if _digest(d.name) % HELD_OUT_ONE_IN != 0]
        # Dealing round by round, rather than by the hash alone, leaves no shard empty.
        training.sort(key=lambda d: (_digest("shard " + d.name), d.name))
        return training[shard.index :: shard.of]

    def _windows(self, documents: list[Document], what: str) -> Tensor:
        """All windows of context + 1 bytes as a view, uint8 (N, T + 1)."""
        text = b"\n".join(d.content for d in documents)
        if len(text) <= self.context:
            raise DataError(
                f"The {what} has only {len(text)} bytes of text where {self.context + 1} are needed: "
                "name more text with --data, or use fewer shards or a shorter context."
            )
        # bytearray: torch wants memory that it may write to.
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, self.context + 1, 1)

    def model(self) -> GPT:
        """Return the fresh GPT."""
        return GPT(self.layers, self.width, self.heads, self.context)

    def batches(self, shard: Shard) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs, next bytes), each int64 (B, T), from random places of the shard's text."""
        windows = self._windows(self.shard_documents(shard), f"shard {shard.index} of {shard.of}")
        generator = torch.Generator().manual_seed(_digest(f"batches {shard.seed} {shard.index}") >> 1)
        while True:
            places = torch.randint(len(windows), (self.batch,), generator=generator)
            batch = windows[places].long()  # (B, T + 1)
            yield batch[:, :-1], batch[:, 1:]

    def loss(self, model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy in nats per byte."""
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())  # (B * T, V) against (B * T,)

    @cached_property
    def _evaluation(self) -> Tensor:
        windows = self._windows(self.held_out(), "held-out part")
        count = max(1, EVALUATION_BYTES // self.context)
        places = torch.randint(len(windows), (count,), generator=torch.Generator().manual_seed(0))
        return windows[places].long()  # (count, T + 1)

    @torch.no_grad()
    def evaluate(self, model: torch.nn.Module) -> float:
        """Return nats per byte on a fixed sample of about 32 kB of the held-out documents."""
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        total = 0.0
        size = max(1, EVALUATION_BATCH // self.context)
        for start in range(0, len(self._evaluation), size):
            part = self._evaluation[start : start + size].to(device)
            total += float(self.loss(model, (part[:, :-1], part[:, 1:]))) * len(part)
        model.train(was_training)
        return total / len(self._evaluation)

    def inner_optimizer(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW with betas (0.9, 0.99) and no weight decay."""
        params = list(params)
        # The fused kernel halves the optimizer's time on the CPU; elsewhere torch chooses.
        fused = True if all(p.device.type == "cpu" for p in params) else None
        return torch.optim.AdamW(params, lr=self.lr, betas=(0.9, 0.99), weight_decay=0.0, fused=fused)

    def lr_scheduler(
        self, optimizer: torch.optim.Optimizer, steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Return warm-up, then a cosine down to 10 % at ``steps``; without an end (0) the peak rate is kept."""
        warmup = min(self.warmup, steps // 2) if steps else self.warmup

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            if not steps:
                return 1.0
            progress = min(1.0, (step - warmup) / max(1, steps - warmup))
            return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
