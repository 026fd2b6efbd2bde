"""The tasks of bench/real.py: a causal language model on English text, fine-tuned or from random
weights.

The text is that of the files of ``data``, the same number of characters of each, one after another;
without files it is the language reference that comes with Python (``pydoc_data``). Every sixteenth
block is held out. `RealText` deals the rest in consecutive parts: with as many files as nodes each
node has a file of its own, and what is held out is of all. `FreshText` deals blocks in turn, so
that all nodes have text of all files, or with ``unlike`` in consecutive parts too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Shard, Task
from shoal.node.tasks.gpt import GPT

BLOCK = 4096  # characters
HELD = 16  # one block in so many is held out
FILE = 600_000  # characters of each file, from its middle: books begin with a preface
SAMPLE = 4 * 2**20  # characters that a tokenizer learns from
SIZES = {
    "10m": (5, 352, 8, 4096),
    "3m": (4, 224, 4, 2048),
    "1m": (3, 128, 4, 2048),
    "tiny": (1, 32, 2, 300),
}
"""Layers, width, heads and vocabulary of models from random weights: 10.3, 3.3, 1.1 and 0.03
million parameters.
"""
TOKENIZER = "tokenizer.json"


def blocks_of(text: str) -> list[str]:
    """Return the text in blocks."""
    return [text[start : start + BLOCK] for start in range(0, len(text) - BLOCK + 1, BLOCK)]


def read(data: str, most: int = FILE) -> list[str]:
    """Return the blocks of all files, which are separated by commas: at most so many characters of
    each.
    """
    if not data:
        return blocks_of("\n".join(topics[name] for name in sorted(topics)))
    files = [Path(name).read_text(encoding="utf-8", errors="replace") for name in data.split(",")]
    least = min(most, *(len(text) for text in files))
    return [
        block for text in files for block in blocks_of(text[(len(text) - least) // 2 :][:least])
    ]


def split(blocks: list[str]) -> tuple[list[str], list[str]]:
    """Return the blocks that are held out, and all others."""
    return blocks[::HELD], [block for number, block in enumerate(blocks) if number % HELD]


class RealText(Task):
    """Task with ``base``: a folder with a model; ``data``: files, ``most`` characters of each;
    ``lora``: rank of an adapter, or 0: all weights are trained.

    ``parts``: a batch is those of so many nodes together, as data parallel training has it: the
    mean of their gradients is the gradient of that batch.
    """

    def __init__(
        self,
        base: str = "",
        data: str = "",
        lora: int = 0,
        context: int = 64,
        batch: int = 2,
        lr: float = 1e-4,
        held: int = 64,
        parts: int = 0,
        most: int = FILE,
    ) -> None:
        self.base, self.data, self.lora, self.context, self.batch, self.lr, self.held = (
            base,
            data,
            lora,
            context,
            batch,
            lr,
            held,
        )
        self.parts, self.most, self.tokens_of = (
            parts,
            most,
            lru_cache(maxsize=None)(self._tokens_of),
        )

    def model(self) -> nn.Module:
        """Return the model; only weights with a gradient are exchanged."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        if self.lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(
                model, LoraConfig(r=self.lora, target_modules="all-linear", task_type="CAUSAL_LM")
            )
        found: nn.Module = model
        return found

    def _text(self, part: int | None, of: int) -> list[str]:
        """Return the blocks of a part of the training text; None: of what is held out."""
        held, rest = split(read(self.data, self.most))
        return held if part is None else rest[len(rest) * part // of : len(rest) * (part + 1) // of]

    def _encoded(self, text: str) -> list[int]:
        from transformers import AutoTokenizer

        found: list[int] = AutoTokenizer.from_pretrained(self.base)(text, verbose=False)[
            "input_ids"
        ]
        return found

    def _tokens_of(self, part: int | None, of: int) -> Tensor:
        """Return the tokens of ``_text``, int64."""
        return torch.tensor(self._encoded("".join(self._text(part, of))))

    def _windows(self, index: int, of: int, seed: int) -> Iterator[Tensor]:
        """Yield windows from random places of a part, int64 (batch, context), without end."""
        tokens, generator = (
            self.tokens_of(index, of),
            torch.Generator().manual_seed(1000 * seed + index),
        )
        while True:
            places = torch.randint(len(tokens) - self.context, (self.batch, 1), generator=generator)
            yield tokens[places + torch.arange(self.context)]

    def batches(self, shard: Shard) -> Iterator[Tensor]:
        """Yield the shard's windows, int64 (batch, context), or those of all parts, int64 (parts *
        batch, context).
        """
        if not self.parts:
            return self._windows(shard.index, shard.of, shard.seed)
        each = [self._windows(index, self.parts, shard.seed) for index in range(self.parts)]
        return (torch.cat(windows) for windows in zip(*each, strict=True))

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


class FreshText(RealText):
    """The same with our own transformer, from random weights.

    ``base``: folder of a tokenizer (`learn`); ``size``: of `SIZES`; ``unlike``: each node has a
    part of the text of its own, in the order of the files.
    """

    def __init__(self, size: str = "1m", unlike: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.unlike = unlike
        self.layers, self.width, self.heads, self.vocabulary = SIZES[size]

    def model(self) -> nn.Module:
        """Return a fresh one."""
        return GPT(self.layers, self.width, self.heads, self.context, self.vocabulary)

    def _text(self, part: int | None, of: int) -> list[str]:
        if self.unlike:
            return super()._text(part, of)
        held, rest = split(read(self.data, self.most))
        return held if part is None else rest[part::of]

    def _encoded(self, text: str) -> list[int]:
        from tokenizers import Tokenizer

        found: list[int] = Tokenizer.from_file(str(Path(self.base) / TOKENIZER)).encode(text).ids
        return found

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the cross-entropy of the next token, nats."""
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def inner_optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW as the built-in task has it."""
        return torch.optim.AdamW(
            params, lr=self.lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True
        )


def learn(folder: Path, size: str, data: str, most: int) -> Path:
    """Return ``folder``, with a byte-level BPE tokenizer that was learnt from the training text, if
    there is none yet.
    """
    import tokenizers

    if (folder / TOKENIZER).exists():
        return folder
    training = split(read(data, most))[1]
    every = max(1, len(training) * BLOCK // SAMPLE)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=SIZES[size][-1],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training[::every], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / f"{TOKENIZER}.part"))
    (folder / f"{TOKENIZER}.part").replace(folder / TOKENIZER)
    return folder
