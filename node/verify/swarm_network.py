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
"""For a log of records."""
LEAVE_S = 2.0
"""For the last records to be sent."""


class SwarmNetwork:
    """What `shoal.node.verify.service.Verification` needs of a member's swarm, for any thread.

    ``gossip`` carries the records.
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
        """Start, once, to give ``take`` the records of others as (author, record, signature), to
        serve ``log(since)``, and to leave out banned peers. All three are called from other
        threads; ``take`` refuses by MessageError, and must not wait.
        """
        self._records = Attestations(self._gossip, take)
        self._logs = LogServer(self._membership.host, self.swarm, log)
        self._membership.directory.barred = is_banned

    def publish(self, record: bytes, signature: bytes) -> None:
        """Send a record of this node to everybody soon, without waiting; after `open`."""
        assert self._records is not None
        self._records.publish(record, signature)

    def put(self, body: bytes) -> bytes:
        """Serve ``body`` to other peers; return its SHA-256."""
        return self._bodies.put(body)

    def get(self, peer: str, sha256: bytes, most: int, timeout: float) -> bytes:
        """Fetch the body with that hash, and serve it too. Raises NetworkError or MessageError."""
        return self._bodies.get(peer, sha256, most, timeout)

    def fetch_log(self, peer: str, since: int) -> bytes:
        """Fetch the log of ``peer`` from round ``since`` on: at most 8 MiB, in 5 s.

        Raises NetworkError or MessageError.
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
        return {} if self._records is None else self._records.topic.counts

    def close(self) -> None:
        """Leave, after what was published is on its way, or `LEAVE_S`."""
        if self._records is not None and self._logs is not None:
            self._records.topic.flush(LEAVE_S)
            self._records.topic.close()
            self._logs.close()
