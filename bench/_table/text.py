"""English text that Debian packages hold, cut into tokens by a BPE tokenizer of its own.

Files are cut into pieces of ``PIECE`` bytes at ends of lines. The hash of a piece's name decides,
as in the built-in task, whether it is held out, from which half of those it is, and which peer
trains on it.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bench._quality_train import QualityText
from shoal.node.data.source import Document
from shoal.node.task import Shard
from shoal.node.tasks.gpt import GPT

ENDINGS = (".txt", ".rst", ".md", ".dict")
SHARE = Path("/usr/share")
PACKED = (".gz", ".dz")  # dictzip is gzip that can be read from the middle
PLACES = ("doc/python3.*/html/_sources/**/*", "dictd/*.dict.dz", "games/fortunes/*")
PACKAGES = "python3.11-doc=3.11.2-6+deb12u8 dict-gcide fortunes"
PIECE = 128 * 1024
MOST_OF_A_FILE = 16 * 2**20  # so that a dictionary does not outweigh all else
MOST = 48 * 2**20
LEAST = 2**20
SAMPLE = 8 * 2**20  # bytes that the tokenizer learns from


class TextError(Exception):
    """There is no text; the message says what to do."""


def _readable(path: Path) -> bool:
    name = path.name
    for ending in PACKED:
        name = name.removesuffix(ending)
    return name.endswith(ENDINGS) or ("fortunes" in path.parts and "." not in name)


def _content(path: Path) -> bytes:
    try:
        with gzip.open(path, "rb") if path.suffix in PACKED else path.open("rb") as file:
            content = file.read(MOST_OF_A_FILE)
    except (OSError, EOFError) as error:
        raise TextError(
            f"Cannot read the text {path} ({error}): name another folder with --data."
        ) from error
    return b"" if b"\0" in content[:1024] else content


def _files(folder: Path | None) -> dict[str, Path]:
    """By their names, which do not depend on where the folder is.

    Each file once: a text under two names, one of them a link, would
    be held out and trained on."""
    root = folder or SHARE
    found = (
        root.rglob("*")
        if folder is not None
        else (path for pattern in PLACES for path in root.glob(pattern))
    )
    once = dict[Path, str]()
    for path in sorted(path for path in found if path.is_file() and _readable(path)):
        once.setdefault(path.resolve(), path.relative_to(root).as_posix())
    return {name: path for path, name in once.items()}


def _pieces(name: str, content: bytes) -> Iterator[Document]:
    start = number = 0
    while start < len(content):
        end = content.find(b"\n", start + PIECE) + 1 if start + PIECE < len(content) else 0
        yield Document(f"{name}#{number}", content[start : end or len(content)])
        start, number = end or len(content), number + 1


def documents(folder: Path | None) -> list[Document]:
    """All pieces, by name; at most ``MOST`` bytes, of the files with the lowest hashes.

    TextError if there is hardly any.
    """
    files, found, left = _files(folder), list[Document](), MOST
    for name in sorted(
        files, key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    ):
        content = _content(files[name])[:left]
        found.extend(_pieces(name, content))
        left -= len(content)
    if MOST - left < LEAST:
        where = "/usr/share" if folder is None else str(folder)
        raise TextError(
            f"There is no English text in {where}: install some (apt install {PACKAGES}), or name "
            "a folder of .txt, .rst or .dict.dz files with --data FOLDER."
        )
    return sorted(found, key=lambda document: document.name)


def _learnt(pieces: Sequence[Document], vocabulary: int) -> str:
    """A byte-level BPE tokenizer, learnt from an even sample of the pieces, as JSON."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    total = sum(len(piece.content) for piece in pieces)
    sample = pieces[:: max(1, total // SAMPLE)]
    tokenizer.train_from_iterator(
        (piece.content.decode("utf-8", "replace") for piece in sample), trainer
    )
    text: str = tokenizer.to_str()
    return text


@dataclass(frozen=True)
class Corpus:
    """The pieces as tokens."""

    digest: str
    """Of text and vocabulary."""
    vocabulary: int
    names: tuple[str, ...]
    nbytes: int
    tokens: Tensor
    """Of all pieces, int32 (n,)."""
    ends: tuple[int, ...]
    """Where each piece ends in ``tokens``."""

    @property
    def bytes_per_token(self) -> float:
        return self.nbytes / len(self.tokens)

    @cached_property
    def spans(self) -> dict[str, slice]:
        return {
            name: slice(start, end)
            for name, start, end in zip(self.names, (0, *self.ends), self.ends, strict=False)
        }


def corpus(folder: Path | None, vocabulary: int, cache: Path) -> Corpus:
    """The text as tokens: from ``cache``, where a run has been before, under the hash of the text
    and of the vocabulary.
    """
    pieces = documents(folder)
    state = hashlib.sha256(f"{vocabulary} {PIECE}".encode())
    for piece in pieces:
        state.update(
            f"\n{piece.name} {hashlib.sha256(piece.content).hexdigest()}".encode(
                "utf-8", "surrogateescape"
            )
        )
    digest = state.hexdigest()[:16]
    path = cache / f"{digest}.safetensors"
    if not path.exists():
        _make(pieces, vocabulary, path)
    try:
        return read(path)
    except (SafetensorError, KeyError, ValueError):  # cut off, or of an earlier version
        _make(pieces, vocabulary, path)
        return read(path)


def _make(pieces: Sequence[Document], vocabulary: int, path: Path) -> None:
    import tokenizers

    held_back = _training(pieces)
    learnt = _learnt(held_back, vocabulary)
    tokenizer = tokenizers.Tokenizer.from_str(learnt)
    found = [
        torch.tensor(
            tokenizer.encode(piece.content.decode("utf-8", "replace")).ids, dtype=torch.int32
        )
        for piece in pieces
    ]
    ends = torch.tensor([len(part) for part in found]).cumsum(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    names = json.dumps([piece.name for piece in pieces])
    metadata = {
        "names": names,
        "nbytes": str(sum(len(piece.content) for piece in pieces)),
        "vocabulary": str(vocabulary),
    }
    part = path.with_suffix(".part")
    save_file({"tokens": torch.cat(found), "ends": ends}, part, metadata)
    part.replace(path)
    path.with_suffix(".tokenizer.json").write_text(learnt, encoding="utf-8")


def _training(pieces: Sequence[Document]) -> list[Document]:
    task = QualityText()
    task.__dict__["documents"] = list(pieces)
    out = {piece.name for piece in task.held_out()}
    return [piece for piece in pieces if piece.name not in out]


def read(path: Path) -> Corpus:
    """What ``corpus`` left there."""
    with safe_open(path, "pt") as file:
        about, tokens, ends = (
            file.metadata(),
            file.get_tensor("tokens").clone(),
            file.get_tensor("ends").clone(),
        )
    names = tuple(json.loads(about["names"]))
    if len(ends) != len(names) or int(ends[-1]) != len(tokens):
        raise ValueError("the tokens are not whole")
    return Corpus(
        path.stem,
        int(about["vocabulary"]),
        names,
        int(about["nbytes"]),
        tokens,
        tuple(ends.tolist()),
    )


class TableText(QualityText):
    """The built-in task on a corpus: its model, batches, schedule and held-out halves, over the
    corpus's tokens.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        layers: int,
        width: int,
        heads: int,
        context: int,
        batch: int,
        unlike: bool = False,
    ) -> None:
        super().__init__(
            layers=layers, width=width, heads=heads, context=context, batch=batch, order="random"
        )
        self.corpus, self.unlike = corpus, unlike
        self.__dict__["documents"] = [Document(name, b"") for name in corpus.names]

    def model(self) -> GPT:
        """A fresh one, with the corpus's vocabulary."""
        return GPT(*self.size, self.corpus.vocabulary)

    def shard_documents(self, shard: Shard) -> list[Document]:
        """Return the pieces of one peer: dealt in turn, or, for texts that are unlike, a part of
        all in the order of their names, of as many tokens as each other part.
        """
        if not self.unlike:
            return super().shard_documents(shard)
        pieces = sorted(self._not_held_out(), key=lambda piece: piece.name)
        lengths = [
            span.stop - span.start for span in (self.corpus.spans[one.name] for one in pieces)
        ]
        before = [0, *itertools.accumulate(lengths)][:-1]
        part = sum(lengths) / shard.of
        return [
            piece
            for piece, start in zip(pieces, before, strict=True)
            if int(start / part) == shard.index
        ]

    def _windows(self, documents: list[Document], what: str) -> Tensor:
        tokens = torch.cat(
            [self.corpus.tokens[self.corpus.spans[document.name]] for document in documents]
            or [torch.empty(0)]
        )
        if len(tokens) <= self.size.context:
            raise TextError(
                f"The {what} has only {len(tokens)} tokens: name more text with --data, or use "
                "fewer peers."
            )
        return tokens.unfold(0, self.size.context + 1, 1)
