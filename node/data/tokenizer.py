"""Tokenizers: bytes, or one of Hugging Face by name or from a file, by the package ``tokenizers``.

All peers of a swarm must cut text alike, or tokens differ in meaning. So a tokenizer has a digest,
which the manifest holds; a swarm gives a name on the hub, never a path on another machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.node.data.hub_name import PART, is_path
from shoal.node.data.source import DataError, reason
from shoal.node.home import expanded
from shoal.node.packages import require

BYTES = "bytes"
FILE = "tokenizer.json"
MAX_FILE_BYTES = 64 * 2**20
"""A manifest may name it, and reading it takes several times its size."""
MAX_VOCABULARY = 2**21
PIECE_CHARS = 2**16
"""To cut into tokens at once, which bounds the memory."""
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
"""Tokens that end a document, of which the first in the vocabulary is used."""
PROBE = (
    "The quick brown fox (aged 12) doesn't jump over 3,141.59 lazy dogs...\n\n\tdef f(x): return "
    "x**2  # naïve\r\n"
    "Ünïcödé — Привет, мир! 你好，世界 こんにちは 안녕 مرحبا "
    "🐟🐠 e\u0301 ﬁ ½ \u00a0\u200b\ufeff AAAAaaaa   end "
)
"""Text that shows differences between tokenizers with the same vocabulary."""


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
        # torch wants a buffer that can be written.
        writable = bytearray(document + b"\n")
        yield torch.frombuffer(writable, dtype=torch.uint8)

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
        text = json.dumps([sorted(self._known.items()), ids])
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def _end(self) -> list[int]:
        found = [self._known[token] for token in ENDS if token in self._known]
        return found[:1] or list(self._inner.encode("\n", add_special_tokens=False).ids)

    def encode(self, document: bytes) -> Iterator[Tensor]:
        """Yield the tokens of parts of 64 Ki characters, int32."""
        text = document.decode("utf-8", "replace")
        for start in range(0, len(text), PIECE_CHARS):
            ids = self._inner.encode(
                text[start : start + PIECE_CHARS], add_special_tokens=False
            ).ids
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
    tokenizer = Bytes() if name == BYTES else _load_named(name)
    if expected and tokenizer.digest != expected:
        raise DataError(
            f"The tokenizer {name!r} is another one here (digest "
            f"{tokenizer.digest[:12] or 'of bytes'}) than in the swarm ({expected[:12]}): give "
            "this node the swarm's with --tokenizer."
        )
    return tokenizer


def _load_named(name: str) -> Named:
    require(
        DataError,
        f"The tokenizer {name!r}",
        "tokenizers",
        extra="data",
        otherwise="set tokenizer=bytes",
    )
    try:
        import tokenizers

        inner = _local(name, tokenizers) if is_path(name) else _from_hub(name, tokenizers)
        return Named(inner, name)
    except DataError:
        raise
    # The package raises bare exceptions, and a network many kinds.
    except Exception as error:
        raise DataError(
            f"The tokenizer {name!r} cannot be loaded ({reason(error)}): check its name and the "
            "network, or name a copy of it with --tokenizer ./FOLDER."
        ) from error


def label(name: str) -> str:
    """Return ``name`` for the manifest: only the last part of a path, since the folder is local."""
    if not is_path(name):
        return name
    return os.path.basename(os.path.normpath(name.replace("\\", "/")))


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
        if size is None or size > MAX_FILE_BYTES:
            raise _too_large(name) from None
        file = hub.hf_hub_download(name, FILE)
    return _read(Path(file), name, tokenizers)


def _read(file: Path, name: str, tokenizers: Any) -> Any:
    if file.stat().st_size > MAX_FILE_BYTES:
        raise _too_large(name)
    return tokenizers.Tokenizer.from_file(str(file))


def _too_large(name: str) -> DataError:
    most = MAX_FILE_BYTES // 2**20
    return DataError(f"The tokenizer {name!r} is larger than {most} MiB: name another.")
