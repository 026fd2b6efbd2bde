"""Tokenizers: bytes, or a tokenizer of Hugging Face by name (needs the package ``tokenizers``).

All peers of a swarm must cut text alike, or tokens differ in meaning. So a tokenizer has a digest, which the manifest holds; a
swarm gives a name on the hub, never a path on another machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.node.data.dealing import DataError, reason
from shoal.node.data.hub import PART, is_path
from shoal.node.extras import require

BYTES = "bytes"
FILE = "tokenizer.json"
MAX_FILE = 64 * 2**20  # a manifest may name it, and reading it takes several times its size
MAX_VOCABULARY = 2**21
PIECE = 2**16  # characters to cut into tokens at once, which bounds the memory
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
"""Tokens that end a document, of which the first in the vocabulary is used."""
# Text that shows differences between tokenizers with the same vocabulary.
PROBE = (
    "The quick brown fox (aged 12) doesn't jump over 3,141.59 lazy dogs...\n\n\tdef f(x): return x**2  # naïve\r\n"
    "Ünïcödé — Привет, мир! 你好，世界 こんにちは 안녕 مرحبا 🐟🐠 e\u0301 ﬁ ½ \u00a0\u200b\ufeff AAAAaaaa   end "
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
        """Yield one part, uint8."""
        yield torch.frombuffer(bytearray(document + b"\n"), dtype=torch.uint8)  # bytearray: torch wants to be able to write

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the bytes as UTF-8."""
        return bytes(tokens).decode("utf-8", "replace")


class Named:
    """Tokenizer of the package ``tokenizers``."""

    def __init__(self, inner: Any, name: str) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner, self.name = inner, name
        self._known: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        if not 0 < self.vocabulary <= MAX_VOCABULARY:
            raise DataError(f"The tokenizer {name!r} has {self.vocabulary} tokens, not 1 to {MAX_VOCABULARY}: name another.")

    @cached_property
    def vocabulary(self) -> int:
        """Highest token plus one: there may be gaps."""
        return max(self._known.values(), default=-1) + 1

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of the vocabulary and of the tokens of a text; not of the file, which differs between versions."""
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
    """Load the tokenizer ``name``: bytes, a name on the hub, or a path (a folder or file) that begins with ``.``, ``/`` or ``~``.

    Raises DataError: it cannot be loaded, or its digest is not the swarm's ``expected`` one.
    """
    if name == BYTES:
        found: Tokenizer = Bytes()
    else:
        require(DataError, f"The tokenizer {name!r}", "tokenizers", extra="data", otherwise="set tokenizer=bytes")
        try:
            import tokenizers

            found = Named(_local(name, tokenizers) if is_path(name) else _from_hub(name, tokenizers), name)
        except DataError:
            raise
        except Exception as error:  # the package raises bare ones, and a network many
            raise DataError(
                f"The tokenizer {name!r} cannot be loaded ({reason(error)}): check its name and the network, "
                "or name a copy of it with --tokenizer ./FOLDER."
            ) from error
    if expected and found.digest != expected:
        raise DataError(
            f"The tokenizer {name!r} is another one here (digest {found.digest[:12] or 'of bytes'}) than in the swarm "
            f"({expected[:12]}): give this node the swarm's with --tokenizer."
        )
    return found


def label(name: str) -> str:
    """Return ``name`` for the manifest: only the last part of a path, since the folder is local."""
    return os.path.basename(os.path.normpath(name.replace("\\", "/"))) if is_path(name) else name


def _local(name: str, tokenizers: Any) -> Any:
    path = Path(os.path.expanduser(name))
    if path.is_dir() and not (path / FILE).is_file():
        try:  # an older format, which transformers can convert
            from transformers import AutoTokenizer
        except ImportError as error:
            raise DataError(f"There is no {FILE} in the folder {name!r}: name one that has it, or install transformers.") from error
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False).backend_tokenizer
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"There is no tokenizer at {name!r}: name a file {FILE} or a folder that has one.")
    return _read(file, name, tokenizers)


def _from_hub(name: str, tokenizers: Any) -> Any:
    if not re.fullmatch(rf"{PART}(/{PART})?", name):
        raise DataError(f"{name!r} names no tokenizer: write bytes, NAME or OWNER/NAME on the hub, or ./FOLDER.")
    import huggingface_hub as hub

    try:
        file = hub.hf_hub_download(name, FILE, local_files_only=True)
    except (OSError, ValueError):  # not here yet
        size = hub.get_hf_file_metadata(hub.hf_hub_url(name, FILE)).size
        if size is None or size > MAX_FILE:
            raise DataError(f"The tokenizer {name!r} is larger than {MAX_FILE // 2**20} MiB: name another.") from None
        file = hub.hf_hub_download(name, FILE)
    return _read(Path(file), name, tokenizers)


def _read(file: Path, name: str, tokenizers: Any) -> Any:
    if file.stat().st_size > MAX_FILE:
        raise DataError(f"The tokenizer {name!r} is larger than {MAX_FILE // 2**20} MiB: name another.")
    return tokenizers.Tokenizer.from_file(str(file))


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Convert a loss to bits a byte, which can be compared across tokenizers."""
    return nats_per_token / math.log(2) / bytes_per_token
