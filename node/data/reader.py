"""Batches from a stream of documents: packed into windows, shuffled in blocks, and resumable from a
few numbers.

Documents are joined, each followed by its end token, and cut into windows of context + 1 tokens,
the last of which is the first of the next window. A block of windows, or the rest of an epoch, is
gathered, shuffled by a seed of (seed, shard, number of the block) and read; the next block begins
with the tokens that were left over. So the place of a reader is where its block begins (epoch,
document, tokens into it) and how many of its windows were read, whatever the size of the data or of
a block: a resumed reader gathers the same block again.

All peers of a swarm must cut text alike, or tokens differ in meaning. So a tokenizer (bytes, or one
of Hugging Face by name, by the package ``tokenizers``) has a digest, which the manifest holds; a
swarm gives a name on the hub, never a path on another machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.node.console import require
from shoal.node.data.source import (
    PART,
    PREFIX,
    DataError,
    DocumentSource,
    Place,
    is_path,
    no_document,
    number,
    reason,
)
from shoal.node.home import expanded
from shoal.node.task import Batches, Shard

BYTES = "bytes"
FILE = "tokenizer.json"
MAX_FILE = 64 * 2**20  # a manifest may name it, and reading it takes several times its size
MAX_VOCABULARY = 2**21
PIECE = 2**16  # characters to cut into tokens at once, which bounds the memory
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
"""Tokens that end a document, of which the first in the vocabulary is used."""
# Text that shows differences between tokenizers with the same vocabulary.
PROBE = (
    "The quick brown fox (aged 12) doesn't jump over 3,141.59 lazy dogs...\n\n\tdef f(x): return "
    "x**2  # naïve\r\n"
    "Ünïcödé — Привет, мир! 你好，世界 こんにちは 안녕 مرحبا "
    "🐟🐠 e\u0301 ﬁ ½ \u00a0\u200b\ufeff AAAAaaaa   end "
)


class Tokenizer(Protocol):
    """Tokenizer of documents."""

    @property
    def digest(self) -> str:
        """Digest, equal where text is cut alike; empty for bytes."""

    @property
    def vocabulary(self) -> int:
        """Number of possible tokens."""

    def encode(self, document: bytes) -> Iterator[Tensor]:
        """Yield the tokens of a document and of its end, whole numbers (n,), in parts."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``; what is no text becomes U+FFFD."""


class Bytes:
    """Tokenizer into bytes; documents end with an end of line."""

    vocabulary = 256
    digest = ""

    def encode(self, document: bytes) -> Iterator[Tensor]:
        yield torch.frombuffer(
            bytearray(document + b"\n"), dtype=torch.uint8
        )  # bytearray: torch wants to be able to write

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")


class Named:
    """Tokenizer of the package ``tokenizers``."""

    def __init__(self, inner: Any, name: str) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.name = name
        self._known: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        if not 0 < self.vocabulary <= MAX_VOCABULARY:
            raise DataError(
                f"The tokenizer {name!r} has {self.vocabulary} tokens, not 1 to {MAX_VOCABULARY}: "
                "name another."
            )

    @cached_property
    def vocabulary(self) -> int:
        """Highest token plus one: there may be gaps."""
        return max(self._known.values(), default=-1) + 1

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of the vocabulary and of the tokens of a text; not of the file, which differs
        between versions.
        """
        ids = self._inner.encode(PROBE, add_special_tokens=False).ids
        return hashlib.sha256(json.dumps([sorted(self._known.items()), ids]).encode()).hexdigest()

    @cached_property
    def _end(self) -> list[int]:
        found = [self._known[token] for token in ENDS if token in self._known]
        return found[:1] or list(self._inner.encode("\n", add_special_tokens=False).ids)

    def encode(self, document: bytes) -> Iterator[Tensor]:
        """Yield the tokens of parts of 64 Ki characters, int32."""
        text = document.decode("utf-8", "replace")
        for start in range(0, len(text), PIECE):
            ids = self._inner.encode(text[start : start + PIECE], add_special_tokens=False).ids
            yield torch.tensor(ids, dtype=torch.int32, device="cpu")
        yield torch.tensor(self._end, dtype=torch.int32, device="cpu")

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text, with the ends of documents as their token is written."""
        return str(self._inner.decode(list(tokens), skip_special_tokens=False))


def load_tokenizer(name: str, expected: str = "") -> Tokenizer:
    """Load the tokenizer ``name``: bytes, a name on the hub, or a path (a folder or file) that
    begins with ``.``, ``/`` or ``~``.

    Raises DataError: it cannot be loaded, or its digest is not the swarm's ``expected`` one.
    """
    if name == BYTES:
        found: Tokenizer = Bytes()
    else:
        require(
            DataError,
            f"The tokenizer {name!r}",
            "tokenizers",
            extra="data",
            otherwise="set tokenizer=bytes",
        )
        try:
            import tokenizers

            found = Named(
                _local(name, tokenizers) if is_path(name) else _from_hub(name, tokenizers), name
            )
        except DataError:
            raise
        except Exception as error:  # the package raises bare ones, and a network many
            raise DataError(
                f"The tokenizer {name!r} cannot be loaded ({reason(error)}): check its name and "
                "the network, "
                "or name a copy of it with --tokenizer ./FOLDER."
            ) from error
    if expected and found.digest != expected:
        raise DataError(
            f"The tokenizer {name!r} is another one here (digest "
            f"{found.digest[:12] or 'of bytes'}) than in the swarm "
            f"({expected[:12]}): give this node the swarm's with --tokenizer."
        )
    return found


def label(name: str) -> str:
    """Return ``name`` for the manifest: only the last part of a path, since the folder is local."""
    return os.path.basename(os.path.normpath(name.replace("\\", "/"))) if is_path(name) else name


def _local(name: str, tokenizers: Any) -> Any:
    path = Path(expanded(name))
    if path.is_dir() and not (path / FILE).is_file():
        try:  # an older format, which transformers can convert
            from transformers import AutoTokenizer
        except ImportError as error:
            raise DataError(
                f"There is no {FILE} in the folder {name!r}: name one that has it, or install "
                "transformers."
            ) from error
        return AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        ).backend_tokenizer
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"There is no tokenizer at {name!r}: name a file {FILE} or a folder that has one."
        )
    return _read(file, name, tokenizers)


def _from_hub(name: str, tokenizers: Any) -> Any:
    if not re.fullmatch(rf"{PART}(/{PART})?", name):
        raise DataError(
            f"{name!r} names no tokenizer: write bytes, NAME or OWNER/NAME on the hub, or ./FOLDER."
        )
    import huggingface_hub as hub

    try:
        file = hub.hf_hub_download(name, FILE, local_files_only=True)
    except (OSError, ValueError):  # not here yet
        size = hub.get_hf_file_metadata(hub.hf_hub_url(name, FILE)).size
        if size is None or size > MAX_FILE:
            raise DataError(
                f"The tokenizer {name!r} is larger than {MAX_FILE // 2**20} MiB: name another."
            ) from None
        file = hub.hf_hub_download(name, FILE)
    return _read(Path(file), name, tokenizers)


def _read(file: Path, name: str, tokenizers: Any) -> Any:
    if file.stat().st_size > MAX_FILE:
        raise DataError(
            f"The tokenizer {name!r} is larger than {MAX_FILE // 2**20} MiB: name another."
        )
    return tokenizers.Tokenizer.from_file(str(file))


EMPTY_EPOCHS = 64
"""Epochs without a document for this shard, as may happen with little text, after which an error is
raised.
"""


@dataclass(frozen=True)
class _Segment:
    """Tokens of one document, ``offset`` tokens into it."""

    epoch: int
    place: Place
    offset: int
    tokens: Tensor


class Reader(Batches):
    """Endless batches (inputs, targets), int64 (batch, context) each, of the shard's part of
    ``source``.

    Args:
        shuffle: approximate number of tokens to gather and shuffle at once.

    Raises DataError: on ``next``, if there is no usable document, too little text, or a read fails.
    """

    def __init__(
        self,
        source: DocumentSource,
        tokenizer: Tokenizer,
        shard: Shard,
        *,
        context: int,
        batch: int,
        shuffle: int,
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._shard = shard
        self._context = context
        self._batch = batch
        self._most = max(1, shuffle // context)
        cut = f"{source.identity} {tokenizer.digest} {shard!r} {context} {self._most}"
        self._cut = hashlib.sha256(cut.encode()).hexdigest()[:32]
        self._begin(0, None, 0)
        self._block = 0
        self._skip = 0

    def _begin(self, epoch: int, place: Place | None, offset: int) -> None:
        self._start = (epoch, place, offset)
        self._stream = self._segments(epoch, place, offset)
        self._left: list[_Segment] = []
        self._windows = torch.empty(0, device="cpu")
        self._order = torch.empty(0, dtype=torch.int64, device="cpu")
        self._drawn = 0

    def __next__(self) -> tuple[Tensor, Tensor]:
        parts: list[Tensor] = []
        need = self._batch
        while need:
            if self._drawn == len(self._order):
                self._next_block()
            taken = self._order[self._drawn : self._drawn + need]
            parts.append(self._windows[taken])
            self._drawn += len(taken)
            need -= len(taken)
        batch = torch.cat(parts).long()  # (B, T + 1)
        return batch[:, :-1], batch[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next batch as a few numbers."""
        epoch, place, offset = self._start
        # Before its first batch a resumed reader has not gathered its block.
        drawn = self._drawn + self._skip
        return {
            "cut": self._cut,
            "epoch": epoch,
            "place": None if place is None else dict(place),
            "offset": offset,
            "block": self._block,
            "drawn": drawn,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``.

        DataError, and no change, if it is of other data, another shard, or cut otherwise.
        """
        if state.get("cut") != self._cut:
            raise DataError(
                "The checkpoint was trained on other data, or with another tokenizer, context or "
                "shuffle: "
                f"this is {self._source.what}: give the node what it had."
            )
        place = state.get("place")
        numbers = [state.get(key) for key in ("epoch", "offset", "block", "drawn")]
        if not (place is None or isinstance(place, dict)) or not all(
            isinstance(n, int) and n >= 0 for n in numbers
        ):
            raise DataError(
                "The checkpoint's place in the data is damaged: take an older checkpoint."
            )
        epoch, offset, block, drawn = (int(str(n)) for n in numbers)
        self._begin(epoch, place, offset)
        self._block = block
        self._skip = drawn

    def _segments(self, epoch: int, place: Place | None, offset: int) -> Iterator[_Segment | None]:
        """Yield the segments from that place on, without end; None after each epoch."""
        while True:
            for at, document in self._source.documents(self._shard, epoch, place):
                done = 0
                for piece in self._tokenizer.encode(document.content):
                    if done + len(piece) > offset:
                        before = max(0, offset - done)
                        yield _Segment(epoch, at, done + before, piece[before:])
                    done += len(piece)
                offset = 0
            yield None
            epoch, place, offset = epoch + 1, None, 0

    def _gather(self) -> list[_Segment]:
        """Gather enough for a block, or the rest of the epoch if that is a window at least."""
        want = self._most * self._context + 1
        found = self._left
        epochs = 0
        total = sum(len(segment.tokens) for segment in found)
        while total < want:
            segment = next(self._stream)
            if segment is not None:
                found.append(segment)
                total += len(segment.tokens)
            elif total > self._context:
                break
            else:
                epochs += 1
                self._check(epochs, total)
        return found

    def _check(self, epochs: int, total: int) -> None:
        shard = self._shard
        source = self._source
        if total == 0 and next(source.documents(Shard(0, 1, shard.seed), 0), None) is None:
            raise no_document(source)
        if epochs == EMPTY_EPOCHS:
            raise DataError(
                f"The shard {shard.index} of {shard.of} has only {total} tokens in {epochs} epochs "
                f"of {source.what}, where "
                f"{self._context + 1} are needed: name more text with --data, or use fewer shards "
                "or a shorter context."
            )

    def _next_block(self) -> None:
        segments = self._gather()
        if self._order.numel():
            self._block += 1
        begin = segments[0]
        self._start = (begin.epoch, begin.place, begin.offset)
        tokens = torch.cat([segment.tokens for segment in segments])
        count = min(self._most, (len(tokens) - 1) // self._context)
        self._windows = tokens[: count * self._context + 1].unfold(
            0, self._context + 1, self._context
        )  # (N, T + 1)
        seed = number("block", self._shard.seed, self._shard.index, self._shard.of, self._block)
        self._order = torch.randperm(
            count, generator=torch.Generator().manual_seed(seed >> 1), device="cpu"
        )
        if self._skip > count:
            raise DataError(
                f"{self._source.what} has less text than when the checkpoint was saved: give the "
                "node what it had."
            )
        self._drawn, self._skip = self._skip, 0
        self._left = _without(segments, count * self._context)


def _without(segments: list[_Segment], count: int) -> list[_Segment]:
    """Return ``segments`` without their first ``count`` tokens."""
    for index, segment in enumerate(segments):
        if count < len(segment.tokens):
            rest = replace(segment, offset=segment.offset + count, tokens=segment.tokens[count:])
            return [rest, *segments[index + 1 :]]
        count -= len(segment.tokens)
    return []


Option = int | float | str | bool
TEXT = "text"
DATA = "data"
TOKENIZER = "tokenizer"
DIGEST = "tokenizer_digest"


def shared(hooks: str, options: Mapping[str, Option]) -> dict[str, Option]:
    """Return the ``options`` for the manifest: a path means nothing on another machine, so data is
    given by name or left out.
    """
    found = dict(options)
    if DATA in found and not _is_name(hooks, found[DATA]):
        del found[DATA]
    if hooks == TEXT and isinstance(name := found.get(TOKENIZER), str):
        found[TOKENIZER] = label(name)
    return found


def taken(hooks: str, swarms: Mapping[str, Option], own: Mapping[str, Option]) -> dict[str, Option]:
    """Return the options of a joining node: the swarm's, for text with ``own`` data and copy of the
    tokenizer where it names them.

    Raises:
        DataError: the swarm names a path, which is never looked up on this machine; or it trains on
            bytes, and this node was given a tokenizer.
    """
    found = dict(swarms)
    paths = [value for key, value in found.items() if key == DATA and not _is_name(hooks, value)]
    paths += [
        value
        for key, value in found.items()
        if key == TOKENIZER and isinstance(value, str) and is_path(value.strip())
    ]
    if paths:
        raise DataError(
            f"The swarm names {paths[0]!r}, a path on somebody's machine, as its data or "
            "tokenizer: leave it."
        )
    if hooks != TEXT:
        return found
    if TOKENIZER in own and own[TOKENIZER] != found.get(TOKENIZER, BYTES) == BYTES:
        raise DataError(
            f"The swarm trains on bytes, this node was given the tokenizer {own[TOKENIZER]!r}: "
            "leave it out."
        )
    return {**found, **{key: own[key] for key in (DATA, TOKENIZER) if key in own}}


def flags(hooks: str, options: Mapping[str, Option]) -> list[str]:
    """Return the command-line flags that give a node of this machine those ``options`` which the
    manifest leaves out.
    """
    there = shared(hooks, options)
    lost = [key for key in (DATA, TOKENIZER) if options.get(key) and there.get(key) != options[key]]
    return [word for key in lost for word in (f"--{key}", str(options[key]))]


def _is_name(hooks: str, data: Option) -> bool:
    """Return whether ``data`` is the name of a dataset, the same for everybody, and no path,
    however it is written.

    ``hf:NAME`` without an owner may be a format of the package ``datasets``, which then reads the
    current folder. A task of the user's own may call data by a plain word.
    """
    if not isinstance(data, str):
        return hooks != TEXT
    if hooks != TEXT and re.fullmatch(rf"({PART})?", data) and not (data and os.path.exists(data)):
        return True
    return (
        re.fullmatch(rf"{PREFIX}{PART}(/{PART}){{1,2}}(:({PART}|{PART}\[[0-9:%-]*\]))?", data)
        is not None
    )
