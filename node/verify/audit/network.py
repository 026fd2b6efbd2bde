"""Network interface of verification, and its implementation on a node's membership."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shoal.node.verify.audit.auditing import Bodies
from shoal.swarm.gossip.gossip import Gossip
from shoal.swarm.membership.membership import Membership
from shoal.swarm.topics.attestation import Attestations, Handler, sign_record, verify_record
from shoal.swarm.topics.evidence import EvidenceStore
from shoal.swarm.topics.log_sync import LogServer, fetch_log

PULL_S = 5.0  # seconds for a log of records


class AuditNetwork(Bodies, Protocol):
    """Part of a swarm that `shoal.node.verify.service.Verification` needs. For any thread."""

    me: str
    """This node's peer id."""
    swarm: str

    def sign(self, record: bytes) -> bytes:
        """Sign an encoded record as this node."""
        ...

    def verify(self, peer: str, record: bytes, signature: bytes) -> bool:
        """Return whether ``peer`` signed the encoded record. Never raises."""
        ...

    def open(self, take: Handler, log: Callable[[int], bytes], is_banned: Callable[[str], bool]) -> None:
        """Start to give ``take`` the records of others as (author, record, signature), to serve ``log(since)``, and to leave out
        banned peers. All three are called from other threads; ``take`` refuses by MessageError, and must not wait.
        """
        ...

    def publish(self, record: bytes, signature: bytes) -> None:
        """Send a record of this node to everybody soon, without waiting."""
        ...

    def fetch_log(self, peer: str, since: int) -> bytes:
        """Fetch the log of ``peer`` from round ``since`` on, within seconds. Raises NetworkError or MessageError."""
        ...

    def others(self) -> Sequence[str]:
        """Return the members but this node, in secret random order."""
        ...

    def name(self, peer: str) -> str:
        """Return the display name of ``peer``."""
        ...

    @property
    def counts(self) -> dict[str, Any]:
        """Numbers of records sent, received and refused."""
        ...

    def close(self) -> None:
        """Stop taking and serving records."""
        ...


class SwarmNetwork:
    """`AuditNetwork` of a member. ``gossip`` carries the records."""

    def __init__(self, membership: Membership, gossip: Gossip) -> None:
        self.me, self.swarm = membership.identity.peer_id, membership.swarm
        self._membership, self._gossip = membership, gossip
        self._bodies = EvidenceStore(membership.host, membership.swarm, membership.directory.addresses)
        self._records: Attestations | None = None
        self._logs: LogServer | None = None

    def sign(self, record: bytes) -> bytes:
        return sign_record(self._membership.identity, record)

    def verify(self, peer: str, record: bytes, signature: bytes) -> bool:
        return verify_record(peer, record, signature)

    def open(self, take: Handler, log: Callable[[int], bytes], is_banned: Callable[[str], bool]) -> None:
        """Implement `AuditNetwork.open`; call it once."""
        self._records = Attestations(self._gossip, take)
        self._logs = LogServer(self._membership.host, self.swarm, log)
        self._membership.directory.barred = is_banned

    def publish(self, record: bytes, signature: bytes) -> None:
        """Implement `AuditNetwork.publish`, after `open`."""
        assert self._records is not None
        self._records.publish(record, signature)

    def put(self, body: bytes) -> bytes:
        return self._bodies.put(body)

    def get(self, peer: str, sha256: bytes, most: int, timeout: float) -> bytes:
        return self._bodies.get(peer, sha256, most, timeout)

    def fetch_log(self, peer: str, since: int) -> bytes:
        """Implement `AuditNetwork.fetch_log`: at most 8 MiB, in 5 s."""
        return fetch_log(self._membership.host, peer, self._membership.directory.addresses(peer), self.swarm, since, PULL_S)

    def others(self) -> list[str]:
        """Implement `AuditNetwork.others`, without banned peers."""
        peers = [peer for peer in self._membership.directory.members() if peer != self.me]
        secrets.SystemRandom().shuffle(peers)
        return peers

    def name(self, peer: str) -> str:
        """Implement `AuditNetwork.name`: the id of a peer that is gone."""
        member = self._membership.directory.everyone().get(peer)
        return member.name if member is not None else peer

    @property
    def counts(self) -> dict[str, Any]:
        """Counts as of `AuditNetwork.counts`."""
        return {} if self._records is None else self._records.counts

    def close(self) -> None:
        if self._records is not None and self._logs is not None:
            self._records.close()
            self._logs.close()
