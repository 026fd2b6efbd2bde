"""How a node publishes its own record: what it announced, and under which keys of the DHT."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shoal.swarm.errors import NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.membership import trie
from shoal.swarm.membership.bucket_index import Index
from shoal.swarm.membership.own_record import OwnRecord
from shoal.swarm.membership.records import key_of, make_record
from shoal.swarm.wire.messages import Member

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host


class OwnRecordPublisher:
    """The record of the node with ``identity`` in ``swarm``.

    ``lives`` returns the seconds for which a record lives. All but `publish` is for any thread.
    """

    def __init__(
        self,
        host: Host,
        identity: Identity,
        swarm: str,
        own_record: OwnRecord,
        index: Index,
        *,
        lives: Callable[[], float],
    ) -> None:
        self.urgent = False
        """Whether it has a change that others should know at once."""
        self.prefix: str | None = None
        """Under which the record is stored."""
        self._host = host
        self._identity = identity
        self._swarm = swarm
        self._own_record = own_record
        self._index = index
        self._lives = lives
        self._lock = threading.Lock()  # guards what is announced, and ``urgent``
        # A record that says leaving must not be overtaken by an earlier one.
        self._publishing = asyncio.Lock()

    @property
    def announced(self) -> bool:
        """Whether there is a record to publish."""
        return self._own_record.announced is not None

    def own(self) -> Member | None:
        """Return the record as published now; None before the first `announce`."""
        with self._lock:
            fields = self._own_record.announced
        return None if fields is None else self._own_record.member(fields)

    def announce(self, fields: dict[str, Any]) -> None:
        """Set what the record says. Raises pydantic's ValidationError."""
        self._own_record.member(fields)
        with self._lock:
            before = self._own_record.announced
            self._own_record.announced = fields
            if before is None or any(before[name] != fields[name] for name in ("round", "state")):
                self.urgent = True

    def renew(self) -> None:
        """Note that something in the record is new."""
        with self._lock:
            self.urgent = self._own_record.announced is not None

    def take_back(self) -> None:
        """Say that this node leaves, if it announced anything."""
        with self._lock:
            fields = self._own_record.announced
            if fields is not None:
                self._own_record.announced = {**fields, "state": "leaving"}

    async def publish(
        self, keys: Mapping[str, trie.Names], note: Callable[[float], None] = lambda issued: None
    ) -> bool:
        """Store the record; return False if there is none.

        ``keys``: as last read. ``note`` is told the date of each record.

        Raises NetworkError: no node took it.
        """
        async with self._publishing:
            with self._lock:
                fields = self._own_record.announced
                self.urgent = False
            if fields is None:
                return False
            for prefix in self._index.places(self.prefix, keys):
                member = self._own_record.member(fields)  # each dated: a store may take seconds
                note(member.issued)
                was_stored = await self._host.store(
                    key_of(self._swarm, prefix),
                    self._identity.peer_id,
                    make_record(prefix, member, self._identity),
                    self._lives(),
                )
                if not was_stored:
                    raise NetworkError("no node of the swarm took this node's record.")
                self.prefix = prefix
            return True
