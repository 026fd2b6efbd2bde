"""The recent members of each swarm, as a bootstrap node keeps them: in memory only, and bounded, for any peer may register.

A bootstrap node serves any swarm, so it cannot judge who belongs to it. It need not: it notes a record only for the peer that
hands it in, which libp2p has authenticated, and the peers that ask check the signatures and contact the swarm themselves.

Keys cost nothing, so places are shared by the address ranges from which records come (`range_of`): where all are taken, the range
that has most of them gives one up, and peers are named one of each range in turn. The swarms that are listed to everybody
(`shoal.swarm.seed.registry`) have as many places as the others, and theirs alone: announcements take no room of private swarms.

A public swarm is listed while its announcer renews what it said and a member of it is noted in the registry. Only a noted member
may announce, and the first one stays until it falls silent: another, who may say something else, does not displace it, unless it is
the creator. A manifest that does not say that its swarm is public is refused, so nobody but the creator can make a swarm public.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from shoal.swarm.errors import MessageError
from shoal.swarm.manifest.manifest import Manifest, is_public, swarm_id
from shoal.swarm.p2p.multiaddr import by_turns, range_of
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.envelope import pack, peek, unseal
from shoal.swarm.wire.member import Member
from shoal.swarm.wire.seed import (
    MAX_CONTACTS,
    MAX_LISTED,
    MAX_NAMED,
    Announcement,
    ListedSwarm,
    SeedReply,
    SeedRequest,
    SwarmsReply,
    SwarmsRequest,
)

log = logging.getLogger(__name__)

MAX_SWARMS = 128  # that are listed, and as many that are not
MAX_MEMBERS = 32  # of a swarm. With 5 KiB each, all of it is below 50 MB.
MAX_PLACES = 4  # swarms in which one peer is noted
TTL = 120.0  # seconds after which a silent member is forgotten
GONE = ("leaving", "done")


class _Place(NamedTuple):
    heard: float
    record: bytes
    host: str
    """The IP address from which the record came."""
    range: str


def _most(ranges: Iterable[str]) -> str:
    return Counter(ranges).most_common(1)[0][0]


class SeedRegistry:
    """A register of members that answers requests; not for several threads. ``clock`` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, chance: random.Random | None = None) -> None:
        self._clock = clock
        self._chance = chance or random.Random()
        self._swarms: dict[str, OrderedDict[str, _Place]] = {}  # swarm -> peer, the one heard of longest ago first
        self._places: Counter[str] = Counter()
        self._listed: set[str] = set()

    def answer(self, peer: str, request: SeedRequest, host: str = "") -> SeedReply:
        """Reply to ``peer``, which called from the IP address ``host``, after noting its record if it brought one."""
        self._forget_silent()
        reason = "" if request.record is None else self._note(peer, request.swarm, request.record, host)
        return SeedReply(members=self._named(request.swarm, MAX_NAMED, but=peer), reason=reason)

    def _named(self, swarm: str, most: int, but: str = "") -> tuple[bytes, ...]:
        """Return the records of at most ``most`` members, drawn at random from each address range in turn."""
        members = self._swarms.get(swarm, OrderedDict())
        drawn = self._chance.sample(sorted(members.keys() - {but}), len(members.keys() - {but}))
        return tuple(members[peer].record for peer in by_turns((peer, members[peer].host) for peer in drawn)[:most])

    def has(self, swarm: str, peer: str) -> bool:
        """Return whether ``peer`` is noted as a member of ``swarm``."""
        self._forget_silent()
        return peer in self._swarms.get(swarm, {})

    def sample(self, swarm: str, most: int) -> tuple[int, tuple[bytes, ...]]:
        """Return how many members of ``swarm`` are noted, at most MAX_MEMBERS, and the sealed records of ``most`` of them."""
        self._forget_silent()
        return len(self._swarms.get(swarm, {})), self._named(swarm, most)

    def count(self) -> tuple[int, int]:
        """Return the numbers of swarms and of members noted."""
        self._forget_silent()
        return len(self._swarms), sum(map(len, self._swarms.values()))

    def _note(self, peer: str, swarm: str, record: bytes, host: str) -> str:
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
        if swarm not in self._swarms and not self._has_room(host, listed=False):
            return "full"
        members = self._swarms.setdefault(swarm, OrderedDict())
        members[peer] = _Place(self._clock(), record, host, range_of(host))
        self._places[peer] += 1
        if len(members) > MAX_MEMBERS:
            crowded = _most(place.range for place in members.values())
            self._forget(swarm, next(other for other, place in members.items() if place.range == crowded))
        return ""

    def enlist(self, swarm: str, peer: str) -> bool:
        """Move ``swarm``, which has the member ``peer``, to the places of those that are listed; if none is left, forget it."""
        if swarm not in self._listed and not self._has_room(self._swarms[swarm][peer].host, listed=True):
            self._forget_swarm(swarm)
            return False
        self._listed.add(swarm)
        return True

    def _has_room(self, host: str, *, listed: bool) -> bool:
        """Return whether a place is free, or make one: the range that has most gives one up, unless ``host``'s would have as many.

        Of its members' ranges a swarm counts for that with the fewest swarms: who joins it does not make it one of theirs. Of a
        range's swarms that goes whose newest member was heard of longest ago.
        """
        here = {swarm: members for swarm, members in self._swarms.items() if (swarm in self._listed) == listed}
        if len(here) < MAX_SWARMS:
            return True
        known = {swarm: {place.range for place in members.values()} for swarm, members in here.items()}
        common = Counter(one for ranges in known.values() for one in ranges)
        ranges = {swarm: min(sorted(of), key=common.__getitem__) for swarm, of in known.items()}
        crowded = _most(ranges.values())
        taken = Counter(ranges.values())
        if taken[crowded] <= taken[range_of(host)] + 1:
            return False
        theirs = [swarm for swarm in here if ranges[swarm] == crowded]
        self._forget_swarm(min(theirs, key=lambda swarm: next(reversed(here[swarm].values())).heard))
        return True

    def _forget_swarm(self, swarm: str) -> None:
        for peer in list(self._swarms[swarm]):
            self._forget(swarm, peer)

    def _forget(self, swarm: str, peer: str) -> None:
        members = self._swarms.get(swarm, OrderedDict())
        if members.pop(peer, None) is None:
            return
        self._places[peer] -= 1
        if not self._places[peer]:
            del self._places[peer]
        if not members:
            del self._swarms[swarm]
            self._listed.discard(swarm)

    def _forget_silent(self) -> None:
        oldest = self._clock() - TTL
        for swarm, members in list(self._swarms.items()):
            for peer, place in list(members.items()):
                if place.heard >= oldest:
                    break  # members are in the order in which they were heard of
                self._forget(swarm, peer)


class AnnouncementBoard:
    """Answers requests for public swarms; not for several threads. ``clock`` in seconds, the registry's."""

    def __init__(self, registry: SeedRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry, self._clock = registry, clock
        self._listed: dict[str, tuple[float, str, bytes]] = {}  # swarm -> when heard, of whom, the sealed announcement

    def answer(self, peer: str, request: SwarmsRequest) -> SwarmsReply:
        """Reply to ``peer``, after noting its announcement if it brought one."""
        self._forget_silent()
        reason = "" if request.announcement is None else self._note(peer, request.announcement)
        behind = [swarm for swarm in sorted(self._listed) if request.after is None or swarm > request.after]
        swarms = tuple(self._packed(swarm) for swarm in behind[:MAX_LISTED])
        return SwarmsReply(swarms=swarms, more=len(behind) > MAX_LISTED, reason=reason)

    def _note(self, peer: str, sealed: bytes) -> str:
        """Note an announcement; return why not, if it is refused."""
        try:
            _, said = unseal(sealed, Announcement)
            if said.peer != peer or swarm_id(said.manifest) != said.swarm:
                return "forged"
            if not is_public(said.manifest):
                return "private"
        except MessageError as error:
            log.debug("the announcement of peer %s was refused: %s", short(peer), error)
            return error.reason
        if not self._registry.has(said.swarm, peer):
            return "unknown"  # the member's record comes first
        if not self._registry.enlist(said.swarm, peer):
            return "full"
        before = self._listed.get(said.swarm)
        if before is None or peer in (before[1], peek(said.manifest, Manifest.LIMIT).get("creator")):
            self._listed[said.swarm] = (self._clock(), peer, sealed)
        return ""

    def _packed(self, swarm: str) -> bytes:
        sealed = self._listed[swarm][2]
        peers, contacts = self._registry.sample(swarm, MAX_CONTACTS)
        return pack(ListedSwarm(announcement=sealed, peers=peers, contacts=contacts))

    def _forget_silent(self) -> None:
        oldest = self._clock() - TTL
        for swarm, (heard, *_) in list(self._listed.items()):
            if heard < oldest or not self._registry.sample(swarm, 0)[0]:
                del self._listed[swarm]
