"""Records of verification between this node and its peers: those that come in wait for one thread,
and those that seem to be missing are fetched from a peer that has them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable

from shoal.node.verify.swarm_network import SwarmNetwork
from shoal.swarm.errors import MessageError, NetworkError
from shoal.verification.consensus.log import decode_log, encode
from shoal.verification.consensus.participant import Participant
from shoal.verification.consensus.records import Refused, Signed, decode

log = logging.getLogger(__name__)

MAX_WAITING = 8192
"""Records that wait to be taken; the oldest go."""
PEERS_PULLED = 3
"""That are asked for a log of records at a time."""
PULLS_PER_ROUND = 20


class RecordExchange:
    """Records for ``participant``, which ``lock`` guards.

    ``clock``: Unix seconds; ``timer``: seconds that never go back. ``counts``: to which that of
    fetched records is added.
    """

    def __init__(
        self,
        participant: Participant,
        network: SwarmNetwork,
        lock: threading.Lock,
        counts: Counter[str],
        *,
        clock: Callable[[], float],
        timer: Callable[[], float],
    ) -> None:
        self._participant = participant
        self._network = network
        self._lock = lock
        self._counts = counts
        self._clock = clock
        self._timer = timer
        self._inbox: deque[tuple[Signed, float]] = deque(maxlen=MAX_WAITING)
        self._pull_at = 0.0

    def receive(self, author: str, data: bytes, signature: bytes) -> None:
        """Decode and queue a record; runs on the host's loop, so the rest is left to the thread of
        verification.

        Raises MessageError.
        """
        try:
            record = decode(data)
        except ValueError as error:
            raise MessageError(f"A record of verification was refused: {error}.") from None
        if record.peer != author:
            raise MessageError(
                "A record of verification was refused: its author did not send it.", "forged"
            )
        self._inbox.append((Signed(record, signature), self._clock()))

    def take(self) -> None:
        """Give the participant what waits. The caller holds the lock."""
        while self._inbox:
            signed, at = self._inbox.popleft()
            # The consensus counts what it refuses.
            with contextlib.suppress(Refused):
                self._participant.take(signed, at)

    def log_since(self, round: int) -> bytes:
        """Return the records since ``round``, for a peer that asks."""
        with self._lock:
            return encode(self._participant.log(round))

    def pull(self, stop: threading.Event) -> None:
        """Fetch the records that this node seems to lack, from a peer that has them."""
        wanted = self._participant.wanted
        now = self._timer()
        if wanted is None or now < self._pull_at:
            return
        # Whatever comes of it.
        self._pull_at = now + self._participant.clock.round_s / PULLS_PER_ROUND
        for peer in wanted.peers[:PEERS_PULLED]:
            if stop.is_set():
                return
            try:
                found = decode_log(self._network.fetch_log(peer, wanted.since))
            except (NetworkError, MessageError, ValueError) as error:
                log.info("no records from %s: %s", peer, error)
                continue
            with self._lock:
                self._counts["pulled"] += self._participant.learn(found)
            return
