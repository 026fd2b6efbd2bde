"""Options ``data`` and ``tokenizer`` of a task: what the manifest has of them, and what a member's
own machine adds.

A path means nothing on another machine, and a path in a manifest is never looked up here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from shoal.node.data.hub_name import PART, PREFIX, is_path
from shoal.node.data.source import DataError
from shoal.node.data.tokenizer import BYTES, label

Option = int | float | str | bool
TEXT = "text"
DATA = "data"
TOKENIZER = "tokenizer"
DIGEST = "tokenizer_digest"
"""Options of the built-in task, and its name."""


def options_for_manifest(hooks: str, options: Mapping[str, Option]) -> dict[str, Option]:
    """Return the ``options`` for the manifest of a new swarm: data by name, or left out."""
    found = dict(options)
    if DATA in found and not _is_name(hooks, found[DATA]):
        del found[DATA]
    if hooks == TEXT and isinstance(name := found.get(TOKENIZER), str):
        found[TOKENIZER] = label(name)
    return found


def options_of_member(
    hooks: str, swarms: Mapping[str, Option], own: Mapping[str, Option]
) -> dict[str, Option]:
    """Return the options of a joining node: the swarm's, with ``own`` data where the swarm names
    none; for text with ``own`` data and copy of the tokenizer where it names them.

    Raises DataError: the swarm names a path; or it trains on bytes, and this node was given a
    tokenizer.
    """
    options = dict(swarms)
    data = options.get(DATA)
    if data is not None and not _is_name(hooks, data):
        raise _names_path(data)
    tokenizer = options.get(TOKENIZER)
    if isinstance(tokenizer, str) and is_path(tokenizer.strip()):
        raise _names_path(tokenizer)
    if hooks != TEXT:
        if DATA in own:
            options.setdefault(DATA, own[DATA])
        return options
    if TOKENIZER in own and own[TOKENIZER] != BYTES and options.get(TOKENIZER, BYTES) == BYTES:
        raise DataError(
            f"The swarm trains on bytes, this node was given the tokenizer {own[TOKENIZER]!r}: "
            "leave it out."
        )
    for key in (DATA, TOKENIZER):
        if key in own:
            options[key] = own[key]
    return options


def _names_path(value: Option) -> DataError:
    return DataError(
        f"The swarm names {value!r}, a path on somebody's machine, as its data or tokenizer: join "
        "another swarm."
    )


def local_flags(hooks: str, options: Mapping[str, Option]) -> list[str]:
    """Return the command-line flags that give a node of this machine those ``options`` which the
    manifest leaves out.
    """
    in_manifest = options_for_manifest(hooks, options)
    flags: list[str] = []
    for key in (DATA, TOKENIZER):
        if options.get(key) and in_manifest.get(key) != options[key]:
            flags += [f"--{key}", str(options[key])]
    return flags


def _is_name(hooks: str, data: Option) -> bool:
    """Return whether ``data`` is the name of a dataset, the same for everybody, and no path,
    however it is written.

    ``hf:NAME`` without an owner may be a format of the package ``datasets``, which then reads the
    current folder. A task of the user's own may call data by a plain word.
    """
    if not isinstance(data, str):
        return hooks != TEXT
    if hooks != TEXT and re.fullmatch(rf"({PART})?", data) and not (data and os.path.exists(data)):
        return True
    split = rf"(:({PART}|{PART}\[[0-9:%-]*\]))?"
    return re.fullmatch(rf"{PREFIX}{PART}(/{PART}){{1,2}}{split}", data) is not None
