"""Bodies behind records, too large for them: kept and handed out by their author, and fetched by digest.

A claim names its evidence (the material of a check, the snapshot of a policy) by SHA-256 alone. A verifier asks the author, states
how many bytes it will take at most, and gets the bytes with that digest or an error; a size is never taken on trust.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shoal.swarm.errors import MessageError
from shoal.swarm.gossip.body_store import BodyStore
from shoal.swarm.p2p.rate_limit import RateLimit

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

EVIDENCE_PROTOCOL = "/shoal/evidence/1"
MAX_BODIES = 1024  # own ones, held at a time
MAX_BYTES = 256 << 20  # of all of them
MAX_FETCHED = 64 << 20  # bytes of others' bodies that are kept, in case they are asked for again
# Handed out to one peer in a minute. In bytes, everything once: no peer can drain a node's uplink by asking again and again.
QUOTA = RateLimit(messages=600, nbytes=MAX_BYTES)
GRACE_S = 1.0  # seconds beyond a caller's deadline for the loop to report what went wrong


class EvidenceStore:
    """The bodies that this node hands out, the newest 1024 and at most 256 MiB, and access to those of others.

    ``addresses``: returns the known addresses of a peer; also of a barred one (``Directory.everyone``), which may still be judged.
    For any thread but the host's own.
    """

    def __init__(self, host: Host, swarm: str, addresses: Callable[[str], Sequence[str]] = lambda peer: ()) -> None:
        self._host = host
        self._store = BodyStore(
            host, swarm, addresses, protocol=EVIDENCE_PROTOCOL, bodies=MAX_BODIES, nbytes=MAX_BYTES, quota=QUOTA
        )
        self._lock = threading.Lock()  # guards the next two
        self._fetched: OrderedDict[bytes, bytes] = OrderedDict()  # least recently used first
        self._nbytes = 0

    def put(self, body: bytes) -> bytes:
        """Hand out ``body`` (1 byte to 256 MiB, else ValueError) from now on; never waits. Returns its SHA-256, 32 bytes."""
        if not 0 < len(body) <= MAX_BYTES:
            raise ValueError(f"a body of {len(body)} bytes: between 1 and {MAX_BYTES} are allowed")
        return self._store.put(body)

    def get(self, peer: str, sha256: bytes, most: int, timeout: float) -> bytes:
        """Return the body with this digest, of at most ``most`` bytes: an own one, one fetched lately, or from ``peer``.

        Waits at most ``timeout`` seconds, and one more. Raises NetworkError if the peer cannot be had or is too slow;
        MessageError if it hands out nothing (reason ``unavailable``), something larger (``oversized``) or other (``digest``).
        """
        body = self._store.get(sha256) or self._again(sha256)
        if body is None:
            body = self._host.call(self._store.fetch_up_to(peer, sha256, most, timeout), timeout + GRACE_S)
            self._keep(sha256, body)
        if len(body) > most:
            raise MessageError(f"A body of {len(body)} bytes was refused: at most {most} are allowed.", "oversized")
        return body

    def _again(self, sha256: bytes) -> bytes | None:
        with self._lock:
            if sha256 in self._fetched:
                self._fetched.move_to_end(sha256)
            return self._fetched.get(sha256)

    def _keep(self, sha256: bytes, body: bytes) -> None:
        with self._lock:
            if sha256 in self._fetched or len(body) > MAX_FETCHED:
                return
            self._fetched[sha256] = body
            self._nbytes += len(body)
            while self._nbytes > MAX_FETCHED:
                _, oldest = self._fetched.popitem(last=False)
                self._nbytes -= len(oldest)
