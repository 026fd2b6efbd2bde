"""The task of bench/real.py: fine-tuning a causal language model on English text of which every node has another part.

The text is that of the files of ``data``, the same number of characters of each, one after another; without files it is the
language reference that comes with Python (``pydoc_data``). Every sixteenth block is held out. The rest is dealt in consecutive
parts: with as many files as nodes each node has a file of its own, and what is held out is of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal import Shard, Task

BLOCK = 4096  # characters
HELD = 16  # one block in so many is held out
FILE = 600_000  # characters of each file, from its middle: books begin with a preface


def blocks_of(text: str) -> list[str]:
    """Return the text in blocks."""
    return [text[start : start + BLOCK] for start in range(0, len(text) - BLOCK + 1, BLOCK)]


def read(data: str) -> list[str]:
    """Return the blocks of all files, which are separated by commas."""
    if not data:
        return blocks_of("\n".join(topics[name] for name in sorted(topics)))
    files = [Path(name).read_text(encoding="utf-8", errors="replace") for name in data.split(",")]
    least = min(FILE, *(len(text) for text in files))
    return [block for text in files for block in blocks_of(text[(len(text) - least) // 2 :][:least])]


class RealText(Task):
    """Task with ``base``: a folder with a model; ``data``: files; ``lora``: rank of an adapter, 0: all weights are trained."""

    def __init__(
        self, base: str = "", data: str = "", lora: int = 0, context: int = 64, batch: int = 2, lr: float = 1e-4, held: int = 64
    ) -> None:
        self.base, self.data, self.lora, self.context, self.batch, self.lr, self.held = base, data, lora, context, batch, lr, held
        self.tokens_of = lru_cache(maxsize=2)(self._tokens_of)

    def model(self) -> nn.Module:
        """Return the model; only weights with a gradient are exchanged."""
        model: Any = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        if self.lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=self.lora, target_modules="all-linear", task_type="CAUSAL_LM"))
        found: nn.Module = model
        return found

    def _tokens_of(self, part: int | None, of: int) -> Tensor:
        """Return the tokens of a part of the training text, int64; None: of what is held out."""
        blocks = read(self.data)
        held, rest = blocks[::HELD], [block for number, block in enumerate(blocks) if number % HELD]
        chosen = held if part is None else rest[len(rest) * part // of : len(rest) * (part + 1) // of]
        return torch.tensor(AutoTokenizer.from_pretrained(self.base)("".join(chosen), verbose=False)["input_ids"])

    def batches(self, shard: Shard) -> Iterator[Tensor]:
        """Yield windows from random places of the shard's part, int64 (batch, context), without end."""
        tokens, generator = self.tokens_of(shard.index, shard.of), torch.Generator().manual_seed(1000 * shard.seed + shard.index)
        while True:
            places = torch.randint(len(tokens) - self.context, (self.batch, 1), generator=generator)
            yield tokens[places + torch.arange(self.context)]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the cross-entropy of the next token, nats."""
        found: Tensor = model(input_ids=batch, labels=batch).loss
        return found

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the same loss on windows evenly spread over the held-out text."""
        tokens = self.tokens_of(None, 1)
        places = torch.linspace(0, len(tokens) - self.context - 1, self.held).long().unsqueeze(1)
        model.eval()
        device = next(model.parameters()).device
        windows = torch.split(tokens[places + torch.arange(self.context)], 4)
        losses = [float(self.loss(model, window.to(device))) * len(window) for window in windows]
        model.train()
        return sum(losses) / self.held

    def inner_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW without weight decay; fused, which needs no memory beyond its state."""
        return torch.optim.AdamW(params, lr=self.lr, weight_decay=0.0, fused=True)
