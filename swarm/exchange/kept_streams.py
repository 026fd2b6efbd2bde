"""Streams that stay open for the next exchange with the same peer: ``KeptStreams`` at the caller,
``answer_all`` at the callee.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from shoal.swarm.p2p.stream import Stream
from shoal.swarm.p2p.stream_places import StreamPlaces

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host


KEPT_S = 600.0  # seconds without a call, after which a stream is ended
KEPT = 32  # streams at most
KEPT_EACH = 4  # to one peer, with which several fragments may be exchanged at once
ANSWERED = 64  # streams of callers that wait for their next call, at most


class KeptStreams:
    """Streams on which a call of this node has ended well.

    The next call to the peer needs no round trip to open one, and the
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
        """Return a kept stream to ``peer`` that may be used, if there is one; it is the
        caller's.
        """
        for stream in [other for other in reversed(self._idle) if other.peer_id == peer]:
            if self._host.usable(stream):
                self._idle.pop(stream).cancel()
                return stream
            self._end(stream)
        return None

    def _end(self, stream: Stream) -> None:
        self._idle.pop(stream).cancel()
        stream.close()


async def answer_all(
    host: Host,
    protocol: str,
    stream: Stream,
    answer: Callable[[Stream], Awaitable[bool]],
    waiting: StreamPlaces,
) -> None:
    """Answer the calls on a stream, one after another; ``answer`` returns whether another may
    follow. It waits for each in one of the places ``waiting``, and each counts as one on a new
    stream does.
    """
    while await answer(stream) and waiting.take(stream):
        try:
            more = await stream.more(KEPT_S)
        finally:
            waiting.free(stream)
        if not (more and host.resource_manager.renew(stream, protocol)):
            return
