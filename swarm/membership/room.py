"""The members that a node keeps in view when the directory has more records than there is room for.

A key costs nothing, so a stranger can write any number of records. As long as all fit, all are in
view, and all nodes see the same. Beyond that the places go to

1. the members that were met, because they called or answered; an address that nobody was met at
   proves nothing;
2. the others, those in view for longest first;
3. and an eighth of the places to newcomers, drawn anew from time to time, so that each is seen
   once, whatever came before it.

In each part one member of each address range comes before the second of any: the /16 of IPv4, the
/32 of IPv6. Private ranges and loopback count as ranges too: a team in one of them is met, and so
in the first part.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from shoal.swarm.membership.records import bits_of
from shoal.swarm.p2p.addresses import host_of, known_first
from shoal.swarm.wire.messages import Member

# Members in view: 5 MB for as many of the largest records, which are read every few seconds.
MAX_IN_VIEW = 1024
NEWCOMERS_ONE_IN = 8  # places is for them
SALT_BYTES = 16


class Room:
    """The choice of at most ``most`` members.

    ``met``: where each peer was met, an IP address or a word. ``salt``: secret, or ids could be
    made that are drawn every time.
    """

    def __init__(
        self, met: Mapping[str, str], most: int = MAX_IN_VIEW, salt: bytes | None = None
    ) -> None:
        self._met = met
        self._most = most
        self._salt = os.urandom(SALT_BYTES) if salt is None else salt
        self._in_view: dict[str, None] = {}  # those in view for longest first

    def choose(self, members: Mapping[str, Member], draw: int) -> dict[str, Member]:
        """Return the ``members`` that are kept.

        ``draw``: a number that is another when newcomers are to be drawn anew.
        """
        order = [peer for peer in self._in_view if peer in members]
        order += sorted(members.keys() - set(order), key=bits_of)  # the same on all nodes
        if len(order) > self._most:
            order = self._best(order, members, draw)
        self._in_view = dict.fromkeys(order)
        return {peer: members[peer] for peer in order}

    def _best(self, order: list[str], members: Mapping[str, Member], draw: int) -> list[str]:
        claimed = []
        for peer in order:
            first_address = next(iter(members[peer].addresses), "")
            claimed.append((peer, host_of(first_address)))
        ranked = known_first(claimed, self._met)
        kept = ranked[: self._most - self._most // NEWCOMERS_ONE_IN]

        def drawn(peer: str) -> bytes:
            return hashlib.sha256(self._salt + f"{draw} {peer}".encode()).digest()

        newcomers = sorted(ranked[len(kept) :], key=drawn)[: self._most - len(kept)]
        chosen = {*kept, *newcomers}
        return [peer for peer in order if peer in chosen]
