"""Names of datasets and tokenizers on the hub of Hugging Face, as users write them.

``hf:NAME``, ``hf:OWNER/NAME[/CONFIG]`` or ``hf:./FOLDER``, each with ``:SPLIT`` or not.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from shoal.node.data.source import DataError
from shoal.node.home import expanded

PREFIX = "hf:"
PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"
"""Pattern of each part of a name."""


@dataclass(frozen=True)
class DatasetName:
    """Parts of ``hf:...``: a name on the hub, or the ``path`` of a folder."""

    path: str
    config: str | None
    split: str

    @classmethod
    def parse(cls, data: str) -> DatasetName:
        """Parse ``hf:...``. Raises DataError."""
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
