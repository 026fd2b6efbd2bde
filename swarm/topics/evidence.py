"""The evidence behind claims: bodies that a node hands out by their SHA-256.

    digest = store.put(body)
    store.get(peer, digest, most=1 << 20, timeout=10.0)

A claim names its evidence by SHA-256 alone; a verifier states how many bytes it will take at most,
and gets the bytes with that digest or an error.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shoal.swarm.errors import MessageError
from shoal.swarm.gossip.bodies import BodyStore
from shoal.swarm.p2p.rate_limit import RateLimit

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

EVIDENCE_PROTOCOL = "/shoal/evidence/1"
MAX_BODIES = 1024
"""Own ones, held at a time."""
MAX_BYTES = 256 << 20
"""Of all own ones."""
MAX_FETCHED_BYTES = 64 << 20
"""Of others' bodies, which are handed out too and never push out an own one."""
BODY_QUOTA = RateLimit(messages=600, nbytes=MAX_BYTES)
"""Handed out to one peer in a minute. In bytes, everything once: no peer can drain a node's uplink
by asking again and again.
"""
GRACE_S = 1.0
"""Beyond a caller's deadline, for the loop to report what went wrong."""


class EvidenceStore:
    """The bodies that this node hands out: of its own the newest 1024 and at most 256 MiB, and
    those that it fetched lately.

    ``addresses``: returns the known addresses of a peer; also of a barred one
    (``Directory.everyone``), which may still be judged. For any thread but the host's own.
    """

    def __init__(
        self, host: Host, swarm: str, addresses: Callable[[str], Sequence[str]] = lambda peer: ()
    ) -> None:
        self._host = host
        self._fetched: OrderedDict[bytes, bytes] = OrderedDict()  # least recently used here first
        self._store = BodyStore(
            host,
            swarm,
            addresses,
            protocol=EVIDENCE_PROTOCOL,
            bodies=MAX_BODIES,
            nbytes=MAX_BYTES,
            quota=BODY_QUOTA,
            more=self._fetched.get,
        )
        self._lock = threading.Lock()  # guards the order of what was fetched

    def put(self, body: bytes) -> bytes:
        """Hand out ``body`` (1 byte to 256 MiB, else ValueError) from now on; never waits.

        Returns its SHA-256, 32 bytes.
        """
        if not 0 < len(body) <= MAX_BYTES:
            raise ValueError(f"a body of {len(body)} bytes: between 1 and {MAX_BYTES} are allowed")
        return self._store.put(body)

    def get(self, peer: str, sha256: bytes, most: int, timeout: float) -> bytes:
        """Return the body with this digest, of at most ``most`` bytes: an own one, one fetched
        lately, or from ``peer``.

        Waits at most ``timeout`` seconds, and one more. Raises NetworkError if the peer cannot be
        had or is too slow; MessageError if it hands out nothing (reason ``unavailable``), something
        larger (``oversized``) or other (``digest``).
        """
        body = self._again(sha256) or self._store.get(sha256)
        if body is None:
            fetching = self._store.fetch(peer, sha256, most, timeout, up_to=True)
            body = self._host.call(fetching, timeout + GRACE_S)
            self._keep(sha256, body)
        if len(body) > most:
            raise MessageError(
                f"A body of {len(body)} bytes was refused: at most {most} are allowed.", "oversized"
            )
        return body

    def _again(self, sha256: bytes) -> bytes | None:
        with self._lock:
            if sha256 in self._fetched:
                self._fetched.move_to_end(sha256)
            return self._fetched.get(sha256)

    def _keep(self, sha256: bytes, body: bytes) -> None:
        with self._lock:
            if len(body) <= MAX_FETCHED_BYTES:
                self._fetched[sha256] = body
            while sum(map(len, self._fetched.values())) > MAX_FETCHED_BYTES:
                self._fetched.popitem(last=False)
