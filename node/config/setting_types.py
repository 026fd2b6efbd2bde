"""What the tables of settings are made of: their base, and the types of values in several."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from shoal.node.home import expanded

MAX_NAME_CHARS = 64


class SettingsTable(BaseModel):
    """A table of settings: no key that it does not know, and no value of another type."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


def _file_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", value):
        raise ValueError(
            "it should be 1 to 64 letters, digits, dots, dashes and underscores, with no dot or "
            "dash first"
        )
    return value


Name = Annotated[str, AfterValidator(_file_name)]
"""A name that is also a folder's, so it must be a plain file name on every system."""


def absolute(path: Path) -> Path:
    """Return ``path`` whatever folder the user's code changes to; as it is where the current one is
    gone.
    """
    with suppress(FileNotFoundError):
        return Path(expanded(path)).absolute()
    return path


PathSetting = Annotated[Path, Field(strict=False), AfterValidator(absolute)]
"""A path; flags and TOML give it as text, which strict mode would refuse."""


def number_as_text(value: object) -> object:
    """Return a whole number of TOML, such as a port, as the text that a flag would give."""
    return str(value) if type(value) is int else value


def spec_here(spec: str) -> str:
    """Return ``path/file.py:Class`` with the whole path, if there is that file: its code may change
    the folder of the process.
    """
    where, colon, name = spec.rpartition(":")
    file = Path(expanded(where))
    if colon and where.endswith(".py") and file.is_file():
        return f"{file.absolute()}:{name}"
    return spec


def spec_label(spec: str) -> str:
    """Return the name of a task or an environment for others: without the folder, which differs
    between machines.
    """
    where, colon, name = spec.rpartition(":")
    return PurePath(where).name + colon + name
