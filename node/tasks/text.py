"""The built-in task ``text``: a language model on text, over bytes or another tokenizer's tokens.

Without ``data`` the text is the sources of the Python standard library, so a demo needs no
download. One document in ten, chosen by a hash, is held out: no node trains on it. The others are
assigned to the shards in the order of their hashes, so that shards hold different documents. Peers
with the same files agree on all of this, whatever folder the files are in (docs/data.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.node.data.hub_name import PREFIX, is_path
from shoal.node.data.reader import Reader
from shoal.node.data.sharding import HELD_OUT_ONE_IN, is_held_out, stable_hash
from shoal.node.data.source import (
    DataError,
    Document,
    DocumentSource,
    Listed,
    Skipped,
    Training,
    no_document,
)
from shoal.node.data.task_options import DIGEST
from shoal.node.data.tokenizer import BYTES, Tokenizer, load_tokenizer
from shoal.node.home import expanded
from shoal.node.task import Shard, Task
from shoal.node.tasks import text_size
from shoal.node.tasks.documents import EVERYTHING, open_stream, read_documents
from shoal.node.tasks.gpt import GPT, VOCABULARY, sized
from shoal.node.tasks.text_size import TextSize
from shoal.node.training.schedule import factor

EVALUATION_BYTES = 32 * 1024
"""Of held-out text: on windows of the default context the sampling noise is near 0.5 %."""
EVALUATION_BATCH_BYTES = 8 * 1024
"""At once, which bounds the logits to 8 MB; of a larger vocabulary, fewer tokens."""
STREAM_EVALUATION_BYTES = 8 * EVALUATION_BYTES
"""Held-out bytes that are read of a stream."""
ORDERS = ("", "random", "epochs")


class TextTask(Task):
    """Task that trains a GPT on text.

    Options:
        data: files or folders, separated by commas or the path separator, or a dataset as
            hf:NAME[/CONFIG][:SPLIT]; empty: the Python standard library. Datasets, .jsonl,
            .jsonl.gz and .txt.gz are streams of documents.
        field: name of a record's text.
        tokenizer: bytes, a name on the hub, or a path that begins with . or / or ~.
        tokenizer_digest: the same on all nodes.
        order: random (windows from random places in memory), or epochs (each document once);
            empty: epochs for streams.
        shuffle: tokens of a stream that are shuffled together.
        layers, width, heads, context: the model.
        batch: windows a step.
        max_bytes: most text held in memory.
        lr, warmup: AdamW's peak learning rate, and the steps up to it or Muon's; then a cosine
            to 10 %.

    Raises DataError: an option is out of range, or (on first use) the text is missing or too short.
    """

    def __init__(
        self,
        *,
        data: str = "",
        layers: int = TextSize().layers,
        width: int = TextSize().width,
        heads: int = TextSize().heads,
        context: int = TextSize().context,
        batch: int = 8,
        lr: float = 1.2e-2,
        warmup: int = 50,
        max_bytes: int = 32 * 2**20,
        field: str = "text",
        tokenizer: str = BYTES,
        tokenizer_digest: str = "",
        order: str = "",
        shuffle: int = 2**18,
    ) -> None:
        self.size = TextSize(layers, width, heads, context)
        counts = {
            **self.size._asdict(),
            "batch": batch,
            "max_bytes": max_bytes,
            "shuffle": shuffle,
        }
        for name, value in counts.items():
            if not text_size.is_within(name, value):
                raise DataError(
                    f"The text option {name}={value!r} must be a whole number from 1 to "
                    f"{text_size.MAXIMA[name]}."
                )
        if width % heads:
            raise DataError(f"The text option width={width} must be a multiple of heads={heads}.")
        has_rate = isinstance(lr, int | float) and 0 < lr < math.inf
        if not has_rate or not isinstance(warmup, int) or warmup < 0:
            raise DataError(
                f"The text options lr={lr!r} and warmup={warmup!r} must be a positive number and a "
                "whole one."
            )
        for name, text in [("field", field), ("tokenizer", tokenizer)]:
            if not isinstance(text, str) or not text:
                raise DataError(f"The text option {name}={text!r} must be a text.")
        if order not in ORDERS:
            raise DataError(f"The text option order={order!r} must be random or epochs.")
        self._at = Path.cwd()
        """Where its paths begin, when they are read."""
        self.data = data
        self.max_bytes = max_bytes
        self.field = field
        self.order = order
        self.shuffle = shuffle
        self.tokenizer_name = tokenizer
        self._expected = str(tokenizer_digest)
        self.skipped = Skipped()
        self.batch = batch
        self.lr = lr
        self.warmup = warmup

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text. Raises DataError."""
        name = self.tokenizer_name
        if is_path(name):
            name = str(self._at / expanded(name))
        return load_tokenizer(name, self._expected)

    @cached_property
    def stream(self) -> DocumentSource | None:
        """Stream of the documents; None if the text is held in memory. Raises DataError."""
        if self.order == "random":
            return None
        return open_stream(self.data, self.field, self.skipped, self._at)

    @cached_property
    def documents(self) -> list[Document]:
        """All documents in memory, sorted by relative path. Raises DataError."""
        return read_documents(self.data, self.max_bytes, self.field, self._at)

    def held_out(self) -> list[Document]:
        """Return the documents that no node trains on; of a stream, the first of them.

        Raises DataError.
        """
        if self.stream is None:
            return [one for one in self.documents if _is_held_out_name(one.name)]
        found = []
        left = STREAM_EVALUATION_BYTES
        document = None
        for _, document in self.stream.documents(EVERYTHING, 0):
            if is_held_out(document.content):
                content = document.content[: min(left, EVALUATION_BYTES)]
                found.append(Document(document.name, content))
                left -= len(content)
                if left <= 0:
                    break
        if document is None:
            raise no_document(self.stream)
        return found

    def _not_held_out(self) -> list[Document]:
        return [one for one in self.documents if not _is_held_out_name(one.name)]

    def shard_documents(self, shard: Shard) -> list[Document]:
        """Return the documents in memory of one shard; those of two shards with equal ``of`` are
        disjoint.
        """
        training = self._not_held_out()
        # Dealing in turn, rather than by the hash alone, leaves no shard empty.
        training.sort(key=lambda one: (stable_hash("shard " + one.name), one.name))
        return training[shard.index :: shard.of]

    def _windows(self, documents: list[Document], what: str) -> Tensor:
        """Return all windows of context + 1 tokens as a view, (N, T + 1): bytes in uint8, other
        tokens in int32.
        """
        pieces: list[Tensor] = []
        for document in documents:
            pieces += self.tokenizer.encode(document.content)
        tokens = torch.empty(0, device="cpu")
        if pieces:
            tokens = torch.cat(pieces)[:-1]  # nothing follows the last document's end
        needed = self.size.context + 1
        if len(tokens) < needed:
            unit = "bytes of text" if self.tokenizer_name == BYTES else "tokens"
            raise DataError(
                f"The {what} has only {len(tokens)} {unit} where {needed} are needed: "
                "name more text with --data, or use fewer shards or a shorter context."
            )
        return tokens.unfold(0, needed, 1)

    def model(self) -> GPT:
        return GPT(*self.size, self.tokenizer.vocabulary)

    def least_parameters(self) -> int:
        """Return the parameters of the model with the smallest vocabulary; a tokenizer's need not
        be known for it.
        """
        vocabulary = VOCABULARY if self.tokenizer_name == BYTES else 1
        return self.size.parameter_count(vocabulary)

    def sized(self) -> GPT:
        """Return the model on the device meta: names, types and shapes, which take no memory.

        Raises DataError.
        """
        return sized(*self.size, self.tokenizer.vocabulary)

    def working_bytes(self) -> int:
        """Return the bytes of a batch and its logits, of a stream's shuffled block, and of a
        dataset held in memory.
        """
        context = self.size.context
        logits = 4 * self.batch * context * self.tokenizer.vocabulary
        nbytes = 8 * self.batch * (context + 1) + 2 * logits + 4 * self.shuffle
        if self.order == "random" and self.data.startswith(PREFIX):
            nbytes += self.max_bytes
        return nbytes

    def agreed_options(self) -> dict[str, int | float | str | bool]:
        if self.tokenizer_name == BYTES:
            return {}
        return {DIGEST: self.tokenizer.digest}

    def batches(self, shard: Shard) -> Iterator[tuple[Tensor, Tensor]]:
        """Return batches (inputs, next tokens), each int64 (B, T): from random places of the
        shard's text, or in epochs.
        """
        source = self._training()
        if source is None:
            return self._random_batches(shard)
        return Reader(
            source,
            self.tokenizer,
            shard,
            context=self.size.context,
            batch=self.batch,
            shuffle=self.shuffle,
        )

    def _training(self) -> DocumentSource | None:
        if self.stream is not None:
            return Training(self.stream)
        if self.order != "epochs":
            return None
        return Listed(self._not_held_out(), self.data or "the Python standard library")

    def _random_batches(self, shard: Shard) -> Iterator[tuple[Tensor, Tensor]]:
        windows = self._windows(self.shard_documents(shard), f"shard {shard.index} of {shard.of}")
        seed = stable_hash(f"batches {shard.seed} {shard.index}") >> 1
        generator = torch.Generator().manual_seed(seed)
        while True:
            places = torch.randint(len(windows), (self.batch,), generator=generator, device="cpu")
            batch = windows[places].long()  # (B, T + 1)
            yield batch[:, :-1], batch[:, 1:]

    def loss(self, model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy in nats per token (per byte, with the tokenizer bytes)."""
        inputs, targets = batch
        logits = model(inputs).flatten(0, 1)  # (B * T, V)
        return F.cross_entropy(logits, targets.flatten())

    @cached_property
    def _held_out(self) -> list[Document]:
        return self.held_out()

    @cached_property
    def _evaluation(self) -> Tensor:
        windows = self._windows(self._held_out, "held-out part")
        count = max(1, EVALUATION_BYTES // self.size.context)
        generator = torch.Generator().manual_seed(0)
        places = torch.randint(len(windows), (count,), generator=generator, device="cpu")
        return windows[places].long()  # (count, T + 1)

    @torch.no_grad()
    def evaluate(self, model: torch.nn.Module) -> float:
        """Return nats per token on a fixed sample of about 32 k tokens of the held-out
        documents.
        """
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        total = 0.0
        window_logits = self.size.context * self.tokenizer.vocabulary
        size = max(1, EVALUATION_BATCH_BYTES * VOCABULARY // window_logits)
        for start in range(0, len(self._evaluation), size):
            part = self._evaluation[start : start + size].to(device)
            total += float(self.loss(model, (part[:, :-1], part[:, 1:]))) * len(part)
        model.train(was_training)
        return total / len(self._evaluation)

    def extra_results(self, loss: float) -> dict[str, int | float]:
        """Return ``loss`` as bits per byte of the held-out documents, whatever the tokenizer, and
        how many records were skipped.
        """
        bits = loss / math.log(2)
        found: dict[str, int | float] = {"bits_per_byte": bits / self._bytes_per_token}
        if self.stream is not None:
            found["skipped"] = self.skipped.count
        return found

    @cached_property
    def _bytes_per_token(self) -> float:
        if self.tokenizer_name == BYTES:
            return 1.0
        nbytes = 0
        tokens = 0
        for document in self._held_out:
            nbytes += len(document.content)
            tokens += sum(map(len, self.tokenizer.encode(document.content)))
        return nbytes / max(1, tokens)

    def inner_optimizer(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW with betas (0.9, 0.99) and no weight decay."""
        params = list(params)
        # The fused kernel halves the optimizer's time on the CPU; elsewhere torch chooses.
        on_cpu = all(parameter.device.type == "cpu" for parameter in params)
        fused = True if on_cpu else None
        return torch.optim.AdamW(
            params, lr=self.lr, betas=(0.9, 0.99), weight_decay=0.0, fused=fused
        )

    def lr_scheduler(
        self, optimizer: torch.optim.Optimizer, steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Return a schedule of warm-up, then a cosine down to 10 % at ``steps``; without an end (0)
        the peak rate is kept.
        """
        shape = "cosine" if steps else "constant"
        rate = factor(shape, self.warmup, steps)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def _is_held_out_name(name: str) -> bool:
    """Return True if no node trains on the document in memory of that name."""
    return stable_hash(name) % HELD_OUT_ONE_IN == 0
