"""What verification needs of the network: records, logs, and the bodies that claims are about."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.membership.membership import Membership
from shoal.swarm.topics.attestation import Attestations, Handler, sign_record, verify_record
from shoal.swarm.topics.evidence import EvidenceStore
from shoal.swarm.topics.verification_log import LogServer, fetch_log

PULL_S = 5.0
"""Seconds in which a peer's log must have arrived."""
LEAVE_S = 2.0
"""Seconds for which `close` waits, at most, until the last records are sent."""


class SwarmNetwork:
    """What ``shoal.node.verify`` needs of a member's swarm. For any thread but the host's own.

    A record is a small signed statement of verification, a log all records of a peer from one round
    on, a body the evidence that a claim names by SHA-256.
    """

    def __init__(self, membership: Membership, gossip: Gossip) -> None:
        self.me = membership.identity.peer_id
        self.swarm = membership.swarm
        self.internal_errors = membership.host.internal_errors
        self._membership = membership
        self._gossip = gossip
        self._bodies = EvidenceStore(
            membership.host, membership.swarm, membership.directory.addresses
        )
        self._records: Attestations | None = None
        self._logs: LogServer | None = None

    def sign(self, record: bytes) -> bytes:
        return sign_record(self._membership.identity, record)

    def verify(self, peer: str, record: bytes, signature: bytes) -> bool:
        return verify_record(peer, record, signature)

    def open(
        self, take: Handler, log: Callable[[int], bytes], is_banned: Callable[[str], bool]
    ) -> None:
        """Begin to take and serve records; call it once.

        ``take(author, record, signature)`` gets each record of another peer, on the host's loop: it
        must not wait, and refuses a record by MessageError. ``log(since)`` is served to peers.
        Peers for which ``is_banned`` is true are left out of the directory's members.
        """
        self._records = Attestations(self._gossip, take)
        self._logs = LogServer(self._membership.host, self.swarm, log)
        self._membership.directory.barred = is_banned

    def publish(self, record: bytes, signature: bytes) -> None:
        """Queue a record of this node to be sent to everybody; never waits. Call `open` first.

        Raises MessageError: it is empty, too large, or signed by another.
        """
        assert self._records is not None
        self._records.publish(record, signature)

    def put(self, body: bytes) -> bytes:
        """Serve ``body`` to other peers; return its SHA-256.

        Raises ValueError: it is empty or too large.
        """
        return self._bodies.put(body)

    def get(self, peer: str, sha256: bytes, most: int, timeout: float) -> bytes:
        """Return the body with that hash, of at most ``most`` bytes: an own one, one had before,
        or from ``peer``, which is then served too.

        Waits ``timeout`` seconds at most. Raises NetworkError or MessageError.
        """
        return self._bodies.get(peer, sha256, most, timeout)

    def fetch_log(self, peer: str, since: int) -> bytes:
        """Fetch the records of ``peer`` from round ``since`` on, whole or not at all.

        Raises NetworkError: the peer cannot be had or is too slow; MessageError: it hands out none,
        as when the log is above 8 MiB.
        """
        return fetch_log(
            self._membership.host,
            peer,
            self._membership.directory.addresses(peer),
            self.swarm,
            since,
            PULL_S,
        )

    def others(self) -> list[str]:
        """Return the members but this node and banned peers, in secret random order."""
        peers = [peer for peer in self._membership.directory.members() if peer != self.me]
        secrets.SystemRandom().shuffle(peers)
        return peers

    def name(self, peer: str) -> str:
        """Return the display name of ``peer``; its id if it is gone."""
        member = self._membership.directory.everyone().get(peer)
        return member.name if member is not None else peer

    @property
    def counts(self) -> dict[str, Any]:
        """Return what became of the records sent and received, by kind; empty before `open`."""
        return {} if self._records is None else self._records.topic.counts

    def close(self) -> None:
        """Stop taking and serving records, once what was published is sent, or after `LEAVE_S`."""
        if self._records is not None and self._logs is not None:
            self._records.topic.flush(LEAVE_S)
            self._records.topic.close()
            self._logs.close()
