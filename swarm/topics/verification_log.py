"""Logs of verification, which a peer fetches that was away, or whose records differ.

    server = LogServer(host, swarm, make)
    fetch_log(host, peer, addresses, swarm, since=12, timeout=20.0)

As many bytes are sent as the other states, bounded, whole or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from shoal.swarm.errors import MessageError
from shoal.swarm.gossip.bodies import deadline
from shoal.swarm.p2p.messages import receive_bytes, receive_message, send_bytes, send_message
from shoal.swarm.p2p.newest import Newest
from shoal.swarm.p2p.rate_limit import RateLimit, TokenBuckets
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.wire.envelope import KIB, Count, Message, Reason, SwarmId

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

LOG_PROTOCOL = "/shoal/verification-log/2"
MAX_LOG_BYTES = 8 << 20
LOG_QUOTA = RateLimit(messages=4)
"""Logs that one peer is handed out in a minute."""
FRESH_S = 1.0
"""For which a log is handed out again."""
MAX_FRESH_LOGS = 4
MESSAGE_S = 5.0
"""For one small message, or without a byte."""
MAKE_S = 20.0
"""In which a log must be made, the wait for others included."""
SERVE_S = 60.0
"""In which it must be taken."""
GRACE_S = 1.0
"""Beyond a caller's deadline, for the loop to report what went wrong."""


class LogRequest(Message):
    """A request for the log of verification from round ``since`` on."""

    KIND = "log-request"
    swarm: SwarmId
    since: Count


class LogReply(Message):
    """The number of bytes that follow; None, and the reason, if the peer serves no log."""

    KIND = "log-reply"
    LIMIT = 4 * KIB
    nbytes: Annotated[int, Field(ge=0, le=MAX_LOG_BYTES)] | None
    reason: Reason = ""


class LogServer:
    """The server of this node's log to the peers of ``swarm``, to each 4 times a minute.

    ``make(since)`` returns the log from round ``since`` on. It runs in a worker thread of its own,
    never twice at once, and its result is handed out again for a second. A log of more than 8 MiB
    is not handed out.
    """

    def __init__(
        self,
        host: Host,
        swarm: str,
        make: Callable[[int], bytes],
        *,
        quota: RateLimit = LOG_QUOTA,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._swarm = swarm
        self._make = make
        self._clock = clock
        self._quotas = TokenBuckets(quota)
        self._worker = ThreadPoolExecutor(1, "shoal-log")
        # In the worker only: the round since -> when it was made, log.
        self._made = Newest[int, tuple[float, bytes]](MAX_FRESH_LOGS)
        host.serve(LOG_PROTOCOL, self._answer)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, stream: Stream) -> None:
        request = await receive_message(stream, LogRequest, MESSAGE_S)
        log = b""
        reason = ""
        if request.swarm != self._swarm:
            reason = f"this peer belongs to swarm {self._swarm}"
        elif not self._quotas.take(stream.peer_id, 1, 0):
            reason = "it was asked too often: ask again in a minute"
        else:
            log, reason = await self._log(request.since)
        nbytes = None if reason else len(log)
        await send_message(stream, LogReply(nbytes=nbytes, reason=reason), MESSAGE_S)
        if log and not reason:
            end, _ = deadline(SERVE_S)
            await send_bytes(stream, memoryview(log), chunk_timeout=MESSAGE_S, deadline=end)

    async def _log(self, since: int) -> tuple[bytes, str]:
        """Return the log, or the reason why there is none."""
        try:
            making = asyncio.get_running_loop().run_in_executor(self._worker, self._newest, since)
        except RuntimeError:  # closed
            return b"", "this peer is leaving"
        try:
            log = await asyncio.wait_for(making, MAKE_S)
        except TimeoutError:
            return b"", f"it could not be made in {MAKE_S:g} s"
        except ValueError as error:  # a log without any record would be too large
            return b"", str(error)
        if len(log) > MAX_LOG_BYTES:
            return b"", (
                f"it has {len(log)} bytes, of which at most {MAX_LOG_BYTES} may be sent: ask for a "
                "later round"
            )
        return log, ""

    def _newest(self, since: int) -> bytes:
        made = self._made.pop(since, None)
        if made is None or not self._clock() - made[0] < FRESH_S:
            log = self._make(since)
            made = self._clock(), log
        self._made[since] = made
        return made[1]


def fetch_log(
    host: Host, peer: str, addresses: Sequence[str], swarm: str, since: int, timeout: float
) -> bytes:
    """Return the log of ``peer`` from round ``since`` on, at most 8 MiB.

    For any thread but the host's own.

    Waits at most ``timeout`` seconds, and one more. Raises NetworkError if the peer cannot be had
    or is too slow; MessageError if it hands out none (reason ``unavailable``: asked too often,
    another swarm, too long), or violates the protocol.
    """
    request = LogRequest(swarm=swarm, since=since)
    return host.call(_fetch(host, peer, addresses, request, timeout), timeout + GRACE_S)


async def _fetch(
    host: Host, peer: str, addresses: Sequence[str], request: LogRequest, timeout: float
) -> bytes:
    end, left = deadline(timeout)
    opened = await host.open(peer, LOG_PROTOCOL, addresses=addresses, timeout=left(timeout))
    with contextlib.closing(opened) as stream:
        await send_message(stream, request, left(MESSAGE_S))
        reply = await receive_message(stream, LogReply, left(MAKE_S + MESSAGE_S))
        if reply.nbytes is None:
            raise MessageError(f"Peer {short(peer)} serves no log: {reply.reason}.", "unavailable")
        log = bytearray(reply.nbytes)
        if log:
            await receive_bytes(stream, memoryview(log), chunk_timeout=MESSAGE_S, deadline=end)
    return bytes(log)
