"""The public swarms that a bootstrap node lists, as their members announce them: in memory only, and bounded.

A swarm is listed while its announcer renews what it said and a member of it is noted in the registry. Only a noted member may
announce, and the first one stays until it falls silent: another, who may say something else, does not displace it, unless it is the
creator. A manifest that does not say that its swarm is public is refused, so nobody but the creator can make a swarm public.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from shoal.swarm.errors import MessageError
from shoal.swarm.manifest.manifest import Manifest, is_public, swarm_id
from shoal.swarm.p2p.stream import short
from shoal.swarm.seed.registry import TTL, SeedRegistry
from shoal.swarm.wire.envelope import pack, peek, unseal
from shoal.swarm.wire.swarms import MAX_CONTACTS, MAX_LISTED, Announcement, ListedSwarm, SwarmsReply, SwarmsRequest

log = logging.getLogger(__name__)


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
