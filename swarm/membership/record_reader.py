"""How a node reads the records of the others from the DHT.

It reads the keys of its part of the swarm (`bucket_index`), and keeps what is credible under them.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from shoal.swarm.access.policy import AccessPolicy
from shoal.swarm.membership import trie
from shoal.swarm.membership.bucket_index import Index
from shoal.swarm.membership.records import VerifiedRecord, bits_of, key_of, open_record
from shoal.swarm.p2p.stream import short
from shoal.swarm.repeats import Repeats
from shoal.swarm.wire.messages import Member
from shoal.swarm.wire.record import GONE

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

MAX_MET_READ = 256
"""Of the peers met last, looked for however many others there are."""

MAX_CLOCK_AHEAD_S = 60.0
"""That a record may be dated ahead of our clock."""

log = logging.getLogger(__name__)


class RecordReader:
    """The records of ``swarm`` that one node reads; on one loop.

    ``cap``: records per key. ``met``: where this node met a peer, the newest last. ``now`` returns
    Unix seconds by the others' clock.
    """

    def __init__(
        self,
        host: Host,
        swarm: str,
        index: Index,
        *,
        cap: int,
        met: Mapping[str, str],
        access_policy: AccessPolicy,
        now: Callable[[], float],
    ) -> None:
        self.keys: dict[str, trie.Names] = {}
        """The peers under each key as last read."""
        self._host = host
        self._swarm = swarm
        self._index = index
        self._cap = cap
        self._met = met
        self._access_policy = access_policy
        self._now = now
        self._said = Repeats()

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
            if record is not None and self.is_credible(peer, prefix, record):
                members[peer] = record.member
        return members

    def is_credible(self, peer: str, prefix: str, record: VerifiedRecord) -> bool:
        """Return whether a record may be believed that was found of ``peer`` under ``prefix``. For
        any thread.
        """
        member = record.member
        if member.peer != peer or member.swarm != self._swarm or record.prefix != prefix:
            return False
        if member.issued > self._now() + MAX_CLOCK_AHEAD_S:
            if self._said.due(peer):
                log.warning(
                    "peer %s is ignored: its clock, or ours, is wrong by more than %g s",
                    short(peer),
                    MAX_CLOCK_AHEAD_S,
                )
            return False
        return self._access_policy.record(
            peer, member.admission, member.issued, member.state not in GONE
        )
