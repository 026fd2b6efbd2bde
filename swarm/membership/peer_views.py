"""The active and the passive view of peer exchange, as HyParView has them (Leitão et al., 2007).

    active    5 peers, chosen by this node from the passive view, with which it stays in touch
    passive   30 places for others that have answered this node, or called it
    hints     peers that others named; nothing is believed of them until they have answered

Each place keeps the peer that comes first by a hash with a secret salt, as a sampler of Brahms
does (Bortnikov et al., 2009). Why: docs/internals.md, "Peer exchange".
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

ACTIVE_PEERS = 5
PASSIVE_PEERS = 30
MAX_HINTS = 60
MAX_OF_SOURCE = PASSIVE_PEERS // 4  # places, and hints, of peers that one partner named
# Records of the active view in what is offered; the others are of the passive one.
OFFERED_OF_ACTIVE = 3
SALT_BYTES = 16
RANK_BYTES = 8
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
        self._me = me
        self._chance = chance
        self._salts = [chance.randbytes(SALT_BYTES) for _ in range(PASSIVE_PEERS)]
        self._ranked: dict[tuple[str, str], list[Rank]] = {}
        # The ranks of the peers that have the places; None: to be found.
        self._best: list[Rank] | None = None
        self.active: dict[str, Contact] = {}
        self.passive: dict[str, Contact] = {}
        self.hints: dict[str, Contact] = {}

    def knows(self, peer: str) -> bool:
        return peer == self._me or peer in self.active or peer in self.passive

    def hint(self, contact: Contact) -> bool:
        """Note a peer that somebody named; return whether it is worth a dial."""
        if self.knows(contact.peer) or contact.peer in self.hints:
            return False
        named = 0
        for view in (self.active, self.passive, self.hints):
            named += sum(known.source == contact.source for known in view.values())
        if named >= MAX_OF_SOURCE or not self._wins(contact):
            return False
        if len(self.hints) >= MAX_HINTS:
            del self.hints[self._chance.choice(list(self.hints))]
        self.hints[contact.peer] = contact
        return True

    def met(self, contact: Contact) -> None:
        """Note a peer that answered or called, with its newest record.

        It gets no place if others come before it in each.
        """
        peer = contact.peer
        before = self.active.get(peer) or self.passive.get(peer) or self.hints.pop(peer, None)
        if before is not None:
            contact = replace(contact, source=before.source)
        if peer in self.active:
            self.active[peer] = contact
        elif peer in self.passive or (peer != self._me and self._wins(contact)):
            self._place(contact)

    def _place(self, contact: Contact) -> None:
        """Give each place of the passive view to the peer that comes first in it."""
        candidates = {**self.passive, contact.peer: contact}.values()
        ranked = [(self._ranks(candidate), candidate) for candidate in candidates]
        self.passive = {}
        for place in range(PASSIVE_PEERS):
            _, winner = min(ranked, key=lambda each: each[0][place])
            self.passive[winner.peer] = winner
        self._best = None

    def drop(self, peer: str) -> None:
        """Forget a peer: it did not answer, has left, or must not be met."""
        for view in (self.active, self.passive, self.hints):
            view.pop(peer, None)
        self._best = None

    def replacement(self) -> Contact | None:
        """Return a peer of the passive view for the active one: at random, of a range that has the
        fewest there.
        """
        there = Counter(contact.where for contact in self.active.values())
        fewest = min((there[contact.where] for contact in self.passive.values()), default=0)
        able = [contact for contact in self.passive.values() if there[contact.where] == fewest]
        return self._chance.choice(able) if able else None

    def promote(self, peer: str) -> None:
        """Move a peer from the passive to the active view; without room in exchange for the one
        that has been there longest.
        """
        if peer in self.passive:
            self.active[peer] = self.passive.pop(peer)
            self._best = None
            if len(self.active) > ACTIVE_PEERS:
                self.met(self.active.pop(next(iter(self.active))))

    def partner(self) -> Contact | None:
        contacts = list((self.passive or self.active).values())
        return self._chance.choice(contacts) if contacts else None

    def sample(self, count: int, but: str, since: float) -> tuple[bytes, ...]:
        """Return at most ``count`` records to offer: not of the peer ``but``, and none issued
        before ``since`` (Unix seconds).
        """

        def fresh(view: Mapping[str, Contact]) -> list[bytes]:
            return [one.record for one in view.values() if one.peer != but and one.issued >= since]

        active = fresh(self.active)
        passive = fresh(self.passive)
        first = self._chance.sample(active, min(OFFERED_OF_ACTIVE, count, len(active)))
        rest = self._chance.sample(passive, min(count - len(first), len(passive)))
        return (*first, *rest)

    def _wins(self, contact: Contact) -> bool:
        """Return whether the peer would get a place if it answered from where it says that it
        is.
        """
        if not self.passive:
            return True
        if self._best is None:
            ranks = [self._ranks(known) for known in self.passive.values()]
            self._best = [min(in_place) for in_place in zip(*ranks, strict=True)]
        own = self._ranks(contact)
        return any(mine < best for mine, best in zip(own, self._best, strict=True))

    def _ranks(self, contact: Contact) -> list[Rank]:
        key = contact.where, contact.peer
        if key not in self._ranked:
            if len(self._ranked) >= 4 * PASSIVE_PEERS:
                self._ranked.clear()
            self._ranked[key] = [
                (_hash(salt, contact.where), _hash(salt, contact.peer)) for salt in self._salts
            ]
        return self._ranked[key]


def _hash(salt: bytes, text: str) -> bytes:
    return hashlib.blake2b(text.encode(), key=salt, digest_size=RANK_BYTES).digest()
