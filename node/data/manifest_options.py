"""Options of the built-in text task in a swarm's manifest, and those that stay local to each node."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.node.data.errors import DataError
from shoal.node.data.hub import PREFIX, is_path
from shoal.node.data.tokenizer import BYTES, label

Option = int | float | str | bool
TEXT = "text"
DATA, TOKENIZER, DIGEST = "data", "tokenizer", "tokenizer_digest"


def shared(options: Mapping[str, Option]) -> dict[str, Option]:
    """Return the ``options`` for the manifest: a path means nothing on another machine, so data is given by name or left out."""
    found = dict(options)
    if DATA in found and not _is_name(found[DATA]):
        del found[DATA]
    if isinstance(name := found.get(TOKENIZER), str):
        found[TOKENIZER] = label(name)
    return found


def taken(swarms: Mapping[str, Option], own: Mapping[str, Option]) -> dict[str, Option]:
    """Return the options of a joining node: the swarm's, with ``own`` data and copy of the tokenizer where it names them.

    Raises:
        DataError: the swarm names a path, which is never looked up on this machine; or it trains on bytes, and this node was given
            a tokenizer.
    """
    found = dict(swarms)
    data, name = found.get(DATA, f"{PREFIX}none"), found.get(TOKENIZER, "")
    if not _is_name(data) or (isinstance(name, str) and is_path(name)):
        wrong = data if not _is_name(data) else name
        raise DataError(f"The swarm names {wrong!r}, a path on somebody's machine, as its data or tokenizer: leave it.")
    if TOKENIZER in own and own[TOKENIZER] != found.get(TOKENIZER, BYTES) == BYTES:
        raise DataError(f"The swarm trains on bytes, this node was given the tokenizer {own[TOKENIZER]!r}: leave it out.")
    return {**found, **{key: own[key] for key in (DATA, TOKENIZER) if key in own}}


def flags(hooks: str, options: Mapping[str, Option]) -> list[str]:
    """Return the command-line flags that give a node of this machine those ``options`` which the manifest leaves out."""
    if hooks != TEXT:
        return []
    return [word for key in (DATA, TOKENIZER) if options.get(key) for word in (f"--{key}", str(options[key]))]


def _is_name(data: Option) -> bool:
    """Return whether ``data`` names a dataset that is the same for everybody."""
    return isinstance(data, str) and data.startswith(PREFIX) and not is_path(data.removeprefix(PREFIX))
