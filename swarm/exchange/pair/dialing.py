"""The streams to partners: kept from one exchange to the next, or dialled, while the partner's own call may come in."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host
    from shoal.swarm.p2p.stream import Stream

KEPT_S = 600.0  # seconds without a call, after which a stream is ended
KEPT, KEPT_EACH = 32, 4  # streams at most, and to one peer, with which several fragments may be exchanged at once


class KeptStreams:
    """Streams on which a call of this node has ended well. The next call to the peer needs no round trip to open one, and the
    windows of flow control, with which a new stream takes four round trips for 1 MB, have grown.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._idle: dict[Stream, asyncio.TimerHandle] = {}  # the one used last is the last

    def keep(self, stream: Stream) -> None:
        """Keep ``stream`` until it is taken, or others take its place."""
        self._idle[stream] = asyncio.get_running_loop().call_later(KEPT_S, self._end, stream)
        of_peer = [other for other in self._idle if other.peer_id == stream.peer_id]
        for oldest in {*of_peer[:-KEPT_EACH], *list(self._idle)[:-KEPT]}:
            self._end(oldest)

    def take(self, peer: str) -> Stream | None:
        """Return a kept stream to ``peer`` that may be used, if there is one; it is the caller's."""
        for stream in [other for other in reversed(self._idle) if other.peer_id == peer]:
            if self._host.usable(stream):
                self._idle.pop(stream).cancel()
                return stream
            self._end(stream)
        return None

    def _end(self, stream: Stream) -> None:
        self._idle.pop(stream).cancel()
        stream.close()


async def open_unless(called: asyncio.Event, opening: Coroutine[Any, Any, Stream]) -> Stream | None:
    """Open a stream; return None if ``called`` is set before it is open, and then end it. Raises NetworkError."""
    stream, call, wanted = asyncio.ensure_future(opening), asyncio.ensure_future(called.wait()), False
    try:
        await asyncio.wait({stream, call}, return_when=asyncio.FIRST_COMPLETED)
        wanted = not called.is_set()
        return stream.result() if wanted else None
    finally:
        call.cancel()
        if not wanted:
            stream.add_done_callback(_hang_up)
            stream.cancel()


def _hang_up(stream: asyncio.Future[Stream]) -> None:
    if not stream.cancelled() and stream.exception() is None:
        stream.result().close()
