"""The members of a group, and their signed ready messages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from shoal.optim.exchange.base import counted_weights
from shoal.swarm.errors import MessageError
from shoal.swarm.exchange.contribution import Contribution
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.envelope import fresh_nonce, unseal
from shoal.swarm.wire.fields import pack_shapes
from shoal.swarm.wire.group import MAX_PATIENCE, GroupFormed, GroupReady

_LENGTH = 2  # bytes before each ready message in a list


@dataclass(frozen=True)
class Roster:
    """A group as all of its members see it. A member's place is its position in the order of peer ids."""

    nonce: bytes
    leader: str
    reduction: Literal["gather", "allreduce"]
    alone: bool
    """True if every peer that was ready is in it."""
    readies: Mapping[str, GroupReady]

    @property
    def members(self) -> tuple[str, ...]:
        """Their peer ids, in order."""
        return tuple(sorted(self.readies))

    @property
    def everybody(self) -> int:
        return (1 << len(self.readies)) - 1

    def weight(self, peer: str) -> float:
        """Return what a member's signed weight counts as (`counted_weights`)."""
        return self._weights[0][peer]

    @property
    def limit(self) -> float:
        return self._weights[1]

    @cached_property
    def _weights(self) -> tuple[dict[str, float], float]:
        weights, limit = counted_weights([self.readies[peer].weight for peer in self.members])
        return dict(zip(self.members, weights, strict=True)), limit

    def places(self, peers: Iterable[str]) -> int:
        """Return the places of ``peers``, as bits."""
        wanted = set(peers)
        return sum(1 << place for place, peer in enumerate(self.members) if peer in wanted)

    def at(self, places: int) -> tuple[str, ...]:
        """Return the peers at ``places``, in order."""
        return tuple(peer for place, peer in enumerate(self.members) if places >> place & 1)


def ready_message(mine: Contribution, swarm: str, model: str, patience: float) -> GroupReady:
    """Return the description of this node's contribution; ``patience`` in seconds."""
    return GroupReady(
        swarm=swarm,
        round=mine.key.round,
        fragment=mine.key.fragment,
        model=model,
        codec=mine.codec.name,
        shapes=hashlib.sha256(pack_shapes(mine.shapes)).digest(),
        nbytes=mine.payload.nbytes,
        weight=mine.weight,
        sha256=mine.sha256,
        patience=min(max(patience, 0.0), MAX_PATIENCE),
        nonce=fresh_nonce(),
        sketch=mine.sketch,
    )


def difference(mine: GroupReady, theirs: GroupReady) -> str | None:
    """Return why two contributions cannot be averaged, in words, or None. Weights may differ."""
    if theirs.swarm != mine.swarm:
        return f"this node is in swarm {mine.swarm}, the contribution is for {theirs.swarm}"
    if (theirs.round, theirs.fragment) != (mine.round, mine.fragment):
        return (
            f"it is of round {theirs.round} and fragment {theirs.fragment}, not of round {mine.round} and fragment {mine.fragment}"
        )
    if theirs.codec != mine.codec:
        return f"the codec is {mine.codec} here and {theirs.codec} there"
    if theirs.model != mine.model or theirs.shapes != mine.shapes:
        return "the tensors have other shapes or types here than there"
    if theirs.nbytes != mine.nbytes:
        return f"the payload has {mine.nbytes} bytes here and {theirs.nbytes} there"
    return None


def encode_roster(sealed: Iterable[bytes]) -> bytes:
    return b"".join(len(message).to_bytes(_LENGTH, "big") + message for message in sealed)


def _each(listed: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(listed):
        start = at + _LENGTH
        at = start + int.from_bytes(listed[at:start], "big")
        if at > len(listed):
            raise MessageError("a group was refused: its list of members ends in the middle of one.")
        yield listed[start:at]


def open_roster(formed: GroupFormed, leader: str, mine: bytes, largest: int) -> Roster:
    """Return the group in ``formed``, with every member checked against this node's own ready message (``mine``, sealed).

    Raises MessageError: this node is not in it, a signature is wrong, a member is listed twice or brings something that cannot
    be averaged with ours, or there are more than ``largest`` or fewer than two.
    """
    _, own = unseal(mine, GroupReady)
    readies: dict[str, GroupReady] = {}
    included = False
    for sealed in _each(formed.members):
        peer, ready = unseal(sealed, GroupReady)
        if peer in readies or len(readies) == largest:
            raise MessageError(f"a group from peer {short(leader)} was refused: a member is in it twice, or it is too large.")
        reason = difference(own, ready)
        if reason is not None:
            raise MessageError(f"a group from peer {short(leader)} was refused: with its member {short(peer)} {reason}.")
        readies[peer] = ready
        included = included or sealed == mine
    if not included or len(readies) < 2:
        raise MessageError(f"a group from peer {short(leader)} was refused: this node is not in it, or nobody else is.")
    return Roster(formed.nonce, leader, formed.reduction, formed.alone, readies)
