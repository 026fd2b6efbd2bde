"""What a swarm's manifest says of the built-in text task's data and tokenizer, and what stays each node's own affair."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.node.data.errors import DataError
from shoal.node.data.hub import PREFIX, is_path
from shoal.node.data.tokenizer import BYTES, label

Option = int | float | str | bool
TEXT = "text"
DATA, TOKENIZER, DIGEST = "data", "tokenizer", "tokenizer_digest"


def told(options: Mapping[str, Option]) -> dict[str, Option]:
    """``options`` for the manifest: a path means nothing on another machine, so data is told by name or not at all."""
    found = dict(options)
    if DATA in found and not _is_name(found[DATA]):
        del found[DATA]
    if isinstance(name := found.get(TOKENIZER), str):
        found[TOKENIZER] = label(name)
    return found


def taken(told_by_swarm: Mapping[str, Option], own: Mapping[str, Option]) -> dict[str, Option]:
    """The options of a node that joins: the swarm's, with ``own`` data and copy of the tokenizer where it names them.

    Raises:
        DataError: the swarm names a path, which it must not: nothing of a stranger's is looked up on this machine. Or it trains on
            bytes, and this node was given a tokenizer.
    """
    found = dict(told_by_swarm)
    data, name = found.get(DATA, f"{PREFIX}none"), found.get(TOKENIZER, "")
    if not _is_name(data) or (isinstance(name, str) and is_path(name)):
        wrong = data if not _is_name(data) else name
        raise DataError(f"The swarm names {wrong!r}, a path on somebody's machine, as its data or tokenizer: leave it.")
    if TOKENIZER in own and own[TOKENIZER] != found.get(TOKENIZER, BYTES) == BYTES:
        raise DataError(f"The swarm trains on bytes, this node was given the tokenizer {own[TOKENIZER]!r}: leave it out.")
    return {**found, **{key: own[key] for key in (DATA, TOKENIZER) if key in own}}


def flags(hooks: str, options: Mapping[str, Option]) -> list[str]:
    """The words of a command line that give a node of this machine those ``options`` which the manifest does not."""
    if hooks != TEXT:
        return []
    return [word for key in (DATA, TOKENIZER) if options.get(key) for word in (f"--{key}", str(options[key]))]


def _is_name(data: Option) -> bool:
    """Whether ``data`` names a dataset that is the same for everybody."""
    return isinstance(data, str) and data.startswith(PREFIX) and not is_path(data.removeprefix(PREFIX))
