"""Peer exchange: a node keeps in touch with a few members directly, and learns of others from them,
whatever the DHT says.

Two members give each other their own signed records and those of some that have answered them. A
record from its author's own hand goes into the directory, as if it had been read; one of anybody
else is a hint to dial its peer. So a swarm outlives its bootstrap peers, and a node whose readings
of the DHT are captured, or that hostile peers surround, still meets honest ones.

A peer of the active view whose record the DHT brings costs nothing; any other is asked for its
record every `LOOK` seconds. Beyond that a node begins one shuffle a minute (about 5 kB each way),
and dials those named that would get a place in its views.

It has an active and a passive view, as HyParView has them (Leitão et al., 2007).

    active    5 peers, chosen by this node from the passive view, with which it stays in touch
    passive   30 places for others that have answered this node, or called it
    hints     peers that others named; nothing is believed of them until they have answered

Hostile peers would fill views in which the newest counts, because they call and are named as often
as they like. So each place keeps, as a sampler of Brahms does (Bortnikov et al., 2009), the peer
that comes first by a hash with a secret salt: first of the address ranges at which peers were met,
then of the peers in that range. Hostile peers get the share of the places that their ranges are of
all ranges, however many keys they have and however often they turn up. No place in the active view
is given on request, and each is taken from the passive view again after a while, or hostile peers
that came first would stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from shoal.swarm.access import address_problem
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.membership.directory import CLOCK, HERE, TTL, Directory
from shoal.swarm.p2p.addresses import by_peer, host_of, range_of
from shoal.swarm.p2p.limits import Counters, RateLimit, TokenBuckets
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.wire.envelope import KIB, Message, Reason, SwarmId, pack, seal, unpack, unseal
from shoal.swarm.wire.messages import Member, Record

if TYPE_CHECKING:
    from shoal.swarm.identity import Identity
    from shoal.swarm.p2p.host import Host

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


ACTIVE = 5
PASSIVE = 30
HINTS = 60
SHARE = PASSIVE // 4  # places, and hints, of peers that one partner named
FROM_ACTIVE = 3  # records of the active view in what is offered; the others are of the passive one
Rank = tuple[bytes, bytes]  # of an address range, then of a peer


@dataclass(frozen=True)
class Contact:
    """A peer and how to reach it.

    ``source``: who named it; ``where``: the address range in which it was met, or says that it is.

    ``record``: its sealed `Member` record, issued at the Unix time ``issued``; empty if it has not
    shown any.
    """

    peer: str
    addresses: tuple[str, ...]
    source: str
    where: str
    record: bytes = b""
    issued: float = 0.0


class PeerViews:
    """The views of the node ``me``.

    ``chance``: source of random numbers and salts, which nobody may be able to predict.
    """

    def __init__(self, me: str, chance: random.Random) -> None:
        self._me, self._chance, self._salts = (
            me,
            chance,
            [chance.randbytes(16) for _ in range(PASSIVE)],
        )
        self._ranked: dict[tuple[str, str], list[Rank]] = {}
        self._best: list[Rank] | None = (
            None  # the ranks of the peers that have the places; None: to be found
        )
        self.active: dict[str, Contact] = {}
        self.passive: dict[str, Contact] = {}
        self.hints: dict[str, Contact] = {}

    def knows(self, peer: str) -> bool:
        return peer == self._me or peer in self.active or peer in self.passive

    def hint(self, contact: Contact) -> bool:
        """Note a peer that somebody named; return whether it is worth a dial."""
        named = Counter(
            known.source
            for view in (self.active, self.passive, self.hints)
            for known in view.values()
        )
        if (
            self.knows(contact.peer)
            or contact.peer in self.hints
            or named[contact.source] >= SHARE
            or not self._wins(contact)
        ):
            return False
        if len(self.hints) >= HINTS:
            del self.hints[self._chance.choice(list(self.hints))]
        self.hints[contact.peer] = contact
        return True

    def met(self, contact: Contact) -> None:
        """Note a peer that answered or called, with its newest record.

        It gets no place if others come before it in each.
        """
        peer = contact.peer
        before = self.active.get(peer) or self.passive.get(peer) or self.hints.pop(peer, None)
        contact = contact if before is None else replace(contact, source=before.source)
        if peer in self.active:
            self.active[peer] = contact
        elif peer in self.passive or (peer != self._me and self._wins(contact)):
            ranked = [
                (self._ranks(known), known) for known in {**self.passive, peer: contact}.values()
            ]
            winners = [min(ranked, key=lambda each: each[0][place])[1] for place in range(PASSIVE)]
            self.passive = {winner.peer: winner for winner in winners}
            self._best = None

    def drop(self, peer: str) -> None:
        """Forget a peer: it did not answer, has left, or must not be met."""
        for view in (self.active, self.passive, self.hints):
            view.pop(peer, None)
        self._best = None

    def heir(self) -> Contact | None:
        """Return a peer of the passive view for the active one: at random, of a range that has the
        fewest there.
        """
        there = Counter(contact.where for contact in self.active.values())
        fewest = min((there[contact.where] for contact in self.passive.values()), default=0)
        heirs = [contact for contact in self.passive.values() if there[contact.where] == fewest]
        return self._chance.choice(heirs) if heirs else None

    def promote(self, peer: str) -> None:
        """Move a peer from the passive to the active view; without room in exchange for the one
        that has been there longest.
        """
        if peer in self.passive:
            self.active[peer] = self.passive.pop(peer)
            self._best = None
            if len(self.active) > ACTIVE:
                self.met(self.active.pop(next(iter(self.active))))

    def partner(self) -> Contact | None:
        contacts = list((self.passive or self.active).values())
        return self._chance.choice(contacts) if contacts else None

    def sample(self, count: int, but: str, since: float) -> tuple[bytes, ...]:
        """Return at most ``count`` records to offer: not of the peer ``but``, and none issued
        before ``since`` (Unix seconds).
        """
        fresh = [
            [known.record for known in view.values() if known.peer != but and known.issued >= since]
            for view in (self.active, self.passive)
        ]
        first = self._chance.sample(fresh[0], min(FROM_ACTIVE, count, len(fresh[0])))
        return (*first, *self._chance.sample(fresh[1], min(count - len(first), len(fresh[1]))))

    def _wins(self, contact: Contact) -> bool:
        """Return whether the peer would get a place if it answered from where it says that it
        is.
        """
        if not self.passive:
            return True
        if self._best is None:
            self._best = list(map(min, zip(*map(self._ranks, self.passive.values()), strict=True)))
        return any(mine < best for mine, best in zip(self._ranks(contact), self._best, strict=True))

    def _ranks(self, contact: Contact) -> list[Rank]:
        key = contact.where, contact.peer
        if key not in self._ranked:
            if len(self._ranked) >= 4 * PASSIVE:
                self._ranked.clear()
            self._ranked[key] = [
                (_hash(salt, contact.where), _hash(salt, contact.peer)) for salt in self._salts
            ]
        return self._ranked[key]


def _hash(salt: bytes, text: str) -> bytes:
    return hashlib.blake2b(text.encode(), key=salt, digest_size=8).digest()


log = logging.getLogger(__name__)

Clock = Callable[[], float]
SECRET = SystemRandom()

LOOK = 10.0  # seconds between two looks at the views
SHUFFLE = 60.0  # seconds between two shuffles that this node begins
# Seconds after which a record of the active view is asked of its peer: before it expires.
STALE = TTL / 2
AGE = 3600.0  # seconds after which a record is no longer offered, nor taken as a hint
AGAIN = 120.0  # seconds until a peer that did not answer is tried again
DRAWN = 16  # members of the directory that are looked at for one that was not met yet
# seconds to open a stream, and for one small message
OPEN_S = 10.0
SMALL_S = 5.0
# shuffles answered in a minute: of one peer, and of all
EACH = 12
ALL = 120


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
        self._chance, self.views = chance, PeerViews(identity.peer_id, chance)
        self._each, self._all = (
            TokenBuckets(RateLimit(EACH), clock),
            TokenBuckets(RateLimit(ALL, senders=1), clock),
        )
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
            await asyncio.sleep(
                LOOK * self._chance.uniform(0.8, 1.2)
            )  # not in step with nodes that began at the same moment
            try:
                own = self._directory.own()
                now = self._clock()
                if own is not None and own.state in HERE:
                    if shuffles := now >= due:
                        due = now + SHUFFLE * self._chance.uniform(0.8, 1.2)
                    await self.look(shuffles)
            except Exception as error:  # a bug must not take this node's other ways into the swarm
                self._host.internal_errors.caught("directory", error)

    async def look(self, shuffles: bool) -> None:
        """Keep in touch with the active view, fill it, and follow one hint.

        ``shuffles``: a partner becomes active in a shuffle.
        """
        self._left = self._directory.departed()
        for peer in [*self.views.active, *self.views.passive, *self.views.hints]:
            if peer in self._left or self._directory.is_barred(peer):
                self.views.drop(peer)
        old = self._clock() - STALE
        seen = self._directory.everyone()
        silent = [
            known
            for peer, known in self.views.active.items()
            if peer not in seen or seen[peer].issued < old
        ]
        await asyncio.gather(*(self._swap(known) for known in silent))
        if (
            shuffles
            and (partner := self.views.partner()) is not None
            and await self._swap(partner, MAX_OFFERED)
        ):
            self.views.promote(partner.peer)
        for _ in range(ACTIVE - len(self.views.active)):
            chosen = self.views.heir() or self._stranger()
            if chosen is not None and await self._swap(
                chosen, MAX_OFFERED if len(self.views.passive) < PASSIVE // 2 else 0
            ):
                self.views.promote(chosen.peer)
        for way in () if self.views.hints else (self._of_directory(), self._of_disk()):
            if way is not None:
                self.views.hint(way)
        if (hint := self._named()) is not None:
            await self._swap(hint)

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
            for member in self._chance.sample(members, min(DRAWN, len(members)))
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
        return Contact(
            peer,
            usable,
            source,
            range_of(self._host.met.get(peer) or host_of(usable[0] if usable else "")),
        )

    def _fresh(self, peer: str) -> bool:
        apart = self.views.knows(peer) or peer in self._left or self._directory.is_barred(peer)
        return not apart and self._due(peer)

    def _due(self, peer: str) -> bool:
        return self._clock() - self._tried.get(peer, float("-inf")) >= AGAIN

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
                await stream.send(pack(self._shuffle(peer, want)), SMALL_S)
                reply = unpack(await stream.receive(ShuffleReply.LIMIT, SMALL_S), ShuffleReply)
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
        offered = self.views.sample(want, peer, self._clock() - AGE)
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
        shuffle = unpack(await stream.receive(Shuffle.LIMIT, SMALL_S), Shuffle)
        own = self._directory.own()
        try:
            if shuffle.swarm != self._swarm:
                raise MessageError(f"this peer belongs to swarm {self._swarm}.", "foreign-swarm")
            met = self._hear(peer, shuffle.record, peer)
            if own is None or own.state not in HERE:
                raise MessageError("this peer has not joined yet, or is leaving.", "early")
        except MessageError as error:
            self.counters.reject(error.reason)
            await stream.send(pack(ShuffleReply(reason=str(error))), SMALL_S)
            return
        offered = self.views.sample(shuffle.want, peer, self._clock() - AGE)
        self.views.met(met)
        if self.views.knows(peer):
            self._host.remember(met.addresses)
        self._take(peer, shuffle.offered)
        await stream.send(
            pack(ShuffleReply(record=seal(own, self._identity), offered=offered)), SMALL_S
        )

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
        if member.state not in HERE or member.issued < self._clock() - TTL - CLOCK:
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
                and member.state in HERE
                and now - AGE <= member.issued <= now + CLOCK
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
