"""The log of verification by stream: for a peer that was away, or whose records differ from the others'.

The content of a log is not judged here: it is as many bytes as the peer states, bounded, whole or not at all.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from shoal.swarm.errors import MessageError
from shoal.swarm.p2p.rate_limit import RateLimit, TokenBuckets
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.envelope import KIB, Message, pack, unpack
from shoal.swarm.wire.fields import Count, Reason, SwarmId

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host
    from shoal.swarm.p2p.stream import Stream

LOG_PROTOCOL = "/shoal/verification-log/2"
MAX_LOG = 8 << 20  # bytes
QUOTA = RateLimit(messages=4)  # logs that one peer is handed out in a minute
FRESH_S = 1.0  # seconds for which a log is handed out again
KEPT = 4  # logs kept for that
SMALL_S = 5.0  # seconds for one small message, or without a byte
MAKE_S = 20.0  # seconds in which a log must be made, the wait for others included
SERVE_S = 60.0  # seconds in which it must be taken
GRACE_S = 1.0  # seconds beyond a caller's deadline for the loop to report what went wrong


class LogRequest(Message):
    """A request for the log of verification from round ``since`` on."""

    KIND = "log-request"
    swarm: SwarmId
    since: Count


class LogReply(Message):
    """The number of bytes that follow; None, and the reason, if the peer serves no log."""

    KIND, LIMIT = "log-reply", 4 * KIB
    nbytes: Annotated[int, Field(ge=0, le=MAX_LOG)] | None
    reason: Reason = ""


class LogServer:
    """The server of this node's log to the peers of ``swarm``, to each 4 times a minute.

    ``make(since)`` returns the log from round ``since`` on. It runs in a worker thread of its own, never twice at once, and its
    result is handed out again for a second. A log of more than 8 MiB is not handed out.
    """

    def __init__(
        self,
        host: Host,
        swarm: str,
        make: Callable[[int], bytes],
        *,
        quota: RateLimit = QUOTA,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._swarm, self._make, self._clock = swarm, make, clock
        self._quotas = TokenBuckets(quota)
        self._worker = ThreadPoolExecutor(1, "shoal-log")
        self._made: OrderedDict[int, tuple[float, bytes]] = OrderedDict()  # in the worker only: since -> when, log
        host.serve(LOG_PROTOCOL, self._answer)

    def close(self) -> None:
        """Stop handing out logs; never waits."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, stream: Stream) -> None:
        request = unpack(await stream.receive(LogRequest.LIMIT, SMALL_S), LogRequest)
        log, reason = b"", ""
        if request.swarm != self._swarm:
            reason = f"this peer belongs to swarm {self._swarm}"
        elif not self._quotas.take(stream.peer_id, 1, 0):
            reason = "it was asked too often: ask again in a minute"
        else:
            log, reason = await self._log(request.since)
        await stream.send(pack(LogReply(nbytes=None if reason else len(log), reason=reason)), SMALL_S)
        if log and not reason:
            deadline = asyncio.get_running_loop().time() + SERVE_S
            await stream.swap(memoryview(log), memoryview(bytearray()), chunk_timeout=SMALL_S, deadline=deadline)

    async def _log(self, since: int) -> tuple[bytes, str]:
        """Return the log, or the reason why there is none."""
        try:
            making = asyncio.get_running_loop().run_in_executor(self._worker, self._newest, since)
        except RuntimeError:  # closed
            return b"", "this peer is leaving"
        try:
            log = await asyncio.wait_for(making, MAKE_S)
        except asyncio.TimeoutError:
            return b"", f"it could not be made in {MAKE_S:g} s"
        except ValueError as error:  # a log without any record would be too large
            return b"", str(error)
        if len(log) > MAX_LOG:
            return b"", f"it has {len(log)} bytes, of which at most {MAX_LOG} may be sent: ask for a later round"
        return log, ""

    def _newest(self, since: int) -> bytes:
        made = self._made.pop(since, None)
        if made is None or not self._clock() - made[0] < FRESH_S:
            log = self._make(since)
            made = self._clock(), log
        self._made[since] = made
        while len(self._made) > KEPT:
            self._made.popitem(last=False)
        return made[1]


async def _fetch(host: Host, peer: str, addresses: Sequence[str], request: LogRequest, timeout: float) -> bytes:
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout

    def left(at_most: float) -> float:
        return max(0.01, min(at_most, end - loop.time()))

    stream = await host.open(peer, LOG_PROTOCOL, addresses=addresses, timeout=left(timeout))
    try:
        await stream.send(pack(request), left(SMALL_S))
        reply = unpack(await stream.receive(LogReply.LIMIT, left(MAKE_S + SMALL_S)), LogReply)
        if reply.nbytes is None:
            raise MessageError(f"Peer {short(peer)} serves no log: {reply.reason}.", "unavailable")
        log = bytearray(reply.nbytes)
        if log:
            await stream.swap(memoryview(b""), memoryview(log), chunk_timeout=SMALL_S, deadline=end)
    finally:
        stream.close()
    return bytes(log)


def fetch_log(host: Host, peer: str, addresses: Sequence[str], swarm: str, since: int, timeout: float) -> bytes:
    """Return the log of ``peer`` from round ``since`` on, at most 8 MiB. For any thread but the host's own.

    Waits at most ``timeout`` seconds, and one more. Raises NetworkError if the peer cannot be had or is too slow; MessageError if
    it hands out none (reason ``unavailable``: asked too often, another swarm, too long), or violates the protocol.
    """
    return host.call(_fetch(host, peer, addresses, LogRequest(swarm=swarm, since=since), timeout), timeout + GRACE_S)
