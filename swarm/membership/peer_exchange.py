"""Peer exchange: a node keeps in touch with a few members directly, and learns of others from them,
whatever the DHT says.

Two members give each other their own signed records and those of some that have answered them. A
record from its author's own hand goes into the directory, as if it had been read; one of anybody
else is a hint to dial its peer. So a swarm outlives its bootstrap peers, and a node whose readings
of the DHT are captured, or that hostile peers surround, still meets honest ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from shoal.swarm.access.address import address_problem
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.membership.directory import PRESENT, TTL_S, Directory
from shoal.swarm.membership.record_reader import MAX_CLOCK_AHEAD_S
from shoal.swarm.p2p.addresses import by_peer, range_met
from shoal.swarm.p2p.counters import Counters
from shoal.swarm.p2p.messages import ask, receive_message, send_message
from shoal.swarm.p2p.rate_limit import RateLimit, TokenBuckets
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.wire.envelope import KIB, Message, Reason, SwarmId, seal, unseal
from shoal.swarm.wire.messages import Member, Record

if TYPE_CHECKING:
    from shoal.swarm.identity import Identity
    from shoal.swarm.p2p.host import Host

from shoal.swarm.membership.peer_views import ACTIVE_PEERS, PASSIVE_PEERS, Contact, PeerViews

SHUFFLE_PROTOCOL = "/shoal/shuffle/1"
# records of others in one message: three of an active view and four of a passive one, as in
# HyParView
MAX_OFFERED = 7


class Shuffle(Message):
    """The sender's own sealed `Member`, some of peers that it knows, and how many it wants (0: it
    only stays in touch).
    """

    KIND = "shuffle"
    LIMIT = 48 * KIB
    swarm: SwarmId
    record: Record
    offered: Annotated[tuple[Record, ...], Field(max_length=MAX_OFFERED)] = ()
    want: Annotated[int, Field(ge=0, le=MAX_OFFERED)] = 0


class ShuffleReply(Message):
    """The same of the answering member; ``record`` None: it does not take part, for ``reason``."""

    KIND = "shuffle-reply"
    LIMIT = 48 * KIB
    record: Record | None = None
    offered: Annotated[tuple[Record, ...], Field(max_length=MAX_OFFERED)] = ()
    reason: Reason = ""


log = logging.getLogger(__name__)

Clock = Callable[[], float]
SECRET = SystemRandom()

LOOK_S = 10.0  # between two looks at the views
SHUFFLE_S = 60.0  # between two shuffles that this node begins
# Seconds after which a record of the active view is asked of its peer: before it expires.
STALE_S = TTL_S / 2
MAX_AGE_S = 3600.0  # after which a record is no longer offered, nor taken as a hint
RETRY_S = 120.0  # until a peer that did not answer is tried again
DRAWN_MEMBERS = 16  # members of the directory that are looked at for one that was not met yet
# seconds to open a stream, and for one small message
OPEN_S = 10.0
SMALL_S = 5.0
# shuffles answered in a minute: of one peer, and of all
SHUFFLES_OF_EACH = 12
SHUFFLES_OF_ALL = 120


class PeerExchange:
    """Peer exchange of one node, until `close`.

    ``clock``: Unix seconds. ``chance``: source of random numbers.
    """

    def __init__(
        self,
        host: Host,
        directory: Directory,
        identity: Identity,
        swarm: str,
        clock: Clock = time.time,
        chance: Random = SECRET,
    ) -> None:
        self._host = host
        self._directory = directory
        self._identity = identity
        self._swarm = swarm
        self._clock = clock
        self._chance = chance
        self.views = PeerViews(identity.peer_id, chance)
        self._each = TokenBuckets(RateLimit(SHUFFLES_OF_EACH), clock)
        self._all = TokenBuckets(RateLimit(SHUFFLES_OF_ALL, senders=1), clock)
        # Shuffles and offered records of others that were refused, by reason.
        self.counters = Counters()
        self._tried: dict[str, float] = {}  # when each peer that did not answer was tried last
        self._left: Mapping[str, Member] = {}
        host.serve(SHUFFLE_PROTOCOL, self._answer)
        self._running = host.submit(self._run())

    def close(self) -> None:
        self._running.cancel()

    # -- on the host's loop ------------------------------------------------------------------------

    async def _run(self) -> None:
        due = 0.0
        while True:
            # Not in step with nodes that began at the same moment.
            await asyncio.sleep(LOOK_S * self._chance.uniform(0.8, 1.2))
            try:
                own = self._directory.own()
                now = self._clock()
                if own is not None and own.state in PRESENT:
                    shuffles = now >= due
                    if shuffles:
                        due = now + SHUFFLE_S * self._chance.uniform(0.8, 1.2)
                    await self.look(shuffles)
            except Exception as error:  # a bug must not take this node's other ways into the swarm
                self._host.internal_errors.caught("directory", error)

    async def look(self, shuffles: bool) -> None:
        """Keep in touch with the active view, fill it, and follow one hint.

        ``shuffles``: a partner becomes active in a shuffle.
        """
        self._drop_departed()
        await self._renew_active()
        if shuffles:
            partner = self.views.partner()
            if partner is not None and await self._swap(partner, MAX_OFFERED):
                self.views.promote(partner.peer)
        await self._fill_active()
        if not self.views.hints:
            for contact in (self._of_directory(), self._of_disk()):
                if contact is not None:
                    self.views.hint(contact)
        if (hint := self._named()) is not None:
            await self._swap(hint)

    def _drop_departed(self) -> None:
        self._left = self._directory.departed()
        for peer in [*self.views.active, *self.views.passive, *self.views.hints]:
            if peer in self._left or self._directory.is_barred(peer):
                self.views.drop(peer)

    async def _renew_active(self) -> None:
        """Ask the peers of the active view whose records the DHT does not bring."""
        oldest = self._clock() - STALE_S
        seen = self._directory.everyone()
        silent = []
        for peer, known in self.views.active.items():
            if peer not in seen or seen[peer].issued < oldest:
                silent.append(known)
        await asyncio.gather(*(self._swap(known) for known in silent))

    async def _fill_active(self) -> None:
        for _ in range(ACTIVE_PEERS - len(self.views.active)):
            chosen = self.views.replacement() or self._stranger()
            want = MAX_OFFERED if len(self.views.passive) < PASSIVE_PEERS // 2 else 0
            if chosen is not None and await self._swap(chosen, want):
                self.views.promote(chosen.peer)

    def _stranger(self) -> Contact | None:
        """Return a peer that was not met yet: named by others, in the directory, or remembered from
        an earlier run.
        """
        ways = [
            way for way in (self._named(), self._of_directory(), self._of_disk()) if way is not None
        ]
        return self._chance.choice(ways) if ways else None  # none of the three can hide the others

    def _named(self) -> Contact | None:
        hints = [hint for hint in self.views.hints.values() if self._due(hint.peer)]
        return self._chance.choice(hints) if hints else None

    def _of_directory(self) -> Contact | None:
        members = list(self._directory.everyone().values())
        some = [
            member
            for member in self._chance.sample(members, min(DRAWN_MEMBERS, len(members)))
            if self._fresh(member.peer)
        ]
        contacts = (self._contact(member.peer, member.addresses, "directory") for member in some)
        return next((contact for contact in contacts if contact.addresses), None)

    def _of_disk(self) -> Contact | None:
        peers = sorted(filter(self._fresh, by_peer(addresses := self._host.known())))
        return self._contact(self._chance.choice(peers), addresses, "disk") if peers else None

    def _contact(self, peer: str, addresses: Sequence[str], source: str) -> Contact:
        usable = tuple(
            each
            for each in addresses
            if each.endswith(f"/p2p/{peer}") and address_problem(each) is None
        )
        return Contact(peer, usable, source, range_met(peer, usable, self._host.met))

    def _fresh(self, peer: str) -> bool:
        apart = self.views.knows(peer) or peer in self._left or self._directory.is_barred(peer)
        return not apart and self._due(peer)

    def _due(self, peer: str) -> bool:
        return self._clock() - self._tried.get(peer, float("-inf")) >= RETRY_S

    # -- the protocol ------------------------------------------------------------------------------

    async def _swap(self, known: Contact, want: int = 0) -> bool:
        """Exchange records with a peer; return whether it is there and a member.

        If not it is out of the views.
        """
        peer = known.peer
        new = not self.views.knows(known.peer)
        try:
            opening = self._host.open(
                peer, SHUFFLE_PROTOCOL, addresses=known.addresses, timeout=OPEN_S
            )
            with contextlib.closing(await opening) as stream:
                # Not before: in a swarm by invitation only, opening a stream has made sure that the
                # peer was invited.
                reply = await ask(stream, self._shuffle(peer, want), ShuffleReply, SMALL_S)
            if reply.record is None:
                raise MessageError(
                    f"peer {short(peer)} does not exchange peers: {reply.reason or 'no reason'}.",
                    "refused",
                )
            met = self._hear(peer, reply.record, known.source)
        except (NetworkError, MessageError) as error:
            log.debug("no peers were exchanged with peer %s: %s", short(peer), error)
            self.views.drop(peer)
            self._tried = {
                other: when for other, when in self._tried.items() if not self._due(other)
            } | {peer: self._clock()}
            return False
        self.views.met(met)
        self._take(peer, reply.offered[:want])
        if new and met.addresses:
            self._host.remember(met.addresses)
            with contextlib.suppress(NetworkError):
                await self._host.meet(met.addresses)
        return True

    def _shuffle(self, peer: str, want: int) -> Shuffle:
        if (own := self._directory.own()) is None:
            raise NetworkError("this node is no member yet.")
        offered = self.views.sample(want, peer, self._clock() - MAX_AGE_S)
        return Shuffle(
            swarm=self._swarm, record=seal(own, self._identity), offered=offered, want=want
        )

    async def _answer(self, stream: Stream) -> None:
        peer = stream.peer_id
        if not self._each.take(peer, 1, 0) or not (
            peer in self.views.active or self._all.take("", 1, 0)
        ):
            self.counters.reject("rate")
            return
        shuffle = await receive_message(stream, Shuffle, SMALL_S)
        own = self._directory.own()
        try:
            if shuffle.swarm != self._swarm:
                raise MessageError(f"this peer belongs to swarm {self._swarm}.", "foreign-swarm")
            met = self._hear(peer, shuffle.record, peer)
            if own is None or own.state not in PRESENT:
                raise MessageError("this peer has not joined yet, or is leaving.", "early")
        except MessageError as error:
            self.counters.reject(error.reason)
            await send_message(stream, ShuffleReply(reason=str(error)), SMALL_S)
            return
        offered = self.views.sample(shuffle.want, peer, self._clock() - MAX_AGE_S)
        self.views.met(met)
        if self.views.knows(peer):
            self._host.remember(met.addresses)
        self._take(peer, shuffle.offered)
        reply = ShuffleReply(record=seal(own, self._identity), offered=offered)
        await send_message(stream, reply, SMALL_S)

    def _hear(self, peer: str, record: bytes, source: str) -> Contact:
        """Check the record that ``peer`` hands over of itself, and give it to the directory.

        Raises MessageError.
        """
        _, member = unseal(record, Member)
        if member.peer != peer:
            raise MessageError(
                "A member record was refused as another's: a peer shows its own.", "another's"
            )
        if member.swarm != self._swarm:
            raise MessageError(
                f"A member record was refused: it is of swarm {member.swarm}.", "foreign-swarm"
            )
        if member.state not in PRESENT or member.issued < self._clock() - TTL_S - MAX_CLOCK_AHEAD_S:
            raise MessageError(
                "A member record was refused as old: its peer has left, or its clock is wrong.",
                "old",
            )
        directory = self._directory
        if (
            directory.is_barred(peer)
            or not directory.hear(member)
            or not directory.access_policy.admits(peer)
        ):
            raise MessageError(
                "A member record was refused: this node does not admit its peer, or its date is "
                "wrong.",
                "denied",
            )
        return replace(
            self._contact(peer, member.addresses, source), record=record, issued=member.issued
        )

    def _take(self, source: str, offered: Sequence[bytes]) -> None:
        """Note the peers of offered records that may be worth a dial.

        Of a wrong one nothing is kept.
        """
        self._left = self._directory.departed()
        for record in offered:
            try:
                _, member = unseal(record, Member)
            except MessageError as error:
                self.counters.reject(error.reason)
                continue
            now = self._clock()
            peer = member.peer
            contact = self._contact(peer, member.addresses, source)
            here = (
                member.swarm == self._swarm
                and member.state in PRESENT
                and now - MAX_AGE_S <= member.issued <= now + MAX_CLOCK_AHEAD_S
            )
            if (
                not here
                or not contact.addresses
                or peer in self._left
                or self._directory.is_barred(peer)
            ):
                self.counters.reject("unusable")
            elif self._due(peer) and self._directory.access_policy.record(
                peer, member.admission, member.issued, True
            ):
                self.views.hint(contact)
