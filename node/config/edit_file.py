"""Changing some values of a settings file, with all else in it kept: comments, order and blanks.

edit(text, {"train.lr": 0.02}, ["tune: chosen of 8 rates"], "tune: ")
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.node.config.settings import ConfigError, merge

_HEADER = re.compile(r"\s*\[")


def edit(text: str, values: Mapping[str, Any], notes: Sequence[str] = (), mark: str = "") -> str:
    """Return the TOML ``text`` with the dotted ``values``, and ``notes`` as comments above the last
    of them.

    ``mark``: how notes begin; earlier ones are removed.

    Raises ConfigError if values are written in a way that cannot be edited, such as in one line.
    """
    wanted = tomllib.loads(text)
    merge(wanted, values)
    lines = text.removesuffix("\n").split("\n") if text else []
    if mark:
        lines = [line for line in lines if not line.startswith(f"# {mark}")]
    at = 0
    for dotted, value in values.items():
        table, _, key = dotted.rpartition(".")
        at = _set(lines, table, key, f"{key} = {toml_value(value)}")
    lines[at:at] = [f"# {note}" for note in notes]
    edited = "\n".join(lines) + "\n"
    if _parsed(edited) != wanted:
        said = ", ".join(f"{dotted} = {toml_value(value)}" for dotted, value in values.items())
        raise ConfigError(
            f"The settings file cannot be edited, for its tables are not written line by line: "
            f"write these values there yourself: {said}."
        )
    return edited


def _set(lines: list[str], table: str, key: str, line: str) -> int:
    """Put ``line`` in place of that of ``key``, or below the header of ``table``, or at the end;
    return where it is.
    """
    header = re.compile(rf"\s*\[\s*{re.escape(table)}\s*\]\s*(#.*)?")
    begin = next((at for at, found in enumerate(lines) if header.fullmatch(found)), None)
    if begin is None:
        lines += ["", f"[{table}]", line] if lines else [f"[{table}]", line]
        return len(lines) - 1
    at = begin + 1
    while at < len(lines) and not _HEADER.match(lines[at]):
        if re.match(rf"\s*{re.escape(key)}\s*=", lines[at]):
            lines[at] = line + _comment(lines[at])
            return at
        at += 1
    lines.insert(begin + 1, line)
    return begin + 1


def toml_value(value: Any) -> str:
    """Return a text, a number, a truth value or a list as TOML has it: JSON, but for characters
    beyond ASCII and DEL.
    """
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(line: str) -> str:
    """Return the comment at the end of a line of TOML, with the blanks before it; empty without
    one.
    """
    for found in re.finditer(r"\s*#", line):
        if _parsed(line[: found.start()]) is not None:
            return line[found.start() :]
    return ""


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
