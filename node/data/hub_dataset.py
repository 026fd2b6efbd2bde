"""Datasets of Hugging Face as a stream of documents, by the package ``datasets``.

Rows are fetched as they are read; only that package's cache is stored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.node.data.hub_name import PREFIX, DatasetName, is_path
from shoal.node.data.sharding import is_in_shard
from shoal.node.data.source import DataError, Document, Place, Skipped, place_number, reason
from shoal.node.packages import require
from shoal.node.task import Shard

ANCHOR_EVERY_ROWS = 256
"""Between two saved states of the dataset: a resumed run reads at most so many again."""
MAX_STATE_CHARS = 2**16
"""A larger state of a dataset is not kept in a checkpoint; rows are counted instead."""


class HubDataset:
    """`DocumentSource` of the rows of a dataset; ``field``: the column of the text."""

    def __init__(self, data: str, field: str, skipped: Skipped) -> None:
        self.name = DatasetName.parse(data)
        self.field = field
        self.skipped = skipped
        self._path = self.name.path
        self.what = f"{data} (texts in the column {field!r})"
        known_as = self.name.path
        if is_path(self.name.path):
            self._path = str(Path(self.name.path).absolute())
            # Only the name of a folder counts: it may lie elsewhere when the run is resumed.
            known_as = os.path.basename(os.path.normpath(self.name.path))
        parts = ["hub", known_as, self.name.config, self.name.split, field]
        self.identity = hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def documents(
        self, shard: Shard, epoch: int, place: Place | None = None
    ) -> Iterator[tuple[Place, Document]]:
        """Implement `DocumentSource.documents`.

        A place is a row, and the dataset's own state at most `ANCHOR_EVERY_ROWS` rows before.
        """
        try:
            for at, record in self._records(place):
                row = at["row"]
                if not is_in_shard(shard, epoch, str(row)):
                    continue
                text = record.get(self.field) if isinstance(record, dict) else None
                if not isinstance(text, str):
                    why = f"has no text in the column {self.field!r}"
                    self.skipped.add(f"Row {row} of {self.what}", why)
                elif text:
                    name = f"{self.name.path}:{row}"
                    yield at, Document(name, text.encode("utf-8", "replace"))
        except DataError:
            raise
        # Files, formats and networks of many kinds, each with errors of its own.
        except Exception as error:
            raise DataError(
                f"Cannot read {self.what}: {reason(error)}: check the name, the column and the "
                "network."
            ) from error

    def _records(self, place: Place | None) -> Iterator[tuple[Place, Any]]:
        """Yield all records from ``place`` on, each with its place."""
        wanted = place_number(place, "row")
        row = place_number(place, "noted")
        state = None if place is None else place.get("state")
        rows = self._open()
        has_own_state = True
        if isinstance(state, str) and hasattr(rows, "load_state_dict"):
            rows.load_state_dict(json.loads(state))
        elif wanted:
            rows = rows.skip(wanted)
            row = wanted
            # The state of such rows would be of another kind.
            has_own_state = False
        anchor: Place = {"noted": row}
        if isinstance(state, str):
            anchor["state"] = state
        for record in rows:
            if row >= wanted:
                yield {"row": row, **anchor}, record
            row += 1
            if has_own_state and row % ANCHOR_EVERY_ROWS == 0:
                found = _state_of(rows)
                if found is not None:
                    anchor = {"noted": row, "state": found}

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
                self._path, self.name.config, split=self.name.split, streaming=True
            )
        # As above.
        except Exception as error:
            raise DataError(
                f"Cannot open the dataset {self.name.path!r}, split {self.name.split!r} "
                f"({reason(error)}): check its name and the network, and write "
                "hf:OWNER/NAME/CONFIG:SPLIT for another part of it."
            ) from error


def _state_of(rows: Any) -> str | None:
    """Return the dataset's own state as JSON, if it has one that is small and plain."""
    try:
        text = json.dumps(rows.state_dict())
    except (AttributeError, TypeError, ValueError):
        return None
    return text if len(text) <= MAX_STATE_CHARS else None
