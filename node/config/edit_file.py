"""Changing some values of a settings file, with all else in it kept: comments, order and blanks.

edit(text, {"train.lr": 0.02}, ["tune: chosen of 8 rates"], "tune: ")
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from shoal.node.config.settings import ConfigError

_HEADER = re.compile(r"\s*\[")


def edit(text: str, values: Mapping[str, Any], notes: Sequence[str] = (), mark: str = "") -> str:
    """Return the TOML ``text`` with the dotted ``values``, and ``notes`` as comments above the last
    of them.

    ``mark``: how notes begin; earlier ones are removed.

    Raises ConfigError if values are written in a way that cannot be edited, such as in one line.
    """
    before = tomllib.loads(text)
    lines = text.removesuffix("\n").split("\n") if text else []
    if mark:
        lines = [line for line in lines if not line.startswith(f"# {mark}")]
    at = 0
    for dotted, value in values.items():
        table, _, key = dotted.rpartition(".")
        at = _set(lines, table, key, f"{key} = {_literal(value)}")
    lines[at:at] = [f"# {note}" for note in notes]
    edited = "\n".join(lines) + "\n"
    if _parsed(edited) != _with(before, values):
        wanted = ", ".join(f"{dotted} = {_literal(value)}" for dotted, value in values.items())
        raise ConfigError(
            f"The settings file cannot be edited, for its tables are not written line by line: "
            f"write these values there yourself: {wanted}."
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


def _literal(value: float | str) -> str:
    """Return a value in TOML, which writes numbers, texts and truth values as JSON does."""
    return json.dumps(value, ensure_ascii=False)


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


def _with(before: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ``before`` with the dotted ``values``; None if a part of a name is no table."""
    wanted = deepcopy(dict(before))
    for dotted, value in values.items():
        *tables, key = dotted.split(".")
        inner: Any = wanted
        for name in tables:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                return None
        inner[key] = value
    return wanted
