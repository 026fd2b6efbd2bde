"""The members of swarms that a bootstrap node names, and the public swarms that it lists.

    registry = SeedRegistry()
    registry.answer(peer, request, host).members      # sealed records, after noting the peer's own
    registry.listing(peer, request).swarms            # public swarms

Any peer may register, so all is bounded. Whom it believes, and how places are shared:
docs/internals.md, "A bootstrap node".
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from shoal.swarm.errors import MessageError
from shoal.swarm.manifest import Manifest, is_public, swarm_id, title_of
from shoal.swarm.p2p.addresses import by_turns, range_of
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.envelope import pack, peek, unseal
from shoal.swarm.wire.messages import (
    MAX_CONTACTS,
    MAX_LISTED,
    MAX_NAMED,
    Announcement,
    ListedSwarm,
    Member,
    SeedReply,
    SeedRequest,
    SwarmsReply,
    SwarmsRequest,
)
from shoal.swarm.wire.record import GONE

log = logging.getLogger(__name__)

MAX_SWARMS = 128
"""That are listed, and as many that are not."""
MAX_MEMBERS = 32
"""Of a swarm that are noted. With 5 KiB each, all of it is below 50 MB."""
MAX_PLACES = 4
"""Swarms in which one peer is noted."""
TTL_S = 120.0
"""After which a silent member is forgotten."""


class _Place(NamedTuple):
    """A member as it was noted."""

    heard: float
    record: bytes
    host: str
    """The IP address from which the record came."""
    range: str


class _Listing(NamedTuple):
    """A public swarm as ``peer`` announced it."""

    heard: float
    peer: str
    announcement: bytes


Members = OrderedDict[str, _Place]
"""Members of a swarm by peer id, the one heard of longest ago first."""


class SeedRegistry:
    """The members of swarms, and of the public ones what is announced; not for several threads.

    ``clock`` in seconds.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, chance: random.Random | None = None
    ) -> None:
        self._clock = clock
        self._chance = chance or random.Random()
        self._swarms: dict[str, Members] = {}
        self._places: Counter[str] = Counter()  # of each peer
        self._listed: dict[str, _Listing] = {}

    def answer(self, peer: str, request: SeedRequest, host: str = "") -> SeedReply:
        """Reply to ``peer``, which called from the IP address ``host``, after noting its record if
        it brought one.
        """
        self._forget_silent()
        reason = ""
        if request.record is not None:
            reason = self._note(peer, request.swarm, request.record, host)
        return SeedReply(members=self._named(request.swarm, MAX_NAMED, but=peer), reason=reason)

    def listing(self, peer: str, request: SwarmsRequest) -> SwarmsReply:
        """Reply to ``peer``, which asks for public swarms, after noting its announcement if it
        brought one.
        """
        self._forget_silent()
        reason = ""
        if request.announcement is not None:
            reason = self._note_public(peer, request.announcement)
        swarms = sorted(self._listed)
        if request.after is not None:
            swarms = [swarm for swarm in swarms if swarm > request.after]
        page = tuple(self._packed(swarm) for swarm in swarms[:MAX_LISTED])
        return SwarmsReply(swarms=page, more=len(swarms) > MAX_LISTED, reason=reason)

    def _named(self, swarm: str, most: int, but: str = "") -> tuple[bytes, ...]:
        """Return the records of at most ``most`` members, drawn at random from each address range
        in turn.
        """
        members = self._swarms.get(swarm, OrderedDict())
        others = sorted(members.keys() - {but})
        drawn = self._chance.sample(others, len(others))
        chosen = by_turns((peer, members[peer].host) for peer in drawn)[:most]
        return tuple(members[peer].record for peer in chosen)

    def _packed(self, swarm: str) -> bytes:
        listed = ListedSwarm(
            announcement=self._listed[swarm].announcement,
            peers=len(self._swarms[swarm]),
            contacts=self._named(swarm, MAX_CONTACTS),
        )
        return pack(listed)

    def _note(self, peer: str, swarm: str, record: bytes, host: str) -> str:
        """Note a record; return why not, if it is refused."""
        try:
            _, member = unseal(record, Member)
        except MessageError as error:
            log.debug("the record of peer %s was refused: %s", short(peer), error)
            return error.reason
        if member.peer != peer or member.swarm != swarm:
            return "forged"
        if member.state in GONE:
            self._forget(swarm, peer)
            return ""
        # Who renews a record keeps the place, and its swarm that of a listed one.
        if peer not in self._swarms.get(swarm, {}):
            if self._places[peer] >= MAX_PLACES:
                return "places"
            if swarm not in self._swarms and not self._has_room(host, listed=False):
                return "full"
            self._places[peer] += 1
        members = self._swarms.setdefault(swarm, OrderedDict())
        members[peer] = _Place(self._clock(), record, host, range_of(host))
        members.move_to_end(peer)
        if len(members) > MAX_MEMBERS:
            self._forget(swarm, _most_crowding(members))
        return ""

    def _note_public(self, peer: str, sealed: bytes) -> str:
        """Note an announcement; return why not, if it is refused."""
        try:
            _, said = unseal(sealed, Announcement)
            if said.peer != peer or swarm_id(said.manifest) != said.swarm:
                return "forged"
            if not is_public(said.manifest):
                return "private"
            title_of(said.manifest)
        except MessageError as error:
            log.debug("the announcement of peer %s was refused: %s", short(peer), error)
            return error.reason
        place = self._swarms.get(said.swarm, OrderedDict()).get(peer)
        if place is None:
            return "unknown"  # the member's record comes first
        before = self._listed.get(said.swarm)
        if before is None and not self._has_room(place.host, listed=True):
            for member in list(self._swarms[said.swarm]):
                self._forget(said.swarm, member)
            return "full"
        creator = peek(said.manifest, Manifest.LIMIT).get("creator")
        if before is None or peer in (before.peer, creator):
            self._listed[said.swarm] = _Listing(self._clock(), peer, sealed)
        return ""

    def _has_room(self, host: str, *, listed: bool) -> bool:
        """Return whether a place is free, or make one: the range that has most gives one up, unless
        ``host``'s would have as many.

        Of its members' ranges a swarm counts for that with the fewest swarms: who joins it does not
        make it one of theirs. Of a range's swarms that goes whose newest member was heard of
        longest ago.
        """
        here: dict[str, Members] = {}
        for swarm, members in self._swarms.items():
            if (swarm in self._listed) == listed:
                here[swarm] = members
        if len(here) < MAX_SWARMS:
            return True
        ranges = _range_of_each(here)
        crowded = _most_common(ranges.values())
        taken = Counter(ranges.values())
        if taken[crowded] <= taken[range_of(host)] + 1:
            return False
        theirs = [swarm for swarm in here if ranges[swarm] == crowded]
        gone = min(theirs, key=lambda swarm: next(reversed(here[swarm].values())).heard)
        for peer in list(here[gone]):
            self._forget(gone, peer)
        return True

    def _forget(self, swarm: str, peer: str) -> None:
        members = self._swarms.get(swarm, OrderedDict())
        if members.pop(peer, None) is None:
            return
        self._places[peer] -= 1
        if not self._places[peer]:
            del self._places[peer]
        if not members:
            del self._swarms[swarm]
            self._listed.pop(swarm, None)

    def _forget_silent(self) -> None:
        oldest = self._clock() - TTL_S
        for swarm, members in list(self._swarms.items()):
            for peer, place in list(members.items()):
                if place.heard >= oldest:
                    break  # members are in the order in which they were heard of
                self._forget(swarm, peer)
        for swarm, listing in list(self._listed.items()):
            if listing.heard < oldest:
                del self._listed[swarm]


def _most_common(ranges: Iterable[str]) -> str:
    return Counter(ranges).most_common(1)[0][0]


def _most_crowding(members: Members) -> str:
    """Return the member of the range that has most that was heard of longest ago."""
    crowded = _most_common(place.range for place in members.values())
    return next(peer for peer, place in members.items() if place.range == crowded)


def _range_of_each(swarms: dict[str, Members]) -> dict[str, str]:
    """Return of each swarm the one of its members' ranges that is in the fewest swarms."""
    known = {}
    in_swarms: Counter[str] = Counter()
    for swarm, members in swarms.items():
        known[swarm] = {place.range for place in members.values()}
        in_swarms.update(known[swarm])
    ranges = {}
    for swarm, of_members in known.items():
        ranges[swarm] = min(sorted(of_members), key=in_swarms.__getitem__)
    return ranges
