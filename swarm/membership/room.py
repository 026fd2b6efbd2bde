"""The members that a node keeps in view when the directory has more records than there is room for.

A key costs nothing, so a stranger can write any number of records. As long as all fit, all are in view, and all nodes see the same.
Beyond that the places go to

1. the members that were met, because they called or answered; an address that nobody was met at proves nothing;
2. the others, those in view for longest first;
3. and an eighth of the places to newcomers, drawn anew from time to time, so that each is seen once, whatever came before it.

In each part one member of each address range comes before the second of any: the /16 of IPv4, the /32 of IPv6. Private ranges and
loopback count as ranges too: a team in one of them is met, and so in the first part.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from shoal.swarm.membership.dht_record import bits_of
from shoal.swarm.p2p.multiaddr import host_of, known_first
from shoal.swarm.wire.member import Member

ROOM = 1024  # members in view: 5 MB for as many of the largest records, which are read every few seconds
NEWCOMERS = 8  # one place in so many is for them


class Room:
    """The choice of at most ``most`` members. ``met``: where each peer was met, an IP address or a word."""

    def __init__(self, met: Mapping[str, str], most: int = ROOM, salt: bytes | None = None) -> None:
        self._met, self._most = met, most
        self._salt = os.urandom(16) if salt is None else salt  # or ids could be made that are drawn every time
        self._in_view: dict[str, None] = {}  # those in view for longest first

    def choose(self, members: Mapping[str, Member], draw: int) -> dict[str, Member]:
        """Return the ``members`` that are kept. ``draw``: a number that is another when newcomers are to be drawn anew."""
        order = [peer for peer in self._in_view if peer in members]
        order += sorted(members.keys() - set(order), key=bits_of)  # the same on all nodes
        if len(order) > self._most:
            order = self._best(order, members, draw)
        self._in_view = dict.fromkeys(order)
        return {peer: members[peer] for peer in order}

    def _best(self, order: list[str], members: Mapping[str, Member], draw: int) -> list[str]:
        ranked = known_first(((peer, host_of(next(iter(members[peer].addresses), ""))) for peer in order), self._met)
        kept = ranked[: self._most - self._most // NEWCOMERS]
        rest = sorted(ranked[len(kept) :], key=lambda peer: hashlib.sha256(self._salt + f"{draw} {peer}".encode()).digest())
        chosen = {*kept, *rest[: self._most - len(kept)]}
        return [peer for peer in order if peer in chosen]
