"""Sources of documents, and which documents are a shard's in each epoch: by pure functions, so that
nobody has to coordinate it.

Where all documents are known beforehand they are shuffled for each (seed, epoch) and assigned in
turn, so that the sizes of shards differ by one document at most. The length of a stream is not
known, so there a hash of (seed, epoch, document) gives the shard. Either way the shards of an epoch
have each document once, and the next epoch assigns them anew.

Of datasets of Hugging Face (``hf:NAME[/CONFIG][:SPLIT]``, by the package ``datasets``) rows are
fetched as they are read; only that package's cache is stored.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

from shoal.node.console import require
from shoal.node.home import expanded
from shoal.node.task import Shard
from shoal.swarm.errors import ShoalError


class DataError(ShoalError):
    """Unreadable or insufficient text, a missing tokenizer, or an option of the text task out of
    range.
    """


def reason(error: BaseException) -> str:
    """Return the first line of ``error``, short, for use inside a sentence."""
    said = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
    return str(said)[:200].rstrip(" .:") or type(error).__name__


HELD_OUT_ONE_IN = 10
"""One document of a stream in this many, chosen by its text, is never trained on."""


def number(*parts: int | str) -> int:
    """Return 64 bits of a hash of ``parts``, the same on every machine."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(
        hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big"
    )


def belongs(shard: Shard, epoch: int, document: str) -> bool:
    """Return whether ``document`` of a stream, by its name, is the shard's in ``epoch``."""
    return (
        shard.of == 1 or number("document", shard.seed, epoch, document) % shard.of == shard.index
    )


def dealt(names: Sequence[str], shard: Shard, epoch: int) -> list[int]:
    """Return the indices of the shard's ``names`` in ``epoch``, in reading order."""
    order = sorted(
        range(len(names)), key=lambda i: (number("order", shard.seed, epoch, names[i]), names[i], i)
    )
    # The first shard changes too: fewer documents than shards would else always go to the first
    # ones.
    return order[(shard.index + number("turn", shard.seed, epoch)) % shard.of :: shard.of]


def held_out(content: bytes) -> bool:
    """Return whether this document of a stream is for evaluation alone."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


logger = logging.getLogger(__name__)


# Files that ``data`` names, in an order that all machines share.

MAX_FILES = 200_000
# Tests of the library repeat themselves and are absent on some systems; packages differ from
# machine to machine.
NOT_LIBRARY = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "lib2to3",
    "idle_test",
    "__pycache__",
}


def _walk(root: Path, skip: set[str], suffix: str) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of the regular files below ``root``; hidden ones and links are left
    out.
    """

    def fail(error: OSError) -> None:
        raise DataError(
            f"Cannot read the folder {error.filename!r} ({error.strerror}): check its permissions."
        )

    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = sorted(f for f in folders if f not in skip and not f.startswith("."))
        for file in sorted(files):
            path = Path(folder, file)
            if (
                file.endswith(suffix)
                and not file.startswith(".")
                and path.is_file()
                and not path.is_symlink()
            ):
                yield path.relative_to(root).as_posix(), path


def find_files(data: str, at: Path | None = None) -> list[tuple[str, Path]]:
    """List (name, path) of all files that ``data`` names, sorted by name; by default Python's
    library. DataError.

    Paths begin at the folder ``at``, by default the current one.
    """
    at = at or Path.cwd()
    if not data.strip():
        return sorted(_walk(Path(sysconfig.get_paths()["stdlib"]), NOT_LIBRARY, ".py"))
    found: list[tuple[str, Path]] = []
    # An existing path is not split: a comma or colon may be part of its name.
    parts = [data] if os.path.exists(at / data) else re.split(f"[,{re.escape(os.pathsep)}]", data)
    for part in filter(None, (p.strip() for p in parts)):
        root = at / expanded(part)
        if os.path.isdir(root):  # unlike Path.is_dir, os.path answers False where it may not look
            found.extend(islice(_walk(root, {"__pycache__"}, ""), MAX_FILES + 1))
        elif os.path.isfile(root):
            found.append((root.name, root))
        elif os.path.exists(root):
            raise DataError(
                f"The text {part!r} is neither a file nor a folder: name files or folders."
            )
        else:
            raise DataError(f"There is no text at {part!r}: name files or folders that exist.")
        if len(found) > MAX_FILES:
            raise DataError(
                f"There are more than {MAX_FILES} files below {part!r}: name a smaller folder."
            )
    return sorted(found)


Place = dict[str, int | str]
"""Place in an epoch of a source at which a document begins: small enough for a checkpoint."""


@dataclass(frozen=True)
class Document:
    """File or part of one. ``name`` is its path below the named folder, with ``/``."""

    name: str
    content: bytes


@dataclass
class Skipped:
    """Counter of unusable records, of which the first is logged as a warning."""

    count: int = 0

    def add(self, where: str, why: str) -> None:
        """Count one more, with ``where`` and ``why`` in words."""
        self.count += 1
        if self.count == 1:
            logger.warning(
                "%s %s, so it is skipped, and others like it will be without a word.", where, why
            )


class DocumentSource(Protocol):
    """Documents in epochs, assigned to shards (`shoal.node.data.source`)."""

    what: str
    """Description for people."""
    identity: str
    """Digest of the data; a place of one source means nothing in another."""

    def documents(
        self, shard: Shard, epoch: int, place: Place | None = None
    ) -> Iterator[tuple[Place, Document]]:
        """Yield the shard's documents of ``epoch``, from the one at ``place`` on, each with its
        place. DataError.
        """


@dataclass
class Listed:
    """Source of documents in memory."""

    known: Sequence[Document]
    what: str
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        found = hashlib.sha256(b"listed\0")
        for document in self.known:
            found.update(
                f"{document.name}\0{len(document.content)}\0".encode("utf-8", "surrogateescape")
            )
        self.identity = found.hexdigest()

    def documents(
        self, shard: Shard, epoch: int, place: Place | None = None
    ) -> Iterator[tuple[Place, Document]]:
        """Implement `DocumentSource.documents`; a place is a number in the order of the epoch."""
        mine = dealt([document.name for document in self.known], shard, epoch)
        for at in range(place_number(place, "document"), len(mine)):
            yield {"document": at}, self.known[mine[at]]


@dataclass
class Training:
    """Part of a stream for training."""

    stream: DocumentSource

    def __post_init__(self) -> None:
        self.what = self.stream.what
        self.identity = self.stream.identity

    def documents(
        self, shard: Shard, epoch: int, place: Place | None = None
    ) -> Iterator[tuple[Place, Document]]:
        """Implement `DocumentSource.documents`, without held-out documents."""
        return (
            found
            for found in self.stream.documents(shard, epoch, place)
            if not held_out(found[1].content)
        )


def no_document(source: DocumentSource) -> DataError:
    return DataError(
        f"There is no usable document in {source.what}: name other data, or the field that has the "
        "text."
    )


def place_number(place: Place | None, key: str) -> int:
    """Return the number ``key`` of ``place``; 0 without a place.

    DataError if it is missing, as in a place of another source.
    """
    found = 0 if place is None else place.get(key)
    if not isinstance(found, int) or found < 0:
        raise DataError(
            f"The checkpoint's place in the data is damaged (its {key!r} is {found!r}): take an "
            "older checkpoint."
        )
    return found


# Files of any size as a stream of documents, read by line: .jsonl, .jsonl.gz, .txt.gz, and plain
# text.
#
# A document of a .jsonl file is one line's text; of other files, a few whole lines of about 4 KiB
# together. At most one line of up to 16 MiB is held, so a small file that unpacks to a huge one
# costs time but no memory. Longer lines, and those that are no record, are skipped and counted.

RECORDS = (".jsonl", ".jsonl.gz", ".txt.gz")
"""Files with these endings are streamed."""
MAX_LINE = 16 * 2**20
PIECE = 4096  # approximate bytes of a document of plain text
_BLOCK = 2**20

Line = tuple[int, int, bytes | None]
"""Offset in the unpacked file, number from 1, and bytes with the end of line; None where they are
too many.
"""


class RecordFiles:
    """`Source` of the documents in ``files``, (name, path) each; ``field``: the field of a record's
    text.
    """

    def __init__(self, files: list[tuple[str, Path]], field: str, skipped: Skipped) -> None:
        self.files = files
        self.field = field
        self.skipped = skipped
        self.names = [name for name, _ in files]
        named = ", ".join(self.names[:3]) + (
            f" and {len(files) - 3} more" if len(files) > 3 else ""
        )
        self.what = (
            f"{named} (texts in the field {field!r})"
            if any(".jsonl" in name for name in self.names)
            else named
        )
        text = json.dumps(["files", field, self.names])
        self.identity = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def documents(
        self, shard: Shard, epoch: int, place: Place | None = None
    ) -> Iterator[tuple[Place, Document]]:
        """Implement `Source.documents`.

        A place is a file's number in the order of the epoch, and a line of it.
        """
        order = dealt(self.names, Shard(0, 1, shard.seed), epoch)
        first = place_number(place, "file")
        byte = place_number(place, "byte")
        number = place_number(place, "line")
        for at in range(first, len(order)):
            name, path = self.files[order[at]]
            read = self._records if name.endswith((".jsonl", ".jsonl.gz")) else self._pieces
            for begin, line, document in read(name, path, byte, number or 1, shard, epoch):
                yield {"file": at, "byte": begin, "line": line}, document
            byte = number = 0

    def _records(
        self, name: str, path: Path, byte: int, number: int, shard: Shard, epoch: int
    ) -> Iterator[tuple[int, int, Document]]:
        for begin, line, raw in _lines(path, byte, number):
            # A shard decodes its own lines alone.
            if not belongs(shard, epoch, f"{name}:{line}"):
                continue
            if raw is None:
                self.skipped.add(
                    f"Line {line} of {name!r}", f"is longer than {MAX_LINE // 2**20} MiB"
                )
            elif raw.strip():
                text = self._text(raw)
                if text is None:
                    self.skipped.add(
                        f"Line {line} of {name!r}",
                        f"is no JSON object with a text in the field {self.field!r}",
                    )
                elif text:
                    yield begin, line, Document(f"{name}:{line}", text)

    def _text(self, raw: bytes) -> bytes | None:
        try:
            record = json.loads(raw)
        except (
            ValueError,
            RecursionError,
        ):  # not JSON, not UTF-8, a number without end, or nested too deeply
            return None
        text = record.get(self.field) if isinstance(record, dict) else None
        return text.encode("utf-8", "replace") if isinstance(text, str) else None

    def _pieces(
        self, name: str, path: Path, byte: int, number: int, shard: Shard, epoch: int
    ) -> Iterator[tuple[int, int, Document]]:
        held: list[bytes] = []
        size = 0
        begin = byte
        first = number
        for start, line, raw in _lines(path, byte, number):
            if start == 0 and raw is not None and b"\0" in raw[:1024]:
                return  # no text
            if raw is None:
                self.skipped.add(
                    f"Line {line} of {name!r}", f"is longer than {MAX_LINE // 2**20} MiB"
                )
                continue
            if not held:
                begin = start
                first = line
            held.append(raw)
            size += len(raw)
            if size >= PIECE:
                if belongs(shard, epoch, f"{name}:{first}"):
                    yield begin, first, Document(f"{name}:{first}", b"".join(held))
                held = []
                size = 0
        if b"".join(held).strip() and belongs(shard, epoch, f"{name}:{first}"):
            yield begin, first, Document(f"{name}:{first}", b"".join(held))


def _lines(path: Path, byte: int, number: int) -> Iterator[Line]:
    """Yield the lines from ``byte`` of the unpacked file on, where line ``number`` begins.

    DataError.
    """
    try:
        with path.open("rb") as raw:
            file: IO[bytes] = gzip.GzipFile(fileobj=raw) if path.name.endswith(".gz") else raw  # type: ignore[assignment]
            # Beyond the end a packed file stops, but a plain one does not notice.
            if file.seek(byte) != byte or (file is raw and os.fstat(raw.fileno()).st_size < byte):
                raise DataError(
                    f"The file {str(path)!r} is shorter than it was when the checkpoint was saved: "
                    "give it back."
                )
            while line := file.readline(MAX_LINE + 1):
                size = len(line)
                whole = line.endswith(b"\n")
                fits = whole or size <= MAX_LINE
                while not whole and (more := file.readline(_BLOCK)):
                    size, whole = size + len(more), more.endswith(b"\n")
                yield byte, number, line if fits else None
                byte, number = byte + size, number + 1
    except (OSError, EOFError, zlib.error) as error:
        todo = (
            "check its permissions"
            if isinstance(error, PermissionError)
            else "name a file that is whole"
        )
        raise DataError(f"Cannot read the text {str(path)!r} ({reason(error)}): {todo}.") from error


PREFIX = "hf:"
PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"
ANCHOR_EVERY = (
    256  # rows between two saved states of the dataset: a resumed run reads at most so many again
)
MAX_STATE = 2**16


@dataclass(frozen=True)
class Name:
    """Parts of ``hf:...``."""

    path: str
    config: str | None
    split: str

    @classmethod
    def parse(cls, data: str) -> Name:
        """Parse ``hf:NAME``, ``hf:OWNER/NAME[/CONFIG]`` or ``hf:./FOLDER``, each with ``:SPLIT`` or
        not. Raises DataError.
        """
        text = data.removeprefix(PREFIX).strip()
        split = "train"
        if found := re.fullmatch(rf"(.+):({PART}|{PART}\[[0-9:%-]*\])", text):
            text = found[1]
            split = found[2]
        if is_path(text):
            path = expanded(text)
            if not os.path.exists(path):
                raise DataError(
                    f"There is no folder {text!r} to read a dataset from: name one that exists."
                )
            return cls(path, None, split)
        if not re.fullmatch(rf"{PART}(/{PART}){{0,2}}", text):
            raise DataError(
                f"{data!r} is no dataset: write hf:NAME, hf:OWNER/NAME or hf:OWNER/NAME/CONFIG, "
                "and :SPLIT at will."
            )
        owner, _, rest = text.partition("/")
        name, _, config = rest.partition("/")
        path = f"{owner}/{name}" if name else owner
        if os.path.exists(path):
            raise DataError(
                f"There is a folder {path!r} here, named as a dataset: write hf:./{path} if you "
                "mean the folder."
            )
        return cls(path, config or None, split)


def is_path(text: str) -> bool:
    """Return whether ``text`` is written as a path, and so is no name on the hub."""
    return text.startswith((".", "/", "~")) or "\\" in text


class HubDataset:
    """`Source` of the rows of a dataset; ``field``: the column of the text."""

    def __init__(self, data: str, field: str, skipped: Skipped) -> None:
        self.name = Name.parse(data)
        self.field = field
        self.skipped = skipped
        self._place = (
            str(Path(self.name.path).absolute()) if is_path(self.name.path) else self.name.path
        )
        self.what = f"{data} (texts in the column {field!r})"
        # Only the name of a folder counts: it may lie elsewhere when the run is resumed.
        path = (
            os.path.basename(os.path.normpath(self.name.path))
            if is_path(self.name.path)
            else self.name.path
        )
        self.identity = hashlib.sha256(
            json.dumps(["hub", path, self.name.config, self.name.split, field]).encode()
        ).hexdigest()

    def documents(
        self, shard: Shard, epoch: int, place: Place | None = None
    ) -> Iterator[tuple[Place, Document]]:
        """Implement `Source.documents`.

        A place is a row, and the dataset's own state at most ``ANCHOR_EVERY`` rows before.
        """
        wanted = place_number(place, "row")
        row = place_number(place, "noted")
        rows = self._open()
        try:
            state = (place or {}).get("state")
            plain = True
            if isinstance(state, str) and hasattr(rows, "load_state_dict"):
                rows.load_state_dict(json.loads(state))
            elif wanted:
                rows, row, plain = (
                    rows.skip(wanted),
                    wanted,
                    False,
                )  # its state would be another kind
            noted = row
            note = state if isinstance(state, str) else None
            for record in rows:
                if row >= wanted and belongs(shard, epoch, str(row)):
                    text = record.get(self.field) if isinstance(record, dict) else None
                    if not isinstance(text, str):
                        self.skipped.add(
                            f"Row {row} of {self.what}", f"has no text in the column {self.field!r}"
                        )
                    elif text:
                        at: Place = {
                            "row": row,
                            "noted": noted,
                            **({"state": note} if note is not None else {}),
                        }
                        yield (
                            at,
                            Document(f"{self.name.path}:{row}", text.encode("utf-8", "replace")),
                        )
                row += 1
                if plain and row % ANCHOR_EVERY == 0 and (found := _note(rows)) is not None:
                    noted = row
                    note = found
        except DataError:
            raise
        except (
            Exception
        ) as error:  # files, formats and networks of many kinds, each with errors of its own
            raise DataError(
                f"Cannot read {self.what}: {reason(error)}: check the name, the column and the "
                "network."
            ) from error

    def _open(self) -> Any:
        require(
            DataError,
            f"The data {PREFIX}{self.name.path}",
            "datasets",
            extra="data",
            otherwise="name files",
        )
        try:
            import datasets

            datasets.disable_progress_bars()
            return datasets.load_dataset(
                self._place, self.name.config, split=self.name.split, streaming=True
            )
        except Exception as error:  # as above
            raise DataError(
                f"Cannot open the dataset {self.name.path!r}, split {self.name.split!r} "
                f"({reason(error)}): check its name and the network, and write "
                "hf:OWNER/NAME/CONFIG:SPLIT for another part of it."
            ) from error


def _note(rows: Any) -> str | None:
    """Return the dataset's own state as JSON, if it has one that is small and plain."""
    try:
        text = json.dumps(rows.state_dict())
    except (AttributeError, TypeError, ValueError):
        return None
    return text if len(text) <= MAX_STATE else None
