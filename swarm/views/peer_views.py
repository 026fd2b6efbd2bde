"""The peers that a node knows without the directory: an active and a passive view, as HyParView has them (Leitão et al., 2007).

    active    5 peers, chosen by this node from the passive view, with which it stays in touch
    passive   30 places for others that have answered this node, or called it
    hints     peers that others named; nothing is believed of them until they have answered

Hostile peers would fill views in which the newest counts, because they call and are named as often as they like. So each place
keeps, as a sampler of Brahms does (Bortnikov et al., 2009), the peer that comes first by a hash with a secret salt: first of the
address ranges at which peers were met, then of the peers in that range. Hostile peers get the share of the places that their ranges
are of all ranges, however many keys they have and however often they turn up. No place in the active view is given on request,
and each is taken from the passive view again after a while, or hostile peers that came first would stay.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import dataclass, replace

ACTIVE, PASSIVE = 5, 30
HINTS = 60
SHARE = PASSIVE // 4  # places, and hints, of peers that one partner named
FROM_ACTIVE = 3  # records of the active view in what is offered; the others are of the passive one
Rank = tuple[bytes, bytes]  # of an address range, then of a peer


@dataclass(frozen=True)
class Contact:
    """A peer and how to reach it. ``source``: who named it; ``where``: the address range in which it was met, or says that it is.

    ``record``: its sealed `Member` record, issued at the Unix time ``issued``; empty if it has not shown any.
    """

    peer: str
    addresses: tuple[str, ...]
    source: str
    where: str
    record: bytes = b""
    issued: float = 0.0


class PeerViews:
    """The views of the node ``me``. ``chance``: source of random numbers and salts, which nobody may be able to predict."""

    def __init__(self, me: str, chance: random.Random) -> None:
        self._me, self._chance, self._salts = me, chance, [chance.randbytes(16) for _ in range(PASSIVE)]
        self._ranked: dict[tuple[str, str], list[Rank]] = {}
        self._best: list[Rank] | None = None
        """The ranks of the peers that have the places; None: to be found."""
        self.active: dict[str, Contact] = {}
        self.passive: dict[str, Contact] = {}
        self.hints: dict[str, Contact] = {}

    def knows(self, peer: str) -> bool:
        """Return whether ``peer`` is in a view, or this node itself."""
        return peer == self._me or peer in self.active or peer in self.passive

    def hint(self, contact: Contact) -> bool:
        """Note a peer that somebody named; return whether it is worth a dial."""
        named = Counter(known.source for view in (self.active, self.passive, self.hints) for known in view.values())
        if self.knows(contact.peer) or contact.peer in self.hints or named[contact.source] >= SHARE or not self._wins(contact):
            return False
        if len(self.hints) >= HINTS:
            del self.hints[self._chance.choice(list(self.hints))]
        self.hints[contact.peer] = contact
        return True

    def met(self, contact: Contact) -> None:
        """Note a peer that answered or called, with its newest record. It gets no place if others come before it in each."""
        peer = contact.peer
        before = self.active.get(peer) or self.passive.get(peer) or self.hints.pop(peer, None)
        contact = contact if before is None else replace(contact, source=before.source)
        if peer in self.active:
            self.active[peer] = contact
        elif peer in self.passive or (peer != self._me and self._wins(contact)):
            ranked = [(self._ranks(known), known) for known in {**self.passive, peer: contact}.values()]
            winners = [min(ranked, key=lambda each: each[0][place])[1] for place in range(PASSIVE)]
            self.passive, self._best = {winner.peer: winner for winner in winners}, None

    def drop(self, peer: str) -> None:
        """Forget a peer: it did not answer, has left, or must not be met."""
        for view in (self.active, self.passive, self.hints):
            view.pop(peer, None)
        self._best = None

    def heir(self) -> Contact | None:
        """Return a peer of the passive view for the active one: at random, of a range that has the fewest there."""
        there = Counter(contact.where for contact in self.active.values())
        fewest = min((there[contact.where] for contact in self.passive.values()), default=0)
        heirs = [contact for contact in self.passive.values() if there[contact.where] == fewest]
        return self._chance.choice(heirs) if heirs else None

    def promote(self, peer: str) -> None:
        """Move a peer from the passive to the active view; without room in exchange for the one that has been there longest."""
        if peer in self.passive:
            self.active[peer], self._best = self.passive.pop(peer), None
            if len(self.active) > ACTIVE:
                self.met(self.active.pop(next(iter(self.active))))

    def partner(self) -> Contact | None:
        """Return the peer of the next shuffle: any of the passive view, if there is one there."""
        contacts = list((self.passive or self.active).values())
        return self._chance.choice(contacts) if contacts else None

    def sample(self, count: int, but: str, since: float) -> tuple[bytes, ...]:
        """Return at most ``count`` records to offer: not of the peer ``but``, and none issued before ``since`` (Unix seconds)."""
        fresh = [
            [known.record for known in view.values() if known.peer != but and known.issued >= since]
            for view in (self.active, self.passive)
        ]
        first = self._chance.sample(fresh[0], min(FROM_ACTIVE, count, len(fresh[0])))
        return (*first, *self._chance.sample(fresh[1], min(count - len(first), len(fresh[1]))))

    def _wins(self, contact: Contact) -> bool:
        """Return whether the peer would get a place if it answered from where it says that it is."""
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
            self._ranked[key] = [(_hash(salt, contact.where), _hash(salt, contact.peer)) for salt in self._salts]
        return self._ranked[key]


def _hash(salt: bytes, text: str) -> bytes:
    return hashlib.blake2b(text.encode(), key=salt, digest_size=8).digest()
