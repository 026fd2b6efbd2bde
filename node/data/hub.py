"""Datasets of Hugging Face by name, as a stream: ``hf:NAME[/CONFIG][:SPLIT]``. Needs the package ``datasets``.

Rows are fetched as they are read; only that package's cache is stored.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.node.data.dealing import DataError, belongs, reason
from shoal.node.data.source import Document, Place, Skipped, place_number
from shoal.node.extras import require
from shoal.node.task import Shard

PREFIX = "hf:"
PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"
ANCHOR_EVERY = 256  # rows between two saved states of the dataset: a resumed run reads at most so many again
MAX_STATE = 2**16


@dataclass(frozen=True)
class Name:
    """Parts of ``hf:...``."""

    path: str
    config: str | None
    split: str

    @classmethod
    def parse(cls, data: str) -> Name:
        """Parse ``hf:NAME``, ``hf:OWNER/NAME[/CONFIG]`` or ``hf:./FOLDER``, each with ``:SPLIT`` or not. Raises DataError."""
        text, split = data.removeprefix(PREFIX).strip(), "train"
        if found := re.fullmatch(rf"(.+):({PART}|{PART}\[[0-9:%-]*\])", text):
            text, split = found[1], found[2]
        if is_path(text):
            path = os.path.expanduser(text)
            if not os.path.exists(path):
                raise DataError(f"There is no folder {text!r} to read a dataset from: name one that exists.")
            return cls(path, None, split)
        if not re.fullmatch(rf"{PART}(/{PART}){{0,2}}", text):
            raise DataError(f"{data!r} is no dataset: write hf:NAME, hf:OWNER/NAME or hf:OWNER/NAME/CONFIG, and :SPLIT at will.")
        owner, _, rest = text.partition("/")
        name, _, config = rest.partition("/")
        path = f"{owner}/{name}" if name else owner
        if os.path.exists(path):
            raise DataError(f"There is a folder {path!r} here, named as a dataset: write hf:./{path} if you mean the folder.")
        return cls(path, config or None, split)


def is_path(text: str) -> bool:
    """Return whether ``text`` is written as a path, and so is no name on the hub."""
    return text.startswith((".", "/", "~")) or "\\" in text


class HubDataset:
    """`Source` of the rows of a dataset; ``field``: the column of the text."""

    def __init__(self, data: str, field: str, skipped: Skipped) -> None:
        self.name, self.field, self.skipped = Name.parse(data), field, skipped
        self._place = str(Path(self.name.path).absolute()) if is_path(self.name.path) else self.name.path
        self.what = f"{data} (texts in the column {field!r})"
        # Only the name of a folder counts: it may lie elsewhere when the run is resumed.
        path = os.path.basename(os.path.normpath(self.name.path)) if is_path(self.name.path) else self.name.path
        self.identity = hashlib.sha256(json.dumps(["hub", path, self.name.config, self.name.split, field]).encode()).hexdigest()

    def documents(self, shard: Shard, epoch: int, place: Place | None = None) -> Iterator[tuple[Place, Document]]:
        """Implement `Source.documents`. A place is a row, and the dataset's own state at most ``ANCHOR_EVERY`` rows before."""
        wanted, row = place_number(place, "row"), place_number(place, "noted")
        rows = self._open()
        try:
            state = (place or {}).get("state")
            plain = True
            if isinstance(state, str) and hasattr(rows, "load_state_dict"):
                rows.load_state_dict(json.loads(state))
            elif wanted:
                rows, row, plain = rows.skip(wanted), wanted, False  # its state would be another kind
            noted, note = row, state if isinstance(state, str) else None
            for record in rows:
                if row >= wanted and belongs(shard, epoch, str(row)):
                    text = record.get(self.field) if isinstance(record, dict) else None
                    if not isinstance(text, str):
                        self.skipped.add(f"Row {row} of {self.what}", f"has no text in the column {self.field!r}")
                    elif text:
                        at: Place = {"row": row, "noted": noted, **({"state": note} if note is not None else {})}
                        yield at, Document(f"{self.name.path}:{row}", text.encode("utf-8", "replace"))
                row += 1
                if plain and row % ANCHOR_EVERY == 0 and (found := _note(rows)) is not None:
                    noted, note = row, found
        except DataError:
            raise
        except Exception as error:  # files, formats and networks of many kinds, each with errors of its own
            raise DataError(f"Cannot read {self.what}: {reason(error)}: check the name, the column and the network.") from error

    def _open(self) -> Any:
        require(DataError, f"The data {PREFIX}{self.name.path}", "datasets", extra="data", otherwise="name files")
        try:
            import datasets

            datasets.disable_progress_bars()
            return datasets.load_dataset(self._place, self.name.config, split=self.name.split, streaming=True)
        except Exception as error:  # as above
            raise DataError(
                f"Cannot open the dataset {self.name.path!r}, split {self.name.split!r} ({reason(error)}): "
                "check its name and the network, and write hf:OWNER/NAME/CONFIG:SPLIT for another part of it."
            ) from error


def _note(rows: Any) -> str | None:
    """Return the dataset's own state as JSON, if it has one that is small and plain."""
    try:
        text = json.dumps(rows.state_dict())
    except (AttributeError, TypeError, ValueError):
        return None
    return text if len(text) <= MAX_STATE else None
