"""Fine-tuning a causal language model of transformers on text: all of it, or a LoRA adapter only.

Without ``base`` it is a tiny Llama with random weights over bytes, so that it can be tried without
a download.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from shoal import Shard, Task
from shoal.node.data.source import DataError, Document
from shoal.node.tasks.documents import read_documents

HELD_OUT_ONE_IN = 16
"""One document in so many is never trained on."""


class Finetune(Task):
    """Task with ``base``: folder or name of a model; ``lora``: rank of an adapter, 0: none;
    ``data``: files or folders of text.
    """

    def __init__(
        self,
        base: str = "",
        lora: int = 0,
        data: str = "",
        context: int = 64,
        batch: int = 8,
        lr: float = 0.0,
    ) -> None:
        self.base = base
        self.lora = lora
        self.context = context
        self.batch = batch
        # A model that was trained before forgets at more.
        usual = 1e-4 if base and not lora else 1e-3
        self.lr = lr or usual
        self.data = data

    @cached_property
    def documents(self) -> list[Document]:
        """All text, read on first use."""
        return read_documents(self.data, max_bytes=4 * 2**20)

    def model(self) -> nn.Module:
        """Return the model.

        Only weights with a gradient are exchanged: with ``lora`` the adapter, otherwise all.
        """
        if self.base:
            model: Any = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        else:
            small: dict[str, Any] = {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
            }
            config = LlamaConfig(vocab_size=256, max_position_embeddings=1024, **small)
            model = AutoModelForCausalLM.from_config(config)
        if self.lora:
            from peft import LoraConfig, get_peft_model

            adapter = LoraConfig(r=self.lora, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, adapter)
        module: nn.Module = model
        return module

    def tokens_of(self, shard: Shard | None) -> Tensor:
        """Return the tokens of a shard; None: of the held-out documents, one in 16, chosen by name
        and so equal on all nodes.
        """
        held_out: list[Document] = []
        training: list[Document] = []
        for document in self.documents:
            is_held_out = crc32(document.name.encode()) % HELD_OUT_ONE_IN == 0
            (held_out if is_held_out else training).append(document)
        chosen = training[shard.index :: shard.of] if shard else held_out
        text = b"\n".join(document.content for document in chosen)
        if self.base:
            tokenizer = AutoTokenizer.from_pretrained(self.base)
            found = torch.tensor(tokenizer(text.decode(errors="replace"))["input_ids"])
        else:
            found = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        if len(found) <= self.context:
            raise DataError(
                f"Only {len(found)} tokens are in this part: name more text with --data, or use "
                "fewer shards."
            )
        return found

    def draw(self, tokens: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Return ``count`` windows from random places, int64 (count, context)."""
        places = torch.randint(len(tokens) - self.context, (count, 1), generator=generator)
        return tokens[places + torch.arange(self.context)]

    def batches(self, shard: Shard) -> Iterator[Tensor]:
        """Yield batches without end.

        They depend on the shard only, so that a resumed run goes on where it was.
        """
        tokens = self.tokens_of(shard)
        generator = torch.Generator().manual_seed(1000 * shard.seed + shard.index)
        while True:
            yield self.draw(tokens, self.batch, generator)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the cross-entropy of the next token, in nats; transformers shifts the labels."""
        found: Tensor = model(input_ids=batch, labels=batch).loss
        return found

    @cached_property
    def held_out(self) -> Tensor:
        """32 windows of held-out text, made on first use."""
        return self.draw(self.tokens_of(None), 32, torch.Generator().manual_seed(0))

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> float:
        """Return the same loss on held-out text, a few windows at a time: the logits of all would
        take much memory.
        """
        device = next(model.parameters()).device
        parts = torch.split(self.held_out, 8)
        return sum(float(self.loss(model, part.to(device))) for part in parts) / len(parts)

    def inner_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW, for the steps between two exchanges."""
        return torch.optim.AdamW(params, lr=self.lr)
