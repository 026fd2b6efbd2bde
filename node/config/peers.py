"""Settings of the peers that this node meets, and of what they may download (table ``[peers]``)."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from shoal.swarm.access.policy import PeerLists
from shoal.swarm.errors import ShoalError
from shoal.swarm.identity import is_peer_id

MAX_FILE_BYTES = 1 << 22


class PeerListError(ShoalError):
    """A list of peers cannot be read, or holds something else."""


class PeersSettings(BaseModel):
    """Peers that this node meets. The swarm is not informed of them."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    allow: list[str] = Field(
        default_factory=list,
        max_length=1024,
        description="Peer ids, or files of them (one a line, # begins a comment): if there are any, no other peer is met.",
    )
    deny: list[str] = Field(
        default_factory=list, max_length=1024, description="Peer ids, or files of them: nothing is sent to them or taken from them."
    )
    models_per_hour: float = Field(
        default=60.0, gt=0, le=1e6,
        description="Most that one peer may download from this node in an hour to catch up with the swarm, in multiples of the "
        "model's size.",
    )  # fmt: skip


def lists(settings: PeersSettings) -> PeerLists:
    """Return the allowed and denied peers. Raises PeerListError for an entry that is neither a peer id nor a file of them."""
    return PeerLists(_ids(settings.allow, "allow"), _ids(settings.deny, "deny"))


def _ids(entries: list[str], name: str) -> frozenset[str]:
    found: set[str] = set()
    for entry in entries:
        found |= {entry} if is_peer_id(entry) else _read(entry, name)
    if name == "allow" and entries and not found:
        raise PeerListError(f"The lists of peers.allow name no peer ({', '.join(entries)[:200]}): add peer ids, or leave it out.")
    return frozenset(found)


def _read(entry: str, name: str) -> set[str]:
    path = Path(os.path.expanduser(entry))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise PeerListError(
            f"peers.{name}: {entry[:200]!r} is neither a peer id nor a file that can be read ({why}): write 12D3Koo... or a path."
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise PeerListError(f"peers.{name}: the file {entry[:200]!r} is over 4 MiB: name a list of peer ids, one a line.")
    found = set()
    for number, line in enumerate(text.splitlines(), 1):
        word = line.partition("#")[0].strip()
        if word and not is_peer_id(word):
            raise PeerListError(f"peers.{name}: line {number} of {entry[:200]!r} is no peer id ({word[:60]!a}): correct it.")
        found |= {word} if word else set()
    return found
