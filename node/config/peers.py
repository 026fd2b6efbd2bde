"""Lists of peers that this node meets or does not: peer ids, and files of them.

A file has one id a line; # begins a comment.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.node.home import expanded
from shoal.swarm.access.policy import PeerLists
from shoal.swarm.errors import ShoalError
from shoal.swarm.identity import is_peer_id

MAX_LIST_BYTES = 1 << 22


class PeerListError(ShoalError):
    """A list of peers cannot be read, or holds something else."""


def peer_lists(allow: Sequence[str], deny: Sequence[str]) -> PeerLists:
    """Return the allowed and denied peers, of the settings ``peers.allow`` and ``peers.deny``.

    Raises PeerListError for an entry that is neither a peer id nor a file of them.
    """
    return PeerLists(_ids(allow, "allow"), _ids(deny, "deny"))


def _ids(entries: Sequence[str], name: str) -> frozenset[str]:
    found: set[str] = set()
    for entry in entries:
        if is_peer_id(entry):
            found.add(entry)
        else:
            found |= _read_list(entry, name)
    if name == "allow" and entries and not found:
        raise PeerListError(
            f"The lists of peers.allow name no peer ({', '.join(entries)[:200]}): add peer ids, or "
            "leave it out."
        )
    return frozenset(found)


def _read_list(entry: str, name: str) -> set[str]:
    path = Path(expanded(entry))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_LIST_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise PeerListError(
            f"peers.{name}: {entry[:200]!r} is neither a peer id nor a file that can be read "
            f"({why}): write 12D3Koo... or a path."
        ) from error
    if len(data) > MAX_LIST_BYTES:
        raise PeerListError(
            f"peers.{name}: the file {entry[:200]!r} is over 4 MiB: name a list of peer ids, one a "
            "line."
        )
    found = set()
    for number, line in enumerate(text.splitlines(), 1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        if not is_peer_id(word):
            raise PeerListError(
                f"peers.{name}: line {number} of {entry[:200]!r} is no peer id ({word[:60]!a}): "
                "correct it."
            )
        found.add(word)
    return found
