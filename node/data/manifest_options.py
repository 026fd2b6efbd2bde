"""Options of a task in a swarm's manifest, and those that stay local to each node."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from shoal.node.data.dealing import DataError
from shoal.node.data.hub import PART, PREFIX, is_path
from shoal.node.data.tokenizer import BYTES, label

Option = int | float | str | bool
TEXT = "text"
DATA, TOKENIZER, DIGEST = "data", "tokenizer", "tokenizer_digest"


def shared(hooks: str, options: Mapping[str, Option]) -> dict[str, Option]:
    """Return the ``options`` for the manifest: a path means nothing on another machine, so data is given by name or left out."""
    found = dict(options)
    if DATA in found and not _is_name(hooks, found[DATA]):
        del found[DATA]
    if hooks == TEXT and isinstance(name := found.get(TOKENIZER), str):
        found[TOKENIZER] = label(name)
    return found


def taken(hooks: str, swarms: Mapping[str, Option], own: Mapping[str, Option]) -> dict[str, Option]:
    """Return the options of a joining node: the swarm's, for text with ``own`` data and copy of the tokenizer where it names them.

    Raises:
        DataError: the swarm names a path, which is never looked up on this machine; or it trains on bytes, and this node was given
            a tokenizer.
    """
    found = dict(swarms)
    paths = [value for key, value in found.items() if key == DATA and not _is_name(hooks, value)]
    paths += [value for key, value in found.items() if key == TOKENIZER and isinstance(value, str) and is_path(value.strip())]
    if paths:
        raise DataError(f"The swarm names {paths[0]!r}, a path on somebody's machine, as its data or tokenizer: leave it.")
    if hooks != TEXT:
        return found
    if TOKENIZER in own and own[TOKENIZER] != found.get(TOKENIZER, BYTES) == BYTES:
        raise DataError(f"The swarm trains on bytes, this node was given the tokenizer {own[TOKENIZER]!r}: leave it out.")
    return {**found, **{key: own[key] for key in (DATA, TOKENIZER) if key in own}}


def flags(hooks: str, options: Mapping[str, Option]) -> list[str]:
    """Return the command-line flags that give a node of this machine those ``options`` which the manifest leaves out."""
    there = shared(hooks, options)
    lost = [key for key in (DATA, TOKENIZER) if options.get(key) and there.get(key) != options[key]]
    return [word for key in lost for word in (f"--{key}", str(options[key]))]


def _is_name(hooks: str, data: Option) -> bool:
    """Return whether ``data`` is the name of a dataset, the same for everybody, and no path, however it is written.

    ``hf:NAME`` without an owner may be a format of the package ``datasets``, which then reads the current folder. A task of the
    user's own may call data by a plain word.
    """
    if not isinstance(data, str):
        return hooks != TEXT
    if hooks != TEXT and re.fullmatch(rf"({PART})?", data) and not (data and os.path.exists(data)):
        return True
    return re.fullmatch(rf"{PREFIX}{PART}(/{PART}){{1,2}}(:({PART}|{PART}\[[0-9:%-]*\]))?", data) is not None
