"""The members that a node keeps in view when the directory has more records than there is room for.

As long as all fit, all are in view. Beyond that the places go to the members that were met, then to
the others, those in view for longest first, and an eighth of them to newcomers, drawn anew from
time to time. In each part one member of each address range comes before the second of any. Why:
docs/internals.md, "Room for members".
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from shoal.swarm.membership.records import bits_of
from shoal.swarm.p2p.addresses import known_first
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
        ranked = known_first(((peer, members[peer].addresses) for peer in order), self._met)
        kept = ranked[: self._most - self._most // NEWCOMERS_ONE_IN]

        def drawn(peer: str) -> bytes:
            return hashlib.sha256(self._salt + f"{draw} {peer}".encode()).digest()

        newcomers = sorted(ranked[len(kept) :], key=drawn)[: self._most - len(kept)]
        chosen = {*kept, *newcomers}
        return [peer for peer in order if peer in chosen]
