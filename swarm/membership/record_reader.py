"""How a node reads the records of the others from the DHT.

It reads the keys of its part of the swarm (`bucket_index`), and keeps what is credible under them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from shoal.swarm.membership import trie
from shoal.swarm.membership.bucket_index import Index
from shoal.swarm.membership.records import VerifiedRecord, bits_of, key_of, open_record
from shoal.swarm.wire.messages import Member

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

MAX_MET_READ = 256
"""Of the peers met last, looked for however many others there are."""

Credible = Callable[[str, str, VerifiedRecord], bool]
"""Whether a record may be believed that was found under (peer, prefix)."""


class RecordReader:
    """The records of ``swarm`` that one node reads; on one loop.

    ``cap``: records per key. ``met``: where this node met a peer, the newest last.
    """

    def __init__(
        self,
        host: Host,
        swarm: str,
        index: Index,
        *,
        cap: int,
        met: Mapping[str, str],
        credible: Credible,
    ) -> None:
        self.keys: dict[str, trie.Names] = {}
        """The peers under each key as last read."""
        self._host = host
        self._swarm = swarm
        self._index = index
        self._cap = cap
        self._met = met
        self._credible = credible

    async def read(self, *, stored_under: str | None, seen: Collection[str]) -> list[Member]:
        """Return the credible records under this node's keys.

        ``stored_under``: the prefix of this node's own record. ``seen``: peers in view.

        Raises NetworkError.
        """
        last_met = list(self._met)[-MAX_MET_READ:]
        known = {peer for peer in seen if peer in self._met}.union(last_met)
        keys = await self._index.read(self._read_key, now=stored_under, known=known)
        self.keys = {prefix: dict.fromkeys(names) for prefix, names in keys.items()}
        found = []
        for names in keys.values():
            found += [member for member in names.values() if isinstance(member, Member)]
        return found

    async def _read_key(self, prefix: str) -> dict[str, Member]:
        """Return the credible records under a key, by peer; of too many the first by their bits."""
        values = await self._host.get(key_of(self._swarm, prefix))
        members = {}
        for peer in heapq.nsmallest(trie.CROWD_FACTOR * self._cap, values, key=bits_of):
            record = open_record(values[peer])
            if record is not None and self._credible(peer, prefix, record):
                members[peer] = record.member
        return members
