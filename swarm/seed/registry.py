"""The recent members of each swarm, as a bootstrap node keeps them: in memory only, and bounded, for any peer may register.

A bootstrap node serves any swarm, so it cannot judge who belongs to it. It need not: it notes a record only for the peer that
hands it in, which libp2p has authenticated, and the peers that ask check the signatures and contact the swarm themselves.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from shoal.swarm.errors import MessageError
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.envelope import unseal
from shoal.swarm.wire.member import Member
from shoal.swarm.wire.seed import MAX_NAMED, SeedReply, SeedRequest

log = logging.getLogger(__name__)

MAX_SWARMS = 128
MAX_MEMBERS = 32  # of a swarm; the one heard of longest ago is dropped. With 5 KiB each, all of it is below 25 MB.
MAX_PLACES = 4  # swarms in which one peer is noted
TTL = 120.0  # seconds after which a silent member is forgotten
GONE = ("leaving", "done")


class SeedRegistry:
    """A register of members that answers requests; not for several threads. ``clock`` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, chance: random.Random | None = None) -> None:
        self._clock = clock
        self._chance = chance or random.Random()
        self._swarms: dict[str, OrderedDict[str, tuple[float, bytes]]] = {}  # swarm -> peer -> when heard, its record
        self._places: Counter[str] = Counter()

    def answer(self, peer: str, request: SeedRequest) -> SeedReply:
        """Reply to ``peer``, after noting its record if it brought one."""
        self._forget_silent()
        reason = "" if request.record is None else self._note(peer, request.swarm, request.record)
        members = self._swarms.get(request.swarm, OrderedDict())
        others = [record for other, (_, record) in members.items() if other != peer]
        return SeedReply(members=tuple(self._chance.sample(others, min(MAX_NAMED, len(others)))), reason=reason)

    def has(self, swarm: str, peer: str) -> bool:
        """Return whether ``peer`` is noted as a member of ``swarm``."""
        self._forget_silent()
        return peer in self._swarms.get(swarm, {})

    def sample(self, swarm: str, most: int) -> tuple[int, tuple[bytes, ...]]:
        """Return how many members of ``swarm`` are noted, at most MAX_MEMBERS, and the sealed records of ``most`` of them."""
        self._forget_silent()
        records = [record for _, record in self._swarms.get(swarm, {}).values()]
        return len(records), tuple(self._chance.sample(records, min(most, len(records))))

    def count(self) -> tuple[int, int]:
        """Return the numbers of swarms and of members noted."""
        self._forget_silent()
        return len(self._swarms), sum(map(len, self._swarms.values()))

    def _note(self, peer: str, swarm: str, record: bytes) -> str:
        """Note a record; return why not, if it is refused."""
        try:
            _, member = unseal(record, Member)
        except MessageError as error:
            log.debug("the record of peer %s was refused: %s", short(peer), error)
            return error.reason
        if member.peer != peer or member.swarm != swarm:
            return "forged"
        self._forget(swarm, peer)
        if member.state in GONE:
            return ""
        if self._places[peer] >= MAX_PLACES:
            return "places"
        if swarm not in self._swarms and len(self._swarms) >= MAX_SWARMS:
            return "full"
        members = self._swarms.setdefault(swarm, OrderedDict())
        members[peer] = (self._clock(), record)
        self._places[peer] += 1
        if len(members) > MAX_MEMBERS:
            self._forget(swarm, next(iter(members)))
        return ""

    def _forget(self, swarm: str, peer: str) -> None:
        members = self._swarms.get(swarm, OrderedDict())
        if members.pop(peer, None) is None:
            return
        self._places[peer] -= 1
        if not self._places[peer]:
            del self._places[peer]
        if not members:
            del self._swarms[swarm]

    def _forget_silent(self) -> None:
        oldest = self._clock() - TTL
        for swarm, members in list(self._swarms.items()):
            for peer, (heard, _) in list(members.items()):
                if heard >= oldest:
                    break  # members are in the order in which they were heard of
                self._forget(swarm, peer)
