"""The exchange over libp2p: what ``optim.Exchange`` promises, with strangers over the internet.

Who meets whom is in swarm/rendezvous.py; how the bytes move and when they count, in swarm/transfer.py. This file is the
synchronous side: the training thread starts a round, may go on computing, and fetches the mean.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from optim.codec import FLOAT32, Codec
from optim.exchange import Mean, RoundKey, weighted_mean
from swarm.digest import digest
from swarm.errors import NetworkError
from swarm.identity import Identity
from swarm.messages import Member
from swarm.rendezvous import Rendezvous
from swarm.transfer import Contribution, Received, Transfers

if TYPE_CHECKING:
    from swarm.host import Host

SLICE_S = 0.1
CLOSE_S = 5.0
Met = tuple["Received | None", RoundKey]


def model_digest(tensors: Sequence[Tensor]) -> str:
    """Hex SHA-256 of the shapes and types: peers average only if theirs are equal."""
    text = ";".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in tensors)
    return hashlib.sha256(text.encode()).hexdigest()


class SwarmExchange:
    """``optim.Exchange`` between the members of a swarm.

    Args:
        host: the node's host; it serves the exchange protocol from now on.
        identity: signs the offers.
        swarm: the swarm id, which is also the run in every ``RoundKey``.
        model: ``model_digest`` of the parameters; members with another one are never paired with.
        seed: of the pairing, the same for all.
        members: who is there now (``Directory.members``).
        departed: who has left lately, and in which round (``Directory.departed``).
        look: called when somebody unknown calls (``Directory.look``).
        wait: seconds that a round waits for a partner.
        chunk_timeout: seconds without a byte after which a transfer is given up.
        exchange_timeout: seconds that one transfer may take.
    """

    def __init__(
        self,
        host: Host,
        identity: Identity,
        *,
        swarm: str,
        model: str,
        seed: int,
        members: Callable[[], Mapping[str, Member]],
        departed: Callable[[], Mapping[str, Member]] = dict,
        look: Callable[[], None] = lambda: None,
        wait: float = 10.0,
        chunk_timeout: float = 5.0,
        exchange_timeout: float = 120.0,
    ) -> None:
        self._host, self._peer_id, self._swarm = host, identity.peer_id, swarm
        transfers = Transfers(host, chunk_timeout=chunk_timeout, exchange_timeout=exchange_timeout)
        self._rendezvous = Rendezvous(
            host, identity, transfers, swarm=swarm, model=model, seed=seed, wait=wait, members=members, departed=departed, look=look
        )
        # What one round can take at most: finding a partner, one transfer, its confirm.
        self._limit = wait + exchange_timeout + 8 * chunk_timeout
        self._until = float("inf")
        self.waited = 0.0
        """Seconds that the calling thread was blocked here, in all."""

    @property
    def next_round(self) -> int:
        """The label of the next round; more than one ahead of the last when this node caught up with the swarm."""
        return self._rendezvous.next_round

    @next_round.setter
    def next_round(self, round: int) -> None:
        self._rendezvous.next_round = round

    def hurry(self, seconds: float) -> None:
        """Let no round take longer than ``seconds`` from now on: the node is about to leave. Callable from a signal handler."""
        self._until = time.monotonic() + seconds

    def start(self, key: RoundKey, tensors: Sequence[Tensor], weight: float = 1.0, codec: Codec = FLOAT32) -> SwarmHandle:
        """Begin to look for a partner. ValueError if ``key`` is of another run than this swarm."""
        if key.run != self._swarm:
            raise ValueError(f"this exchange belongs to swarm {self._swarm}, the round to run {key.run}")
        payload = codec.encode(tensors)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        sha256 = digest(payload.numpy().data)
        contribution = Contribution(key, payload, shapes, codec, float(weight), sha256)
        return SwarmHandle(self, contribution, self._host.submit(self._rendezvous.meet(contribution)))

    def _mean(self, mine: Contribution, theirs: Received) -> Mean:
        """Both sides compute it from the same bytes in the same order."""
        own = mine.codec.decode(mine.payload, mine.shapes)
        return weighted_mean([(self._peer_id, mine.weight, own), (theirs.peer, theirs.weight, theirs.tensors)])


async def _close(contribution: Contribution) -> None:
    """In the loop, so that it comes either before the commit, which then does not happen, or after it."""
    contribution.decision.closed = True


class SwarmHandle:
    """One round in flight."""

    def __init__(
        self, exchange: SwarmExchange, contribution: Contribution, future: concurrent.futures.Future[Met]
    ) -> None:
        self._exchange, self._contribution, self._future = exchange, contribution, future
        self._mean: Mean | None = None

    def done(self) -> bool:
        """True once ``result`` would not wait."""
        return self._future.done()

    def result(self, deadline: float | None = None) -> Mean | None:
        """Wait at most ``deadline`` seconds (None: the exchange's own limits), then go on alone: the round is called off."""
        began = time.monotonic()
        limit = self._exchange._limit if deadline is None else min(deadline, self._exchange._limit)
        try:
            received, _ = self._wait(began + limit)
        except concurrent.futures.CancelledError:
            received = self._contribution.decision.received
        finally:
            self._exchange.waited += time.monotonic() - began
        if received is not None and self._mean is None:  # once, for it is computed in place
            self._mean = self._exchange._mean(self._contribution, received)
        return self._mean

    def _wait(self, until: float) -> Met:
        while True:
            left = min(until, self._exchange._until) - time.monotonic()
            if left <= 0 and not self._future.done():
                self._call_off()
                self._future.cancel()
            try:
                # In slices: ``hurry`` may shorten the wait, and a signal handler runs only between two of them.
                return self._future.result(min(max(left, 0), SLICE_S))
            except (concurrent.futures.TimeoutError, asyncio.TimeoutError):
                continue

    def _call_off(self) -> None:
        try:
            self._exchange._host.call(_close(self._contribution), CLOSE_S)
        except NetworkError:  # the loop has ended or hangs, so nothing can be committed in it meanwhile
            self._contribution.decision.closed = True
